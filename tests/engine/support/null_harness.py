"""A null engine whose every answer is known beforehand, and whose KV is checked slot by slot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from noria import _core
from noria.config import EngineConfig
from noria.engine import Engine
from noria.outputs import EventCollector, Events, FinishedRequest
from noria.runner.base import (
    DraftProvider,
    Executor,
    HostMasks,
    MaskProvider,
    PendingIds,
    SeatInit,
    StepResult,
)
from noria.runner.null_runner import AcceptDrafts, Fault, NullExecutor, NullScript, accept_pseudorandomly
from noria.runner.step import StepView
from noria.runner.thread import ThreadRunner
from noria.sampling.params import SamplingParams

VOCAB_SIZE = 50
EOS = 7


@dataclass
class NullRequest:
    """What was asked, and what must come of it."""

    seed: int
    prompt: list[int]
    max_tokens: int
    priority: int = 0
    parked: bool = False
    host_masked: bool = False
    handle: int = -1


class CheckedExecutor:
    """A null executor with a KV of token ids: a row whose context is not its request's own raises."""

    def __init__(self, inner: NullExecutor, layout: _core.StepLayout, script: NullScript) -> None:
        self.inner = inner
        self.script = script
        self.block_size = layout.block_size
        self.kv = np.full((layout.num_blocks + 1) * layout.block_size, -1, dtype=np.int64)
        self.prompts: dict[int, list[int]] = {}  # by seed
        self.seeds = np.zeros(layout.max_num_seqs, dtype=np.int64)  # by seat
        self.num_checked_rows = 0
        self.texts: dict[int, list[int]] = {}  # by seed: the prompt, and what is known of the answer

    def expand(self, view: StepView, inits: Sequence[SeatInit]) -> None:
        self.inner.expand(view, inits)
        if inits:
            self.seeds[view.gained_seats] = [init.seed for init in inits]

    def forward(self, view: StepView) -> None:
        self.inner.forward(view)
        arrays = self.inner.expander
        ids = arrays.input_ids[: view.num_tokens]
        slots = arrays.slot_mapping[: view.num_tokens]
        stored = slots >= 0
        assert len(np.unique(slots[stored])) == np.count_nonzero(stored), "two tokens were stored in one slot"
        assert (slots[stored] >= self.block_size).all(), "block 0 was stored to"
        self.kv[slots[stored]] = ids[stored]
        for row in range(view.num_rows):
            self._check_row(view, row)

    def _check_row(self, view: StepView, row: int) -> None:
        arrays = self.inner.expander
        flags = int(view.row_flags[row])
        if flags & _core.PADDING:
            assert arrays.context_lens[row] == 0
            return
        seat = int(arrays.row_seats[row])
        seed = int(self.seeds[seat])
        first, end = int(view.cu_seqlens_q[row]), int(view.cu_seqlens_q[row + 1])
        start = int(arrays.positions[first])
        assert list(arrays.positions[first:end]) == list(range(start, start + end - first))
        # Listed drafts may be wrong; what they store is stored again.
        length = start + 1 if flags & _core.DRAFT_IDS else start + end - first
        wanted = self._text(seed, length)
        blocks = arrays.block_tables[seat][: -(-length // self.block_size)]
        slots = (blocks[:, None].astype(np.int64) * self.block_size + np.arange(self.block_size)).ravel()[
            :length
        ]
        assert list(self.kv[slots]) == wanted, f"step {view.step}, row {row}: the context is another's"
        self.num_checked_rows += 1

    def _text(self, seed: int, length: int) -> list[int]:
        """The first tokens of a request's prompt and answer."""
        if len(self.texts.get(seed, ())) < length:
            self.texts[seed] = self.prompts[seed] + self.script.answer(seed, length + 64)
        return self.texts[seed][:length]

    def sample(self, view: StepView, masks: HostMasks | None) -> PendingIds:
        return self.inner.sample(view, masks)


class InlineRunner:
    """A runner without a thread: a step's jobs run when they are enqueued, or when its result is taken.

    The two are the extremes of when a thread may run them.
    """

    def __init__(self, executor: Executor, ring: Sequence[StepView], *, is_eager: bool) -> None:
        self.executor = executor
        self.ring = ring
        self.is_eager = is_eager
        self.jobs: list[tuple[int, Callable[[], PendingIds | None]]] = []
        self.results: list[StepResult] = []
        self.views: dict[int, StepView] = {}
        self.is_broken = False

    def forward(self, step: int, buffer_index: int, inits: Sequence[SeatInit]) -> None:
        view = self.views[step] = self.ring[buffer_index]

        def job() -> None:
            self.executor.expand(view, inits)
            self.executor.forward(view)

        self._enqueue(step, job)

    def sample(self, step: int, masks: HostMasks | None = None) -> None:
        self._enqueue(step, lambda: self.executor.sample(self.views[step], masks))

    def _enqueue(self, step: int, job: Callable[[], PendingIds | None]) -> None:
        self.jobs.append((step, job))
        if self.is_eager:
            self._run()

    def _run(self) -> None:
        while self.jobs:
            step, job = self.jobs.pop(0)
            if self.is_broken:
                continue
            assert self.views[step].step == step, "a buffer was overwritten before its step ran"
            try:
                pending = job()
            except Exception as error:  # noqa: BLE001
                self.is_broken = True
                self.results.append(StepResult(step, None, error))
                continue
            if pending is not None:
                self.results.append(StepResult(step, pending.wait()))
                if not self.is_eager:
                    return

    def next_result(
        self, *, block: bool, while_waiting: Callable[[], None] | None = None
    ) -> StepResult | None:
        if not self.results:
            self._run()
        assert self.results or not block, "the engine waits for a step that was not sampled"
        return self.results.pop(0) if self.results else None

    def discard_from(self, step: int) -> None:
        self.jobs = [job for job in self.jobs if job[0] < step]
        self.results = [result for result in self.results if result.step < step]
        self.is_broken = False

    def close(self) -> None:
        self.jobs.clear()


@dataclass
class NullRun:
    """An engine, what was asked of it, and what it should have answered."""

    engine: Engine
    executor: CheckedExecutor
    script: NullScript
    core: _core.Core
    num_blocks: int
    requests: list[NullRequest] = field(default_factory=list)
    events: list[Events] = field(default_factory=list)

    def submit(self, request: NullRequest) -> int:
        self.executor.prompts[request.seed] = request.prompt
        params = SamplingParams(seed=request.seed, max_tokens=request.max_tokens)
        request.handle = self.engine.submit(
            request.prompt,
            SeatInit(params, request.seed, len(request.prompt)),
            request.max_tokens,
            stop_token_ids=[EOS],
            priority=request.priority,
            parked=request.parked,
            host_masked=request.host_masked,
        )
        self.requests.append(request)
        return request.handle

    def turn(self) -> Events:
        events = self.engine.turn()
        assert events is not None
        self.events.append(events)
        return events

    def finish_all(self) -> list[FinishedRequest]:
        """Turns until nothing is left; the answers in the order of the submits."""
        while self.engine.has_work:
            self.turn()
            self.core.check()
        collector = EventCollector([request.handle for request in self.requests])
        for events in self.events:
            collector.add(events)
        return collector.finished()

    def expected(self, request: NullRequest) -> tuple[list[int], int]:
        """All tokens and the reason, if nothing interferes."""
        answer = self.script.answer(request.seed, request.max_tokens)
        if EOS in answer:
            answer = answer[: answer.index(EOS) + 1]
            return answer, _core.STOP
        return answer, _core.LENGTH

    def assert_all_as_scripted(self, finished: Sequence[FinishedRequest]) -> None:
        assert len(finished) == len(self.requests)
        for request, answer in zip(self.requests, finished, strict=True):
            assert (answer.token_ids.tolist(), answer.reason) == self.expected(request)

    def assert_nothing_is_left(self) -> None:
        """No request, seat, block or step is left over."""
        core = self.core
        core.check()
        assert (core.num_running, core.num_waiting, core.num_parked, core.num_in_flight) == (0, 0, 0, 0)
        assert core.num_held_blocks == 0
        assert core.num_free_blocks + core.num_cached_blocks == self.num_blocks
        assert self.engine.num_requests == 0
        assert not self.engine.has_work
        assert self.executor.num_checked_rows > 0


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    ids: list[int] = rng.integers(0, VOCAB_SIZE, length).tolist()
    return ids


def ids_of(events: npt.NDArray[np.int64], handle: int) -> list[int]:
    ids: list[int] = events[(events[:, 0] == handle) & (events[:, 1] == _core.TOKEN), 2].tolist()
    return ids


def build_run(
    config: EngineConfig | None = None,
    *,
    eos_positions: dict[int, int] | None = None,
    fault: Fault | None = None,
    forward_us: int = 0,
    max_model_len: int = 96,
    max_drafts: int = 0,
    accept_drafts: AcceptDrafts = accept_pseudorandomly,
    mask_provider: MaskProvider | None = None,
    draft_provider: DraftProvider | None = None,
    runner: str = "thread",
    record: bool = False,
) -> NullRun:
    """A run; `runner` is `thread`, `eager` or `lazy`."""
    config = config or small_config()
    script = NullScript(VOCAB_SIZE, eos_token_id=EOS, eos_positions=eos_positions or {})
    resolved = config.resolve_without_model(vocab_size=VOCAB_SIZE, max_model_len=max_model_len)
    core = resolved.core(max_drafts=max_drafts, record=record)
    layout = core.layout
    executor = CheckedExecutor(
        NullExecutor(layout, script, forward_us=forward_us, accept_drafts=accept_drafts, fault=fault),
        layout,
        script,
    )
    ring = tuple(StepView(layout) for _ in range(config.depth + 1))
    made = (
        ThreadRunner(executor, ring)
        if runner == "thread"
        else InlineRunner(executor, ring, is_eager=runner == "eager")
    )
    engine = Engine(
        core,
        made,
        ring,
        mask_provider=mask_provider,
        draft_provider=draft_provider,
        policy=config.policy,
    )
    return NullRun(engine, executor, script, core, resolved.num_kv_blocks)


def small_config(**changes: object) -> EngineConfig:
    """Four seats, blocks of 4 tokens, 32 tokens a step; admission lets a small pool preempt."""
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "admission": "optimistic",
    }
    return EngineConfig(model="null", **(values | changes))  # type: ignore[arg-type]
