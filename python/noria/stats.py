"""What an engine has done so far: sums over its step records, and time by stage."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from noria._core import RECORD_FIELDS, Core
from noria.policy import PolicyCost
from noria.runner.base import StepResult

_COLUMN = {name: index for index, name in enumerate(RECORD_FIELDS)}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sums from the engine's start; subtract two of them for what lies between.

    Attributes:
        num_steps: steps committed or failed.
        num_failed_steps: of those, discarded by a failure.
        num_decode_steps: steps that sampled at least one row.
        num_rows: rows computed: padding and ghosts included.
        num_sample_rows: rows that sampled, ghosts included.
        num_seat_rows: decode rows, ghosts included.
        num_ghost_rows: finished rows that a static batch kept computing.
        num_padding_rows: rows of padding.
        num_tokens: tokens computed, padding included.
        num_prefill_tokens: tokens of prompts, and of sequences computed again.
        num_padding_tokens: tokens of padding.
        num_draft_tokens: draft tokens planned.
        num_output_tokens: tokens given to requests.
        num_wasted_tokens: tokens sampled for requests that had ended.
        num_prefix_hit_tokens: tokens whose KV was found instead of computed.
        num_admitted: first admissions.
        num_resumed: returns after a preemption.
        num_preemptions: times a sequence gave up its KV.
        num_preempted_tokens: tokens whose KV those gave up.
        num_finished: requests that commits finished.
        num_moves: KV blocks moved.
        num_run_misses: admissions that failed for want of a run of free KV blocks.
        num_swapped_out: KV blocks of preempted requests copied to the host.
        num_swapped_in: KV blocks copied back.
        num_swap_misses: preemptions for which there was no room there, so that tokens were computed again.
        num_window_blocks: KV blocks behind a window that running requests gave back.
        seat_steps: sum over steps of the seats held.
        available_seat_steps: sum over steps of the seats there are.
        peak_held_blocks: the most KV blocks held after any plan.
        device_us: the device's time in forward and sample.
        plan_us: the engine thread's time in plans and launches.
        commit_us: the engine thread's time in commits.
        policy_us: the engine thread's time in asking a policy of the user's own.
        num_policy_requests: requests that it was asked about, each as often as it got in line.
        text_us: time in tokenizing and detokenizing.
        expand_us: the runner's time expanding buffers.
        forward_us: the runner's time in forwards; on a GPU, in launching them.
        sample_us: the runner's time sampling; on a GPU, launching it.
        runner_idle_us: time that the runner waited for a job while a request was unfinished.
    """

    num_steps: int = 0
    num_failed_steps: int = 0
    num_decode_steps: int = 0
    num_rows: int = 0
    num_sample_rows: int = 0
    num_seat_rows: int = 0
    num_ghost_rows: int = 0
    num_padding_rows: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_padding_tokens: int = 0
    num_draft_tokens: int = 0
    num_output_tokens: int = 0
    num_wasted_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_admitted: int = 0
    num_resumed: int = 0
    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    num_finished: int = 0
    num_moves: int = 0
    num_run_misses: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_swap_misses: int = 0
    num_window_blocks: int = 0
    seat_steps: int = 0
    available_seat_steps: int = 0
    peak_held_blocks: int = 0
    device_us: int = 0
    plan_us: int = 0
    commit_us: int = 0
    policy_us: int = 0
    num_policy_requests: int = 0
    text_us: int = 0
    expand_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    runner_idle_us: int = 0

    @property
    def num_useful_rows(self) -> int:
        """Rows computed for a request that was still running: neither padding nor ghosts."""
        return self.num_rows - self.num_ghost_rows - self.num_padding_rows

    @property
    def num_chunk_rows(self) -> int:
        """Useful rows that sampled nothing: a prompt's chunks before its last."""
        return self.num_rows - self.num_sample_rows - self.num_padding_rows

    @property
    def seat_occupancy(self) -> float:
        """Share of seats held by a request, over all steps; 0 before the first."""
        return self.seat_steps / self.available_seat_steps if self.available_seat_steps else 0.0

    @property
    def runner_busy_us(self) -> int:
        """The runner's time in jobs."""
        return self.expand_us + self.forward_us + self.sample_us

    @property
    def runner_idle_share(self) -> float:
        """Share of the runner's time spent waiting while a request was unfinished; 0 before any step."""
        total = self.runner_busy_us + self.runner_idle_us
        return self.runner_idle_us / total if total else 0.0

    def __sub__(self, earlier: "EngineStats") -> "EngineStats":
        """What happened since `earlier`; `peak_held_blocks` stays the peak since the start."""
        names = [name for name in EngineStats.__slots__ if name != "peak_held_blocks"]
        return EngineStats(
            peak_held_blocks=self.peak_held_blocks,
            **{name: getattr(self, name) - getattr(earlier, name) for name in names},
        )


