"""Products with packed weights: noria-cpu against torch, in turns, weights cold.

A forward's linear maps in SmolLM2-135M's shapes, one after another, so that each comes from memory: 30 layers
of qkv, output, gate and up, down; and the head. Each round times every way once, and medians over rounds
count; torch runs oneDNN with weights packed at load where it can.

The limit is max(bytes of weights / measured bandwidth, operations / measured rate), measured just before and
just after each run, as what a shared machine gives changes from one moment to the next. noria-cpu's time
includes making the inputs: a multiplication by one, rounding to whole numbers, laying them out.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from smollm import BYTES, HIDDEN, INTERMEDIATE, NUM_LAYERS, VOCAB, Limits, packed, shapes, weight

from noria._core import CpuBuilder, cpu_isa
from noria.backends.cpu.threads import chosen_threads
from noria.backends.torch.linear import chosen_kernel
from noria.bench.machine import detect_machine

Seconds = npt.NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,4,8,16,32,64,256", help="numbers of rows")
    parser.add_argument("--storages", default="float32,bfloat16,int8", help="how noria-cpu keeps weights")
    parser.add_argument("--rounds", type=int, default=15)
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
    ways: dict[str, Callable[[int], Seconds]] = {"torch": torch_products(arguments.layers, arguments.vocab)}
    for storage in storages:
        ways[storage] = our_products(storage, arguments.layers, arguments.vocab, max(rows))
    num_weights = sum(out * columns for out, columns in shapes(arguments.layers, arguments.vocab))
    print(
        f"ms of all products, median of {arguments.rounds} rounds; x: torch over noria-cpu; %: of the limit"
    )
    print("rows    torch  " + "  ".join(f"{storage:>34}" for storage in storages))
    for count in rows:
        seconds, limits = in_turns(ways, count, arguments.rounds, num_threads)
        cells = []
        for storage in storages:
            num_bytes, num_operations = num_weights * BYTES[storage], 2 * num_weights * count
            least = [limit.seconds(storage, num_bytes, num_operations) for limit in limits[storage]]
            # A run has a look at the limit on either side.
            shares = (np.array(least[::2]) + np.array(least[1::2])) / 2 / seconds[storage]
            low, share, high = np.percentile(shares, [10, 50, 90])
            ours = np.median(seconds[storage])
            ratio = np.median(seconds["torch"] / seconds[storage])
            cells.append(f"{ours * 1e3:8.1f} {ratio:5.2f} x {share:4.0%} ({low:4.0%} to {high:4.0%})")
        print(f"{count:4} {np.median(seconds['torch']) * 1e3:8.1f}  " + "  ".join(cells), flush=True)


def in_turns(
    ways: dict[str, Callable[[int], Seconds]], count: int, num_rounds: int, num_threads: int
) -> tuple[dict[str, Seconds], dict[str, list[Limits]]]:
    """Seconds of all maps `[num_rounds]`, and what the machine gave before and after each of them."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    limits: dict[str, list[Limits]] = {name: [] for name in ways}
    before = Limits.now(num_threads)
    for _ in range(num_rounds):
        for name, run in ways.items():
            seconds[name].append(float(run(count).sum()))
            after = Limits.now(num_threads)
            limits[name] += [before, after]
            before = after
    return {name: np.array(taken) for name, taken in seconds.items()}, limits


def torch_products(num_layers: int, vocab: int) -> Callable[[int], Seconds]:
    kernel = chosen_kernel(torch.float32, torch.device("cpu"))
    maps = [kernel.linear(weight(*shape, seed), None) for seed, shape in enumerate(shapes(num_layers, vocab))]

    def run(count: int) -> Seconds:
        inputs = {size: torch.randn(count, size) for size in (HIDDEN, INTERMEDIATE)}
        sizes = [columns for _, columns in shapes(num_layers, vocab)]
        marks = [0.0] * (len(maps) + 1)
        with torch.inference_mode():
            marks[0] = time.perf_counter()
            for index, (linear, size) in enumerate(zip(maps, sizes, strict=True)):
                linear.apply(inputs[size])
                marks[index + 1] = time.perf_counter()
        return np.diff(marks)

    return run


def our_products(storage: str, num_layers: int, vocab: int, max_rows: int) -> Callable[[int], Seconds]:
    builder = CpuBuilder()
    rng = np.random.default_rng(0)
    x, wide = (
        builder.embed(builder.table(rng.standard_normal((max_rows, size), np.float32)))
        for size in (HIDDEN, INTERMEDIATE)
    )
    maps = [packed(builder, storage, *shape, seed) for seed, shape in enumerate(shapes(num_layers, vocab))]
    for layer in range(num_layers):
        qkv, output, gate_up, down = maps[4 * layer : 4 * layer + 4]
        # Inputs of its own for each, or only the first would be quantised and laid out.
        for inputs, linear in ((x, qkv), (x, output), (x, gate_up), (wide, down)):
            builder.linear(builder.scale(inputs, 1.0), linear)
    program = builder.build(builder.logits(x, maps[-1]), num_threads=chosen_threads()[0])
    counted = ("linear", "head", "scale", "quantise", "pack")

    def run(count: int) -> Seconds:
        ids = np.arange(count)
        before = program.stage_ns
        program.run(
            input_ids=ids,
            positions=ids,
            slot_mapping=np.full(count, -1),
            cu_seqlens_q=np.array([0, count], dtype=np.int32),
            context_lens=np.zeros(1, dtype=np.int32),
            row_seats=np.zeros(1, dtype=np.int64),
            block_tables=np.zeros((1, 1), dtype=np.int32),
            logits_indices=ids,
            kv=np.zeros((1, 2, 1, 1, 1, 4), dtype=np.uint8),
            kv_dtype="float32",
            logits=np.empty((count, vocab), dtype=np.float32),
        )
        pairs = zip(program.stage_ns, before, strict=True)
        taken = [after - earlier for (name, after), (_, earlier) in pairs if name.startswith(counted)]
        return np.array(taken) / 1e9

    return run


if __name__ == "__main__":
    main()
