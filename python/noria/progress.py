"""The progress bar of long work."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_QUIET_S = 1.0  # what is done by then needs no bar


class ProgressBar:
    """Finished requests of all, and tokens a second; on standard error, if that is a terminal.

    Args:
        num_requests: of all.
        is_shown: false for none.
    """

    def __init__(self, num_requests: int, *, is_shown: bool) -> None:
        self._num_requests = num_requests
        self._console = Console(stderr=True)
        self._is_shown = is_shown and self._console.is_terminal
        self._started = time.perf_counter()
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def update(self, num_finished: int, num_tokens: int) -> None:
        """Shows how far the work has come."""
        if not self._is_shown:
            return
        elapsed = time.perf_counter() - self._started
        if self._progress is None:
            if elapsed < _QUIET_S:
                return
            self._progress = Progress(
                TextColumn("requests"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:,.0f} tok/s"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("requests", total=self._num_requests, rate=0.0)
            self._progress.start()
        self._progress.update(self._task, completed=num_finished, rate=num_tokens / elapsed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
