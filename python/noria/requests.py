"""From a prompt and its sampling parameters to what the engine, the runner and the watch have to know."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from noria.errors import SamplingParamsError, TokenizerError
from noria.prompts import Prompt
from noria.runner.base import SeatInit
from noria.sampling.context import SeatContext
from noria.sampling.params import SamplingParams
from noria.text.answer import AnswerText
from noria.watch import Watched

if TYPE_CHECKING:
    from noria.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request on its way; a prompt has `n` of them.

    Attributes:
        request_id: the prompt's name.
        prompt_index: which prompt of the call.
        index: which of the prompt's answers.
        handle: the engine's.
        prompt: as given.
        token_ids: of the prompt.
        params: its own.
        stop_token_ids: what ends it, the model's end of sequence included.
        arrival_us: when it was submitted.
    """

    request_id: str
    prompt_index: int
    index: int
    handle: int
    prompt: Prompt
    token_ids: list[int]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    arrival_us: int


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What all answers to one prompt have in common.

    Attributes:
        params: how they are sampled.
        stop_token_ids: what ends them, ascending.
        context: what their logits edits depend on.
        grammar: in the grammar engine's form.
    """

    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    context: SeatContext
    grammar: str | None

    def seat_init(self, seed: int, num_prompt_tokens: int) -> SeatInit:
        """What the runner has to know of one of them."""
        return SeatInit(self.params, seed, num_prompt_tokens, self.context)

    def text(self, tokenizer: "Tokenizer | None") -> AnswerText | None:
        """The text of one of them as its tokens come; None if it has none."""
        params = self.params
        if tokenizer is None or not params.detokenize:
            return None
        return AnswerText(
            tokenizer.stream(params.skip_special_tokens, after_prompt=True),
            stops=tuple(params.stop or ()),
            stop_token_ids=self.stop_token_ids,
            keeps_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def watched(self, tokenizer: "Tokenizer | None") -> Watched | None:
        """What reads the tokens of one of them; None if nothing has to."""
        params = self.params
        text = self.text(tokenizer) if params.stop else None
        if text is None and self.grammar is None and not params.logits_processors:
            return None
        return Watched(text, self.grammar, params.logits_processors or ())


def plan_request(
    params: SamplingParams,
    token_ids: Sequence[int],
    *,
    tokenizer: "Tokenizer | None",
    eos_token_ids: Sequence[int],
    vocab_size: int,
) -> RequestPlan:
    """Checks what parameters ask for against the model, and looks up what they name.

    Args:
        params: of the request.
        token_ids: of its prompt.
        tokenizer: None if there is none.
        eos_token_ids: the model's.
        vocab_size: the model's.

    Raises:
        SamplingParamsError: the model or its tokenizer cannot do it, or the grammar is bad.
    """
    _check_ids(params, vocab_size)
    for name in ("stop", "bad_words", "structured_outputs"):
        if tokenizer is None and getattr(params, name):
            raise SamplingParamsError(
                f"{name} needs a tokenizer, and the engine has none (skip_tokenizer_init is set)",
                value=getattr(params, name),
            )
    if params.stop and tokenizer is not None:
        _check_streams(tokenizer)
    stops = set(params.stop_token_ids)
    if not params.ignore_eos:
        stops.update(eos_token_ids)
    stop_token_ids = tuple(sorted(stops))
    reads_prompt = params.has_penalty or params.prompt_logprobs is not None
    context = SeatContext(
        stop_token_ids=stop_token_ids if params.min_tokens else (),
        bad_words=_bad_words(params.bad_words or (), tokenizer) if tokenizer is not None else (),
        prompt_token_ids=np.asarray(token_ids if reads_prompt else (), dtype=np.int64),
    )
    grammar = None
    if params.structured_outputs is not None:
        from noria.sampling.grammar import grammar_of  # only who asks for it needs its engine

        grammar = grammar_of(params.structured_outputs)
    return RequestPlan(params, stop_token_ids, context, grammar)


def _check_streams(tokenizer: "Tokenizer") -> None:
    """Stop strings are looked for while tokens come, which not every decoder allows."""
    try:
        tokenizer.stream()
    except TokenizerError as error:
        raise SamplingParamsError(f"stop cannot be used with this model: {error}") from error


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Ids that the model has no logit for are mistakes."""
    for name, ids in (
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", list(params.logit_bias or ())),
        ("stop_token_ids", params.stop_token_ids),
    ):
        unknown = [token_id for token_id in ids if token_id >= vocab_size]
        if unknown:
            raise SamplingParamsError(
                f"{name} has the token id {unknown[0]}; the model has {vocab_size} tokens",
                value=unknown[0],
                limit=vocab_size,
            )
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is not None and asked > vocab_size:
            raise SamplingParamsError(
                f"{name} is {asked}; the model has {vocab_size} tokens", value=asked, limit=vocab_size
            )


def _bad_words(words: Sequence[str], tokenizer: "Tokenizer") -> tuple[tuple[int, ...], ...]:
    """Token ids of each word as it begins a text, and as it follows a space where that is another token."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        for ids in (bare, spaced):
            if ids:
                found[ids] = None
    return tuple(found)


def child_seed(seed: int, index: int) -> int:
    """The seed of a prompt's answer `index`; its first answer has the seed itself."""
    return seed if index == 0 else request_seed(seed % 2**64, index - 1)


def request_seed(seed: int, number: int) -> int:
    """A seed for the engine's request `number`: splitmix64 of both; 0 to 2**63 − 1."""
    x = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) >> 1
