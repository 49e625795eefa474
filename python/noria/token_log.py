"""Output tokens of the requests whose seat must be told of them when they come back from a preemption."""

import numpy as np
import numpy.typing as npt

from noria import _core

_MAX_PARTS = 256


class TokenLog:
    """Tokens as they come, sorted by request only when one of them asks, which is rare.

    What finished requests left is dropped now and then, so a token costs constant time.
    """

    def __init__(self) -> None:
        self._handles: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._parts: list[npt.NDArray[np.int64]] = []  # event rows, oldest first

    def watch(self, handle: int) -> None:
        """Keeps this request's tokens from now on."""
        self._handles = np.append(self._handles, handle)

    def forget(self, handles: npt.NDArray[np.int64]) -> None:
        """These have finished."""
        if len(self._handles):
            self._handles = self._handles[~np.isin(self._handles, handles)]
            if not len(self._handles):
                self._parts.clear()

    def add(self, rows: npt.NDArray[np.int64]) -> None:
        """Takes event rows `[n, 4]`."""
        if not len(self._handles):
            return
        self._parts.append(rows[(rows[:, 1] == _core.TOKEN) & np.isin(rows[:, 0], self._handles)])
        if len(self._parts) > _MAX_PARTS:
            whole = np.concatenate(self._parts)
            self._parts = [whole[np.isin(whole[:, 0], self._handles)]]

    def outputs(self, handle: int) -> npt.NDArray[np.int64]:
        """`[n]`: a request's tokens so far."""
        if not self._parts:
            return np.empty(0, dtype=np.int64)
        whole: npt.NDArray[np.int64] = np.concatenate(self._parts)
        outputs: npt.NDArray[np.int64] = whole[whole[:, 0] == handle, 2]
        return outputs
