"""Continuous against static batching, and our static baseline against transformers' `generate`.

The same requests (lognormal lengths, seed 0) in turns: continuous, gang and padded batching on 16 seats, and
transformers in batches of 16, left-padded, each batch until its longest answer. Greedy, the end of sequence
ignored, float32.

    python benches/engine/static_batching.py MODEL.gguf [--num-requests 128] [--repeat 2] [--output-json FILE]
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch

from noria.bench.machine import detect_machine
from noria.bench.report import machine_line
from noria.bench.throughput import ThroughputRun, run_throughput, torch_engines
from noria.bench.workload import Workload, synthetic_workload
from noria.config import EngineConfig
from noria.models import load_model

SEATS = 16
BATCHINGS = ("continuous", "gang", "padded")


def transformers_model(path: Path) -> torch.nn.Module:
    """The same weights in transformers, float32."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    if path.suffix != ".gguf":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    # What `from_pretrained(gguf_file=...)` does, by the same functions, without its need of accelerate.
    config = LlamaConfig(**load_gguf_checkpoint(path)["config"])
    model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def transformers_rate(model: torch.nn.Module, workload: Workload) -> float:
    """Output tokens a second of `generate`; a batch's tokens past a request's own length do not count."""
    started = time.perf_counter()
    for first in range(0, len(workload.requests), SEATS):
        batch = workload.requests[first : first + SEATS]
        longest = max(len(request.prompt_token_ids) for request in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            prompt = torch.from_numpy(request.prompt_token_ids)
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        num_tokens = max(request.max_tokens for request in batch)
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
    return float(workload.output_lengths.sum()) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder or .gguf file")
    parser.add_argument("--num-requests", type=int, default=128, help="requests (default: 128)")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each, in turns (default: 2)")
    parser.add_argument("--output-json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()

    ours = load_model(arguments.model, dtype=torch.float32, device=torch.device("cpu"))
    theirs = transformers_model(arguments.model)
    workload = synthetic_workload(arguments.num_requests, vocab_size=ours.config.vocab_size)
    start = torch_engines(ours)
    configs = {
        name: EngineConfig(
            model=str(arguments.model),
            dtype="float32",
            batching=name,
            max_num_seqs=SEATS,
            max_model_len=workload.static_reservation,
            # Room for each seat's worst case, so that nothing is preempted.
            num_kv_blocks=SEATS * -(-workload.static_reservation // 16),
        )
        for name in BATCHINGS
    }
    runs: dict[str, list[ThroughputRun]] = {name: [] for name in BATCHINGS}
    peer: list[float] = []
    for repeat in range(arguments.repeat):
        for name, config in configs.items():
            run = run_throughput(start, config, workload, repeat=repeat)
            runs[name].append(run)
            print(f"round {repeat}  {name:12} {run.output_tokens_per_s:7.1f} tok/s", flush=True)
        peer.append(transformers_rate(theirs, workload))
        print(f"round {repeat}  transformers {peer[-1]:7.1f} tok/s", flush=True)

    rate = {name: statistics.median(run.output_tokens_per_s for run in of) for name, of in runs.items()}
    steps = {name: of[0].num_decode_steps for name, of in runs.items()}
    step_ratio = steps["padded"] / steps["continuous"]
    rate_ratio = rate["continuous"] / rate["padded"]
    machine = detect_machine()
    print(machine_line(machine, torch_version=torch.__version__, num_threads=torch.get_num_threads()))
    rounded = {name: round(value, 1) for name, value in rate.items()}
    print(f"decode steps {steps}; tokens/s {rounded}")
    print(
        f"continuous / padded: {rate_ratio:.2f} in tokens/s, {step_ratio:.2f} in steps "
        f"(share {rate_ratio / step_ratio:.2f}); "
        f"padded / transformers: {rate['padded'] / statistics.median(peer):.2f}"
    )
    if arguments.output_json:
        report = {
            "tokens_per_s": rate,
            "transformers_tokens_per_s": peer,
            "step_ratio": step_ratio,
            "rate_ratio": rate_ratio,
            "runs": {name: [dataclasses.asdict(run) for run in of] for name, of in runs.items()},
            "machine": dataclasses.asdict(machine),
        }
        arguments.output_json.write_text(json.dumps(report, indent=2, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
