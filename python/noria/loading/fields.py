"""Values of a JSON object, each checked as it is read."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from noria.errors import ModelError

_MAX_SHOWN = 60
_MAX_INTEGER = 2**40


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits, which Python does not write out
        text = "an integer of thousands of digits"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class JsonFields:
    """Values of a JSON object, each checked as it is read."""

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    @classmethod
    def of_file(cls, path: Path) -> "JsonFields":
        """Reads a file that must hold one JSON object."""
        try:
            values = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path}: a JSON object was expected, found a {type(values).__name__}")
        return cls(path, values)

    def changed(self, **values: object) -> "JsonFields":
        """The same object with other values; None takes one away."""
        return JsonFields(self.path, {**self.values, **values}, self._prefix)

    def with_defaults(self, defaults: Mapping[str, object]) -> "JsonFields":
        """The same object, with these values where it has none."""
        missing = {key: value for key, value in defaults.items() if not self.has(key)}
        return JsonFields(self.path, {**self.values, **missing}, self._prefix)

    def error(self, key: str, expected: str) -> ModelError:
        """That a key's value is not what it should be."""
        value = self.values.get(key)
        found = "no such key" if value is None else f"found {shown(value)}"
        return ModelError(f"{self.path}: {self._prefix + key!r} should be {expected}, {found}")

    def has(self, key: str) -> bool:
        """Whether the key is there, and not null."""
        return self.values.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = _MAX_INTEGER
    ) -> int:
        """A whole number from `least` to `most`."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"a whole number of at least {least}")
        if value > most:
            raise self.error(key, f"at most {most}")
        return value

    def number(self, key: str, default: float | None = None, *, least: float | None = None) -> float:
        """A finite number above 0, and not below `least`."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        expected = "a number above 0" if least is None else f"a number of at least {least:g}"
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(key, expected)
        if not (value > 0 if least is None else least <= value) or value == math.inf:
            raise self.error(key, expected)
        try:
            return float(value)
        except OverflowError:
            raise self.error(key, "a number that a double can hold") from None

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; none where the key is missing."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(key, "a token id or a list of them")
        return tuple(ids)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` finite numbers above 0."""
        value = self.values.get(key)
        expected = f"a list of {count} numbers above 0"
        if not isinstance(value, list) or len(value) != count:
            raise self.error(key, expected)
        found = JsonFields(self.path, {f"{key}[{at}]": item for at, item in enumerate(value)}, self._prefix)
        return tuple(found.number(name) for name in found.values)

    def names(self, key: str) -> list[str]:
        """A list of strings."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(key, "a list of names")
        return value

    def object(self, key: str) -> "JsonFields | None":
        """A nested object; None where the key is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return JsonFields(self.path, value, f"{self._prefix}{key}.")
