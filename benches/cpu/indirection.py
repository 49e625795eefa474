"""What it costs that K and V lie in blocks: decode attention against one piece for each sequence.

SmolLM2-135M's heads, every sequence with the same context, blocks in random order. The contiguous run is the
same kernel over blocks as long as the context. Each case is timed in turns with it; of each, the least of all
rounds counts. Prints a table in Markdown, and below it what moving a block costs: copying it once.
"""

import argparse
import time

import numpy as np
from smollm import HEADS, HIDDEN, Rows

from noria._core import CpuBuilder, CpuProgram, cpu_isa
from noria.backends.cpu.threads import chosen_threads
from noria.bench.machine import detect_machine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", default="16,32,64,128", help="block sizes")
    parser.add_argument("--batches", default="1,4,16,64,256", help="numbers of sequences")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    num_threads, reason = chosen_threads()
    machine = detect_machine()
    print(f"{machine.cpu_model}; {cpu_isa()} kernels, {num_threads} threads ({reason})\n")
    blocks = [int(size) for size in arguments.blocks.split(",")]
    print("| sequences | contiguous, ms | " + " | ".join(f"blocks of {size}" for size in blocks) + " |")
    print("|---|---|" + "---|" * len(blocks))
    program = attention(arguments.layers, num_threads)
    for batch in (int(count) for count in arguments.batches.split(",")):
        sizes = [arguments.context, *blocks]
        best = least(program, batch, sizes, arguments)
        cells = [f"{best[size] / best[arguments.context]:.2f} x" for size in blocks]
        whole = best[arguments.context] * 1e3
        print(f"| {batch} | {whole:.2f} | " + " | ".join(cells) + " |", flush=True)
    print("\n" + move_cost(blocks, arguments.rounds))


def attention(num_layers: int, num_threads: int) -> CpuProgram:
    builder = CpuBuilder()
    numbers = np.random.default_rng(0)
    qkv_width = (HEADS[0] + 2 * HEADS[1]) * HEADS[2]
    x = builder.embed(builder.table(numbers.standard_normal((1000, qkv_width), np.float32)))
    out = x
    for layer in range(num_layers):
        out = builder.attention(x, layer, HEADS, scale=0.125, window=None, softcap=None)
    head = builder.matrix(numbers.standard_normal((16, HIDDEN), np.float32), None, storage="float32")
    return builder.build(builder.logits(out, head), num_threads=num_threads)


def least(
    program: CpuProgram, batch: int, sizes: list[int], arguments: argparse.Namespace
) -> dict[int, float]:
    """Seconds of attention by block size, each in its best round."""
    best = dict.fromkeys(sizes, float("inf"))
    steps = {size: Rows(batch, 1, arguments.context, size) for size in sizes}
    caches = {size: step.cache(arguments.layers, "float32") for size, step in steps.items()}
    logits = np.empty((batch, 16), np.float32)
    for _ in range(arguments.rounds):
        for size, step in steps.items():
            before = attended(program)
            step.run(program, caches[size], logits)
            best[size] = min(best[size], (attended(program) - before) / 1e9)
    return best


def attended(program: CpuProgram) -> int:
    return sum(ns for name, ns in program.stage_ns if name == "attention")


def move_cost(blocks: list[int], num_rounds: int) -> str:
    """A sentence: microseconds a block and layer."""
    cells = []
    for size in blocks:
        pool = np.ones((2, 2048, size, HEADS[1], HEADS[2]), np.float32)
        best = float("inf")
        for index in range(num_rounds * 20):
            started = time.perf_counter()
            pool[:, index % 1000] = pool[:, 1000 + index * 7 % 1000]
            best = min(best, time.perf_counter() - started)
        cells.append(f"{best * 1e6:.1f} µs for {size}")
    return "Moving a block, K and V of one layer: " + ", ".join(cells) + "."


if __name__ == "__main__":
    main()
