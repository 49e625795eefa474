"""What a caller gets back, and how it is put together from the core's events.

Nothing here loops over requests while steps run: events are kept as arrays, and are sorted into
answers once, when all have finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria import _core
from noria.scores import ScoreBook, Scores, TokenLogprobs
from noria.text.tool_calls import ToolCall

FINISH_REASONS = {
    _core.STOP: "stop",
    _core.LENGTH: "length",
    _core.ABORT: "abort",
    _core.ERROR: "error",
    _core.EXPIRED: "expired",
}


@dataclass(frozen=True, slots=True)
class Events:
    """What happened in one turn of the loop.

    Attributes:
        rows: `[n, 4]` int64: handle, kind and two values, as DESIGN.md chapter 1 lists them.
        times_us: `[n]` int64: microseconds on the clock of `time.perf_counter`.
        scores: log probabilities of tokens, where requests ask for them.
    """

    rows: npt.NDArray[np.int64]
    times_us: npt.NDArray[np.int64]
    scores: Sequence[Scores] = ()

    @property
    def handles(self) -> npt.NDArray[np.int64]:
        """`[n]`: whose event each row is."""
        return self.rows[:, 0]

    @property
    def kinds(self) -> npt.NDArray[np.int64]:
        """`[n]`: `ADMITTED`, `TOKEN`, `FINISHED`, `PREEMPTED` or `RESUMED`."""
        return self.rows[:, 1]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When a request did what, in seconds on the clock of `time.perf_counter`.

    Attributes:
        arrival_time: submitted.
        first_scheduled_time: its first row was planned; None if it never was.
        first_token_time: its first token was committed; None if it has none.
        finished_time: it finished.
        num_preemptions: times it gave up its KV and was computed again.
        num_cached_tokens: prompt tokens found in the prefix cache when it was first admitted.
    """

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    num_preemptions: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: which of the prompt's answers.
        text: the decoded tokens; empty without a tokenizer, or if `detokenize` is off.
        token_ids: all sampled tokens; the token that stopped it included.
        finish_reason: `stop`, `length`, `abort`, `expired` or `error`; None while it is being made, as a
            stream of `AsyncEngine` gives it out.
        stop_reason: the text from `stop` or the id from `stop_token_ids` that stopped it; None for end of
            sequence, and for every other reason.
        cumulative_logprob: sum of the tokens' log probabilities; None if `logprobs` is.
        logprobs: for each token the log probabilities of it and of the most likely ones, if asked for.
        tool_calls: what `text` calls, where a chat offered tools; None where it offered none, or where the
            model's chat template does not say how it writes calls.
        content: `text` without these calls; None where they are.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    tool_calls: list[ToolCall] | None = None
    content: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers.

    Attributes:
        request_id: a name that no other request of this engine has.
        prompt: its text; None if it was given as token ids.
        prompt_token_ids: its token ids.
        outputs: its answers, as many as `n` says.
        finished: all answers are whole; false only in a stream of `AsyncEngine`.
        metrics: its times; None if it was refused before it was submitted, or has not finished.
        error: why it ended with `finish_reason` `error`; else None.
        prompt_logprobs: for each prompt token the log probabilities of it and of the most likely ones, if
            asked for; None for the first, which nothing precedes. In a stream it comes at the end.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What the events say about one request.

    Attributes:
        token_ids: `[num_output_tokens]` int64, cut where it was finished.
        reason: `STOP`, `LENGTH`, `ABORT`, `ERROR` or `EXPIRED`.
        first_scheduled_us: its first `ADMITTED`; None if it never was.
        first_token_us: its first `TOKEN`; None if it has none.
        finished_us: its `FINISHED`.
        num_preemptions: its `PREEMPTED` events.
        num_cached_tokens: prompt tokens that its first `ADMITTED` found in the prefix cache.
    """

    token_ids: npt.NDArray[np.int64]
    reason: int
    first_scheduled_us: int | None
    first_token_us: int | None
    finished_us: int
    num_preemptions: int
    num_cached_tokens: int


class EventCollector:
    """Keeps the events of a fixed set of requests, and sorts them into answers at the end.

    Args:
        handles: whose events to keep, in the order in which `finished` gives them.

    Attributes:
        scores: log probabilities of their tokens.
    """

    def __init__(self, handles: Sequence[int]) -> None:
        array = np.asarray(handles, dtype=np.int64)
        self._order = np.argsort(array, kind="stable")
        self._sorted = array[self._order]
        self._num_requests = len(array)
        self._rows: list[npt.NDArray[np.int64]] = []
        self._times: list[npt.NDArray[np.int64]] = []
        self._indices: list[npt.NDArray[np.int64]] = []
        self._num_finished = 0
        self._num_tokens = 0
        self.scores = ScoreBook()

    @property
    def num_finished(self) -> int:
        """Requests whose `FINISHED` was seen."""
        return self._num_finished

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far, of all requests; those that a late stop will cut included."""
        return self._num_tokens

    def add(self, events: Events) -> npt.NDArray[np.int64]:
        """Takes a turn's events.

        Returns:
            `[n]` int64: the place in `handles` of each event's request; −1 for a stranger's.
        """
        indices = np.full(len(events.rows), -1, dtype=np.int64)
        if self._num_requests:
            place = np.minimum(np.searchsorted(self._sorted, events.handles), self._num_requests - 1)
            ours = self._sorted[place] == events.handles
            indices[ours] = self._order[place[ours]]
        ours = indices >= 0
        self._rows.append(events.rows[ours])
        self._times.append(events.times_us[ours])
        self._indices.append(indices[ours])
        if events.scores:
            self.scores.add(events.scores, self._sorted)
        kinds = self._rows[-1][:, 1]
        self._num_finished += int(np.count_nonzero(kinds == _core.FINISHED))
        self._num_tokens += int(np.count_nonzero(kinds == _core.TOKEN))
        return indices

    def finished(self) -> list[FinishedRequest]:
        """One entry a request, in the order of `handles`; all must have finished."""
        if self._num_finished != self._num_requests:
            raise AssertionError(f"{self._num_finished} of {self._num_requests} requests have finished")
        if not self._num_requests:
            return []
        rows = np.concatenate(self._rows)
        times = np.concatenate(self._times)
        indices = np.concatenate(self._indices)
        kinds = rows[:, 1]

        ends = _last_of(indices, kinds == _core.FINISHED, self._num_requests)
        starts = _first_of(indices, kinds == _core.ADMITTED, self._num_requests)
        preemptions = np.bincount(indices[kinds == _core.PREEMPTED], minlength=self._num_requests)

        # Tokens by request, then by output position.
        (token_rows,) = np.nonzero(kinds == _core.TOKEN)
        token_rows = token_rows[np.lexsort((rows[token_rows, 3], indices[token_rows]))]
        counts = np.bincount(indices[token_rows], minlength=self._num_requests)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        positions = np.arange(len(token_rows)) - np.repeat(offsets[:-1], counts)
        if not np.array_equal(rows[token_rows, 3], positions):
            raise AssertionError("a request's tokens came with a gap or twice")

        answers = []
        for index in range(self._num_requests):
            end, start = int(ends[index]), int(starts[index])
            num_tokens = min(int(rows[end, 3]), int(counts[index]))  # an abort may name more than there are
            mine = token_rows[offsets[index] : offsets[index + 1]]
            answers.append(
                FinishedRequest(
                    token_ids=rows[mine[:num_tokens], 2],
                    reason=int(rows[end, 2]),
                    first_scheduled_us=int(times[start]) if start >= 0 else None,
                    first_token_us=int(times[mine[0]]) if len(mine) else None,
                    finished_us=int(times[end]),
                    num_preemptions=int(preemptions[index]),
                    num_cached_tokens=int(rows[start, 2]) if start >= 0 else 0,
                )
            )
        return answers


def _first_of(
    indices: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_], num: int
) -> npt.NDArray[np.int64]:
    """`[num]`: each request's first chosen row; −1 where it has none."""
    first = np.full(num, -1, dtype=np.int64)
    (rows,) = np.nonzero(chosen)
    first[indices[rows[::-1]]] = rows[::-1]  # of repeated indices, the last written stays
    return first


def _last_of(
    indices: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_], num: int
) -> npt.NDArray[np.int64]:
    """`[num]`: each request's last chosen row; −1 where it has none."""
    last = np.full(num, -1, dtype=np.int64)
    (rows,) = np.nonzero(chosen)
    last[indices[rows]] = rows
    return last
