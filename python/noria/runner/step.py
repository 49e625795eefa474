"""A view of one step buffer; DESIGN.md chapter 2.2."""

import numpy as np
import numpy.typing as npt

from noria import _core
from noria._core import StepLayout

_HEADER_WORDS = 32
_GAINED_WORDS = 8
_PAIR_WORDS = 2


class StepView:
    """The header and sections of a buffer, as slices of it.

    The full sections are made once; a property cuts one to the entries that the current step has.

    Attributes:
        buffer: `[layout.size]` int32: what `Core.plan` writes and `Expander.expand` reads.
    """

    __slots__ = (
        "_cu_seqlens_q",
        "_gained",
        "_header",
        "_lost",
        "_moves",
        "_row_count",
        "_row_flags",
        "_row_seat",
        "_row_start",
        "_swap_in",
        "_swap_out",
        "buffer",
    )

    def __init__(self, layout: StepLayout) -> None:
        self.buffer: npt.NDArray[np.int32] = np.zeros(layout.size, dtype=np.int32)
        self._header = self.buffer[:_HEADER_WORDS]
        self._lost = self.buffer[layout.offset_lost : layout.offset_gained]
        self._gained = self.buffer[layout.offset_gained : layout.offset_gained_blocks].reshape(
            -1, _GAINED_WORDS
        )
        self._moves = self._pairs(layout.offset_moves, layout.capacity_moves)
        self._swap_out = self._pairs(layout.offset_swap_out, layout.capacity_swaps)
        self._swap_in = self._pairs(layout.offset_swap_in, layout.capacity_swaps)
        self._row_seat = self._section(layout.offset_row_seat, layout.max_rows)
        self._row_start = self._section(layout.offset_row_start, layout.max_rows)
        self._row_count = self._section(layout.offset_row_count, layout.max_rows)
        self._row_flags = self._section(layout.offset_row_flags, layout.max_rows)
        self._cu_seqlens_q = self._section(layout.offset_cu_seqlens_q, layout.max_rows + 1)

    def _section(self, offset: int, num_words: int) -> npt.NDArray[np.int32]:
        return self.buffer[offset : offset + num_words]

    def _pairs(self, offset: int, num: int) -> npt.NDArray[np.int32]:
        return self._section(offset, num * _PAIR_WORDS).reshape(-1, _PAIR_WORDS)

    @property
    def step(self) -> int:
        """The step's id."""
        low = int(self._header[_core.H_STEP_LOW]) & 0xFFFF_FFFF
        return int(self._header[_core.H_STEP_HIGH]) << 32 | low

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return int(self._header[_core.H_NUM_ROWS])

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return int(self._header[_core.H_NUM_TOKENS])

    @property
    def num_seat_rows(self) -> int:
        """The first rows, whose source is the seat's last token."""
        return int(self._header[_core.H_NUM_SEAT_ROWS])

    @property
    def num_sample_rows(self) -> int:
        """Rows that sample."""
        return int(self._header[_core.H_NUM_SAMPLE_ROWS])

    @property
    def num_logits(self) -> int:
        """Tokens whose logits are wanted."""
        return int(self._header[_core.H_NUM_LOGITS])

    @property
    def num_gained(self) -> int:
        """Seats gained."""
        return int(self._header[_core.H_NUM_GAINED])

    @property
    def num_host_masked(self) -> int:
        """Rows whose logits the host edits."""
        return int(self._header[_core.H_NUM_HOST_MASKED])

    @property
    def max_context(self) -> int:
        """Longest start + count, in tokens."""
        return int(self._header[_core.H_MAX_CONTEXT])

    @property
    def lost(self) -> npt.NDArray[np.int32]:
        """`[num_lost]`: seats."""
        return self._lost[: self._header[_core.H_NUM_LOST]]

    @property
    def gained_seats(self) -> npt.NDArray[np.int32]:
        """`[num_gained]`: seats."""
        return self._gained[: self._header[_core.H_NUM_GAINED], 0]

    @property
    def gained_handles(self) -> npt.NDArray[np.int64]:
        """`[num_gained]`: whom each seat belongs to from this step on."""
        words = self._gained[: self._header[_core.H_NUM_GAINED], 1:3].astype(np.int64)
        return (words[:, 0] & 0xFFFF_FFFF) | words[:, 1] << 32

    @property
    def moves(self) -> npt.NDArray[np.int32]:
        """`[num_moves, 2]`: source block, destination block."""
        return self._moves[: self._header[_core.H_NUM_MOVES]]

    @property
    def swap_out(self) -> npt.NDArray[np.int32]:
        """`[n, 2]`: block, host block that it is copied to; before all else of the step."""
        return self._swap_out[: self._header[_core.H_NUM_SWAP_OUT]]

    @property
    def swap_in(self) -> npt.NDArray[np.int32]:
        """`[n, 2]`: host block, block that it is copied to; behind `swap_out`, before `moves`."""
        return self._swap_in[: self._header[_core.H_NUM_SWAP_IN]]

    @property
    def has_copies(self) -> bool:
        """Whether any block is moved, or copied to the host or back."""
        header = self._header
        return bool(header[_core.H_NUM_MOVES] or header[_core.H_NUM_SWAP_OUT] or header[_core.H_NUM_SWAP_IN])

    @property
    def row_seat(self) -> npt.NDArray[np.int32]:
        """`[num_rows]`: each row's seat."""
        return self._row_seat[: self._header[_core.H_NUM_ROWS]]

    @property
    def row_start(self) -> npt.NDArray[np.int32]:
        """`[num_rows]`: position of each row's first token."""
        return self._row_start[: self._header[_core.H_NUM_ROWS]]

    @property
    def row_count(self) -> npt.NDArray[np.int32]:
        """`[num_rows]`: tokens of each row."""
        return self._row_count[: self._header[_core.H_NUM_ROWS]]

    @property
    def row_flags(self) -> npt.NDArray[np.int32]:
        """`[num_rows]`: bits of `SAMPLES`, `HOST_MASKED` and the others."""
        return self._row_flags[: self._header[_core.H_NUM_ROWS]]

    @property
    def cu_seqlens_q(self) -> npt.NDArray[np.int32]:
        """`[num_rows + 1]`: prefix sums of `row_count`."""
        return self._cu_seqlens_q[: self._header[_core.H_NUM_ROWS] + 1]
