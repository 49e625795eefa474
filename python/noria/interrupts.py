"""Ctrl-C while an engine turns."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class HeldInterrupts:
    """Holds Ctrl-C until the loop asks, so that no turn is cut short.

    The first one is raised between two turns, a second one also while a turn waits for its step.

    Does nothing where Ctrl-C is not Python's to raise: outside the main thread, or where somebody
    else handles it.
    """

    def __init__(self) -> None:
        self._num_pending = 0
        self._is_installed = False

    def raise_pending(self) -> None:
        """Raises KeyboardInterrupt if there was a Ctrl-C."""
        if self._num_pending:
            raise KeyboardInterrupt

    def raise_second(self) -> None:
        """Raises KeyboardInterrupt if there was more than one Ctrl-C."""
        if self.has_second:
            raise KeyboardInterrupt

    @property
    def has_second(self) -> bool:
        """Whether there was more than one Ctrl-C."""
        return self._num_pending > 1

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)
            self._is_installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_installed = False
        # One that came after the last look must not be lost.
        if kind is None:
            self.raise_pending()

    def _on_interrupt(self, _signum: int, _frame: FrameType | None) -> None:
        self._num_pending += 1
