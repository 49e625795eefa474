"""Runs a workload through an engine and counts what it cost.

All requests arrive at once; tokens are greedy and the end of sequence is ignored, so that every
batching makes the same number of tokens for each request.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from noria import _core
from noria.bench.limit import Limit
from noria.bench.workload import Workload
from noria.engine import Engine, start_engine
from noria.errors import ConfigError, NoriaError, RejectedError
from noria.interrupts import HeldInterrupts
from noria.outputs import Events
from noria.runner.base import SeatInit
from noria.runner.null_runner import NullExecutor, NullScript
from noria.sampling.params import SamplingParams
from noria.stats import STEPS_A_FOLD, EngineStats, RecordReader

if TYPE_CHECKING:
    from noria.config import EngineConfig
    from noria.models import Model

_WARM_UP_PROMPTS = 2
_WARM_UP_TOKENS = 4

OnEvents = Callable[[Engine, Events], None]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ThroughputRun:
    """One workload, once, under one batching.

    Attributes:
        batching: `continuous`, `padded` or `gang`.
        repeat: which repeat, from 0.
        wall_s: from the first submit to the last finish, seconds.
        output_tokens_per_s: output tokens over `wall_s`.
        total_tokens_per_s: prompt and output tokens over `wall_s`.
        num_requests: all of them finished.
        num_prompt_tokens: tokens of all prompts.
        num_output_tokens: tokens given to requests.
        num_steps: steps of the engine.
        num_decode_steps: steps that sampled at least one row.
        num_rows_computed: rows of all steps: the useful ones, the ghosts' and padding's.
        num_rows_useful: of those, rows of a request that was still running: one for each output token, and
            `num_chunk_rows`.
        num_chunk_rows: of those, rows that sampled nothing: a prompt's chunks before its last, where a step's
            token budget cut it.
        useful_share: `num_rows_useful / num_rows_computed`.
        num_ghost_rows: rows of finished requests that a static batch computed all the same.
        num_padding_rows: rows that fill one prompt each up to its gang's longest.
        num_padding_tokens: tokens that only fill prompts up to their gang's longest.
        num_tokens_computed: tokens of all rows.
        num_wasted_tokens: tokens sampled for requests that had ended.
        seat_occupancy: share of seats held by a request, over all steps.
        num_preemptions: times a sequence gave up its KV.
        ttft_ms: from submit to each request's first token.
        inter_token_ms: between one token of a request and its next.
        e2e_ms: from submit to each request's last token.
        stage_s: seconds by stage. Engine thread: `plan`, `commit`; runner thread: `expand`, `forward`,
            `sample`; `text` is 0, as ids go in and come out.
        runner_idle_share: share of its time that the runner waited for work.
        forward_s: seconds of the forward by what took them, where the backend knows: products by their shape,
            "attention", and the small ops by name.
        limit_share: the least time that its steps can take on this machine, of `wall_s`; None where that is
            not known.
    """

    batching: str
    repeat: int
    wall_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    num_decode_steps: int
    num_rows_computed: int
    num_rows_useful: int
    num_chunk_rows: int
    useful_share: float
    num_ghost_rows: int
    num_padding_rows: int
    num_padding_tokens: int
    num_tokens_computed: int
    num_wasted_tokens: int
    seat_occupancy: float
    num_preemptions: int
    ttft_ms: Percentiles
    inter_token_ms: Percentiles
    e2e_ms: Percentiles
    stage_s: dict[str, float]
    runner_idle_share: float
    forward_s: dict[str, float]
    limit_share: float | None


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model that runs are explained by.

    Attributes:
        limit: what bounds its steps; None where that is not measured.
        forward_us: microseconds of its forward so far, by what took them; None where nobody knows.
    """

    limit: Limit | None = None
    forward_us: Callable[[], dict[str, int]] | None = None


class EngineFactory(Protocol):
    """Starts engines that differ in their configuration alone."""

    def __call__(self, config: "EngineConfig") -> Engine:
        """An engine that has run nothing yet."""


def null_engines(*, vocab_size: int, max_model_len: int) -> EngineFactory:
    """Engines without a model: steps are planned and counted, tokens come from a script.

    Args:
        vocab_size: token ids are below this.
        max_model_len: tokens of a request, where the configuration does not say.
    """

    def start(config: "EngineConfig") -> Engine:
        resolved = config.resolve_without_model(vocab_size=vocab_size, max_model_len=max_model_len)
        core = resolved.core()
        return start_engine(core, NullExecutor(core.layout, NullScript(vocab_size)), depth=config.depth)

    return start


