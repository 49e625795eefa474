"""Requests whose tokens the host reads while they run: stop strings, grammars, logits processors.

All others cost nothing here. Nothing in this module is on the device's path but `masks`, which is asked while
the device computes the step whose rows they are for.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from noria import _core
from noria.errors import SamplingParamsError
from noria.outputs import Events
from noria.runner.base import HostMasks, MaskRequest
from noria.sampling.params import LogitsProcessor
from noria.text.answer import AnswerText

if TYPE_CHECKING:
    import llguidance
    import torch

    from noria.engine import Engine
    from noria.sampling.grammar import GrammarEngine

_log = logging.getLogger(__name__)


class MakesGrammarEngine(Protocol):
    """Makes the grammar engine when it is first needed: it takes a second."""

    def __call__(self) -> "GrammarEngine":
        """It is called once, and not on the engine's thread."""


WakesEngine = Callable[[], None]
"""Called on another thread than the engine's."""


@dataclass(slots=True)
class Watched:
    """One request whose tokens are read.

    Attributes:
        text: its text, if it has stop strings.
        grammar: what its text obeys, in the grammar engine's form.
        processors: edit its logits.
        matcher: of its grammar, once that is compiled.
        output_ids: its tokens, for its processors.
        num_tokens: tokens it keeps, once a stop was found here.
        parts: of its text.
    """

    text: AnswerText | None = None
    grammar: str | None = None
    processors: Sequence[LogitsProcessor] = ()
    matcher: "llguidance.LLMatcher | None" = None
    output_ids: list[int] = field(default_factory=list)
    num_tokens: int | None = None
    parts: list[str] = field(default_factory=list)


class AnswerWatch:
    """What is known of the watched requests of an engine.

    Args:
        makes_grammar_engine: called when the first grammar is to be compiled.
        wakes_engine: called when `unpark_compiled` has something to do.
    """

    def __init__(
        self, makes_grammar_engine: MakesGrammarEngine, wakes_engine: WakesEngine | None = None
    ) -> None:
        self._makes_grammar_engine = makes_grammar_engine
        self._wakes_engine = wakes_engine
        self._grammar_engine: GrammarEngine | None = None
        self._watched: dict[int, Watched] = {}
        self._handles: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._compiler: ThreadPoolExecutor | None = None
        self._compiling: dict[Future[llguidance.LLMatcher], int] = {}

    # ---- a request's time here

    def add(self, handle: int, watched: Watched) -> None:
        """Begins; a request with a grammar must be parked."""
        self._watched[handle] = watched
        self._handles = np.append(self._handles, handle)
        if watched.grammar is not None:
            if self._compiler is None:
                self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="noria-grammar")
            compiled = self._compiler.submit(self._compile, watched.grammar)
            self._compiling[compiled] = handle
            if self._wakes_engine is not None:
                compiled.add_done_callback(partial(_wake, self._wakes_engine))

    def take(self, handle: int) -> Watched | None:
        """Ends; None if the request is not watched."""
        watched = self._watched.pop(handle, None)
        if watched is not None:
            self._handles = self._handles[self._handles != handle]
        return watched

    def close(self) -> None:
        """Ends the thread that compiles. Idempotent."""
        if self._compiler is not None:
            self._compiler.shutdown(wait=True, cancel_futures=True)

    # ---- grammars that compile

    @property
    def is_compiling(self) -> bool:
        """Whether requests wait parked for their grammar."""
        return bool(self._compiling)

    def unpark_compiled(self, engine: "Engine", timeout_s: float = 0.0) -> None:
        """Puts requests in line whose grammar is ready, and ends those whose grammar has failed.

        Args:
            engine: theirs.
            timeout_s: waits so long for a first one.
        """
        if not self._compiling:
            return
        done, _ = wait(self._compiling, timeout=timeout_s, return_when=FIRST_COMPLETED)
        for future in done:
            handle = self._compiling.pop(future)
            watched = self._watched.get(handle)
            if watched is None:  # it was aborted meanwhile
                continue
            try:
                watched.matcher = future.result()
            except Exception as error:  # noqa: BLE001  whatever it is ends this request alone
                engine.finish(handle, 0, _core.ERROR, f"its grammar did not compile: {error}")
                continue
            engine.unpark(handle)

    def _compile(self, grammar: str) -> "llguidance.LLMatcher":
        # One thread compiles, so there is no race here.
        if self._grammar_engine is None:
            self._grammar_engine = self._makes_grammar_engine()
        return self._grammar_engine.compile(grammar)

    # ---- tokens

    def see(self, events: Events, engine: "Engine") -> None:
        """Reads a turn's tokens of watched requests; ends those that have met their stop."""
        if not len(self._handles):
            return
        started_ns = time.perf_counter_ns()
        rows = events.rows
        tokens = rows[(rows[:, 1] == _core.TOKEN) & np.isin(rows[:, 0], self._handles)]
        for handle, _, token_id, position in tokens.tolist():
            self._see_token(handle, token_id, position + 1, engine)
        engine.add_text_time((time.perf_counter_ns() - started_ns) // 1000)

    def _see_token(self, handle: int, token_id: int, num_tokens: int, engine: "Engine") -> None:
        watched = self._watched[handle]
        if watched.num_tokens is not None:
            return
        if watched.processors:
            watched.output_ids.append(token_id)
        has_stopped = False
        if watched.text is not None:
            watched.parts.append(watched.text.push(token_id))
            has_stopped = watched.text.stop is not None
        if watched.matcher is not None and not watched.matcher.is_stopped():
            if not watched.matcher.consume_token(token_id):
                cause = f"its grammar took no {token_id}: {watched.matcher.get_error()}"
                engine.finish(handle, num_tokens, _core.ERROR, cause)
                return
            # The rule is fulfilled and nothing may follow: no step is spent on an end of sequence.
            has_stopped |= watched.matcher.is_stopped()
        if has_stopped:
            watched.num_tokens = num_tokens
            engine.finish(handle, num_tokens, _core.STOP)

    # ---- masks

    def masks(self, request: MaskRequest) -> HostMasks:
        """What the host does to the logits of grammars' and processors' rows: a `MaskProvider`."""
        edits: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        rows: list[int] = []
        matchers: list[llguidance.LLMatcher] = []
        for row, handle in zip(request.rows.tolist(), request.handles.tolist(), strict=True):
            watched = self._watched[handle]
            if watched.matcher is not None:
                rows.append(row)
                matchers.append(watched.matcher)
            if watched.processors:
                edits[row] = partial(_process, watched.processors, list(watched.output_ids))
        allowed = np.empty((0, 0), dtype=np.bool_)
        if matchers:
            assert self._grammar_engine is not None  # it made the matchers
            allowed = self._grammar_engine.masks(matchers)
        return HostMasks(np.array(rows, dtype=np.int64), allowed, edits)


def _wake(wakes_engine: WakesEngine, _compiled: object) -> None:
    wakes_engine()


def _process(
    processors: Sequence[LogitsProcessor], output_ids: list[int], logits: "torch.Tensor"
) -> "torch.Tensor":
    """A row of logits after all of a request's processors."""
    shape = logits.shape
    for processor in processors:
        logits = processor(output_ids, logits)
        given = getattr(logits, "shape", None)
        if given != shape:
            what = type(logits).__name__ if given is None else f"{list(given)} logits"
            raise SamplingParamsError(f"it gave {what} where it must give {list(shape)} logits")
    return logits
