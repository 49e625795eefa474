"""The loop: plan as far as depth allows, launch, take one result, commit.

One thread owns an engine, and through it the core.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from noria import _core
from noria._core import Core
from noria.errors import ConfigError, NoriaError, RejectedError, TokenOutOfRangeError
from noria.hints import NO_HINTS, SchedulingHints
from noria.kv_stats import KvEvents, KvStats
from noria.masks import MaskKeeper
from noria.outputs import Events
from noria.policy import PolicyFailedError, PolicyFunction, PolicyKeeper
from noria.runner.base import (
    DraftProvider,
    Executor,
    KvMemory,
    MaskProvider,
    SeatInit,
    StepResult,
    StepRunner,
)
from noria.runner.step import StepView
from noria.runner.thread import ThreadRunner
from noria.scores import scores_of
from noria.seat_table import SeatTable
from noria.stats import EngineStats, StatsKeeper
from noria.token_log import TokenLog
from noria.turn_log import TurnLog

_log = logging.getLogger(__name__)

_NO_TOKEN = "no token could be sampled: its logits are not finite, or its mask is missing or allows nothing"
_ALL_TOKENS = 2**31 - 1  # `finish` cuts at what there is


class EngineDeadError(NoriaError):
    """The engine was closed, its device was lost, or a turn was cut short; it takes no more work."""


class _WaitEndedError(Exception):
    """`while_waiting` raised."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(str(raised))
        self.raised = raised


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was launched.

    Attributes:
        step: its id.
        buffer_index: where it lies in the ring.
        max_idle_us: the runner's wait before it that counts as idle, at most; None: all of it.
        row_handles: `[num_rows]` int64: whose its rows are, where log probabilities are asked for.
    """

    step: int
    buffer_index: int
    max_idle_us: int | None
    row_handles: npt.NDArray[np.int64] | None


class Engine:
    """A core, a ring of step buffers and a runner.

    Args:
        core: nobody else calls it from now on.
        runner: reads the buffers of `ring`; closed with the engine.
        ring: depth + 1 buffers.
        mask_provider: asked for the masks of `host_masked` requests' rows, once the tokens before
            them have been given out; if it raises, the requests that it was asked about end with an
            error.
        draft_provider: asked before each plan, if the core was built with `max_drafts`.
        kv_memory: what `resize_kv_cache` resizes beside the core's pool; None: there is none.
        policy: scores requests, if the core was built with the policy `own`; if it raises, the requests
            that it was asked about end with an error.
    """

    def __init__(
        self,
        core: Core,
        runner: StepRunner,
        ring: Sequence[StepView],
        *,
        mask_provider: MaskProvider | None = None,
        draft_provider: DraftProvider | None = None,
        kv_memory: KvMemory | None = None,
        policy: PolicyFunction | None = None,
    ) -> None:
        self._process_id = os.getpid()
        self._core = core
        self._runner = runner
        self._ring = ring
        self._depth = len(ring) - 1
        self._masks = None if mask_provider is None else MaskKeeper(mask_provider)
        self._draft_provider = draft_provider
        self._kv_memory = kv_memory
        self._policy = None if policy is None else PolicyKeeper(core, policy)
        self._is_kv_memory_due = False  # the pool has another size than the memory
        self._next_buffer = 0
        self._in_flight: deque[_InFlight] = deque()
        self._held: _InFlight | None = None  # its sample waits for masks; nothing is planned meanwhile
        self._requests: dict[int, SeatInit] = {}
        self._causes: dict[int, str] = {}  # of requests that end as ERROR, until someone asks
        self._last_failure = "the step failed"
        self._dead: str | None = None
        self._work_since_us: int | None = None  # set by the submit that ended idleness, until a launch
        self._seats = SeatTable(core.layout.max_num_seqs)
        self._stats = StatsKeeper(core, core.layout.max_num_seqs)
        self._told = TurnLog()
        self._num_scored = 0  # requests that ask for them
        self._interrupt: KeyboardInterrupt | None = None  # that a logits edit raised, until someone asks
        self._log = TokenLog()

    # ---- what a caller asks

    @property
    def core(self) -> Core:
        """The core, to be read only."""
        return self._core

    @property
    def has_work(self) -> bool:
        """Whether `turn` has anything to do; parked requests alone are none."""
        return bool(self._in_flight) or len(self._requests) > self._core.num_parked

    @property
    def is_usable(self) -> bool:
        """Whether it takes work: not closed, its device not lost, no turn cut short."""
        return self._dead is None

    @property
    def num_requests(self) -> int:
        """Requests that have not finished."""
        return len(self._requests)

    @property
    def seat_handles(self) -> npt.NDArray[np.int64]:
        """`[max_num_seqs]`: who holds each seat, a copy; −1 for nobody."""
        return self._seats.handles

    @property
    def seconds_to_expiry(self) -> float | None:
        """Until the next request expires, 0 if it is due; `turn` ends it, even if it has no other work."""
        expiry_us = self._core.next_expiry_us
        return None if expiry_us is None else max(0, expiry_us - _now_us()) / 1e6

    def stats(self) -> EngineStats:
        """Sums since the engine started."""
        return self._stats.snapshot()

    def records(self) -> npt.NDArray[np.int64]:
        """`[n, len(noria._core.RECORD_FIELDS)]`: the last committed steps, 4,096 at most, oldest first."""
        return self._core.records()

    def kv_stats(self) -> KvStats:
        """How KV memory lies now."""
        return KvStats.of(self._core)

    def kv_events(self, first: int = 0) -> KvEvents:
        """What became findable in the KV cache, moved or was forgotten, from event number `first` on.

        For a router that sends requests to where their prefix is: ask again from `next_event`; where
        `num_missed` is not 0, forget all and start over after `reset_prefix_cache`.
        """
        return KvEvents.of(self._core, first)

    def add_text_time(self, text_us: int) -> None:
        """Counts time spent between text and token ids, for `stats`."""
        self._stats.text_us += text_us

    def take_cause(self, handle: int) -> str | None:
        """Why a request ended as `ERROR`, once; None if it did not."""
        return self._causes.pop(handle, None)

    def raise_interrupt(self) -> None:
        """Raises a KeyboardInterrupt that a request's logits edit raised, once; that request has ended."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    # ---- requests

    def submit(
        self,
        prompt_token_ids: npt.ArrayLike,
        init: SeatInit,
        max_tokens: int,
        *,
        stop_token_ids: Sequence[int] = (),
        priority: int = 0,
        hints: SchedulingHints = NO_HINTS,
        cache_salt: bytes = b"",
        parked: bool = False,
        host_masked: bool = False,
        reads_prefix_cache: bool = True,
    ) -> int:
        """Queues a request.

        Args:
            prompt_token_ids: `[num_prompt_tokens]` integers.
            init: what the runner has to know of it.
            max_tokens: output tokens; cut to what the context leaves after the prompt.
            stop_token_ids: output ids that end it; they count as output.
            priority: its band; lower runs first, but under `fcfs`.
            hints: what else its sender knows that order and admission may go by.
            cache_salt: at most 16 bytes; requests of different salts never share KV.
            parked: it waits out of line until `unpark`.
            host_masked: its logits are edited by the mask provider.
            reads_prefix_cache: whether it takes KV that others computed; one whose prompt is scored does not.

        Returns:
            Its handle.

        Raises:
            RejectedError: it is bad, or can never run; nothing of it is kept.
            EngineDeadError: the engine takes no more work.
        """
        self._require_usable()
        if host_masked and self._masks is None:
            raise RejectedError("host_masked is set, but the engine has no mask_provider", value=host_masked)
        now_us = _now_us()
        was_idle = not self.has_work
        handle = self._core.submit(
            now_us,
            _token_array(prompt_token_ids),
            max_tokens,
            priority=priority,
            tenant=hints.tenant_id,
            expected_tokens=hints.expected_tokens,
            ttft_target_us=hints.ttft_target_us,
            itl_target_us=hints.itl_target_us,
            adapter=hints.adapter_id,
            expires_us=hints.expiry_us(now_us),
            stop_token_ids=_token_array(stop_token_ids) if len(stop_token_ids) else None,
            cache_salt=cache_salt,
            parked=parked,
            host_masked=host_masked,
            reads_prefix_cache=reads_prefix_cache,
        )
        self._requests[handle] = init
        self._num_scored += init.is_scored
        if init.reads_output:
            self._log.watch(handle)
        if was_idle:
            self._work_since_us = now_us
        return handle

    def finish(
        self, handle: int, num_output_tokens: int, reason: int, cause: str = "it was ended from outside"
    ) -> bool:
        """Ends a request: a stop found outside the core.

        Its `FINISHED` comes with the next turn, and says at which token it was cut.

        Args:
            handle: a stale one is ignored.
            num_output_tokens: tokens that it keeps.
            reason: `STOP`, `LENGTH`, `ABORT`, `ERROR` or `EXPIRED`.
            cause: for `ERROR`, what `take_cause` will say.

        Returns:
            False if it had ended already.
        """
        has_ended = self._core.finish(handle, num_output_tokens, reason, _now_us())
        if has_ended:
            # Its FINISHED comes later, but no mask is wanted for it any more.
            self._seats.forget(handle)
            if reason == _core.ERROR:
                self._causes[handle] = cause
        return has_ended

    def abort(self, handle: int) -> bool:
        """Ends a request whose client quit; False if it had ended already."""
        return self.finish(handle, _ALL_TOKENS, _core.ABORT)

    def unpark(self, handle: int) -> bool:
        """Puts a parked request in line; False if it was not parked."""
        was_idle = not self.has_work
        has_changed = self._core.unpark(handle, _now_us())
        if has_changed and was_idle:
            self._work_since_us = _now_us()
        return has_changed

    def reset_prefix_cache(self) -> int:
        """Forgets what prompts have in common; the number of blocks that came free."""
        return self._core.reset_prefix_cache(_now_us())

    def resize_kv_cache(self, num_blocks: int) -> None:
        """Gives the KV cache another size, while requests run.

        Down: cached blocks beyond it are forgotten, those in use move, and once no step reads them their
        memory goes back to the system. Nobody is admitted before that; where not all fit, some requests
        are preempted. Up: what is in flight is waited for, as memory may move.

        Args:
            num_blocks: usable blocks from now on.

        Raises:
            ConfigError: out of range, or a request that was accepted may need more, or batches are
                static, or the system does not give so much memory; nothing has changed.
            EngineDeadError: the engine takes no more work.
        """
        self._require_usable()
        if num_blocks < 1:
            raise ConfigError(
                f"num_blocks is {num_blocks}; it must be at least 1", name="num_blocks", value=num_blocks
            )
        if num_blocks > self._core.num_blocks and self._kv_memory is not None:
            self._grow_kv_memory(self._kv_memory, num_blocks)
        self._core.resize(num_blocks, _now_us())
        self._is_kv_memory_due = self._kv_memory is not None
        self._resize_kv_memory()

    def _grow_kv_memory(self, memory: KvMemory, num_blocks: int) -> None:
        """Takes memory for a larger pool; where the pool refuses after all, the next resize gives it back."""
        while self._in_flight:  # it may lie elsewhere afterwards
            self._supply_masks()
            self._take_result(self._await_result(None))
        if num_blocks > memory.num_blocks:
            memory.resize(num_blocks)

    def _resize_kv_memory(self) -> bool:
        """Brings the memory to the pool's size, if that is due; whether no step may be planned before."""
        if not self._is_kv_memory_due or self._core.is_shrinking:
            return False
        if self._in_flight:
            return True
        assert self._kv_memory is not None
        self._kv_memory.resize(self._core.num_blocks)
        self._is_kv_memory_due = False
        return False

    # ---- the loop

    def turn(self, *, while_waiting: Callable[[], None] | None = None) -> Events | None:
        """One turn of the loop; waits for a step's result if any is in flight.

        Args:
            while_waiting: called at least once a second of that wait. What it raises ends the turn
                where nothing is half done: the engine stays usable, and the next turn waits on.

        Returns:
            What happened; None if there was nothing to do, and will not be before a `submit`, an
            `unpark` or a `finish`.

        Raises:
            EngineDeadError: the engine takes no more work.
        """
        self._require_usable()
        try:
            self._supply_masks()
            self._plan_ahead()
            result = self._await_result(while_waiting) if self._in_flight else None
            return self._end_turn(result)
        except _WaitEndedError as ended:
            raise ended.raised from None
        except BaseException as error:
            # Between a plan and its commit there is no state to go back to.
            self._dead = f"a turn was cut short by {type(error).__name__}: {error}"
            raise

    def _await_result(self, while_waiting: Callable[[], None] | None) -> StepResult:
        def ask() -> None:
            try:
                if while_waiting is not None:
                    while_waiting()
            except BaseException as error:
                raise _WaitEndedError(error) from error

        result = self._runner.next_result(block=True, while_waiting=ask)
        if result is None:
            raise NoriaError(f"the runner gave no result for step {self._in_flight[0].step}")
        return result

    def _end_turn(self, result: StepResult | None) -> Events | None:
        if result is not None:
            self._take_result(result)
            self._resize_kv_memory()
        elif not self._told:
            if self.has_work:
                raise NoriaError(f"the core is idle while {len(self._requests)} requests wait")
            return None
        return self._told.take()

    def _plan_ahead(self) -> None:
        while len(self._in_flight) < self._depth and self._held is None and not self._resize_kv_memory():
            self._ask_policy()
            now_us = _now_us()
            view = self._ring[self._next_buffer]
            drafts = None if self._draft_provider is None else self._draft_provider()
            if drafts is None:
                plan = self._core.plan(now_us, view.buffer)
            else:
                plan = self._core.plan(now_us, view.buffer, drafts.handles, drafts.counts, drafts.ids)
            self._collect(plan.num_events, now_us, self._last_failure)
            if plan.kind == plan.STEP:
                self._launch(plan.step, view, now_us)
            self._stats.plan_us += _now_us() - now_us
            if plan.kind != plan.STEP:
                return
            self._supply_masks()

    def _ask_policy(self) -> None:
        """Has those scored that have got in line."""
        if self._policy is None:
            return
        try:
            self._policy.score_changed(_now_us())
        except PolicyFailedError as error:
            for handle in error.handles.tolist():
                self.finish(handle, _ALL_TOKENS, _core.ERROR, str(error))
        self._stats.policy_cost = self._policy.cost

    def _launch(self, step: int, view: StepView, now_us: int) -> None:
        self._seats.lose(view.lost)
        inits: Sequence[SeatInit] = ()
        if view.num_gained:
            handles = view.gained_handles
            inits = [self._seat_init(handle) for handle in handles.tolist()]
            self._seats.gain(view.gained_seats, handles, [init.num_prompt_tokens for init in inits])
        max_idle_us = None if self._work_since_us is None else now_us - self._work_since_us
        self._work_since_us = None
        row_handles = self._seats.of_rows(view) if self._num_scored else None
        launched = _InFlight(step, self._next_buffer, max_idle_us, row_handles)
        self._in_flight.append(launched)
        self._runner.forward(step, launched.buffer_index, inits)
        if view.num_host_masked:
            self._held = launched
        else:
            self._runner.sample(step)
        self._next_buffer = (self._next_buffer + 1) % len(self._ring)

    def _seat_init(self, handle: int) -> SeatInit:
        """What the runner has to know of a request that gains a seat now."""
        init = self._requests[handle]
        if not init.reads_output:
            return init
        return replace(init, context=replace(init.context, output_token_ids=self._log.outputs(handle)))

    def _supply_masks(self) -> None:
        """Enqueues the held sample, once every earlier step is committed."""
        held = self._held
        if held is None or self._in_flight[0] is not held:
            return
        request = self._seats.mask_request(held.step, self._ring[held.buffer_index])
        masks = None
        if request is not None:
            assert self._masks is not None  # `submit` refuses masked requests without it
            masks = self._masks.masks(request)
        self._held = None
        self._runner.sample(held.step, masks)

    def _take_result(self, result: StepResult) -> None:
        oldest = self._in_flight.popleft()
        if result.step != oldest.step:
            raise NoriaError(f"the runner gave {result} for step {oldest.step}")
        now_us = _now_us()
        if result.sampled is None:
            self._fail(result, now_us)
        else:
            sampled = result.sampled
            num_events = self._core.commit(
                result.step, sampled.num_ids, sampled.ids, result.device_us, now_us
            )
            self._collect(num_events, now_us, _NO_TOKEN)
            if sampled.interrupt is not None:
                self._interrupt = sampled.interrupt
            if oldest.row_handles is not None:
                self._told.add_scores(scores_of(sampled, oldest.row_handles))
        idle_us = result.forward_wait_us
        if oldest.max_idle_us is not None:
            idle_us = min(idle_us, oldest.max_idle_us)
        flags = self._ring[oldest.buffer_index].row_flags
        num_padding_rows = int(np.count_nonzero(flags & _core.PADDING))
        self._stats.add_result(result, idle_us + result.sample_wait_us, num_padding_rows)
        self._stats.commit_us += _now_us() - now_us

    def _collect(self, num_events: int, now_us: int, error_cause: str) -> None:
        """Keeps a verb's events for the end of the turn, and forgets the requests that finished."""
        if not num_events:
            return
        rows = self._core.events[:num_events].copy()
        self._told.add(rows, now_us)
        self._log.add(rows)
        finished = rows[rows[:, 1] == _core.FINISHED]
        if not len(finished):
            return
        self._seats.forget(finished[:, 0])
        for handle in finished[:, 0].tolist():
            self._num_scored -= self._requests.pop(handle).is_scored
        self._log.forget(finished[:, 0])
        for handle in finished[finished[:, 2] == _core.ERROR, 0].tolist():
            unmasked = None if self._masks is None else self._masks.take_cause(handle)
            self._causes.setdefault(handle, unmasked or error_cause)

    # ---- failure and end

    def _fail(self, result: StepResult, now_us: int) -> None:
        error = result.error
        self._last_failure = f"its step failed: {type(error).__name__}: {error}"
        self._runner.discard_from(result.step)
        self._core.fail(result.step, now_us)
        self._in_flight.clear()
        self._held = None
        if result.is_fatal:
            _log.error("step %d failed, and the device with it", result.step, exc_info=error)
            self._end_all(now_us)
        else:
            _log.warning("step %d failed; its requests run again", result.step, exc_info=error)

    def _end_all(self, now_us: int) -> None:
        """Nothing can be computed any more: everything finishes as `ERROR`."""
        for handle in list(self._requests):
            self.finish(handle, _ALL_TOKENS, _core.ERROR, self._last_failure)
        while self._requests:  # `events` holds a bounded number a verb
            plan = self._core.plan(now_us, self._ring[self._next_buffer].buffer)
            if not plan.num_events:
                raise NoriaError(f"the core keeps {len(self._requests)} requests that were finished")
            self._collect(plan.num_events, now_us, self._last_failure)
        self._dead = self._last_failure

    def close(self) -> None:
        """Drops what is in flight and stops the runner. Idempotent."""
        if self._dead is None:
            self._dead = "it was closed"
        self._runner.close()

    def _require_usable(self) -> None:
        if os.getpid() != self._process_id:
            raise EngineDeadError(
                f"the engine takes no more work: it belongs to process {self._process_id}, and this is "
                f"process {os.getpid()}, forked from it, where its thread does not exist; make a new one here"
            )
        if self._dead is not None:
            raise EngineDeadError(f"the engine takes no more work: {self._dead}")


