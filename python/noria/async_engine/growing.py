"""A prompt whose answers are being made, as the event loop knows it."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from noria import _core
from noria.answers import Answer, AnswerWriter
from noria.outputs import CompletionOutput, FinishedRequest, RequestOutput
from noria.requests import Submitted
from noria.scores import ScoreBook, TokenLogprobs
from noria.text.answer import AnswerText
from noria.text.tool_calls import ToolCall, ToolCallStream
from noria.watch import Watched

OutputKind = Literal["cumulative", "delta", "final"]
"""What an output of a stream holds: all so far, what is new, or, given out once, the whole answer."""


@dataclass(slots=True)
class GrowingAnswer:
    """One answer, token by token.

    Attributes:
        request: as it was submitted.
        text: reads its tokens; None if no text is wanted.
        token_ids: its tokens.
        num_read: tokens that a reader has.
        num_chars_read: characters that a reader has.
        text_read: these characters; kept for cumulative outputs only.
        logprobs_read: log probabilities that a reader has; kept for cumulative outputs only.
        cumulative_logprob: their sum.
        calls: reads tool calls out of the text; None if none are looked for, or nothing was read yet.
        content_read: text without calls that a reader has.
        calls_read: calls that a reader has.
        first_scheduled_us: see `FinishedRequest`, as for the next three.
        first_token_us: of its first token.
        num_preemptions: so far.
        num_cached_tokens: when it was first admitted.
        answer: once it has ended.
        is_told: a reader knows that it has ended.
    """

    request: Submitted
    text: AnswerText | None
    token_ids: list[int]
    num_read: int = 0
    num_chars_read: int = 0
    text_read: str = ""
    logprobs_read: list[TokenLogprobs] | None = None
    cumulative_logprob: float = 0.0
    calls: ToolCallStream | None = None
    content_read: str = ""
    calls_read: list[ToolCall] = field(default_factory=list)
    first_scheduled_us: int | None = None
    first_token_us: int | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    answer: Answer | None = None
    is_told: bool = False

    def take_event(self, kind: int, value: int, detail: int, time_us: int) -> None:
        """Takes one event that is not its last."""
        if kind == _core.TOKEN:
            if detail != len(self.token_ids):
                raise AssertionError(f"token {detail} came where token {len(self.token_ids)} was due")
            if self.first_token_us is None:
                self.first_token_us = time_us
            self.token_ids.append(value)
        elif kind == _core.ADMITTED and self.first_scheduled_us is None:
            self.first_scheduled_us, self.num_cached_tokens = time_us, value
        elif kind == _core.PREEMPTED:
            self.num_preemptions += 1

    def end(
        self, reason: int, num_tokens: int, time_us: int, watched: Watched | None, cause: str | None
    ) -> None:
        """Takes its last event."""
        finished = FinishedRequest(
            token_ids=np.asarray(self.token_ids[:num_tokens], dtype=np.int64),
            reason=reason,
            first_scheduled_us=self.first_scheduled_us,
            first_token_us=self.first_token_us,
            finished_us=time_us,
            num_preemptions=self.num_preemptions,
            num_cached_tokens=self.num_cached_tokens,
        )
        self.answer = Answer(self.request, finished, watched, cause)

    def read(self, kind: OutputKind, writer: AnswerWriter, scores: ScoreBook) -> CompletionOutput:
        """What a reader gets now; it counts as read."""
        if self.answer is not None:
            self.is_told = True
            return self.cut(kind, writer.completion(self.answer, scores))
        first, end = self.num_read, len(self.token_ids)
        ids = self.token_ids[first:end]
        text = "" if self.text is None else "".join([self.text.push(token_id) for token_id in ids])
        logprobs = writer.logprobs(self.request, first, end, scores)
        if logprobs is not None:
            told = zip(ids, logprobs, strict=True)
            self.cumulative_logprob += sum(entry[token_id].logprob for token_id, entry in told)
        tool_calls, content = self._read_calls(kind, text, writer)
        self.num_read = end
        self.num_chars_read += len(text)
        if kind == "cumulative":
            self.text_read = text = self.text_read + text
            ids = self.token_ids[:end]
            if logprobs is not None:
                logprobs = self.logprobs_read = [*(self.logprobs_read or ()), *logprobs]
        return CompletionOutput(
            index=self.request.index,
            text=text,
            token_ids=ids,
            finish_reason=None,
            stop_reason=None,
            cumulative_logprob=None if logprobs is None else self.cumulative_logprob,
            logprobs=logprobs,
            tool_calls=tool_calls,
            content=content,
        )

    def _read_calls(
        self, kind: OutputKind, text: str, writer: AnswerWriter
    ) -> tuple[list[ToolCall] | None, str | None]:
        """The calls and the content that a reader gets with new text; None where none are looked for."""
        written = writer.tool_call_format(self.request)
        if written is None:
            return None, None
        if self.calls is None:
            self.calls = ToolCallStream(written)
        new = self.calls.push(text)
        self.content_read += new.content
        self.calls_read += new.calls
        if kind == "cumulative":
            return list(self.calls_read), self.content_read
        return list(new.calls), new.content

    def cut(self, kind: OutputKind, whole: CompletionOutput) -> CompletionOutput:
        """Of its whole answer what a reader gets."""
        if kind != "delta":
            return whole
        return replace(
            whole,
            text=whole.text[self.num_chars_read :],
            token_ids=whole.token_ids[self.num_read :],
            logprobs=None if whole.logprobs is None else whole.logprobs[self.num_read :],
            tool_calls=None if whole.tool_calls is None else whole.tool_calls[len(self.calls_read) :],
            content=None if whole.content is None else whole.content[len(self.content_read) :],
        )


class GrowingOutput:
    """A prompt, and its answers so far. But for two flags the loop's thread owns it.

    Args:
        request_id: its name.
        kind: what an output holds.
        writer: makes outputs.

    Attributes:
        request_id: as given.
        kind: as given.
        is_abandoned: nobody will read it any more; set on any thread, and never taken back.
        is_aborted: its answers are to be ended; never taken back.
        is_over: all its answers have ended, or it has failed.
    """

    def __init__(self, request_id: str, kind: OutputKind, writer: AnswerWriter) -> None:
        self.request_id = request_id
        self.is_abandoned = False
        self.is_aborted = False
        self.is_over = False
        self.kind = kind
        self._writer = writer
        self._answers: list[GrowingAnswer] = []
        self._scores = ScoreBook()
        self._error: BaseException | None = None
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None

    # ---- the desk's side

    @property
    def handles(self) -> list[int]:
        """The engine's, of its answers; none before it was submitted."""
        return [answer.request.handle for answer in self._answers]

    def begin(self, answers: list[GrowingAnswer], scores: ScoreBook) -> None:
        """It was submitted; its log probabilities are in `scores` until it is over."""
        self._answers, self._scores = answers, scores

    def wake(self) -> None:
        """Its answers have grown, or have ended."""
        self.is_over = self.is_over or all(answer.answer is not None for answer in self._answers)
        if self.kind == "final" and not self.is_over:
            return
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def own_scores(self, scores: ScoreBook) -> None:
        """Its log probabilities are in `scores` from now on."""
        self._scores = scores

    def fail(self, error: BaseException) -> None:
        """Its reader gets this error."""
        self.is_over = True
        self._error = error
        self.wake()

    # ---- the reader's side

    @property
    def is_being_read(self) -> bool:
        """Somebody waits for news."""
        return self._waiter is not None

    async def news(self) -> None:
        """Waits until there is something to read."""
        if self._has_news:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def read(self) -> RequestOutput:
        """What the reader gets now; raises its error."""
        self._has_news = False
        if self._error is not None:
            # Not kept: its traceback leads to the reader, and so back here.
            error, self._error = self._error, None
            raise error
        kind, writer, scores = self.kind, self._writer, self._scores
        first = self._answers[0].request
        if self.is_over:
            ended = [answer.answer for answer in self._answers if answer.answer is not None]
            whole = writer.output(ended, scores)
            outputs = [
                answer.cut(kind, completion)
                for answer, completion in zip(self._answers, whole.outputs, strict=True)
                if kind != "delta" or not answer.is_told
            ]
            return replace(whole, outputs=outputs)
        told = [answer for answer in self._answers if kind == "cumulative" or _has_news(answer)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=first.prompt.text,
            prompt_token_ids=first.token_ids,
            outputs=[answer.read(kind, writer, scores) for answer in told],
            finished=False,
            metrics=None,
        )


def _has_news(answer: GrowingAnswer) -> bool:
    return not answer.is_told and (answer.num_read < len(answer.token_ids) or answer.answer is not None)
