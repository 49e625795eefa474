"""Who holds each seat, and what is being said on it: the demo's screen."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from noria import _core

if TYPE_CHECKING:
    from noria.outputs import Events
    from noria.text.answer import AnswerText

_REDRAW_EVERY_S = 0.25
_LINE_EVERY_S = 2.0
_EMPTY = -1


@dataclass(slots=True)
class Answer:
    """One request on the screen.

    Attributes:
        question: what was asked.
        stream: makes text of its tokens.
        text: what came so far.
        seat: where it sits or sat last; -1 before it had a seat.
        has_finished: whether it has ended.
    """

    question: str
    stream: "AnswerText"
    text: str = ""
    seat: int = _EMPTY
    has_finished: bool = False


@dataclass(slots=True)
class _Counts:
    finished: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)


class SeatScreen:
    """Shows answers as they come.

    On a terminal: a table of the seats, redrawn a few times a second, above it the finished answers.
    Elsewhere: a line an answer, and, at most every two seconds, a line when somebody else holds a seat.

    Args:
        answers: by index of the prompt.
        seat_handles: who holds each seat now, `[num_seats]`; -1 for nobody.
        out: where to draw.
    """

    def __init__(
        self, answers: Sequence[Answer], seat_handles: Callable[[], npt.NDArray[np.int64]], out: Console
    ) -> None:
        self._answers = answers
        self._seat_handles = seat_handles
        self._out = out
        self._index_of: dict[int, int] = {}
        self._holders = [_EMPTY] * len(seat_handles())
        self._counts = _Counts()
        self._printed_holders: list[int] = []
        self._drawn = 0.0
        self._live = Live(console=out, auto_refresh=False, transient=True) if out.is_terminal else None

    def update(self, events: "Events", indices: npt.NDArray[np.int64]) -> None:
        """Takes one turn's events; `LLM.generate` calls it."""
        kinds, rows = events.kinds, events.rows
        admitted = kinds == _core.ADMITTED
        self._index_of.update(zip(rows[admitted, 0].tolist(), indices[admitted].tolist(), strict=True))
        self._look_at_seats()
        is_token, is_end = kinds == _core.TOKEN, kinds == _core.FINISHED
        for index, token_id in zip(indices[is_token].tolist(), rows[is_token, 2].tolist(), strict=True):
            answer = self._answers[index]
            answer.text += answer.stream.push(token_id)
            self._counts.tokens += 1
        for index in indices[is_end].tolist():
            answer = self._answers[index]
            answer.text += answer.stream.end()
            answer.has_finished = True
            self._counts.finished += 1
            self._print_answer(index)
        self._draw()

    def _look_at_seats(self) -> None:
        for seat, handle in enumerate(self._seat_handles().tolist()):
            index = self._index_of.get(handle, _EMPTY)
            self._holders[seat] = index
            if index != _EMPTY:
                self._answers[index].seat = seat

    def _print_answer(self, index: int) -> None:
        answer = self._answers[index]
        line = Text.assemble(
            (f"#{index:02d} ", "bold green"),
            (f"seat {answer.seat}, {answer.stream.num_tokens:3d} tokens  ", "dim"),
            (answer.question + " ", "cyan"),
            one_line(answer.text),
        )
        self._out.print(line, no_wrap=True, overflow="ellipsis", highlight=False)

    def _draw(self) -> None:
        now = time.perf_counter()
        if now - self._drawn < (_REDRAW_EVERY_S if self._live else _LINE_EVERY_S):
            return
        self._drawn = now
        if self._live is not None:
            self._live.update(self._screen(), refresh=True)
        elif self._holders != self._printed_holders:
            self._printed_holders = list(self._holders)
            self._out.print(self._line(), highlight=False)

    def _screen(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for seat, index in enumerate(self._holders):
            if index == _EMPTY or self._answers[index].has_finished:
                table.add_row(Text(f"seat {seat}", "bold"), Text("free", "dim"), "", "")
                continue
            answer = self._answers[index]
            # The newest words are what moves: show the end of the answer that fits.
            room = max(20, self._out.width - 24 - min(len(answer.question), 40))
            tail = one_line(answer.text)[-room:]
            question = answer.question if len(answer.question) <= 40 else answer.question[:37] + "..."
            table.add_row(
                Text(f"seat {seat}", "bold"),
                Text(f"#{index:02d}", "bold yellow"),
                Text(str(answer.stream.num_tokens), "dim"),
                Text.assemble((question + " ", "cyan"), tail),
            )
        return Group(Text(self._line(), "bold"), table)

    def _line(self) -> str:
        seats = " ".join(
            f"{seat}:{'--' if index == _EMPTY or self._answers[index].has_finished else f'#{index:02d}'}"
            for seat, index in enumerate(self._holders)
        )
        counts = self._counts
        num_admitted = len(self._index_of)
        rate = counts.tokens / max(time.perf_counter() - counts.started, 1e-9)
        num_waiting = len(self._answers) - num_admitted
        return f"seats {seats} | waiting {num_waiting}, done {counts.finished}, {rate:.0f} tokens/s"

    def __enter__(self) -> Self:
        self._counts = _Counts()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()


def one_line(text: str) -> str:
    """A text without line breaks, and without what a terminal would take for a command."""
    return "".join(char if char.isprintable() else "·" for char in " ".join(text.split()))
