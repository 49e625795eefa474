"""A core driven by a script: every request's true length is known, and no model runs."""

from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from noria import _core
from noria._core import Core
from noria.errors import NoriaError
from noria.policy import PolicyFunction, PolicyKeeper
from noria.runner.step import StepView

STOP_ID = 2
_OTHER_ID = 7
_STOP_IDS = np.array([STOP_ID], dtype=np.int32)
_FIRST_ID = 10
_VOCAB_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did.

    Attributes:
        admitted: handles that got their first seat.
        preempted: handles that lost their seat.
        handles: of the rows, in order.
        plan_us: what `plan` took, microseconds.
    """

    admitted: list[int]
    preempted: list[int]
    handles: list[int]
    plan_us: float


class ScriptedCore:
    """A core at depth 1, and a null runner that knows when each request wants to end.

    Args:
        core: built with depth 1, and nothing submitted to it.
        policy: scores requests, if the core was built with the policy `own`.
    """

    def __init__(self, core: Core, policy: PolicyFunction | None = None) -> None:
        self.core = core
        self.policy = None if policy is None else PolicyKeeper(core, policy)
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_output_tokens = 0
        self.num_preempted = 0
        self.now_us = 0
        self.finished_us: dict[int, int] = {}
        self._view = StepView(core.layout)
        self._seat_handle = np.full(core.layout.max_num_seqs, -1, dtype=np.int64)
        self._seat_wanted = np.zeros(core.layout.max_num_seqs, dtype=np.int64)
        self._seat_prompt = np.zeros(core.layout.max_num_seqs, dtype=np.int64)
        self._wanted: dict[int, tuple[int, int]] = {}
        self._num_submitted = 0

    @property
    def num_waiting(self) -> int:
        """Requests without a seat."""
        return self.core.num_waiting

    @property
    def num_available_blocks(self) -> int:
        """Blocks that are free, or cached and held by nobody."""
        return self.core.num_free_blocks + self.core.num_cached_blocks

    def submit(
        self,
        num_prompt: int,
        max_tokens: int,
        *,
        wanted: int | None = None,
        priority: int = 0,
        expected: int | None = None,
        name: int | None = None,
        is_parked: bool = False,
    ) -> int:
        """Queues a request.

        Args:
            num_prompt: tokens of its prompt.
            max_tokens: output tokens, at most.
            wanted: output tokens after which it stops by itself; None: never.
            priority: its band.
            expected: a hint of its length.
            name: prompts of one name begin alike; None: it begins like no other.
            is_parked: it gets no seat until it is unparked.
        """
        prompt = np.full(num_prompt, _FIRST_ID, dtype=np.int32)
        # The first id names the prompt, so that no two others share a block.
        prompt[0] = _FIRST_ID + 1 + self._num_submitted if name is None else -name - 1 + _VOCAB_SIZE
        self._num_submitted += 1
        handle = self.core.submit(
            self.now_us,
            prompt,
            max_tokens,
            priority=priority,
            expected_tokens=expected,
            stop_token_ids=_STOP_IDS,
            parked=is_parked,
        )
        self._wanted[handle] = (num_prompt, max_tokens + 1 if wanted is None else wanted)
        return handle

    def abort(self, handle: int) -> None:
        """Ends a request."""
        self.core.finish(handle, 0, _core.ABORT, self.now_us)

    def is_finished(self, handle: int) -> bool:
        """Whether it ended by itself."""
        return handle in self.finished_us

    def step(self) -> Step | None:
        """Plans a step, runs it and commits it; None where there is nothing to do."""
        if self.policy is not None:
            self.policy.score_changed(self.now_us)
        started = perf_counter_ns()
        plan = self.core.plan(self.now_us, self._view.buffer)
        plan_us = (perf_counter_ns() - started) / 1e3
        if plan.kind == plan.IDLE:
            return None
        if plan.kind != plan.STEP:
            raise NoriaError(f"the core waits for step {plan.step}, though none is in flight")
        told = self.core.events[: plan.num_events].tolist()
        view = self._view
        self._seat_handle[view.lost] = -1
        for seat, handle in zip(view.gained_seats.tolist(), view.gained_handles.tolist(), strict=True):
            self._seat_handle[seat] = handle
            self._seat_prompt[seat], self._seat_wanted[seat] = self._wanted[handle]
        seats = view.row_seat
        step = Step(
            admitted=[row[0] for row in told if row[1] == _core.ADMITTED],
            preempted=[row[0] for row in told if row[1] == _core.PREEMPTED],
            handles=self._seat_handle[seats].tolist(),
            plan_us=plan_us,
        )
        samples = (view.row_flags & _core.SAMPLES) != 0
        # The token that a row samples is at this output position.
        ends = view.row_start[samples].astype(np.int64) + view.row_count[samples]
        is_last = ends - self._seat_prompt[seats[samples]] + 1 >= self._seat_wanted[seats[samples]]
        ids = np.where(is_last, STOP_ID, _OTHER_ID).astype(np.int32)
        num_events = self.core.commit(plan.step, samples.astype(np.int32), ids, 0, self.now_us)
        told = self.core.events[:num_events].tolist()
        for row in told:
            if row[1] == _core.FINISHED:
                self.finished_us[row[0]] = self.now_us
                del self._wanted[row[0]]
        self.num_steps += 1
        self.num_computed_tokens += int(view.num_tokens)
        self.num_output_tokens += len(ids)
        self.num_preempted += len(step.preempted)
        return step

    def drain(self) -> None:
        """Steps until nothing is left to do."""
        while self.step() is not None:
            self.now_us += 1
