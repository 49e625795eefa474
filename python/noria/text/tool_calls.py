"""Tool calls in a model's text: what a template told the model to write, read back.

Three formats cover the families that noria runs, and a model's chat template says which is its own:

- Hermes (also Qwen2.5, Qwen3): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or several;
- Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and later `[TOOL_CALLS]name{…}` (with `[ARGS]`
  and `[CALL_ID]…` between);
- Llama 3: the whole answer is `{"name": …, "parameters": {…}}`, or several with `;` between.

What is not such a call after all stays text: nothing that a model wrote is lost.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

ToolCallFormat = Literal["hermes", "mistral", "llama3"]

_SIGNS: Mapping[ToolCallFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>", '"parameters": dictionary of argument name'),
}
"""What a chat template has that tells the model to write its calls so."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL_NAME = re.compile(r"\s*(?P<name>[\w.-]+)\s*(\[CALL_ID\][\w-]*)?\s*(\[ARGS\])?\s*(?=\{)")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to have called.

    Attributes:
        name: of the function.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """An answer, or what came new of one.

    Attributes:
        content: its text without the calls.
        calls: in the order in which they were written.
    """

    content: str
    calls: tuple[ToolCall, ...]


def tool_call_format(chat_template: str | None) -> ToolCallFormat | None:
    """How a model with this template writes its calls; None if it is not known to write any."""
    template = chat_template or ""
    for kind in get_args(ToolCallFormat):
        if any(sign in template for sign in _SIGNS[kind]):
            found: ToolCallFormat = kind
            return found
    return None


def shows_special_tokens(kind: ToolCallFormat) -> bool:
    """Whether calls are marked by special tokens, so that a text without these would hide them."""
    return kind == "mistral"


def split_tool_calls(text: str, kind: ToolCallFormat) -> ToolAnswer:
    """A whole answer's calls, and the rest of its text."""
    stream = ToolCallStream(kind)
    first, last = stream.push(text), stream.end()
    return ToolAnswer(first.content + last.content, first.calls + last.calls)


class ToolCallStream:
    """An answer that grows: what `push` and the final `end` give, joined, does not hang on where it was cut.

    Text that may be the beginning of a call is held back, and nothing else is.

    Args:
        kind: how calls are written.
    """

    def __init__(self, kind: ToolCallFormat) -> None:
        self._kind = kind
        self._held = ""
        self._has_content = False

    def push(self, text: str) -> ToolAnswer:
        """Adds text; what became certain by it."""
        self._held += text
        if self._kind == "hermes":
            return self._take_hermes()
        if self._kind == "mistral":
            return self._given(self._released(_MISTRAL))
        return self._given(self._released_llama3())

    def end(self) -> ToolAnswer:
        """Ends the answer: what was held back."""
        held, self._held = self._held, ""
        if self._kind == "hermes":
            # A model that is stopped, or forgets the end, may still have written a whole call.
            calls = list(_hermes_call(held.removeprefix(_OPEN))) if held.startswith(_OPEN) else []
            return ToolAnswer("", tuple(calls)) if calls else self._given(held)
        marker = _MISTRAL if self._kind == "mistral" else _PYTHON_TAG
        read = _mistral_calls if self._kind == "mistral" else _llama3_calls
        if self._kind == "llama3" or held.startswith(marker):
            calls = read(held.lstrip().removeprefix(marker))
            if calls:
                return ToolAnswer("", tuple(calls))
        return self._given(held)

    def _given(self, content: str) -> ToolAnswer:
        self._has_content = self._has_content or bool(content)
        return ToolAnswer(content, ())

    def _released(self, marker: str) -> str:
        """Text before a marker, or before what may become one; the rest stays held."""
        at = self._held.find(marker)
        if at < 0:
            at = len(self._held) - _num_begun(self._held, marker)
        released, self._held = self._held[:at], self._held[at:]
        return released

    def _released_llama3(self) -> str:
        """A call is the whole answer: its first characters tell whether it may be one."""
        begun = self._held.lstrip()
        may_be = not self._has_content and (
            begun.startswith(("{", _PYTHON_TAG)) or _PYTHON_TAG.startswith(begun)
        )
        if may_be:
            return ""
        released, self._held = self._held, ""
        return released

    def _take_hermes(self) -> ToolAnswer:
        content, calls = "", []
        while True:
            content += self._released(_OPEN)
            if not self._held.startswith(_OPEN):
                break
            end = self._held.find(_CLOSE)
            if end < 0:
                break
            found = list(_hermes_call(self._held[len(_OPEN) : end]))
            if found:
                calls += found
            else:
                content += self._held[: end + len(_CLOSE)]
            self._held = self._held[end + len(_CLOSE) :]
        self._has_content = self._has_content or bool(content)
        return ToolAnswer(content, tuple(calls))


def _num_begun(text: str, marker: str) -> int:
    """How many of the last characters may be the beginning of a marker."""
    for num in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-num:]):
            return num
    return 0


def _hermes_call(text: str) -> Iterator[ToolCall]:
    values = _json_values(text)
    if values is not None and len(values) == 1:
        yield from _calls_of(values) or ()


def _mistral_calls(text: str) -> list[ToolCall]:
    values = _json_values(text)
    if values is not None and len(values) == 1 and isinstance(values[0], list):
        return _calls_of(values[0]) or []
    calls = []
    for part in text.split(_MISTRAL):
        match = _MISTRAL_NAME.match(part)
        arguments = None if match is None else _json_values(part[match.end() :])
        if match is None or arguments is None or len(arguments) != 1:
            return []
        calls.append(ToolCall(match["name"], json.dumps(arguments[0], ensure_ascii=False)))
    return calls


def _llama3_calls(text: str) -> list[ToolCall]:
    values = _json_values(text, separator=";")
    return [] if values is None else _calls_of(values) or []


def _json_values(text: str, separator: str = "") -> list[object] | None:
    """The JSON values that a text is, one after another; None if it is anything else."""
    values: list[object] = []
    rest = text.strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        rest = rest[end:].lstrip()
        if rest and separator:
            if not rest.startswith(separator):
                return None
            rest = rest[len(separator) :].lstrip()
    return values


def _calls_of(values: list[object]) -> list[ToolCall] | None:
    """A call each; None if one is none."""
    calls = []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # some models write the object as text
            read = _json_values(arguments)
            arguments = read[0] if read is not None and len(read) == 1 else None
        if not isinstance(arguments, dict):
            return None
        calls.append(ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls
