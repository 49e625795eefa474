"""Cases of a scheduler under pressure, as scripts that noria's core and vLLM's scheduler run alike.

This file imports the standard library alone: it also runs in vLLM's own environment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Protocol

Figures = dict[str, float]
"""What a script measured, by name."""

BLOCK_SIZE = 16
_MOST_STEPS = 3_000
_NUM_TIMED = 50


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a scheduler is made with.

    Attributes:
        num_blocks: of the KV cache, all of them to be had.
        max_num_seqs: seats.
        token_budget: of a step.
        policy: `fcfs`, `priority`, or one that noria alone has.
        enable_prefix_caching: whether prompts that begin alike share KV.
        admission, peak_percent, ageing_steps: noria's, where it is not its default; vLLM has none of them.
    """

    num_blocks: int
    max_num_seqs: int
    token_budget: int
    policy: str = "priority"
    enable_prefix_caching: bool = True
    admission: str = "peak"
    peak_percent: int = 100
    ageing_steps: int = 1024

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return min(self.num_blocks * BLOCK_SIZE, 65_536)


class StepTold(Protocol):
    """What a step did.

    Attributes:
        admitted: requests that got their first seat.
        preempted: requests that lost their seat.
        handles: of the rows.
        plan_us: what deciding it took, microseconds.
    """

    @property
    def admitted(self) -> Sequence[int]: ...
    @property
    def preempted(self) -> Sequence[int]: ...
    @property
    def handles(self) -> Sequence[int]: ...
    @property
    def plan_us(self) -> float: ...


class Scripted(Protocol):
    """A scheduler that a script drives: tokens come without a model, and every request's length is known."""

    @property
    def num_waiting(self) -> int:
        """Requests without a seat."""

    @property
    def num_available_blocks(self) -> int:
        """Blocks that are free, or cached and held by nobody."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of all steps so far."""

    def submit(
        self,
        num_prompt: int,
        max_tokens: int,
        *,
        priority: int = 0,
        name: int | None = None,
        is_parked: bool = False,
    ) -> int:
        """Queues a request that makes `max_tokens`; its handle.

        Args:
            num_prompt: tokens of its prompt.
            max_tokens: output tokens.
            priority: lower is better.
            name: prompts of one name begin alike; None: it begins like no other.
            is_parked: it may not run yet, as what it needs is not ready.
        """

    def abort(self, handle: int) -> None:
        """Ends a request."""

    def is_finished(self, handle: int) -> bool:
        """Whether it made its tokens."""

    def step(self) -> StepTold | None:
        """Plans a step, runs it and takes its tokens in; None where there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Side:
    """A scheduler's side of a table.

    Attributes:
        policies: all that it has.
        make: a fresh one.
    """

    policies: tuple[str, ...]
    make: Callable[[Sizes], Scripted]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: prompt and output tokens, and its priority."""

    num_prompt: int
    max_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Pressure:
    """Some run when others come.

    Attributes:
        sizes: of the scheduler.
        first: those that run.
        then: the others; it is the last of them that is waited for.
    """

    sizes: Sizes
    first: tuple[Ask, ...]
    then: tuple[Ask, ...]


PRESSURES: Mapping[str, Pressure] = {
    "A": Pressure(Sizes(1024, 4, 2048), (Ask(64, 300, 5),) * 4, (Ask(64, 16),)),
    "B": Pressure(Sizes(160, 8, 4096), (Ask(330, 300, 5),) * 4, (Ask(1600, 16),)),
    "C": Pressure(Sizes(2048, 8, 512), (Ask(16_000, 16, 5),), (Ask(100, 16),)),
    # For a model whose context is 8,192.
    "C, half": Pressure(Sizes(2048, 8, 512), (Ask(8_000, 16, 5),), (Ask(100, 16),)),
    "D": Pressure(
        Sizes(160, 32, 4096, policy="fcfs"), (Ask(1720, 160),), (Ask(952, 8), *((Ask(8, 8),) * 10))
    ),
}


def _waits(side: Side, pressure: Pressure) -> Figures:
    scripted = side.make(pressure.sizes)
    for ask in pressure.first:
        scripted.submit(ask.num_prompt, ask.max_tokens, priority=ask.priority)
    scripted.step()
    handles = [
        scripted.submit(ask.num_prompt, ask.max_tokens, priority=ask.priority) for ask in pressure.then
    ]
    return _steps_until(scripted, handles[-1])


def _steps_until(scripted: Scripted, handle: int, before: Callable[[], None] = lambda: None) -> Figures:
    """`waited`: steps until `handle` gets tokens, 0: in the next one; and whether it ran at all."""
    for waited in range(_MOST_STEPS):
        before()
        step = scripted.step()
        if step is None:
            break
        if handle in step.handles:
            return {"waited": waited, "ran": 1}
    return {"waited": _MOST_STEPS, "ran": 0}


def _without_end(side: Side) -> Figures:
    scripted = side.make(Sizes(1024, 4, 64, ageing_steps=200))
    for _ in range(4):
        scripted.submit(16, 20)
    scripted.step()
    low = scripted.submit(16, 8, priority=5)

    def keep_busy() -> None:
        while scripted.num_waiting < 5:
            scripted.submit(16, 20)

    return _steps_until(scripted, low, keep_busy)


