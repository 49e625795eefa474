"""Checks of one value each: its name, its value and what was expected make the error's sentence."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real

from noria.errors import SamplingParamsError

MAX_TOKEN_ID = 2**31 - 1
"""Token ids are int32 wherever they are stored."""


def error(name: str, value: object, expected: str, limit: object = None) -> SamplingParamsError:
    """`name must be expected; got value`."""
    return SamplingParamsError(f"{name} must be {expected}; got {value!r}", value=value, limit=limit)


def real(name: str, value: object, expected: str) -> float:
    """A number, as a float; not yet in any range."""
    # bool is an Integral and therefore a Real; True as a temperature is a mistake.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(name, value, expected)
    try:
        return float(value)
    except OverflowError:
        raise error(name, value, expected) from None


def real_in(name: str, value: object, low: float, high: float) -> float:
    """A number from `low` to `high`."""
    expected = f"from {low:g} to {high:g}"
    number = real(name, value, f"a number {expected}")
    if not low <= number <= high:
        raise error(name, value, expected, low if number < low else high)
    return number


def integer(name: str, value: object, expected: str) -> int:
    """An integer; not yet in any range."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(name, value, expected)
    return int(value)


def integer_from(name: str, value: object, low: int, expected: str) -> int:
    """An integer of at least `low`, which `expected` says in words."""
    number = integer(name, value, f"an integer, {expected}")
    if number < low:
        raise error(name, value, expected, low)
    return number


def boolean(name: str, value: object) -> bool:
    """True or False, and nothing that is merely like one."""
    if not isinstance(value, bool):
        raise error(name, value, "True or False")
    return value


def token_ids(name: str, values: object) -> tuple[int, ...]:
    """Token ids, each from 0 to 2**31 − 1."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise error(name, values, "a sequence of token ids")
    ids = tuple(integer(f"{name}[{index}]", value, "a token id") for index, value in enumerate(values))
    for index, token_id in enumerate(ids):
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise error(f"{name}[{index}]", token_id, f"from 0 to {MAX_TOKEN_ID}", MAX_TOKEN_ID)
    return ids


def texts(name: str, values: object) -> tuple[str, ...]:
    """Texts that are not empty; one alone may stand without a list, None is no text."""
    if values is None:
        return ()
    if isinstance(values, str):
        values = (values,)
    if isinstance(values, bytes) or not isinstance(values, Sequence):
        raise error(name, values, "a text or a list of texts")
    for index, text in enumerate(values):
        if not isinstance(text, str) or not text:
            raise error(f"{name}[{index}]", text, "a text that is not empty")
    return tuple(values)


def biases(name: str, values: object) -> dict[int, float]:
    """Token id → bias, −100 to 100; the keys may be texts of integers, as JSON has them."""
    if not isinstance(values, Mapping):
        raise error(name, values, "a mapping from token ids to biases")
    read = {}
    for key, value in values.items():
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11:
            key = int(key)
        token_id = integer(f"a key of {name}", key, "a token id")
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise error(f"a key of {name}", token_id, f"from 0 to {MAX_TOKEN_ID}", MAX_TOKEN_ID)
        read[token_id] = real_in(f"{name}[{token_id}]", value, -100.0, 100.0)
    return read


def is_finite(value: float) -> bool:
    """Neither infinite nor NaN."""
    return math.isfinite(value)
