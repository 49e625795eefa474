"""The progress bar of loading."""

import sys
import time
from types import TracebackType
from typing import Self

_QUIET_S = 1.0  # what is done by then needs no bar


class LoadingBar:
    """Elements loaded of all; on standard error, if that is a terminal and it takes longer than a second.

    Args:
        num_elements: of all tensors.
    """

    def __init__(self, num_elements: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._num_elements = num_elements
        self._is_shown = sys.stderr.isatty()
        self._started = time.perf_counter()
        self._is_started = False
        columns = (TextColumn("loading"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("loading", total=num_elements)

    def advance(self, num_elements: int) -> None:
        """Counts elements that are loaded now."""
        self._progress.advance(self._task, num_elements)
        if self._is_shown and not self._is_started and time.perf_counter() - self._started > _QUIET_S:
            self._is_started = True
            self._progress.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_started:
            self._progress.stop()
