"""A scripted executor: real buffers, real seat state, no model.

A request's tokens are a function of its seed and the output position, so whatever the schedule was,
what a request should have got is known beforehand.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from noria import _core
from noria._core import Expander, StepLayout
from noria.errors import ConfigError
from noria.runner.base import HostMasks, Ready, SampledIds, SeatInit
from noria.runner.step import StepView

Phase = Literal["expand", "forward", "sample"]
Fault = Callable[[Phase, StepView], Exception | None]

_NEVER = -1


@dataclass(frozen=True, slots=True)
class NullScript:
    """What every request answers.

    Attributes:
        vocab_size: tokens are below this; at least 2.
        eos_token_id: the token that `eos_positions` gives, and that is given nowhere else.
        eos_positions: seed → output position at which that request gives `eos_token_id`.
    """

    vocab_size: int
    eos_token_id: int | None = None
    eos_positions: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.vocab_size < 2:
            raise ConfigError(
                f"vocab_size is {self.vocab_size}; it must be at least 2",
                name="vocab_size",
                value=self.vocab_size,
            )
        if self.eos_positions and self.eos_token_id is None:
            raise ConfigError(
                f"{len(self.eos_positions)} eos_positions were given without an eos_token_id",
                name="eos_positions",
                value=len(self.eos_positions),
            )

    def token_ids(
        self,
        seeds: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        eos_positions: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """`[n]`: the token of each seed at each output position; all three arguments are `[n]`."""
        mixed = _mix(seeds, positions)
        if self.eos_token_id is None:
            return (mixed % np.uint64(self.vocab_size)).astype(np.int64)
        ids = (mixed % np.uint64(self.vocab_size - 1)).astype(np.int64)
        ids += ids >= self.eos_token_id
        return np.where(positions == eos_positions, self.eos_token_id, ids)

    def answer(self, seed: int, num_tokens: int) -> list[int]:
        """The first `num_tokens` tokens of a request, `eos_token_id` and what follows it included."""
        ids: list[int] = self.token_ids(
            np.full(num_tokens, seed, dtype=np.int64),
            np.arange(num_tokens, dtype=np.int64),
            np.full(num_tokens, self.eos_positions.get(seed, _NEVER), dtype=np.int64),
        ).tolist()
        return ids


def _mix(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finisher over both; Steele, Lea and Flood, OOPSLA 2014."""
    x = seeds.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
    x *= np.uint64(0xD1342543DE82EF95)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


AcceptDrafts = Callable[
    [npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.int64]
]
"""(seeds, first output positions, draft counts), each `[n]` → how many drafts of each row are accepted."""


def accept_pseudorandomly(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], num_drafts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """From none to all of a row's drafts, the same at each run."""
    return (_mix(~seeds, positions) % (num_drafts.astype(np.uint64) + np.uint64(1))).astype(np.int64)