def torch_engines(model: "Model") -> EngineFactory:
    """Engines over one loaded model; each has a KV cache of its own."""
    from noria.kv_cache import KvCache
    from noria.memory import kv_memory_budget
    from noria.runner.torch_runner import TorchExecutor

    def start(config: "EngineConfig") -> Engine:
        resolved = config.resolve(model.config, model.dtype, kv_memory_budget(model.device))
        core = resolved.core()
        stored = resolved.kv_dtype or model.dtype
        kv = KvCache(model.config, resolved.num_kv_blocks, config.block_size, stored, model.device)
        return start_engine(core, TorchExecutor(model, kv, core.layout), depth=config.depth)

    return start


def run_throughput(
    start: EngineFactory,
    config: "EngineConfig",
    workload: Workload,
    *,
    repeat: int = 0,
    facts: Facts = Facts(),
    on_start: Callable[[], None] | None = None,
    on_events: OnEvents | None = None,
) -> ThroughputRun:
    """Runs the workload once in a fresh engine, after a short warm-up.

    Args:
        start: makes the engine.
        config: of the engine; its `batching` is what is measured.
        workload: what is asked.
        repeat: kept in the result.
        facts: of the model, for `limit_share` and `forward_s`.
        on_start: called when all is submitted and the first step is about to run.
        on_events: called after each turn; its time counts as wall time.

    Raises:
        ConfigError: a request does not fit the KV cache; the text names the entry (from 0).
        NoriaError: a request ended otherwise than by its length.
    """
    engine = start(config)
    try:
        with HeldInterrupts() as interrupts:
            _warm_up(engine, workload)
            before = engine.stats()
            log = _EventLog()
            steps = _StepLog(engine)
            before_us = {} if facts.forward_us is None else facts.forward_us()
            started = perf_counter()
            for number, request in enumerate(workload.requests):
                _submit(engine, number, request.prompt_token_ids, request.max_tokens)
            if on_start is not None:
                on_start()
            while engine.has_work:
                interrupts.raise_pending()
                events = engine.turn()
                if events is None:
                    raise NoriaError(f"the engine stopped with {engine.num_requests} requests unfinished")
                log.add(events)
                steps.add()
                if on_events is not None:
                    on_events(engine, events)
            stats = engine.stats() - before
            after_us = {} if facts.forward_us is None else facts.forward_us()
            least_s = None if facts.limit is None else facts.limit.seconds(steps.records(), workload)
    finally:
        engine.close()
    run = _result(config.batching, repeat, workload, stats, log.latencies(workload, started))
    return replace(
        run,
        forward_s={name: (us - before_us.get(name, 0)) / 1e6 for name, us in after_us.items()},
        limit_share=None if least_s is None else least_s / run.wall_s,
    )


def _submit(engine: Engine, number: int, prompt: npt.NDArray[np.int32], max_tokens: int) -> None:
    init = SeatInit(_greedy(max_tokens), number, len(prompt))
    try:
        engine.submit(prompt, init, max_tokens)
    except RejectedError as error:
        raise ConfigError(f"workload entry {number}: {error}", name="workload", value=number) from None


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def _warm_up(engine: Engine, workload: Workload) -> None:
    """A few tokens of throw-away requests: the first steps of a process pay for what later ones reuse."""
    for number, request in enumerate(workload.requests[:_WARM_UP_PROMPTS]):
        # Reversed, so that no prompt of the workload is found in the prefix cache (it is reset as well).
        _submit(engine, number, request.prompt_token_ids[::-1], min(_WARM_UP_TOKENS, request.max_tokens))
    while engine.has_work:
        engine.turn()
    engine.reset_prefix_cache()


@dataclass(frozen=True, slots=True)
class _Latencies:
    """Of one run; `finished_s` on the clock of `perf_counter`."""

    wall_s: float
    ttft_ms: Percentiles
    inter_token_ms: Percentiles
    e2e_ms: Percentiles


class _StepLog:
    """The records of all steps from here on."""

    def __init__(self, engine: Engine) -> None:
        self._reader = RecordReader(engine.records)
        self._reader.take()
        self._parts: list[npt.NDArray[np.int64]] = []
        self._num_turns = 0

    def add(self) -> None:
        """A turn has ended."""
        self._num_turns += 1
        if self._num_turns % STEPS_A_FOLD == 0:
            self._parts.append(self._reader.take())

    def records(self) -> npt.NDArray[np.int64]:
        """`[num_steps, len(RECORD_FIELDS)]`."""
        return np.concatenate([*self._parts, self._reader.take()])


