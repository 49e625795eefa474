"""Overlap: how long does the runner wait for the engine at depth 1 and at depth 2?

Without MODEL a tiny random Llama is made (it needs transformers), with steps of 2 to 4 ms, where waiting
shows most. With MODEL, tokens a second at both depths. Runs of both depths take turns.

    python benches/engine/overlap.py [MODEL] [--seats 16] [--tokens 200] [--rounds 5] [--output-json FILE]
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from noria import LLM, SamplingParams
from noria.bench.machine import detect_machine

DEPTHS = (1, 2)


@dataclass(frozen=True, slots=True)
class Run:
    """One run at one depth.

    Attributes:
        idle_share: the runner's wait for jobs, of the whole run.
        tokens_per_s: output tokens.
        step_ms: the device's time a step, mean.
    """

    idle_share: float
    tokens_per_s: float
    step_ms: float


def make_tiny_model(folder: Path) -> None:
    """Writes a random Llama whose steps take 2 to 4 ms on two cores."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def measure(llm: LLM, num_seats: int, num_tokens: int, seed: int) -> Run:
    """Runs two requests a seat, of lengths around `num_tokens`."""
    generator = np.random.default_rng(seed)
    num_requests = 2 * num_seats
    prompts = [generator.integers(0, llm.model.config.vocab_size, 32).tolist() for _ in range(num_requests)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=int(num), ignore_eos=True)
        for num in generator.integers(num_tokens // 2, num_tokens + 1, num_requests)
    ]
    before = llm.stats()
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    elapsed_us = (time.perf_counter() - start) * 1e6
    after = llm.stats()
    num_output = after.num_output_tokens - before.num_output_tokens
    return Run(
        (after.runner_idle_us - before.runner_idle_us) / elapsed_us,
        num_output / elapsed_us * 1e6,
        (after.device_us - before.device_us) / (after.num_steps - before.num_steps) / 1e3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a folder or .gguf file (default: a tiny random one)")
    parser.add_argument("--seats", type=int, default=16, help="requests at once (default: 16)")
    parser.add_argument(
        "--tokens", type=int, default=200, help="output tokens a request, at most (default: 200)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each depth, in turns (default: 5)")
    parser.add_argument("--output-json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    runs: dict[int, list[Run]] = {depth: [] for depth in DEPTHS}
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            model = folder
            make_tiny_model(Path(folder))
        llms = {
            depth: LLM(
                model,
                depth=depth,
                max_num_seqs=arguments.seats,
                max_model_len=1024,
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
            )
            for depth in DEPTHS
        }
        for seed in range(arguments.rounds + 1):
            for depth, llm in llms.items():
                run = measure(llm, arguments.seats, arguments.tokens, seed)
                print(f"{'warm-up' if seed == 0 else f'round {seed}'}  depth {depth}  {run}", flush=True)
                if seed:
                    runs[depth].append(run)
        for llm in llms.values():
            llm.close()
    idle = {depth: statistics.median(run.idle_share for run in of) for depth, of in runs.items()}
    rate = {depth: statistics.median(run.tokens_per_s for run in of) for depth, of in runs.items()}
    print(
        f"idle share {idle[1]:.1%} at depth 1, {idle[2]:.1%} at depth 2 (ratio {idle[2] / idle[1]:.3f}); "
        f"{rate[1]:.0f} tok/s at depth 1, {rate[2]:.0f} at depth 2 (ratio {rate[2] / rate[1]:.3f}); "
        f"steps of {statistics.median(run.step_ms for run in runs[2]):.2f} ms"
    )
    if arguments.output_json:
        report = {
            "idle_ratio": idle[2] / idle[1],
            "rate_ratio": rate[2] / rate[1],
            "runs": {depth: [asdict(run) for run in of] for depth, of in runs.items()},
            "machine": asdict(detect_machine()),
        }
        arguments.output_json.write_text(json.dumps(report, indent=2, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
