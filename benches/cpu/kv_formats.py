"""What a number format of the KV cache costs and saves: decode attention's time and bytes, and loss on text.

SmolLM2-135M's heads, 16 sequences of 1,500 tokens, blocks of 16 in random order, one thread: its CPU time,
in which other work on the machine does not count. Formats go in turns, each over more K and V than a cache
holds; of each, the least of all rounds counts. The limit is its bytes over the bandwidth measured between
rounds. With a MODEL, its loss on the beginning of a text in each format follows. Prints tables in Markdown.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from indirection import attention
from smollm import HEADS, Limits, Rows

from noria import LLM
from noria._core import cpu_isa
from noria.bench.machine import detect_machine
from noria.kv_format import kv_dtype, stored_size

KV_DTYPES = ("float32", "bfloat16", "float16", "int8")
README = Path(__file__).parents[2] / "README.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="whose loss is shown")
    parser.add_argument("--text", type=Path, default=README, help="what the loss is of")
    parser.add_argument("--tokens", type=int, default=480, help="of the text, from its beginning")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--rounds", type=int, default=10, help="0: no times")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--context", type=int, default=1500)
    arguments = parser.parse_args()
    machine = detect_machine()
    print(f"{machine.cpu_model} ({machine.isa_summary}); {cpu_isa()} kernels, one thread\n")
    if arguments.rounds:
        show_times(arguments)
    if arguments.model is not None:
        show_losses(arguments)


def show_times(arguments: argparse.Namespace) -> None:
    """A row for each format."""
    step, limits = Rows(arguments.sequences, 1, arguments.context), Limits(1)
    best = least(step, arguments, limits)
    print("| K and V | ms a layer | over float32 | KB a sequence | of the bandwidth |")
    print("|---|---|---|---|---|")
    for name in KV_DTYPES:
        num_bytes = bytes_of(step, name)
        share = num_bytes / limits.num_bytes / best[name]
        print(
            f"| {name} | {best[name] * 1e3:.2f} | {best[name] / best['float32']:.2f} x "
            f"| {num_bytes / step.num_rows / 1e3:.0f} | {share:.0%} |"
        )
    print(f"\nlimits: {limits}\n", flush=True)


def least(step: Rows, arguments: argparse.Namespace, limits: Limits) -> dict[str, float]:
    """Seconds of a layer by format."""
    program = attention(arguments.layers, 1)
    caches = {name: step.cache(arguments.layers, name) for name in KV_DTYPES}
    logits = np.empty((step.num_rows, 16), np.float32)
    best = dict.fromkeys(KV_DTYPES, math.inf)
    for _ in range(arguments.rounds):
        for name, kv in caches.items():
            started = time.thread_time_ns()
            step.run(program, kv, logits, name)
            best[name] = min(best[name], (time.thread_time_ns() - started) / 1e9 / arguments.layers)
        limits.measure()
    return best


def bytes_of(step: Rows, name: str) -> int:
    """Of K and V that a layer reads."""
    _, num_kv_heads, head_dim = HEADS
    stored = kv_dtype(name, torch.float32)
    return step.num_rows * step.context * 2 * num_kv_heads * stored_size(head_dim, stored) * stored.itemsize


def show_losses(arguments: argparse.Namespace) -> None:
    """A row for each format: mean negative log probability of the text's tokens, in nats."""
    text = arguments.text.read_text(encoding="utf-8")
    print(f"| K and V | loss on {arguments.tokens} tokens of {arguments.text.name} |")
    print("|---|---|")
    for name in KV_DTYPES:
        with LLM(
            arguments.model,
            dtype=arguments.dtype,
            kv_cache_dtype=name,
            max_num_seqs=1,
            max_model_len=arguments.tokens + 16,
        ) as llm:
            assert llm.tokenizer is not None
            ids = llm.tokenizer.encode(text)[: arguments.tokens]
            (score,) = llm.score([ids], use_tqdm=False)
            print(f"| {name} | {-score.logprob / len(score.token_ids):.4f} |", flush=True)


if __name__ == "__main__":
    main()
