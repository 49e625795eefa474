"""Products with packed weights: noria-cpu against torch, in turns, weights cold.

A forward's linear maps in SmolLM2-135M's shapes, one after another, so that each comes from memory: 30 layers
of qkv, output, gate and up, down; and the head. Each round times every way once; the least of all rounds
counts, as other work on the machine only adds. torch runs oneDNN with weights packed at load where it can.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from noria._core import CpuBuilder, cpu_isa
from noria.backends.cpu.threads import chosen_threads
from noria.backends.torch.linear import chosen_kernel
from noria.bench.machine import detect_machine

HIDDEN, QKV, INTERMEDIATE, VOCAB = 576, 960, 1536, 49152
NUM_LAYERS = 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,4,8,16,32,64,256", help="numbers of rows")
    parser.add_argument("--storages", default="float32,bfloat16,int8", help="how noria-cpu keeps weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    arguments = parser.parse_args()
    rows = [int(count) for count in arguments.rows.split(",")]
    storages = arguments.storages.split(",")
    num_threads, reason = chosen_threads()
    torch.set_num_threads(num_threads)
    machine = detect_machine()
    print(
        f"{machine.cpu_model} ({machine.isa_summary}); {cpu_isa()} kernels, {num_threads} threads ({reason})"
    )
    ways: dict[str, Callable[[int], float]] = {"torch": torch_products(arguments.layers, arguments.vocab)}
    for storage in storages:
        ways[storage] = our_products(storage, arguments.layers, arguments.vocab, max(rows))
    print(f"ms a forward's products, least of {arguments.rounds} rounds; x: torch over noria-cpu")
    print("rows   torch  " + "  ".join(f"{storage:>18}" for storage in storages))
    for count in rows:
        least = dict.fromkeys(ways, float("inf"))
        for _ in range(arguments.rounds):
            for name, run in ways.items():
                least[name] = min(least[name], run(count))
        cells = [f"{least[s] * 1e3:9.1f} ({least['torch'] / least[s]:5.2f} x)" for s in storages]
        print(f"{count:4} {least['torch'] * 1e3:8.1f}  " + "  ".join(cells), flush=True)


def weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5


def shapes(num_layers: int, vocab: int) -> list[tuple[int, int]]:
    layer = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    return layer * num_layers + [(vocab, HIDDEN)]


def torch_products(num_layers: int, vocab: int) -> Callable[[int], float]:
    kernel = chosen_kernel(torch.float32, torch.device("cpu"))
    maps = [kernel.linear(weight(*shape, seed), None) for seed, shape in enumerate(shapes(num_layers, vocab))]

    def run(count: int) -> float:
        inputs = {size: torch.randn(count, size) for size in (HIDDEN, INTERMEDIATE)}
        sizes = [columns for _, columns in shapes(num_layers, vocab)]
        with torch.inference_mode():
            started = time.perf_counter()
            for linear, size in zip(maps, sizes, strict=True):
                linear.apply(inputs[size])
            return time.perf_counter() - started

    return run


def our_products(storage: str, num_layers: int, vocab: int, max_rows: int) -> Callable[[int], float]:
    builder = CpuBuilder()
    x = builder.embed(builder.table(np.random.default_rng(0).standard_normal((max_rows, HIDDEN), np.float32)))
    maps = [
        builder.matrix(weight(*shape, seed).numpy(), None, storage=storage)
        for seed, shape in enumerate(shapes(num_layers, vocab))
    ]
    for layer in range(num_layers):
        qkv, output, gate_up, down = maps[4 * layer : 4 * layer + 4]
        builder.linear(x, qkv)
        builder.linear(x, output)
        builder.linear(builder.silu_mul(builder.linear(x, gate_up)), down)
    program = builder.build(builder.logits(x, maps[-1]), num_threads=chosen_threads()[0])

    def run(count: int) -> float:
        """Seconds in products; for int8 also in rounding their inputs, and the little else there is."""
        ids = np.arange(count)
        before = program.stage_us
        program.run(
            input_ids=ids,
            positions=ids,
            slot_mapping=np.full(count, -1),
            cu_seqlens_q=np.array([0, count], dtype=np.int32),
            context_lens=np.zeros(1, dtype=np.int32),
            row_seats=np.zeros(1, dtype=np.int64),
            block_tables=np.zeros((1, 1), dtype=np.int32),
            logits_indices=ids,
            kv=np.zeros((1, 2, 1, 1, 1, 1), dtype=np.float32),
            logits=np.empty((count, vocab), dtype=np.float32),
        )
        gemm, head, _, other = (
            after - earlier for after, earlier in zip(program.stage_us, before, strict=True)
        )
        return (gemm + head + (other if storage == "int8" else 0)) / 1e6

    return run


if __name__ == "__main__":
    main()
