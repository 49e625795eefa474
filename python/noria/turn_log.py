"""What a turn of the loop has to tell, until it ends."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from noria.outputs import Events
from noria.scores import Scores


class TurnLog:
    """Events and scores in the order in which they came."""

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.int64]] = []
        self._times: list[tuple[int, int]] = []  # events, and when they came
        self._scores: list[Scores] = []

    def __bool__(self) -> bool:
        """Whether there is any event."""
        return bool(self._rows)

    def add(self, rows: npt.NDArray[np.int64], now_us: int) -> None:
        """Keeps event rows `[n, 4]`."""
        self._rows.append(rows)
        self._times.append((len(rows), now_us))

    def add_scores(self, scores: Iterable[Scores]) -> None:
        """Keeps log probabilities of tokens among the events."""
        self._scores += scores

    def take(self) -> Events:
        """All of it, once."""
        rows = np.concatenate(self._rows) if self._rows else np.empty((0, 4), dtype=np.int64)
        counts, times = zip(*self._times, strict=True) if self._times else ((), ())
        times_us = np.repeat(np.asarray(times, dtype=np.int64), np.asarray(counts, dtype=np.int64))
        events = Events(rows, times_us, tuple(self._scores))
        self._rows.clear()
        self._times.clear()
        self._scores.clear()
        return events
