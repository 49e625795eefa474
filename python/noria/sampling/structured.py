"""What text an answer may have: a JSON schema, a regular expression, a choice or a grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from noria.errors import SamplingParamsError

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """One rule that the whole answer obeys, under vLLM's names; exactly one of the fields is given.

    Attributes:
        json: a JSON schema, as a mapping or as its text.
        regex: a regular expression, in the syntax of Rust's `regex` crate.
        choice: texts, of which the answer is one.
        grammar: a context-free grammar in Lark's syntax, or in llama.cpp's GBNF (rules written `root ::= …`).
        json_object: any JSON object.
        disable_any_whitespace: JSON has no space between its tokens; else one, or a line break and an indent.

    Raises:
        SamplingParamsError: none or several are given, or one is of the wrong type.
    """

    json: str | Mapping[str, object] | None = field(default=None, hash=False)
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise SamplingParamsError(
                f"structured_outputs must have exactly one of {', '.join(_KINDS)}; got {got}",
                value=given,
                limit=1,
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choice(self.choice))
        for kind in ("regex", "grammar"):
            value = getattr(self, kind)
            if value is not None and not (isinstance(value, str) and value):
                raise _error(kind, value, "a text that is not empty")
        if self.json_object not in (None, True, False):
            raise _error("json_object", self.json_object, "True or None")
        if not isinstance(self.disable_any_whitespace, bool):
            raise _error("disable_any_whitespace", self.disable_any_whitespace, "True or False")

    @property
    def kind(self) -> str:
        """Which of the fields is given."""
        return next(kind for kind in _KINDS if getattr(self, kind) not in (None, False))


def _schema(value: object) -> object:
    """A schema given as text becomes what it says."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _error("json", value, f"a JSON schema, and it is not valid JSON ({error})") from None
        except RecursionError:
            raise SamplingParamsError("structured_outputs.json is nested too deeply to be read") from None
    if not isinstance(value, (Mapping, bool)):
        raise _error("json", value, "a JSON schema")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _error("json", value, f"a JSON schema, and it is no JSON ({error})") from None
    except RecursionError:
        raise SamplingParamsError("structured_outputs.json is nested too deeply to be read") from None
    return value


def _choice(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
        raise _error("choice", value, "a list of texts, at least one")
    for index, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise _error(f"choice[{index}]", text, "a text that is not empty")
    return tuple(value)


def _error(name: str, value: object, expected: str) -> SamplingParamsError:
    return SamplingParamsError(f"structured_outputs.{name} must be {expected}; got {value!r}", value=value)
