"""What the engine's thread says, brought to the event loop and sorted to its requests."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria import _core
from noria.answers import AnswerWriter
from noria.async_engine.growing import GrowingAnswer, GrowingOutput
from noria.engine import EngineDeadError
from noria.outputs import Events
from noria.requests import Submitted
from noria.scores import ScoreBook
from noria.stats import EngineStats
from noria.text.answer import AnswerText
from noria.watch import Watched


@dataclass(frozen=True, slots=True)
class Accepted:
    """A prompt was submitted; its answers' texts are read by `texts`."""

    output: GrowingOutput
    submitted: Sequence[Submitted]
    texts: Sequence[AnswerText | None]


@dataclass(frozen=True, slots=True)
class Refused:
    """A prompt was not submitted, or was taken back."""

    output: GrowingOutput
    error: Exception


@dataclass(frozen=True, slots=True)
class Turned:
    """A turn has ended; for each `FINISHED` of its events, in their order, what the host read and a cause."""

    events: Events
    ends: Sequence[tuple[Watched | None, str | None]]


@dataclass(frozen=True, slots=True)
class Told:
    """An answer to `AsyncEngine.stats`."""

    asked: "asyncio.Future[EngineStats]"
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine's thread ends, and why; nothing comes after it."""

    cause: str


News = Accepted | Refused | Turned | Told | Ended


class Outbox:
    """From the engine's thread to the loop's: at most one wake-up is under way at any time.

    Args:
        deliver: takes what was put in; called on the loop.

    Attributes:
        loop: whom to wake; None until somebody asks something.
        is_lost: the loop was closed, and nobody will read any more.
    """

    def __init__(self, deliver: "Callable[[News], None]") -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_lost = False
        self._deliver = deliver
        self._news: deque[News] = deque()
        self._is_waking = False

    def put(self, news: News) -> None:
        """Hands something on; from any thread."""
        self._news.append(news)
        # Seen true here, the flag is taken back only before the deque is emptied: nothing is left lying.
        if self.loop is None or self.is_lost:
            return
        self.is_lost = self.loop.is_closed()
        if self._is_waking or self.is_lost:
            return
        self._is_waking = True
        try:
            self.loop.call_soon_threadsafe(self._empty)
        except RuntimeError:  # it was closed just now
            if not self.loop.is_closed():
                raise
            self.is_lost = True

    def _empty(self) -> None:
        self._is_waking = False
        while self._news:
            self._deliver(self._news.popleft())


class Desk:
    """Who is waiting for what. The loop's thread owns it.

    Args:
        writer: makes outputs.

    Attributes:
        outputs: prompts that are not over, by name.
        asked: who asked for statistics.
        cause: why the engine takes no more work; None while it does.
        ended: set when the engine's thread ends.
    """

    def __init__(self, writer: AnswerWriter) -> None:
        self.outputs: dict[str, GrowingOutput] = {}
        self.asked: set[asyncio.Future[EngineStats]] = set()
        self.cause: str | None = None
        self.ended = asyncio.Event()
        self._writer = writer
        self._answers: dict[int, tuple[GrowingAnswer, GrowingOutput]] = {}
        self._scores = ScoreBook()
        self._scored: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)  # handles, ascending

    def deliver(self, news: News) -> None:
        """Takes what the engine's thread says."""
        match news:
            case Turned():
                self._take_turn(news)
            case Accepted():
                self._begin(news)
            case Refused():
                self._close(news.output)
                news.output.fail(news.error)
            case Told():
                self.asked.discard(news.asked)
                if not news.asked.done():
                    news.asked.set_result(news.stats)
            case Ended():
                self._end(news)

    def require_open(self) -> None:
        """Raises EngineDeadError if the engine takes no more work."""
        if self.cause is not None:
            raise EngineDeadError(f"the engine takes no more work: {self.cause}")

    def _begin(self, news: Accepted) -> None:
        answers = [
            GrowingAnswer(request, text, []) for request, text in zip(news.submitted, news.texts, strict=True)
        ]
        news.output.begin(answers, self._scores)
        self._answers.update({answer.request.handle: (answer, news.output) for answer in answers})
        params = news.submitted[0].params
        if params.logprobs is not None or params.prompt_logprobs is not None:
            handles = [request.handle for request in news.submitted]
            self._scored = np.sort(np.append(self._scored, handles))

    def _take_turn(self, news: Turned) -> None:
        events = news.events
        if events.scores and len(self._scored):
            self._scores.add(events.scores, self._scored)
        grown: dict[GrowingOutput, None] = {}
        ends = iter(news.ends)
        for (handle, kind, value, detail), time_us in zip(
            events.rows.tolist(), events.times_us.tolist(), strict=True
        ):
            end = next(ends) if kind == _core.FINISHED else None
            known = self._answers.get(handle)
            if known is None:  # one of a prompt's answers was refused, and those before it were taken back
                continue
            answer, output = known
            if end is not None:
                del self._answers[handle]
                answer.end(value, detail, time_us, *end)
            elif output.is_abandoned:
                continue
            else:
                answer.take_event(kind, value, detail, time_us)
                if kind != _core.TOKEN:
                    continue
            grown[output] = None
        for output in grown:
            output.wake()
            if output.is_over:
                self._close(output)

    def _close(self, output: GrowingOutput) -> None:
        """It is over: nothing of it is kept here."""
        self.outputs.pop(output.request_id, None)
        handles = np.array([handle for handle in output.handles if handle in self._scored], dtype=np.int64)
        if len(handles):
            output.own_scores(self._scores.split(handles.tolist()))
            self._scored = np.setdiff1d(self._scored, handles)

    def _end(self, news: Ended) -> None:
        if self.cause is None:
            self.cause = news.cause
        for output in list(self.outputs.values()):
            output.fail(EngineDeadError(f"the engine takes no more work: {self.cause}"))
        for asked in self.asked:
            if not asked.done():
                asked.set_exception(EngineDeadError(f"the engine takes no more work: {self.cause}"))
        self.outputs.clear()
        self.asked.clear()
        self._answers.clear()
        self.ended.set()
