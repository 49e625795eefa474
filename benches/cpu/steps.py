"""Steps of SmolLM2-135M's shapes on noria-cpu: where time goes, and what share of the limit they reach.

Four kinds of step: one sequence, 64 sequences with 200 tokens of context, 16 with 1,500, and a prompt of
1,800 tokens. Of each stage the least of all rounds counts, as other work on the machine only adds. A part's
limit is max(bytes / measured bandwidth, operations / measured rate); attention counts K and V, or its two
products over what queries see.
"""

import argparse

import numpy as np
import torch
from smollm import BYTES, HEADS, NUM_LAYERS, VOCAB, Limits, Rows, recorded, shapes

from noria._core import CpuProgram, cpu_isa
from noria.backends.cpu.threads import chosen_threads
from noria.bench.machine import detect_machine
from noria.kv_format import kv_dtype, stored_size

KINDS = {
    "1 x 200": Rows(1, 1, 200),
    "64 x 200": Rows(64, 1, 200),
    "16 x 1500": Rows(16, 1, 1500),
    "prompt of 1800": Rows(1, 1800, 1800),
}
KV_DTYPES = ("float32", "bfloat16", "float16", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--storages", default="float32,bfloat16,int8,Q4_0", help="how weights are kept")
    parser.add_argument("--steps", default=",".join(KINDS), help="kinds of step")
    parser.add_argument("--kv", default="float32", choices=KV_DTYPES, help="how K and V are kept")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    arguments = parser.parse_args()
    num_threads, reason = chosen_threads()
    machine = detect_machine()
    print(
        f"{machine.cpu_model} ({machine.isa_summary}); {cpu_isa()} kernels, {num_threads} threads ({reason})"
    )
    limits = Limits(num_threads)
    for storage in arguments.storages.split(","):
        program = recorded(storage, arguments.layers, arguments.vocab, num_threads)
        for name in arguments.steps.split(","):
            step = KINDS[name]
            stages = least(program, step, arguments, limits)
            report(f"{storage}, {name}", storage, step, stages, arguments, limits)
    print(f"limits: {limits}")


def least(
    program: CpuProgram, step: Rows, arguments: argparse.Namespace, limits: Limits
) -> list[tuple[str, float]]:
    """Seconds by stage, each in its best round."""
    kv = step.cache(arguments.layers, arguments.kv)
    logits = np.empty((step.num_rows, arguments.vocab), np.float32)
    best = np.full(len(program.stage_ns), np.inf)
    for _ in range(arguments.rounds):
        before = np.array([ns for _, ns in program.stage_ns])
        step.run(program, kv, logits, arguments.kv)
        best = np.minimum(best, np.array([ns for _, ns in program.stage_ns]) - before)
        limits.measure()
    return [(name, ns / 1e9) for (name, _), ns in zip(program.stage_ns, best, strict=True)]


def report(
    title: str,
    storage: str,
    step: Rows,
    stages: list[tuple[str, float]],
    arguments: argparse.Namespace,
    limits: Limits,
) -> None:
    """Prints ms by kind of stage, the share of the limit where there is one, and of the whole."""
    totals: dict[str, float] = {}
    for name, seconds in stages:
        totals[name] = totals.get(name, 0.0) + seconds
    least_of = {"attention": attention_limit(step, storage, arguments, limits)}
    num_tokens = step.num_rows * step.num_tokens
    for out, columns in shapes(arguments.layers, arguments.vocab):
        is_head = out == arguments.vocab
        name = f"{'head' if is_head else 'linear'} {columns} to {out}"
        rows = step.num_rows if is_head else num_tokens
        limit = limits.seconds(storage, out * columns * BYTES[storage], 2 * out * columns * rows)
        least_of[name] = least_of.get(name, 0.0) + limit
    total, limit = sum(totals.values()), sum(least_of.values())
    print(f"{title}: {total * 1e3:.1f} ms, {limit / total:.0%} of the limit")
    for name, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        share = f" {least_of[name] / seconds:5.0%}" if name in least_of else ""
        print(f"  {name:22} {seconds * 1e3:8.2f} ms{share}", flush=True)


def attention_limit(step: Rows, storage: str, arguments: argparse.Namespace, limits: Limits) -> float:
    num_heads, num_kv_heads, head_dim = HEADS
    stored = kv_dtype(arguments.kv, torch.float32)
    head_bytes = stored_size(head_dim, stored) * stored.itemsize
    kv_bytes = step.num_rows * step.context * 2 * num_kv_heads * head_bytes
    first = step.context - step.num_tokens + 1
    num_seen = step.num_rows * (first + step.context) * step.num_tokens / 2
    operations = num_seen * num_heads * head_dim * 4
    return arguments.layers * max(kv_bytes / limits.num_bytes, operations / limits.rates["float32"])


if __name__ == "__main__":
    main()
