"""Message content of several parts, as OpenAI's API has it, for templates that read parts or only texts."""

import json
from collections.abc import Mapping, Sequence

from jinja2 import nodes

from noria.errors import RejectedError

_TEXT_TYPES = ("text", "input_text", "output_text")


def reads_parts(template: nodes.Template) -> bool:
    """Whether a template goes through the parts of a content itself.

    It does if a loop of its goes over what is called `content`, or over a variable that was set from it.
    """
    names = {"content"}
    for setting in template.find_all(nodes.Assign):
        if isinstance(setting.target, nodes.Name) and _is_content(setting.node, names):
            names.add(setting.target.name)
    return any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    match node:
        case nodes.Filter(node=nodes.Node() as inner):
            return _is_content(inner, names)
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
    return False


def with_text_content(message: Mapping[str, object], place: int, *, keeps_parts: bool) -> dict[str, object]:
    """A message whose content is text, or text parts if the template reads those.

    Args:
        message: as given; its content may be a text, a list of parts, or missing.
        place: which message it is.
        keeps_parts: whether parts stay parts; else they become one text, a line each.

    Raises:
        RejectedError: a part is not text, or the message says nothing at all.
    """
    content = message.get("content")
    # One that calls tools, or has what only its own template knows, may do without.
    if content is None and not {key for key in message if message[key] is not None} - {"role", "name"}:
        raise RejectedError(f"message {place} has no content; give it a text", value=dict(message))
    if content is None or isinstance(content, str):
        return dict(message)
    if isinstance(content, (bytes, Mapping)) or not isinstance(content, Sequence):
        raise RejectedError(
            f"the content of message {place} must be a text or a list of parts; got {type(content).__name__}",
            value=content,
        )
    texts = [_text_of(part, place, index) for index, part in enumerate(content)]
    if keeps_parts:
        return {**message, "content": [{"type": "text", "text": text} for text in texts]}
    return {**message, "content": "\n".join(texts)}


def with_read_arguments(message: Mapping[str, object]) -> Mapping[str, object]:
    """A message whose tool calls have objects for arguments, as templates read them; OpenAI's are texts."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return call  # the template gets what was said
    return {**call, "function": {**function, "arguments": read}}


def _text_of(part: object, place: int, index: int) -> str:
    if isinstance(part, str):
        return part
    where = f"part {index} of message {place}"
    if not isinstance(part, Mapping):
        raise RejectedError(f"{where} must be a text or a mapping; got {type(part).__name__}", value=part)
    kind = part.get("type", "text")
    if kind not in _TEXT_TYPES:
        raise RejectedError(f"{where} is of type {kind!r}; only text is read", value=kind)
    text = part.get("text")
    if not isinstance(text, str):
        raise RejectedError(f"{where} has no text", value=part)
    return text
