"""Who holds which seat, as the steps have it that were launched."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from noria import _core
from noria.runner.base import MaskRequest
from noria.runner.step import StepView

_NOBODY = -1


class SeatTable:
    """The requests on an engine's seats; one that has ended holds none, whatever is still in flight for it.

    Args:
        num_seats: seats there are.
    """

    def __init__(self, num_seats: int) -> None:
        self._handles = np.full(num_seats, _NOBODY, dtype=np.int64)
        self._prompt_tokens = np.zeros(num_seats, dtype=np.int64)

    @property
    def handles(self) -> npt.NDArray[np.int64]:
        """`[num_seats]`: who holds each, a copy; −1 for nobody."""
        return self._handles.copy()

    def lose(self, seats: npt.NDArray[np.int32]) -> None:
        """Nobody holds these any more."""
        self._handles[seats] = _NOBODY

    def gain(
        self,
        seats: npt.NDArray[np.int32],
        handles: npt.NDArray[np.int64],
        num_prompt_tokens: Sequence[int],
    ) -> None:
        """Each of the seats is its request's."""
        self._handles[seats] = handles
        self._prompt_tokens[seats] = num_prompt_tokens

    def forget(self, handles: npt.ArrayLike) -> None:
        """These requests have ended."""
        self._handles[np.isin(self._handles, handles)] = _NOBODY

    def of_rows(self, view: StepView) -> npt.NDArray[np.int64]:
        """`[num_rows]`: whose the rows of a step are."""
        return self._handles[view.row_seat]

    def mask_request(self, step: int, view: StepView) -> MaskRequest | None:
        """What the step's masks are made from; None where no row that wants one is of a request that runs."""
        (rows,) = np.nonzero(view.row_flags & _core.HOST_MASKED)
        rows = rows[self._handles[view.row_seat[rows]] != _NOBODY]
        if not len(rows):
            return None
        seats = view.row_seat[rows]
        ends = (view.row_start[rows] + view.row_count[rows]).astype(np.int64)
        return MaskRequest(step, rows, self._handles[seats], ends - self._prompt_tokens[seats])
