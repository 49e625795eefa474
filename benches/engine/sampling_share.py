"""Sampling's share of a step: forward against sample, in a steady decode, float32 model and logits.

Every kind of sampling takes its turn in every round, on each backend. A step has two halves, timed where the
runner calls them; of a round the first step, which reads the prompts, and the last are left out. Wall time is
what a user waits for; the process's CPU time (all threads) says the same on a machine that others use too.

    python benches/engine/sampling_share.py MODEL [--rows 64] [--tokens 16] [--rounds 5] [--backend cpu,torch]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from noria import LLM, SamplingParams
from noria.bench.machine import detect_machine
from noria.runner.torch_runner import TorchExecutor

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-p, penalties": {"temperature": 0.8, "top_p": 0.9, **PENALTIES},
    "top-p, penalties, flat": {"temperature": 3.0, "top_p": 0.9, **PENALTIES},
    "top-k, min-p": {"temperature": 0.8, "top_k": 40, "min_p": 0.05},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
BARS = {"greedy": 0.05, "top-p, penalties": 0.12}


@dataclass(slots=True)
class Half:
    """What one half of the steps took, one entry a step."""

    wall_s: list[float]
    cpu_s: list[float]


@dataclass(frozen=True, slots=True)
class Round:
    """Medians of one round, by step.

    Attributes:
        forward_ms: of the model.
        sample_ms: of the sampler.
        share: of both, the sampler's, by wall time.
        cpu_share: the same by the process's CPU time.
    """

    forward_ms: float
    sample_ms: float
    share: float
    cpu_share: float


def timed(half: Half, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with what it takes noted in `half`."""

    def note(*args: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = call(*args)
        half.cpu_s.append(time.process_time() - cpu)
        half.wall_s.append(time.perf_counter() - wall)
        return result

    return note


def measure(
    llm: LLM, kind: dict[str, Any], arguments: argparse.Namespace, halves: tuple[Half, Half]
) -> Round:
    """One round: every row decodes as many tokens."""
    for half in halves:
        half.wall_s.clear()
        half.cpu_s.clear()
    prompts = [[1000 + index, 2000 + index] for index in range(arguments.rows)]
    params = SamplingParams(max_tokens=arguments.tokens + 2, ignore_eos=True, seed=1, **kind)
    llm.generate(prompts, params, use_tqdm=False)
    forward, sample = (
        (statistics.median(half.wall_s[1:-1]), statistics.median(half.cpu_s[1:-1])) for half in halves
    )
    return Round(
        forward[0] * 1e3,
        sample[0] * 1e3,
        sample[0] / (forward[0] + sample[0]),
        sample[1] / (forward[1] + sample[1]),
    )


def run_backend(backend: str, arguments: argparse.Namespace) -> dict[str, list[Round]]:
    """All kinds in turns on one backend, after a round of each as a warm-up."""
    halves = Half([], []), Half([], [])
    originals = TorchExecutor.forward, TorchExecutor.sample
    TorchExecutor.forward = timed(halves[0], originals[0])  # type: ignore[method-assign]
    TorchExecutor.sample = timed(halves[1], originals[1])  # type: ignore[method-assign]
    rounds: dict[str, list[Round]] = {name: [] for name in KINDS}
    try:
        with LLM(
            arguments.model,
            dtype="float32",
            backend=backend,
            max_model_len=512,
            max_num_seqs=arguments.rows,
            depth=1,  # the engine's thread is idle while a step runs
        ) as llm:
            for number in range(arguments.rounds + 1):
                for name, kind in KINDS.items():
                    one = measure(llm, kind, arguments, halves)
                    if number:
                        rounds[name].append(one)
    finally:
        TorchExecutor.forward, TorchExecutor.sample = originals  # type: ignore[method-assign]
    return rounds


def spread(values: list[float], unit: str) -> str:
    """The median, with the least and the largest beside it."""
    return f"{statistics.median(values):{unit}} ({min(values):{unit}} to {max(values):{unit}})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder or .gguf file")
    parser.add_argument("--rows", type=int, default=64, help="that decode at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=16, help="decoded in a round (default: 16)")
    parser.add_argument("--rounds", type=int, default=5, help="of all kinds, in turns (default: 5)")
    parser.add_argument("--backend", default="cpu,torch", help="one or several (default: cpu,torch)")
    parser.add_argument("--output-json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": asdict(detect_machine())}
    for backend in arguments.backend.split(","):
        rounds = run_backend(backend, arguments)
        print(
            f"backend {backend}, {arguments.rows} rows; medians of {arguments.rounds} rounds (least to most)"
        )
        for name, of in rounds.items():
            bar = f"; at most {BARS[name]:.0%}" if name in BARS else ""
            print(
                f"  {name:<23} forward {spread([one.forward_ms for one in of], '.1f')} ms, "
                f"sample {spread([one.sample_ms for one in of], '.2f')} ms: "
                f"share {spread([one.share for one in of], '.1%')}, "
                f"by CPU time {spread([one.cpu_share for one in of], '.1%')}{bar}",
                flush=True,
            )
        report[backend] = {name: [asdict(one) for one in of] for name, of in rounds.items()}
    if arguments.output_json:
        arguments.output_json.write_text(json.dumps(report, indent=2, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
