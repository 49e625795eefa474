"""vLLM's own scheduler under the scripts of `noria bench cases`: no model, no device.

The first line out says what it is, then a line comes for each script: its name, and what it measured.
"""

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

# What vLLM prints goes to the errors, so that the results stand alone.
_RESULTS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

import torch  # noqa: E402 - its output must not reach the results
import vllm  # noqa: E402
from case_scripts import BLOCK_SIZE, SCRIPTS, Side, Sizes  # noqa: E402
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.sampling_params import SamplingParams, StructuredOutputsParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

_STOP_ID, _TOKEN, _FIRST_ID = 2, 7, 10
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1 << 20,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": _STOP_ID,
}


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did; see `case_scripts.StepTold`."""

    admitted: list[int]
    preempted: list[int]
    handles: list[int]
    plan_us: float


class ScriptedScheduler:
    """vLLM's scheduler, each of its rows given a token that stops nothing; see `case_scripts.Scripted`."""

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=sizes.enable_prefix_caching)
        cache.num_gpu_blocks = sizes.num_blocks + 1  # one of them is its null block
        config = VllmConfig(
            scheduler_config=SchedulerConfig(
                max_num_seqs=sizes.max_num_seqs,
                max_num_batched_tokens=sizes.token_budget,
                max_model_len=sizes.max_model_len,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
                policy=sizes.policy,
            ),
            model_config=ModelConfig(
                model=str(folder),
                tokenizer=str(folder),
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=sizes.max_model_len,
            ),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
        )
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=16, dtype=torch.float32)
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=cache.num_gpu_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            log_stats=False,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256) if sizes.enable_prefix_caching else None
        self._num_submitted = 0
        self._admitted: set[str] = set()
        self.num_computed_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Requests without a seat."""
        return self._scheduler.get_request_counts()[1]

    @property
    def num_available_blocks(self) -> int:
        """Its free queue holds cached blocks too."""
        return self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def submit(
        self,
        num_prompt: int,
        max_tokens: int,
        *,
        priority: int = 0,
        name: int | None = None,
        is_parked: bool = False,
    ) -> int:
        """Queues a request; one that is parked waits for a grammar that nobody compiles."""
        handle = self._num_submitted
        self._num_submitted += 1
        rule = StructuredOutputsParams(regex="a") if is_parked else None
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, stop_token_ids=[_STOP_ID], structured_outputs=rule
        )
        params.update_from_generation_config({}, _STOP_ID)
        prompt = [_FIRST_ID] * num_prompt
        prompt[0] = _FIRST_ID + 1 + handle if name is None else _MODEL["vocab_size"] - 1 - name
        request = Request(
            request_id=str(handle),
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(handle),
            priority=priority,
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(request)
        return handle

    def abort(self, handle: int) -> None:
        """Ends a request."""
        self._scheduler.finish_requests(str(handle), RequestStatus.FINISHED_ABORTED)

    def is_finished(self, handle: int) -> bool:
        """Whether it is gone."""
        return str(handle) not in self._scheduler.requests

    def step(self) -> Step | None:
        """Schedules a step, and gives it its tokens."""
        if not self._scheduler.has_unfinished_requests():
            return None
        started = time.perf_counter_ns()
        planned = self._scheduler.schedule()
        plan_us = (time.perf_counter_ns() - started) / 1e3
        ids = list(planned.num_scheduled_tokens)
        requests = [self._scheduler.requests[request_id] for request_id in ids]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            # It has counted the step's tokens already.
            sampled_token_ids=[
                [_TOKEN] if request.num_computed_tokens >= request.num_tokens else [] for request in requests
            ],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self._scheduler.update_from_output(planned, result)
        self.num_computed_tokens += planned.total_num_scheduled_tokens
        # Which list a resumed request comes in depends on its model runner.
        newcomers = {new.req_id for new in planned.scheduled_new_reqs} - self._admitted
        self._admitted |= newcomers
        return Step(
            admitted=[int(request_id) for request_id in newcomers],
            preempted=[int(request_id) for request_id in planned.preempted_req_ids or ()],
            handles=[int(request_id) for request_id in ids],
            plan_us=plan_us,
        )


def main() -> None:
    """Runs every script."""
    print(json.dumps({"about": f"vLLM {vllm.__version__}"}), file=_RESULTS, flush=True)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        side = Side(("fcfs", "priority"), lambda sizes: ScriptedScheduler(sizes, Path(name)))
        for script, run in SCRIPTS.items():
            print(json.dumps({"script": script, "figures": run(side)}), file=_RESULTS, flush=True)


if __name__ == "__main__":
    main()