def start_engine(
    core: Core,
    executor: Executor,
    *,
    depth: int,
    mask_provider: MaskProvider | None = None,
    draft_provider: DraftProvider | None = None,
    kv_memory: KvMemory | None = None,
    policy: PolicyFunction | None = None,
) -> Engine:
    """An engine over a thread of its own.

    Args:
        core: whose layout `executor` was made for.
        executor: computes the steps.
        depth: of the core.
        mask_provider: see `Engine`.
        draft_provider: see `Engine`.
        kv_memory: see `Engine`.
        policy: see `Engine`.
    """
    ring = tuple(StepView(core.layout) for _ in range(depth + 1))
    runner = ThreadRunner(executor, ring)
    return Engine(
        core,
        runner,
        ring,
        mask_provider=mask_provider,
        draft_provider=draft_provider,
        kv_memory=kv_memory,
        policy=policy,
    )


def _token_array(ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """`[n]` int32."""
    array = np.asarray(ids)
    if array.ndim != 1:
        raise TokenOutOfRangeError(f"token ids must be one list, not of shape {list(array.shape)}", value=ids)
    if array.dtype == object and all(isinstance(token_id, int) for token_id in array):
        pass  # some do not fit in 64 bits, and are named below
    elif array.size and array.dtype.kind not in "iu":
        raise TokenOutOfRangeError(f"token ids must be integers, not {array.dtype}", value=ids)
    outside = array[(array < -(2**31)) | (array >= 2**31)]
    if outside.size:
        raise TokenOutOfRangeError(f"token id {outside[0]} is not in the vocabulary", value=int(outside[0]))
    return array.astype(np.int32)


def _now_us() -> int:
    return time.perf_counter_ns() // 1000
