"""The cost of the decision core in steady decode, measured across the Python boundary.

Every running sequence decodes one token a step; 1% of the rows finish in each step and are replaced
by requests with new prompts. Timed are the verbs (`submit`, `plan`, `commit`) and `Expander.expand`; the
ids that stand in for a model's are made outside the clock.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

from noria import _core
from noria.errors import ConfigError, NoriaError

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 100
"""A request lives this many steps, so that 1% of the rows finish in each."""
BLOCK_SIZE = 16
DEPTH = 2
VOCAB_SIZE = 49_152
_STOP_IDS = np.array([0, 1], dtype=np.int32)
_FIRST_ID = 2  # random ids start here: a stop id would end a request before its time
_WARM_STEPS = 2 * OUTPUT_TOKENS
_MAX_RUNNING = 65_536

VLLM_SOURCE = (
    "vLLM 0.32, schedule + update + input preparation; stored figures, AMD EPYC with AVX512, 2 cores"
)
VLLM_US_PER_STEP = {64: 753.0, 256: 2511.0, 1024: 10302.0, 4096: 45863.0}
"""Microseconds a step by sequences running; prefix cache off, which spares vLLM the hashing."""

VERBS = ("submit", "plan", "commit", "expand")


@dataclass(frozen=True, slots=True)
class SchedulerRow:
    """One size's result.

    Attributes:
        running: seats, all of them filled whenever a request waits.
        ns_per_sequence: submit + plan + commit + expand, nanoseconds a row; median over the repeats.
        ns_per_sequence_min: the fastest repeat.
        ns_per_sequence_max: the slowest repeat.
        us_per_step: the same cost, microseconds a step; median over the repeats.
        us_per_step_p50: the step in the middle of all; far below `us_per_step` where the machine is shared.
        us_by_verb: microseconds a step by verb; mean over all repeats.
        rows_per_step: rows planned a step; mean.
        finished_share: rows that finish, of those that run; mean.
        num_steps: timed steps, all repeats together.
        vllm_us_per_step: the stored figure, or None at other sizes.
        times_cheaper_than_vllm: `vllm_us_per_step / us_per_step`.
    """

    running: int
    ns_per_sequence: float
    ns_per_sequence_min: float
    ns_per_sequence_max: float
    us_per_step: float
    us_per_step_p50: float
    us_by_verb: dict[str, float]
    rows_per_step: float
    finished_share: float
    num_steps: int
    vllm_us_per_step: float | None
    times_cheaper_than_vllm: float | None


@dataclass(slots=True)
class _Sample:
    """Sums over one repeat."""

    num_steps: int
    num_rows: int
    num_finished: int
    ns: dict[str, int]
    step_ns: list[int]

    @property
    def total_ns(self) -> int:
        return sum(self.ns.values())


class SteadyDecode:
    """A core kept in steady decode at one size, with a clock around each verb.

    Args:
        running: seats; 16 to 65536.
        seed: of prompts and sampled ids.
    """

    def __init__(self, running: int, *, seed: int = 0) -> None:
        if not 1 <= running <= _MAX_RUNNING:
            raise ConfigError(
                f"running is {running}; it must be 1 to {_MAX_RUNNING}", name="running", value=running
            )
        self.running = running
        self._rng = np.random.default_rng(np.random.SeedSequence([seed, running]))
        blocks_per_request = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE)
        # Enough for four times the replacements of a step, so that prompts never queue up behind the budget.
        joining_tokens = PROMPT_TOKENS * max(8, running // 25)
        self._core = _core.Core(
            num_blocks=(blocks_per_request + 4) * running + 64,
            block_size=BLOCK_SIZE,
            max_num_seqs=running,
            max_num_batched_tokens=running + joining_tokens,
            max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
            vocab_size=VOCAB_SIZE,
            depth=DEPTH,
            enable_prefix_caching=True,
        )
        self._layout = self._core.layout
        self._expander = _core.Expander(self._layout)
        self._ring = [np.zeros(self._layout.size, dtype=np.int32) for _ in range(DEPTH + 1)]
        self._next_slot = 0
        self._in_flight: deque[tuple[int, npt.NDArray[np.int32]]] = deque()
        for number in range(running):
            # The first lives are staggered, so that the finishes are spread evenly over the steps.
            self._submit(self._prompts(1), 1 + number % OUTPUT_TOKENS)
        self._submit(self._prompts(2 + running // 50), OUTPUT_TOKENS)  # always a few in line
        self.run(_WARM_STEPS)

    def run(self, num_steps: int) -> _Sample:
        """Runs `num_steps` steps and returns what they cost."""
        sample = _Sample(num_steps, 0, 0, dict.fromkeys(VERBS, 0), [])
        total_ns = 0
        for _ in range(num_steps):
            self._turn(sample)
            total_ns, before_ns = sample.total_ns, total_ns
            sample.step_ns.append(total_ns - before_ns)
        return sample

    def _turn(self, sample: _Sample) -> None:
        """Plans until the depth is reached, then commits the oldest step; expansion in stream order."""
        started = perf_counter_ns()
        planned: deque[npt.NDArray[np.int32]] = deque()
        while len(self._in_flight) < DEPTH:
            buffer = self._ring[self._next_slot]
            plan = self._core.plan(0, buffer)
            if plan.kind != _core.Plan.STEP:
                break
            self._next_slot = (self._next_slot + 1) % len(self._ring)
            self._in_flight.append((plan.step, buffer))
            planned.append(buffer)
        sample.ns["plan"] += perf_counter_ns() - started
        if not self._in_flight:
            raise NoriaError(f"the core planned nothing with {self._core.num_waiting} requests waiting")
        step, buffer = self._in_flight.popleft()
        # Only after an idle moment is the oldest step new: it has to be expanded before it is "sampled".
        if planned and planned[0] is buffer:
            self._expand(planned.popleft(), sample)
        num_ids, ids = self._sampled(buffer)
        started = perf_counter_ns()
        num_events = self._core.commit(step, num_ids, ids, 0, 0)
        sample.ns["commit"] += perf_counter_ns() - started

        num_finished = int(np.count_nonzero(self._core.events[:num_events, 1] == _core.FINISHED))
        prompts = self._prompts(num_finished)
        started = perf_counter_ns()
        self._submit(prompts, OUTPUT_TOKENS)
        sample.ns["submit"] += perf_counter_ns() - started
        for later in planned:
            self._expand(later, sample)
        sample.num_rows += int(buffer[_core.H_NUM_ROWS])
        sample.num_finished += num_finished

    def _expand(self, buffer: npt.NDArray[np.int32], sample: _Sample) -> None:
        started = perf_counter_ns()
        self._expander.expand(buffer)
        sample.ns["expand"] += perf_counter_ns() - started

    def _sampled(self, buffer: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Random ids for the rows of a step that sample, kept by seat as a runner keeps them."""
        num_rows = int(buffer[_core.H_NUM_ROWS])
        layout = self._layout
        flags = buffer[layout.offset_row_flags : layout.offset_row_flags + num_rows]
        seats = buffer[layout.offset_row_seat : layout.offset_row_seat + num_rows]
        samples = (flags & _core.SAMPLES) != 0
        num_ids = samples.astype(np.int32)
        ids = self._rng.integers(_FIRST_ID, VOCAB_SIZE, size=int(num_ids.sum()), dtype=np.int32)
        self._expander.last_token[seats[samples]] = ids
        return num_ids, ids

    def _prompts(self, num: int) -> npt.NDArray[np.int32]:
        return self._rng.integers(_FIRST_ID, VOCAB_SIZE, size=(num, PROMPT_TOKENS), dtype=np.int32)

    def _submit(self, prompts: npt.NDArray[np.int32], max_tokens: int) -> None:
        for prompt in prompts:
            self._core.submit(0, prompt, max_tokens, stop_token_ids=_STOP_IDS)


