"""What is shown while a benchmark runs."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from noria import _core

if TYPE_CHECKING:
    from noria.engine import Engine
    from noria.outputs import Events

_REFRESHES_PER_S = 2
"""Few, because the screen is drawn by the same cores that compute."""
_UPDATE_EVERY_S = 0.5


class RunProgress:
    """A bar a run on a terminal's standard error; else one line a run.

    Args:
        num_requests: of each run.
        num_repeats: runs of each batching.
    """

    def __init__(self, num_requests: int, num_repeats: int) -> None:
        self._num_requests = num_requests
        self._num_repeats = num_repeats
        self._num_finished = 0
        self._num_tokens = 0
        self._started = 0.0
        self._updated = 0.0
        self._task: TaskID | None = None
        self._progress: Progress | None = None
        console = Console(stderr=True)
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("requests, {task.fields[rate]:,.0f} tok/s"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
                refresh_per_second=_REFRESHES_PER_S,
            )

    def begin(self, batching: str, repeat: int) -> None:
        """A run begins."""
        text = batching if self._num_repeats == 1 else f"{batching}, run {repeat + 1} of {self._num_repeats}"
        self._num_finished = self._num_tokens = 0
        self._started = self._updated = time.perf_counter()
        if self._progress is None:
            print(f"running: {text}", file=sys.stderr, flush=True)
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=self._num_requests, rate=0.0)

    def update(self, _engine: "Engine", events: "Events") -> None:
        """A turn has ended."""
        if self._progress is None or self._task is None:
            return
        self._num_finished += int(np.count_nonzero(events.kinds == _core.FINISHED))
        self._num_tokens += int(np.count_nonzero(events.kinds == _core.TOKEN))
        now = time.perf_counter()
        if now - self._updated >= _UPDATE_EVERY_S:
            self._updated = now
            rate = self._num_tokens / (now - self._started)
            self._progress.update(self._task, completed=self._num_finished, rate=rate)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
