"""Log probabilities of tokens, from a step's rows to the shape that vLLM gives them."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria.runner.base import SampledIds, TokenScores


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one place.

    Attributes:
        logprob: its log probability.
        rank: its place among all tokens, from 1.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = Mapping[int, Logprob]
"""Token id → what is told of it, for one place of a text: the token that stands there first."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of one step's tokens.

    Attributes:
        handles: `[n]` int64: whose they are.
        is_prompt: of prompt tokens, not of output tokens.
        tokens: the values, one entry a handle.
    """

    handles: npt.NDArray[np.int64]
    is_prompt: bool
    tokens: TokenScores


def scores_of(sampled: SampledIds, row_handles: npt.NDArray[np.int64]) -> Iterator[Scores]:
    """What a step's result says; `row_handles` `[num_rows]` are those of its rows."""
    for is_prompt, tokens in ((False, sampled.output_scores), (True, sampled.prompt_scores)):
        if tokens is not None:
            yield Scores(row_handles[tokens.rows], is_prompt, tokens)


class ScoreBook:
    """Log probabilities by request, as steps give them out."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, bool], dict[int, tuple[TokenScores, int]]] = {}

    def add(self, scores: Sequence[Scores], handles: npt.NDArray[np.int64]) -> None:
        """Takes a turn's; those of others than `handles` (sorted) are passed over."""
        for part in scores:
            (places,) = np.nonzero(np.isin(part.handles, handles))
            positions = part.tokens.positions[places].tolist()
            for place, handle, position in zip(
                places.tolist(), part.handles[places].tolist(), positions, strict=True
            ):
                # A prompt computed again after a preemption says the same again.
                self._of.setdefault((handle, part.is_prompt), {})[position] = (part.tokens, place)

    def split(self, handles: Iterable[int]) -> "ScoreBook":
        """What it knows of some requests; it is forgotten here."""
        other = ScoreBook()
        for handle in handles:
            for is_prompt in (False, True):
                places = self._of.pop((handle, is_prompt), None)
                if places is not None:
                    other._of[handle, is_prompt] = places
        return other

    def output(
        self, handle: int, num_tokens: int, num_logprobs: int, text_of: "TextOf", *, first: int = 0
    ) -> list[TokenLogprobs]:
        """One entry for each of a request's output tokens from `first` up to `num_tokens`."""
        places = self._of.get((handle, False), {})
        return [_entry(*places[position], num_logprobs, text_of) for position in range(first, num_tokens)]

    def prompt(
        self, handle: int, num_tokens: int, num_logprobs: int, text_of: "TextOf"
    ) -> list[TokenLogprobs | None]:
        """One entry for each prompt token; None for the first, and where it ended too early to know."""
        places = self._of.get((handle, True), {})
        return [
            _entry(*places[position], num_logprobs, text_of) if position in places else None
            for position in range(num_tokens)
        ]


TextOf = Callable[[int], str | None]
"""From a token id to its text."""


def _entry(tokens: TokenScores, place: int, num_logprobs: int, text_of: TextOf) -> TokenLogprobs:
    """The token itself, then the most likely ones."""
    num = tokens.ids.shape[1] if num_logprobs < 0 else 1 + num_logprobs
    ids = tokens.ids[place, :num].tolist()
    values = tokens.values[place, :num].tolist()
    ranks = itertools.chain((int(tokens.ranks[place]),), itertools.count(1))
    entry: dict[int, Logprob] = {}
    for token_id, value, rank in zip(ids, values, ranks, strict=False):  # ranks are endless
        entry.setdefault(token_id, Logprob(value, rank, text_of(token_id)))
    return entry
