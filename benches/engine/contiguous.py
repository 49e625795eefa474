"""Contiguous sequences: half the cache is free, and nobody fits; runs that slide together cure it.

Every sequence is one run of blocks, as attention without a gather and single copies to a host would
have it. The same requests run twice, with and without moves, on a core alone. Writes the figure of
docs/contiguous.svg.

python benches/engine/contiguous.py [OUT.svg]
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from noria import _core
from noria.cli.options import find_smollm2
from noria.kv_cache import KvCache
from noria.loading import read_model_config

NUM_BLOCKS = 512
BLOCK_SIZE = 16
NUM_STEPS = 1500
LENGTHS = (32, 2400)  # of prompt and output together, in tokens; most are short


@dataclass
class Course:
    """What each step of a run left, and what it did."""

    free: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    misses: int = 0
    tokens: int = 0
    idle_steps: int = 0  # with half of the cache free, and requests waiting

    def describe(self) -> str:
        moved = sum(self.moves)
        return (
            f"{self.tokens} tokens in {NUM_STEPS} steps; {self.misses} admissions missed a run; in "
            f"{self.idle_steps} steps half of the cache was free while requests waited; {moved} blocks "
            f"moved, {moved / NUM_STEPS:.2f} a step, {max(self.moves)} at most"
        )


def run(max_moves: int) -> Course:
    """`NUM_STEPS` steps under a queue that is never empty."""
    rng = np.random.default_rng(7)
    core = _core.Core(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        depth=1,
        enable_prefix_caching=False,
        contiguous=True,
        max_moves=max_moves,
    )
    buffer = np.zeros(core.layout.size, dtype=np.int32)
    course = Course()
    for step in range(NUM_STEPS):
        while core.num_waiting < 4:
            low, high = np.log(LENGTHS)
            num_tokens = int(np.exp(low + (high - low) * rng.random() ** 1.5))
            prompt = rng.integers(0, 1000, max(num_tokens // 4, 1)).astype(np.int32)
            core.submit(step, prompt, max(num_tokens - len(prompt), 1))
        plan = core.plan(step, buffer)
        assert plan.kind == plan.STEP
        num_rows = int(buffer[_core.H_NUM_ROWS])
        flags = buffer[core.layout.offset_row_flags :][:num_rows]
        num_ids = ((flags & _core.SAMPLES) != 0).astype(np.int32)
        core.commit(plan.step, num_ids, np.ones(int(num_ids.sum()), dtype=np.int32), 1, step)
        figures = core.kv_figures()
        course.free.append(figures.num_free / NUM_BLOCKS)
        course.longest.append(figures.longest_free_run / NUM_BLOCKS)
        course.moves.append(int(buffer[_core.H_NUM_MOVES]))
        course.tokens += int(buffer[_core.H_NUM_TOKENS])
        course.idle_steps += course.free[-1] >= 0.5
    names = _core.RECORD_FIELDS
    course.misses = int(core.records()[:, names.index("num_run_misses")].sum())
    return course


def move_us() -> float:
    """Microseconds that one block of SmolLM2-135M in float32 takes to move, 32 at a time, best of 20."""
    kv = KvCache(read_model_config(find_smollm2()), 256, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    src, dst = torch.arange(100, 132), torch.arange(10, 42)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        kv.move(src, dst)
        times.append(time.perf_counter() - started)
    return min(times) / 32 * 1e6


def line(values: list[float], box: tuple[int, int, int, int], top: float, style: str) -> str:
    """A polyline of `values` in a box (left, upper edge, width, height)."""
    left, upper, width, height = box
    points = " ".join(
        f"{left + width * index / len(values):.1f},{upper + height * (1 - value / top):.1f}"
        for index, value in enumerate(values)
        if index % 2 == 0
    )
    return f'<polyline points="{points}" fill="none" {style}/>'


def draw(courses: list[tuple[str, Course]], cost_us: float) -> str:
    """The figure, as SVG."""
    parts = []
    for place, (name, course) in enumerate(courses):
        box = (60, 50 + 190 * place, 720, 130)
        left, upper, width, height = box
        parts += [
            f'<text x="{left}" y="{upper - 10}" font-weight="bold">{name}: {course.tokens} tokens, '
            f"{course.misses} admissions missed a run</text>",
            f'<rect x="{left}" y="{upper}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
            *(
                f'<text x="{left - 8}" y="{upper + height * (1 - share) + 4}" text-anchor="end">'
                f"{share:.0%}</text>"
                for share in (0.0, 0.5, 1.0)
            ),
            line(course.free, box, 1.0, 'stroke="#999" stroke-width="1"'),
            line(course.longest, box, 1.0, 'stroke="#06c" stroke-width="1.2"'),
        ]
    box = (60, 50 + 190 * len(courses), 720, 80)
    moves = [float(num) for num in courses[-1][1].moves]
    top = max(*moves, 1.0)
    left, upper, width, height = box
    parts += [
        f'<text x="{left}" y="{upper - 10}" font-weight="bold">blocks moved a step: {sum(moves):.0f} in all, '
        f"{top:.0f} at most, {cost_us:.0f} µs each (SmolLM2-135M, float32)</text>",
        f'<rect x="{left}" y="{upper}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
        line(moves, box, top, 'stroke="#c40" stroke-width="1"'),
        f'<text x="{left}" y="{upper + height + 18}">{NUM_STEPS} steps; grey: share of the cache that is '
        "free; blue: its longest free run</text>",
    ]
    body = "\n".join(parts)
    size = 'width="800" height="560" font-family="sans-serif" font-size="12"'
    ground = '<rect width="800" height="560" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{ground}\n{body}\n</svg>\n'


def main() -> None:
    """Runs both, prints what came of them, and draws."""
    courses = [("without moves", run(0)), ("with moves", run(256))]
    cost_us = move_us()
    for name, course in courses:
        print(f"{name}: {course.describe()}")
    print(f"a block of SmolLM2-135M in float32 moves in {cost_us:.0f} µs on this machine")
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/contiguous.svg")
    out.parent.mkdir(exist_ok=True)
    out.write_text(draw(courses, cost_us))


if __name__ == "__main__":
    main()