def _crowd(side: Side, peak_percent: int) -> Figures:
    """Steps, preemptions, and tokens computed again by those that had to be."""
    scripted = side.make(Sizes(16 * 36, 64, 2048, policy="fcfs", peak_percent=peak_percent))
    handles = [scripted.submit(64, 512) for _ in range(64)]
    num_steps = num_preempted = 0
    while (step := scripted.step()) is not None:
        num_steps += 1
        num_preempted += len(step.preempted)
        assert num_steps < _MOST_STEPS
    assert all(scripted.is_finished(handle) for handle in handles)
    needed = 64 * (64 + 512 - 1)
    again = scripted.num_computed_tokens / needed - 1
    return {"num_steps": num_steps, "again": again, "num_preempted": num_preempted}


def _admits(side: Side) -> Figures:
    """Whether the step that preempts lets a better one in, which has waited for it."""
    scripted = side.make(Sizes(40, 8, 64, admission="optimistic"))
    for _ in range(8):
        scripted.submit(60, 100, priority=5)
    while scripted.num_available_blocks:
        scripted.step()
    urgent = scripted.submit(8, 4)
    while (step := scripted.step()) is not None:
        if step.preempted:
            return {"admits": urgent in step.admitted}
    raise AssertionError("nobody was preempted")


def _storm(side: Side) -> Figures:
    """1,024 in a block each, 128 free, and all want a second one: 448 must leave. The median of three."""
    steps = [_storm_step(side) for _ in range(3)]
    return {"num_preempted": len(steps[0].preempted), "us": median(step.plan_us for step in steps)}


def _storm_step(side: Side) -> StepTold:
    scripted = side.make(Sizes(1024 + 128, 1024, 1024 * 9, admission="optimistic"))
    for number in range(1024):
        scripted.submit(8, 32, priority=number % 4)
    while (step := scripted.step()) is not None:
        if step.preempted:
            return step
    raise AssertionError("nobody was preempted")


def _abort(side: Side) -> Figures:
    scripted = side.make(Sizes(1024, 4, 2048))
    handles = [scripted.submit(8, 8) for _ in range(100_000)]
    times = []
    for handle in handles[50_000:50_031]:
        started = perf_counter_ns()
        scripted.abort(handle)
        times.append(perf_counter_ns() - started)
    return {"us": median(times) / 1e3}


def _blocked(side: Side, *, is_parked: bool) -> Figures:
    """Microseconds of a plan in which one decodes, while 1,000 or 5,000 wait."""
    figures = {}
    for num_waiting in (1000, 5000):
        scripted = side.make(Sizes(2200, 64, 40_000, policy="fcfs"))
        scripted.submit(34_000, 1000)
        scripted.step()
        for _ in range(num_waiting):
            scripted.submit(2000, 2000, is_parked=is_parked)
        figures["few_us" if num_waiting == 1000 else "many_us"] = _plan_us(scripted)
    return figures


def _cached_head(side: Side) -> Figures:
    """Microseconds of a plan in which one decodes; a prompt waits that is cached but for 1,600 tokens."""
    figures = {}
    for num_tokens in (16_384, 32_768):
        num_blocks = 2 * num_tokens // BLOCK_SIZE + 70
        scripted = side.make(Sizes(num_blocks, 64, num_tokens, policy="fcfs"))
        scripted.submit(num_tokens, 1, name=1)
        scripted.step()
        scripted.submit(num_tokens, 1000)
        scripted.step()
        scripted.submit(num_tokens + 1600, 16, name=1)
        figures["half_us" if num_tokens == 16_384 else "whole_us"] = _plan_us(scripted)
    return figures


def _plan_us(scripted: Scripted) -> float:
    """The median of steps in each of which one decodes, and nobody else can run."""
    times = []
    for _ in range(_NUM_TIMED):
        step = scripted.step()
        assert step is not None
        assert len(step.handles) == 1
        times.append(step.plan_us)
    return median(times)


def _victims(side: Side) -> Figures:
    """Victims, and those of them that had 11 of their 12 tokens."""
    num_late = num_preempted = 0
    for policy in side.policies:
        for num_prompt in range(17, 49):
            num_blocks = 20 + -(-(num_prompt + 10) // BLOCK_SIZE)
            sizes = Sizes(
                num_blocks, 8, 512, policy=policy, admission="optimistic", enable_prefix_caching=False
            )
            scripted = side.make(sizes)
            for _ in range(5):
                scripted.submit(54, 60)
            ending = scripted.submit(num_prompt, 12)
            num_output = 0
            while not scripted.is_finished(ending):
                step = scripted.step()
                assert step is not None
                num_late += ending in step.preempted and num_output >= 11
                num_preempted += len(step.preempted)
                num_output += step.handles.count(ending)
    return {"num_late": num_late, "num_preempted": num_preempted, "num_policies": len(side.policies)}


SCRIPTS: Mapping[str, Callable[[Side], Figures]] = {
    "A": lambda side: _waits(side, PRESSURES["A"]),
    "B": lambda side: _waits(side, PRESSURES["B"]),
    "C": lambda side: _waits(side, PRESSURES["C"]),
    "C, half": lambda side: _waits(side, PRESSURES["C, half"]),
    "D": lambda side: _waits(side, PRESSURES["D"]),
    "E": _without_end,
    "F": lambda side: _crowd(side, 100),
    "F, 300%": lambda side: _crowd(side, 300),
    "G": _admits,
    "H": _storm,
    "I": _abort,
    "K": lambda side: _blocked(side, is_parked=False),
    "K, parked": lambda side: _blocked(side, is_parked=True),
    "L": _cached_head,
    "N": _victims,
}
