"""Grammars: which tokens may come next so that an answer's text obeys its rule, through llguidance."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import llguidance
import llguidance.numpy
import numpy as np
import numpy.typing as npt

from noria.errors import SamplingParamsError
from noria.sampling.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from noria.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_WHITESPACE = r"( |\n {0,32})?"
"""Between JSON's tokens: enough to indent. Without a bound, a small model may write spaces until its end."""

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*?)\]")
_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose value has schemas by names; a name may look like any keyword."""


def grammar_of(rule: StructuredOutputsParams) -> str:
    """A rule in the engine's own form.

    Raises:
        SamplingParamsError: it is bad or not supported; the sentence names the keyword.
    """
    matcher = llguidance.LLMatcher
    kind = rule.kind
    if rule.json is not None:
        _check_num_properties(rule.json)
        grammar = _json_grammar(rule.json, rule.disable_any_whitespace)
    elif rule.json_object:
        grammar = _json_grammar({"type": "object"}, rule.disable_any_whitespace)
    elif rule.regex is not None:
        grammar = matcher.grammar_from_regex(rule.regex)
    elif rule.choice is not None:
        grammar = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in rule.choice))
    else:
        assert rule.grammar is not None
        grammar = matcher.grammar_from_lark(_lark_of(rule.grammar))
    is_error, messages = matcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise _error(kind, getattr(rule, kind), messages[0])
    for message in messages:
        _log.warning("structured_outputs.%s: %s", kind, " ".join(message.split()))
    return grammar


def _json_grammar(schema: object, disable_any_whitespace: bool) -> str:
    whitespace = "" if disable_any_whitespace else _WHITESPACE
    text = json.dumps(schema)
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": whitespace})


def _lark_of(grammar: str) -> str:
    """Lark's syntax, from GBNF where it is that."""
    if not _GBNF_RULE.search(grammar):
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:
        raise _error("grammar", grammar, str(error)) from error


def _check_num_properties(schema: object) -> None:
    """Refuses a `minProperties` that the engine may fall short of; iterative, as schemas may be deep.

    Keys beyond those in `properties` may come twice from the engine, and then count once.
    """
    todo: list[tuple[object, str, bool]] = [
        (schema, "", False)
    ]  # what, where, and whether its keys are names
    while todo:
        part, at, has_names = todo.pop()
        if isinstance(part, list):
            todo += [(value, f"{at}/{index}", False) for index, value in enumerate(part)]
        if not isinstance(part, Mapping):
            continue
        required, least = part.get("required"), part.get("minProperties")
        num_required = len(required) if isinstance(required, list) else 0
        if not has_names and isinstance(least, int) and least > max(1, num_required):
            raise SamplingParamsError(
                f"structured_outputs.json has the keyword 'minProperties' at {at or 'its top'}, which is "
                f"supported up to the number of required properties, {num_required}; got {least}",
                value=least,
                limit=max(1, num_required),
            )
        todo += [
            (value, f"{at}/{key}", not has_names and key in _NAMES)
            for key, value in part.items()
            if has_names or key not in ("enum", "const", "default", "examples")
        ]


def _error(kind: str, value: object, message: str) -> SamplingParamsError:
    """One sentence of the engine's message, which may have many lines."""
    unimplemented = _UNIMPLEMENTED.search(message)
    if unimplemented:
        keywords = unimplemented.group(1).replace('"', "'")
        return SamplingParamsError(
            f"structured_outputs.{kind} has the keyword {keywords}, which is not supported", value=value
        )
    if "oneOf constraints are not supported" in message:
        return SamplingParamsError(
            f"structured_outputs.{kind} has the keyword 'oneOf' with choices that may overlap, "
            "which is not supported; anyOf is",
            value=value,
        )
    told = " ".join(message.split())
    return SamplingParamsError(f"structured_outputs.{kind} is refused: {told[:300]}", value=value)


class GrammarEngine:
    """Matchers over a model's vocabulary, and the masks of many at once.

    Args:
        tokenizer: of the model.
        vocab_size: width of the logits.
        eos_token_ids: tokens that end an answer; allowed where the rule is fulfilled.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.to_json(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids) or None
        )
        self._executor = llguidance.LLExecutor()

    def compile(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the start of an answer. Takes up to seconds, most of them without the GIL.

        Raises:
            SamplingParamsError: the grammar is too large.
        """
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds what the first mask needs, so that no step waits for it
        if matcher.is_error():
            raise SamplingParamsError(
                f"structured_outputs is refused: {' '.join(matcher.get_error().split())[:300]}"
            )
        return matcher

    def masks(self, matchers: Sequence[llguidance.LLMatcher]) -> npt.NDArray[np.bool_]:
        """`[len(matchers), vocab_size]`: what each allows next."""
        bits = np.zeros((len(matchers), -(-self._vocab_size // 32)), dtype=np.int32)
        llguidance.numpy.fill_next_token_bitmask_par(
            self._executor, [(matcher, place) for place, matcher in enumerate(matchers)], bits
        )
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        return allowed[:, : self._vocab_size].view(np.bool_)
