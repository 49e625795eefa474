"""What a request may ask of the sampler, by vLLM's names and with vLLM's meaning."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from noria.errors import SamplingParamsError

_GREEDY_BELOW = 1e-5
"""vLLM's `_SAMPLING_EPS`: a temperature below it means the most likely token."""

_MIN_SEED = -(2**63)
_MAX_SEED = 2**63 - 1
_MAX_TOKEN_ID = 2**31 - 1
"""Token ids are int32 wherever they are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    The order is vLLM's: logits are divided by the temperature, then `min_p`, `top_k` and `top_p` each drop
    tokens, and the token is drawn from what is left, in proportion to its probability.

    Attributes:
        temperature: divides the logits; 0 (in fact anything below 1e-5) takes the most likely token.
        top_k: keeps this many of the most likely tokens, and what ties with the last; 0 or −1 keeps all.
        top_p: keeps the most likely tokens until they hold this much of the probability; in (0, 1].
        min_p: drops tokens less likely than this times the most likely one; in [0, 1].
        seed: makes the tokens repeatable; the engine chooses one where it is None. A signed 64-bit integer.
        max_tokens: most tokens to generate; None generates until the context is full.
        stop_token_ids: tokens that end the request, beside the model's end of sequence.
        ignore_eos: goes on past the model's end of sequence.
        skip_special_tokens: leaves special tokens out of the text.
        detokenize: makes text at all.

    Raises:
        SamplingParamsError: a value is of the wrong type or out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._set("temperature", _real("temperature", self.temperature, "a finite number, 0 or more"))
        self._set("top_p", _real("top_p", self.top_p, "a number above 0, up to 1"))
        self._set("min_p", _real("min_p", self.min_p, "a number from 0 to 1"))
        self._set("top_k", _integer("top_k", self.top_k, "an integer, 1 or more (0 or -1 turns it off)"))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, "a signed 64-bit integer or None"))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, "an integer, 1 or more, or None"))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _error(name, value, "True or False")
        self._check_ranges()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; this is its constructor

    def _check_ranges(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise _error("temperature", self.temperature, "a finite number, 0 or more", 0.0)
        if not 0.0 < self.top_p <= 1.0:
            raise _error("top_p", self.top_p, "above 0 and at most 1", 1.0)
        if not 0.0 <= self.min_p <= 1.0:
            raise _error("min_p", self.min_p, "from 0 to 1", 1.0)
        if self.top_k < -1:
            raise _error("top_k", self.top_k, "1 or more (0 or -1 turns it off)", -1)
        if self.seed is not None and not _MIN_SEED <= self.seed <= _MAX_SEED:
            expected = f"a signed 64-bit integer ({_MIN_SEED} to {_MAX_SEED})"
            raise _error("seed", self.seed, expected, _MAX_SEED)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _error("max_tokens", self.max_tokens, "1 or more", 1)

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken, so no noise is needed."""
        return self.temperature < _GREEDY_BELOW


def _error(name: str, value: object, expected: str, limit: object = None) -> SamplingParamsError:
    return SamplingParamsError(f"{name} must be {expected}; got {value!r}", value=value, limit=limit)


def _real(name: str, value: object, expected: str) -> float:
    # bool is an Integral and therefore a Real; True as a temperature is a mistake.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _error(name, value, expected)
    try:
        return float(value)
    except OverflowError:
        raise _error(name, value, expected) from None


def _integer(name: str, value: object, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _error(name, value, expected)
    return int(value)


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise _error(name, values, "a sequence of token ids")
    ids = tuple(_integer(f"{name}[{index}]", value, "a token id") for index, value in enumerate(values))
    for index, token_id in enumerate(ids):
        if not 0 <= token_id <= _MAX_TOKEN_ID:
            raise _error(f"{name}[{index}]", token_id, f"from 0 to {_MAX_TOKEN_ID}", _MAX_TOKEN_ID)
    return ids