STEPS_A_FOLD: Final = 1024
"""Steps after which records are taken: that copies the core's ring, which has room for four times as many."""


class RecordReader:
    """Takes the core's step records, each once.

    Args:
        records: the last of them, oldest first: `Core.records`, or `Engine.records`.
    """

    def __init__(self, records: Callable[[], npt.NDArray[np.int64]]) -> None:
        self._records = records
        self._last_step = -1

    def take(self) -> npt.NDArray[np.int64]:
        """`[n, len(RECORD_FIELDS)]`: those since the last call, as far as the core has them still."""
        records = self._records()
        fresh = records[_of(records, "step") > self._last_step]
        if len(fresh):
            self._last_step = int(fresh[-1, _COLUMN["step"]])
        return fresh


class StatsKeeper:
    """Adds up step records before the core's ring drops them.

    Args:
        core: whose records; keeps `num_records` of the last.
        num_seats: seats there are.
    """

    def __init__(self, core: Core, num_seats: int) -> None:
        self._records = RecordReader(core.records)
        self._num_seats = num_seats
        self._sums = np.zeros(len(RECORD_FIELDS), dtype=np.int64)
        self._num_steps = 0
        self._num_decode_steps = 0
        self._peak_held_blocks = 0
        self._num_unfolded = 0
        self.plan_us = 0
        self.commit_us = 0
        self.policy_cost = PolicyCost()
        self.text_us = 0
        self._num_padding_rows = 0
        self._expand_us = 0
        self._forward_us = 0
        self._sample_us = 0
        self._idle_us = 0

    def add_result(self, result: StepResult, idle_us: int, num_padding_rows: int) -> None:
        """Takes a step's host times once it was committed or failed.

        Args:
            result: of the step.
            idle_us: of the runner's waits, what passed while a request was unfinished.
            num_padding_rows: of the step.
        """
        self._num_padding_rows += num_padding_rows
        self._expand_us += result.expand_us
        self._forward_us += result.forward_us
        self._sample_us += result.sample_us
        self._idle_us += idle_us
        self._num_unfolded += 1
        if self._num_unfolded >= STEPS_A_FOLD:
            self._fold()

    def _fold(self) -> None:
        fresh = self._records.take()
        self._num_unfolded = 0
        if not len(fresh):
            return
        self._sums += fresh.sum(axis=0)
        self._num_steps += len(fresh)
        sampled = (_of(fresh, "num_sample_rows") > 0) & (_of(fresh, "has_failed") == 0)
        self._num_decode_steps += int(np.count_nonzero(sampled))
        self._peak_held_blocks = max(self._peak_held_blocks, int(_of(fresh, "num_held_blocks").max()))

    def snapshot(self) -> EngineStats:
        """All of it so far."""
        self._fold()
        total = {name: int(value) for name, value in zip(RECORD_FIELDS, self._sums, strict=True)}
        return EngineStats(
            num_steps=self._num_steps,
            num_failed_steps=total["has_failed"],
            num_decode_steps=self._num_decode_steps,
            num_rows=total["num_rows"],
            num_sample_rows=total["num_sample_rows"],
            num_seat_rows=total["num_seat_rows"],
            num_ghost_rows=total["num_ghost_rows"],
            num_padding_rows=self._num_padding_rows,
            num_tokens=total["num_tokens"],
            num_prefill_tokens=total["num_prefill_tokens"],
            num_padding_tokens=total["num_padding_tokens"],
            num_draft_tokens=total["num_draft_tokens"],
            num_output_tokens=total["num_output_tokens"],
            num_wasted_tokens=total["num_wasted_tokens"],
            num_prefix_hit_tokens=total["num_prefix_hit_tokens"],
            num_admitted=total["num_admitted"],
            num_resumed=total["num_resumed"],
            num_preemptions=total["num_preempted"],
            num_preempted_tokens=total["num_preempted_tokens"],
            num_finished=total["num_finished"],
            num_moves=total["num_moves"],
            num_run_misses=total["num_run_misses"],
            num_swapped_out=total["num_swapped_out"],
            num_swapped_in=total["num_swapped_in"],
            num_swap_misses=total["num_swap_misses"],
            num_window_blocks=total["num_window_blocks"],
            seat_steps=total["num_running"],
            available_seat_steps=self._num_steps * self._num_seats,
            peak_held_blocks=self._peak_held_blocks,
            device_us=total["device_us"],
            plan_us=self.plan_us,
            commit_us=self.commit_us,
            policy_us=round(self.policy_cost.time_us),
            num_policy_requests=self.policy_cost.num_requests,
            text_us=self.text_us,
            expand_us=self._expand_us,
            forward_us=self._forward_us,
            sample_us=self._sample_us,
            runner_idle_us=self._idle_us,
        )


def _of(records: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
    """`[n]`: one field of all records."""
    return records[:, _COLUMN[name]]