def run_scheduler_bench(
    sizes: Sequence[int],
    *,
    num_steps: int = 200,
    num_repeats: int = 5,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> list[SchedulerRow]:
    """Measures each size `num_repeats` times, the sizes in turns.

    Args:
        sizes: sequences running, one result each.
        num_steps: timed steps a repeat.
        num_repeats: repeats a size.
        seed: of prompts and sampled ids.
        on_progress: told, in words, what comes next.

    Raises:
        ConfigError: a size, `num_steps` or `num_repeats` is out of range.
    """
    if num_steps < 1:
        raise ConfigError(
            f"num_steps is {num_steps}; it must be 1 or more", name="num_steps", value=num_steps
        )
    if num_repeats < 1:
        raise ConfigError(
            f"num_repeats is {num_repeats}; it must be 1 or more", name="num_repeats", value=num_repeats
        )
    tell = on_progress or (lambda _text: None)
    benches: list[SteadyDecode] = []
    for running in sizes:
        tell(f"filling {running} seats")
        benches.append(SteadyDecode(running, seed=seed))
    samples: list[list[_Sample]] = [[] for _ in benches]
    for repeat in range(num_repeats):
        for place, bench in enumerate(benches):
            tell(f"repeat {repeat + 1} of {num_repeats}: {bench.running} running")
            samples[place].append(bench.run(num_steps))
    return [_row(bench.running, of_size) for bench, of_size in zip(benches, samples, strict=True)]


def _row(running: int, samples: list[_Sample]) -> SchedulerRow:
    per_row = [sample.total_ns / sample.num_rows for sample in samples]
    us_per_step = float(np.median([sample.total_ns / sample.num_steps for sample in samples])) / 1e3
    num_steps = sum(sample.num_steps for sample in samples)
    num_rows = sum(sample.num_rows for sample in samples)
    vllm = VLLM_US_PER_STEP.get(running)
    return SchedulerRow(
        running=running,
        ns_per_sequence=float(np.median(per_row)),
        ns_per_sequence_min=min(per_row),
        ns_per_sequence_max=max(per_row),
        us_per_step=us_per_step,
        us_per_step_p50=float(np.median([ns for sample in samples for ns in sample.step_ns])) / 1e3,
        us_by_verb={verb: sum(sample.ns[verb] for sample in samples) / num_steps / 1e3 for verb in VERBS},
        rows_per_step=num_rows / num_steps,
        finished_share=sum(sample.num_finished for sample in samples) / num_rows,
        num_steps=num_steps,
        vllm_us_per_step=vllm,
        times_cheaper_than_vllm=None if vllm is None else vllm / us_per_step,
    )