class _EventLog:
    """Keeps every event as arrays, and sorts them once, at the end."""

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.int64]] = []
        self._times_us: list[npt.NDArray[np.int64]] = []

    def add(self, events: Events) -> None:
        self._rows.append(events.rows)
        self._times_us.append(events.times_us)

    def latencies(self, workload: Workload, started_s: float) -> _Latencies:
        """All requests arrived at `started_s`."""
        rows = np.concatenate(self._rows)  # [num_events, 4]
        times_ms = np.concatenate(self._times_us) / 1e3 - started_s * 1e3
        ends = rows[:, 1] == _core.FINISHED
        num_whole = int((rows[ends, 2] == _core.LENGTH).sum())
        if num_whole != len(workload.requests) or num_whole != int(ends.sum()):
            raise NoriaError(f"{num_whole} of {len(workload.requests)} requests ended by their length")
        if int(rows[ends, 3].sum()) != int(workload.output_lengths.sum()):
            raise NoriaError(
                f"{int(rows[ends, 3].sum())} tokens came; {workload.output_lengths.sum()} were asked for"
            )
        is_token = rows[:, 1] == _core.TOKEN
        handles, positions, token_ms = rows[is_token, 0], rows[is_token, 3], times_ms[is_token]
        order = np.lexsort((positions, handles))
        handles, positions, token_ms = handles[order], positions[order], token_ms[order]
        gaps_ms = np.diff(token_ms)[handles[1:] == handles[:-1]]
        return _Latencies(
            wall_s=float(times_ms[ends].max()) / 1e3,
            ttft_ms=percentiles(token_ms[positions == 0]),
            inter_token_ms=percentiles(gaps_ms),
            e2e_ms=percentiles(times_ms[ends]),
        )


def percentiles(values_ms: npt.NDArray[np.float64]) -> Percentiles:
    """Of at least one value; zeros where there is none (no request has a second token)."""
    if not len(values_ms):
        return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values_ms, [50, 90, 95, 99]))
    return Percentiles(float(values_ms.mean()), p50, p90, p95, p99, float(values_ms.max()))


def _result(
    batching: str,
    repeat: int,
    workload: Workload,
    stats: EngineStats,
    latencies: _Latencies,
) -> ThroughputRun:
    num_prompt_tokens = int(workload.prompt_lengths.sum())
    num_output_tokens = stats.num_output_tokens
    return ThroughputRun(
        batching=batching,
        repeat=repeat,
        wall_s=latencies.wall_s,
        output_tokens_per_s=num_output_tokens / latencies.wall_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / latencies.wall_s,
        num_requests=len(workload.requests),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_steps=stats.num_steps,
        num_decode_steps=stats.num_decode_steps,
        num_rows_computed=stats.num_rows,
        num_rows_useful=stats.num_useful_rows,
        num_chunk_rows=stats.num_chunk_rows,
        useful_share=stats.num_useful_rows / stats.num_rows,
        num_ghost_rows=stats.num_ghost_rows,
        num_padding_rows=stats.num_padding_rows,
        num_padding_tokens=stats.num_padding_tokens,
        num_tokens_computed=stats.num_tokens,
        num_wasted_tokens=stats.num_wasted_tokens,
        seat_occupancy=stats.seat_occupancy,
        num_preemptions=stats.num_preemptions,
        ttft_ms=latencies.ttft_ms,
        inter_token_ms=latencies.inter_token_ms,
        e2e_ms=latencies.e2e_ms,
        stage_s={
            "plan": stats.plan_us / 1e6,
            "expand": stats.expand_us / 1e6,
            "forward": stats.forward_us / 1e6,
            "sample": stats.sample_us / 1e6,
            "commit": stats.commit_us / 1e6,
            "text": stats.text_us / 1e6,
        },
        runner_idle_share=stats.runner_idle_share,
        forward_s={},
        limit_share=None,
    )


def run_batchings(
    start: EngineFactory,
    configs: "list[EngineConfig]",
    workload: Workload,
    *,
    num_repeats: int = 1,
    facts: Facts = Facts(),
    on_run: Callable[[str, int], None] | None = None,
    on_events: OnEvents | None = None,
) -> list[ThroughputRun]:
    """Runs each configuration `num_repeats` times, in turns, so that a machine's drift meets all alike.

    Raises:
        ConfigError: `num_repeats` is below 1.
    """
    if num_repeats < 1:
        raise ConfigError(f"repeat is {num_repeats}; it must be 1 or more", name="repeat", value=num_repeats)
    runs: list[ThroughputRun] = []
    for repeat in range(num_repeats):
        for config in configs:
            on_start = None if on_run is None else partial(on_run, config.batching, repeat)
            runs.append(
                run_throughput(
                    start,
                    config,
                    workload,
                    repeat=repeat,
                    facts=facts,
                    on_start=on_start,
                    on_events=on_events,
                )
            )
    return runs
