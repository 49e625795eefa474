"""Chat templates: Jinja programs that come with a model and turn messages into a prompt.

A template is foreign code. It runs in Jinja's immutable sandbox, and on a budget of loop passes and calls, so
that one which would not end is an error and not a hang. Memory is bounded only where that is cheap: products.

What templates may use is what transformers gives them: loop controls, `raise_exception`, `strftime_now`, a
`tojson` that does not escape for HTML, and `{% generation %}` blocks, whose content is simply rendered.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from noria.errors import RejectedError, TokenizerError
from noria.text.content import reads_parts, with_read_arguments, with_text_content

Message = Mapping[str, object]
"""One turn: `role`, `content`, and what else the template reads."""

_MAX_PASSES = 2_000_000
"""Loop passes of one rendering: seconds of them. A chat of a hundred turns needs some thousands."""

_PASSES_A_CALL = 10
"""A call takes the time of so many loop passes."""

_MAX_REPEATED = 1_000_000
"""Most characters or items that a template may make by multiplication."""


_BUDGET = "budget of passes"
"""Where a rendering finds its budget: no template can name a variable with spaces."""


class _Budget:
    """Counts what a rendering does, and ends it."""

    __slots__ = ("_left",)

    def __init__(self, num_passes: int) -> None:
        self._left = num_passes

    def spend(self, num_passes: int) -> None:
        self._left -= num_passes
        if self._left < 0:
            raise jinja2.TemplateRuntimeError(f"it takes more than {_MAX_PASSES} loop passes and calls")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, counting."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        return tree

    def call(
        __self,  # noqa: N805 — a template's keyword arguments may have any name but these
        __context: Context,
        __obj: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        __context.parent[_BUDGET].spend(_PASSES_A_CALL)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "**":
            if isinstance(right, int) and abs(right) > 64:
                raise jinja2.TemplateRuntimeError(f"it raises a number to the power {right}; 64 is the limit")
        else:
            for sized, times in ((left, right), (right, left)):
                if not isinstance(sized, (str, list, tuple)) or not isinstance(times, int):
                    continue
                if len(sized) * times > _MAX_REPEATED:
                    raise jinja2.TemplateRuntimeError(
                        f"it makes {len(sized)} × {times} items; {_MAX_REPEATED} are the limit"
                    )
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Namespace(jinja2.utils.Namespace):
    """Takes no name that begins with an underscore: those lead to the interpreter's insides."""

    def __init__(*args: object, **kwargs: object) -> None:
        self, *rest = args
        assert isinstance(self, _Namespace)
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"it stores the name {name!r}, which begins with '_'")
        super().__setitem__(name, value)


@jinja2.pass_context
def _counted(context: Context, items: Iterable[object]) -> Iterator[object]:
    spend = context.parent[_BUDGET].spend
    for item in items:
        spend(1)
        yield item


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["counted"] = _counted
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


_ENVIRONMENT = _environment()


def _sentence(error: Exception) -> str:
    """An exception's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja program.
        special_tokens: texts of `bos_token`, `eos_token`, … as the template may name them.

    Raises:
        TokenizerError: the program is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _ENVIRONMENT.from_string(source)
            self._keeps_parts = reads_parts(_ENVIRONMENT.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template is not valid: {_sentence(error)} (line {error.lineno})"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for a chat.

        Args:
            messages: the turns so far, oldest first. A content of several text parts becomes one text, a line
                each, where the template does not go through them itself.
            add_generation_prompt: ends with what opens the assistant's next turn.
            tools: JSON schemas of tools, if the template knows tools.
            variables: what else the template reads, by name.

        Raises:
            RejectedError: the messages are not what the template takes.
        """
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RejectedError(
                    f"message {index} must be a mapping with a 'role'; got {message!r}", value=message
                )
        given = {
            **self._special_tokens,
            **(variables or {}),
            "messages": [
                with_text_content(with_read_arguments(message), place, keeps_parts=self._keeps_parts)
                for place, message in enumerate(messages)
            ],
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            _BUDGET: _Budget(_MAX_PASSES),
        }
        try:
            return self._template.render(given)
        except RecursionError:
            raise RejectedError("the chat template calls itself too deeply", value=messages) from None
        except Exception as error:
            # Anything may come out of foreign code: a template that adds a string to None raises TypeError.
            raise RejectedError(
                f"the chat template refuses these messages: {_sentence(error)}", value=messages
            ) from error
