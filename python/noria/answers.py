"""From what the events say of requests to the answers that a caller gets."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from noria import _core
from noria.errors import RejectedError
from noria.outputs import FINISH_REASONS, CompletionOutput, FinishedRequest, RequestMetrics, RequestOutput
from noria.prompts import Prompt
from noria.requests import Submitted
from noria.scores import ScoreBook, TokenLogprobs
from noria.text.tool_calls import ToolCallFormat, split_tool_calls
from noria.watch import Watched

if TYPE_CHECKING:
    from noria.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that has ended.

    Attributes:
        request: as it was submitted.
        finished: what the events say.
        watched: what the host read of it; None if it was not watched.
        cause: why it ended as `ERROR`.
    """

    request: Submitted
    finished: FinishedRequest
    watched: Watched | None
    cause: str | None


class AnswerWriter:
    """Makes outputs: text, reasons, log probabilities.

    Args:
        tokenizer: None if there is none.
        eos_token_ids: the model's.
    """

    def __init__(self, tokenizer: "Tokenizer | None", eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._texts: dict[int, str | None] = {}  # of single tokens

    def output(self, answers: Sequence[Answer], scores: ScoreBook) -> RequestOutput:
        """All answers to one prompt, in the order of their indices."""
        first = answers[0].request
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = scores.prompt(
                first.handle, len(first.token_ids), first.params.prompt_logprobs, self._token_text
            )
        return RequestOutput(
            request_id=first.request_id,
            prompt=first.prompt.text,
            prompt_token_ids=first.token_ids,
            outputs=[self.completion(answer, scores) for answer in answers],
            finished=True,
            metrics=_metrics(answers),
            error=next((answer.cause for answer in answers if answer.cause is not None), None),
            prompt_logprobs=prompt_logprobs,
        )

    def completion(self, answer: Answer, scores: ScoreBook) -> CompletionOutput:
        """One answer that has ended."""
        request, watched = answer.request, answer.watched
        token_ids: list[int] = answer.finished.token_ids.tolist()
        reason = answer.finished.reason
        if watched is not None and watched.num_tokens is not None:
            # What the host found comes first: the core's own reason is of a token after it, or of the same.
            token_ids, reason = token_ids[: watched.num_tokens], _core.STOP
        is_stop_token = reason == _core.STOP and bool(token_ids) and token_ids[-1] in request.stop_token_ids
        stop_reason: int | str | None = None
        if watched is not None and watched.text is not None and watched.text.stop is not None:
            stop_reason, is_stop_token = watched.text.stop, False
        elif is_stop_token and (request.params.ignore_eos or token_ids[-1] not in self._eos_token_ids):
            stop_reason = token_ids[-1]
        logprobs = self.logprobs(request, 0, len(token_ids), scores)
        cumulative = None
        if logprobs is not None:
            pairs = zip(token_ids, logprobs, strict=True)
            cumulative = sum(told[token_id].logprob for token_id, told in pairs)
        text = self._text(answer, token_ids, is_stop_token)
        kind = self.tool_call_format(request)
        read = None if kind is None else split_tool_calls(text, kind)
        return CompletionOutput(
            index=request.index,
            text=text,
            token_ids=token_ids,
            finish_reason=FINISH_REASONS[reason],
            stop_reason=stop_reason,
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            tool_calls=None if read is None else list(read.calls),
            content=None if read is None else read.content,
        )

    def tool_call_format(self, request: Submitted) -> ToolCallFormat | None:
        """How the calls of an answer are written; None if none are looked for."""
        if self._tokenizer is None or not request.prompt.offers_tools or not request.params.detokenize:
            return None
        return self._tokenizer.tool_call_format

    def _text(self, answer: Answer, token_ids: list[int], is_stop_token: bool) -> str:
        params, watched = answer.request.params, answer.watched
        if self._tokenizer is None or not params.detokenize:
            return ""
        if watched is not None and watched.text is not None:
            return "".join((*watched.parts, watched.text.end()))
        # The token that stopped it is no part of the answer's text.
        shown = token_ids[:-1] if is_stop_token and not params.include_stop_str_in_output else token_ids
        return self._tokenizer.decode(shown, params.skip_special_tokens, after_prompt=True)

    def logprobs(
        self, request: Submitted, first: int, end: int, scores: ScoreBook
    ) -> list[TokenLogprobs] | None:
        """Of a request's output tokens from `first` up to `end`; None if it asks for none."""
        if request.params.logprobs is None:
            return None
        num_logprobs = request.params.logprobs
        return scores.output(request.handle, end, num_logprobs, self._token_text, first=first)

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token_id not in self._texts:
            self._texts[token_id] = self._tokenizer.decode([token_id], False, after_prompt=True)
        return self._texts[token_id]


def refused_output(
    request_id: str, prompt: Prompt, token_ids: list[int], error: RejectedError
) -> RequestOutput:
    """The output of a prompt that was not submitted."""
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error", stop_reason=None)
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=token_ids,
        outputs=[completion],
        finished=True,
        metrics=None,
        error=str(error),
    )


def _metrics(answers: Sequence[Answer]) -> RequestMetrics:
    """Of all answers to a prompt: from the first that began to the last that ended."""
    finished = [answer.finished for answer in answers]
    return RequestMetrics(
        arrival_time=answers[0].request.arrival_us / 1e6,
        first_scheduled_time=_earliest(one.first_scheduled_us for one in finished),
        first_token_time=_earliest(one.first_token_us for one in finished),
        finished_time=max(one.finished_us for one in finished) / 1e6,
        num_preemptions=sum(one.num_preemptions for one in finished),
        num_cached_tokens=finished[0].num_cached_tokens,
    )


def _earliest(times_us: Iterable[int | None]) -> float | None:
    known = [time_us for time_us in times_us if time_us is not None]
    return min(known) / 1e6 if known else None
