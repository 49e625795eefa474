"""How likely texts are: prompts whose tokens are scored, and what is read out of their log probabilities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from noria.errors import RejectedError
from noria.prompts import read_prompt

if TYPE_CHECKING:
    from noria.outputs import RequestOutput
    from noria.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How likely a model finds some tokens after those before them.

    Attributes:
        prompt_token_ids: what came before; of a text that is scored by itself, its first token.
        token_ids: what is scored.
        token_logprobs: of each of these, given all before it.
        logprob: their sum.
        is_greedy: each of them is the most likely one at its place.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    token_logprobs: list[float]
    logprob: float
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of which those from `first` on are scored."""

    token_ids: list[int]
    first: int


def scored_tokens(prompt: object, continuation: object, tokenizer: "Tokenizer | None") -> Scored:
    """A prompt and what follows it, as tokens.

    Texts are joined before they are split into tokens, as the model has seen text; where a token spans the
    end of the prompt, it is scored too.

    Args:
        prompt: a text, or token ids.
        continuation: of the same kind; None: the prompt is scored, but for its first token.
        tokenizer: None if there is none.

    Raises:
        RejectedError: they are of two kinds, or nothing is left to score.
    """
    given, ids = _read(prompt, tokenizer)
    if continuation is None:
        if len(ids) < 2:
            raise RejectedError(
                f"it has {len(ids)} tokens; at least 2 are needed, as nothing comes before the first",
                value=prompt,
                limit=2,
            )
        return Scored(ids, 1)
    followed, more = _read(continuation, tokenizer, "its continuation")
    if (given is None) != (followed is None):
        raise RejectedError(
            "the prompt and its continuation must both be texts, or both token ids", value=continuation
        )
    if not ids:
        raise RejectedError("the prompt has no token that the continuation could follow", value=prompt)
    if given is None or followed is None or tokenizer is None:
        whole, first = ids + more, len(ids)
    else:
        whole = tokenizer.encode(given + followed)
        first = next(
            (at for at, pair in enumerate(zip(ids, whole, strict=False)) if pair[0] != pair[1]), len(ids)
        )
        first = max(1, min(first, len(whole)))
    if first >= len(whole):
        raise RejectedError("the continuation has no token", value=continuation)
    return Scored(whole, first)


def _read(
    prompt: object, tokenizer: "Tokenizer | None", what: str = "a prompt"
) -> tuple[str | None, list[int]]:
    """Its text, if it is one, and its token ids; errors say `what` it is."""
    read = read_prompt(prompt, what)
    if read.token_ids is not None:
        return None, read.token_ids
    if tokenizer is None:
        raise RejectedError(
            "it is a text, but the engine has no tokenizer (skip_tokenizer_init is set)", value=prompt
        )
    assert read.text is not None
    return read.text, tokenizer.encode(read.text)


def score_output(scored: Scored, output: "RequestOutput") -> ScoreOutput:
    """What is read out of a prompt's log probabilities.

    Raises:
        RejectedError: the request could not be computed.
    """
    told = output.prompt_logprobs
    if output.error is not None or told is None:
        raise RejectedError(f"it could not be scored: {output.error}", value=scored.token_ids)
    token_ids = scored.token_ids[scored.first :]
    entries = []
    for token_id, entry in zip(token_ids, told[scored.first :], strict=True):
        if entry is None:
            raise RejectedError("it was ended before all of it was scored", value=scored.token_ids)
        entries.append(entry[token_id])
    logprobs = [entry.logprob for entry in entries]
    return ScoreOutput(
        prompt_token_ids=scored.token_ids[: scored.first],
        token_ids=token_ids,
        token_logprobs=logprobs,
        logprob=sum(logprobs),
        is_greedy=all(entry.rank == 1 for entry in entries),
    )


def spread_continuations(continuations: object, num_prompts: int) -> list[object]:
    """One a prompt; None, none for any.

    Raises:
        RejectedError: they are not as many as the prompts.
    """
    if continuations is None:
        return [None] * num_prompts
    if isinstance(continuations, str | bytes | Mapping) or not isinstance(continuations, Sequence):
        raise RejectedError(
            f"continuations is of type {type(continuations).__name__}; it must be a list, one a prompt",
            value=continuations,
        )
    if len(continuations) != num_prompts:
        raise RejectedError(
            f"{len(continuations)} continuations were given for {num_prompts} prompts",
            value=len(continuations),
            limit=num_prompts,
        )
    return list(continuations)