class NullExecutor:
    """An `Executor` that answers from a script.

    Args:
        layout: of the buffers.
        script: what every request answers.
        forward_us: a forward sleeps this long.
        accept_drafts: how many drafts are accepted.
        fault: asked before each phase of each step; what it returns is raised there.
    """

    def __init__(
        self,
        layout: StepLayout,
        script: NullScript,
        *,
        forward_us: int = 0,
        accept_drafts: AcceptDrafts = accept_pseudorandomly,
        fault: Fault | None = None,
    ) -> None:
        self.expander = Expander(layout)
        self._script = script
        self._forward_us = forward_us
        self._has_drafts = layout.max_drafts > 0
        self._accept_drafts = accept_drafts
        self._fault = fault
        self._seeds = np.zeros(layout.max_num_seqs, dtype=np.int64)  # by seat
        self._eos_positions = np.full(layout.max_num_seqs, _NEVER, dtype=np.int64)  # by seat

    def expand(self, view: StepView, inits: Sequence[SeatInit]) -> None:
        self._raise_fault("expand", view)
        self.expander.expand(view.buffer)
        if inits:
            seats = view.gained_seats
            self._seeds[seats] = [init.seed for init in inits]
            self._eos_positions[seats] = [self._script.eos_positions.get(init.seed, _NEVER) for init in inits]

    def forward(self, view: StepView) -> None:
        self._raise_fault("forward", view)
        if self._has_drafts:
            self._make_drafts(view)
        if self._forward_us:
            time.sleep(self._forward_us / 1e6)

    def sample(self, view: StepView, masks: HostMasks | None) -> Ready:
        self._raise_fault("sample", view)
        expander = self.expander
        rows = expander.sample_rows[: view.num_sample_rows]
        seats = expander.row_seats[rows]
        last_tokens = view.cu_seqlens_q[rows + 1] - 1
        num_accepted = np.zeros(len(rows), dtype=np.int64)
        if self._has_drafts:  # then a row's logits are of its last K + 1 tokens
            has_drafts = (view.row_flags[rows] & _core.DRAFTS) != 0
            num_drafts = np.where(has_drafts, view.row_count[rows].astype(np.int64) - 1, 0)
            last_tokens = last_tokens - num_drafts
        next_positions = expander.positions[last_tokens] + 1  # of the first sampled token, prompt included
        outputs = next_positions - expander.num_prompt_tokens[seats]
        if self._has_drafts:
            num_accepted = self._accept_drafts(self._seeds[seats], outputs, num_drafts)
        num_sampled = num_accepted + 1
        ends = np.cumsum(num_sampled)

        of_row = np.repeat(np.arange(len(rows)), num_sampled)
        outputs = outputs[of_row] + np.arange(len(of_row)) - (ends - num_sampled)[of_row]
        ids = self._script.token_ids(self._seeds[seats[of_row]], outputs, self._eos_positions[seats[of_row]])
        is_kept = np.ones(len(rows), dtype=np.bool_)
        if view.num_host_masked:
            is_masked = (view.row_flags[rows] & _core.HOST_MASKED) != 0
            is_kept[is_masked] = _apply_masks(rows[is_masked], ids, (ends - num_sampled)[is_masked], masks)
        # What was computed past the last accepted draft is computed again, in its place.
        expander.num_computed_tokens[seats] = next_positions + num_accepted
        expander.last_token[seats] = ids[ends - 1]

        num_ids = np.zeros(view.num_rows, dtype=np.int32)
        num_ids[rows] = np.where(is_kept, num_sampled, 0)
        return Ready(SampledIds(num_ids, ids[is_kept[of_row]].astype(np.int32)))

    def _make_drafts(self, view: StepView) -> None:
        """Drafts that the device is to make are what the script will answer."""
        flags = view.row_flags
        (rows,) = np.nonzero((flags & (_core.DRAFTS | _core.DRAFT_IDS)) == _core.DRAFTS)
        if not len(rows):
            return
        expander = self.expander
        num_drafts = view.row_count[rows].astype(np.int64) - 1
        of_row = np.repeat(np.arange(len(rows)), num_drafts)
        place = np.arange(len(of_row)) - np.repeat(np.cumsum(num_drafts) - num_drafts, num_drafts)
        tokens = view.cu_seqlens_q[rows][of_row] + 1 + place
        seats = expander.row_seats[rows][of_row]
        outputs = expander.positions[tokens] - expander.num_prompt_tokens[seats]
        expander.input_ids[tokens] = self._script.token_ids(
            self._seeds[seats], outputs, self._eos_positions[seats]
        )

    def _raise_fault(self, phase: Phase, view: StepView) -> None:
        error = self._fault(phase, view) if self._fault is not None else None
        if error is not None:
            raise error


def _apply_masks(
    rows: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int64],
    at: npt.NDArray[np.int64],
    masks: HostMasks | None,
) -> npt.NDArray[np.bool_]:
    """Replaces an id that its row's mask forbids by the lowest that it allows.

    Args:
        rows: `[n]`: the step's masked rows.
        ids: the step's tokens; changed in place.
        at: `[n]`: where each row's token lies in `ids`.
        masks: what the host supplied.

    Returns:
        `[n]`: whether a row has a mask that allows anything; others sample nothing.
    """
    if masks is not None and masks.edits:
        raise ConfigError(
            f"{len(masks.edits)} rows have logits edits; the null runner has no logits to edit",
            name="edits",
            value=len(masks.edits),
        )
    if masks is None or not len(masks.rows):
        return np.zeros(len(rows), dtype=np.bool_)
    order = np.argsort(masks.rows)
    place = np.minimum(np.searchsorted(masks.rows[order], rows), len(order) - 1)
    mask = order[place]
    is_kept: npt.NDArray[np.bool_] = (masks.rows[mask] == rows) & masks.allowed[mask].any(axis=1)
    is_allowed = masks.allowed[mask, ids[at]]
    lowest = masks.allowed[mask].argmax(axis=1)
    ids[at] = np.where(is_allowed, ids[at], lowest)
    return is_kept
