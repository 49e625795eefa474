"""How KV memory lies, and what can be found in it."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from noria._core import KV_MOVED, KV_REMOVED, KV_STORED, Core

STORED, REMOVED, MOVED = KV_STORED, KV_REMOVED, KV_MOVED

_EVENT_WORDS = 8  # before the tokens


@dataclass(frozen=True, slots=True)
class KvStats:
    """KV memory at one moment, in blocks.

    Attributes:
        num_blocks: in all; while the cache shrinks, also those that are still to be moved.
        num_free: without content.
        num_cached: held by no request, and found by prompts that begin alike.
        num_held: in use by requests.
        num_free_runs: runs that the free blocks lie in.
        longest_free_run: the longest of them.
        num_sequences: sequences that hold blocks.
        num_table_blocks: blocks of all sequences; a shared one counts for each.
        num_runs: runs that those lie in.
        num_unused_slots: slots of held blocks without a token.
        is_shrinking: whether blocks beyond a new size are still in use.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_free_runs: int
    longest_free_run: int
    num_sequences: int
    num_table_blocks: int
    num_runs: int
    num_unused_slots: int
    is_shrinking: bool

    @classmethod
    def of(cls, core: Core) -> Self:
        """Of a core, now."""
        figures = core.kv_figures()
        return cls(
            num_blocks=figures.num_blocks,
            num_free=figures.num_free,
            num_cached=figures.num_cached,
            num_held=figures.num_held,
            num_free_runs=figures.num_free_runs,
            longest_free_run=figures.longest_free_run,
            num_sequences=figures.num_sequences,
            num_table_blocks=figures.num_table_blocks,
            num_runs=figures.num_runs,
            num_unused_slots=figures.num_unused_slots,
            is_shrinking=core.is_shrinking,
        )

    @property
    def external_fragmentation(self) -> float:
        """Share of the free blocks that are not in the longest run; 0 where none is free."""
        return 1 - self.longest_free_run / self.num_free if self.num_free else 0.0

    @property
    def runs_per_sequence(self) -> float:
        """Runs that a sequence lies in, on average; 0 without sequences."""
        return self.num_runs / self.num_sequences if self.num_sequences else 0.0

    @property
    def unused_slots_per_sequence(self) -> float:
        """Slots of its last blocks that a sequence does not use, on average; 0 without sequences."""
        return self.num_unused_slots / self.num_sequences if self.num_sequences else 0.0


@dataclass(frozen=True, slots=True)
class KvEvents:
    """What happened to blocks that can be found.

    Attributes:
        next_event: the number to ask from next.
        num_missed: events asked for that were dropped already.
        kinds: `[n]`: `STORED`, `REMOVED` or `MOVED`.
        blocks: `[n]`: where the content is now, or was.
        from_blocks: `[n]`: where it was before a move; else the same.
        hashes: `n` hashes of 128 bits, of the prefix that each block ends.
        parents: `n` hashes of the prefix before each block, or its salt; 0 where nothing was stored.
        token_ids: `n` arrays: of the block that was stored; else empty.
    """

    next_event: int
    num_missed: int
    kinds: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    from_blocks: npt.NDArray[np.int64]
    hashes: tuple[int, ...]
    parents: tuple[int, ...]
    token_ids: tuple[npt.NDArray[np.int64], ...]

    @classmethod
    def of(cls, core: Core, first: int) -> Self:
        """Events of a core from number `first` on."""
        num_missed, rows = core.kv_events(first)
        counts = rows[:, 7].tolist()
        return cls(
            next_event=core.num_kv_events,
            num_missed=num_missed,
            kinds=rows[:, 0],
            blocks=rows[:, 1],
            from_blocks=rows[:, 2],
            hashes=_hashes(rows[:, 3:5]),
            parents=_hashes(rows[:, 5:7]),
            token_ids=tuple(row[:count] for row, count in zip(rows[:, _EVENT_WORDS:], counts, strict=True)),
        )


def _hashes(halves: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """`n` numbers of 128 bits from their halves `[n, 2]`, the low one first."""
    return tuple((high % 2**64) << 64 | low % 2**64 for low, high in halves.tolist())
