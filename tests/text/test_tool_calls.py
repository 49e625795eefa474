"""Tool calls in what models write; the texts are those of the models' own cards and templates."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.text.tool_calls import (
    ToolAnswer,
    ToolCall,
    ToolCallFormat,
    ToolCallStream,
    split_tool_calls,
    tool_call_format,
)

PARIS = ToolCall("get_weather", '{"city": "Paris"}')
ROME = ToolCall("get_weather", '{"city": "Rome", "days": 3}')
WRITTEN_PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
WRITTEN_ROME = '{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}'
LLAMA_PARIS = '{"name": "get_weather", "parameters": {"city": "Paris"}}'

CASES: list[tuple[ToolCallFormat, str, str, list[ToolCall]]] = [
    ("hermes", f"<tool_call>\n{WRITTEN_PARIS}\n</tool_call>", "", [PARIS]),
    (
        "hermes",
        f"I look.\n<tool_call>\n{WRITTEN_PARIS}\n</tool_call>\n<tool_call>\n{WRITTEN_ROME}\n</tool_call>",
        "I look.\n\n",
        [PARIS, ROME],
    ),
    ("hermes", f"<tool_call>{WRITTEN_PARIS}", "", [PARIS]),  # its end was forgotten
    ("hermes", "a <tool_call>{torn</tool_call> b", "a <tool_call>{torn</tool_call> b", []),
    ("hermes", 'a < b <tool_call>{"name": ', 'a < b <tool_call>{"name": ', []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", "no call <tool", "no call <tool", []),
    ("mistral", f"[TOOL_CALLS] [{WRITTEN_PARIS}, {WRITTEN_ROME}]", "", [PARIS, ROME]),
    ("mistral", f"So: [TOOL_CALLS][{WRITTEN_PARIS}]", "So: ", [PARIS]),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', "", [PARIS]),
    (
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
        '[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{"city": "Rome", "days": 3}',
        "",
        [PARIS, ROME],
    ),
    ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ("mistral", "a [list] of [TOOL", "a [list] of [TOOL", []),
    ("llama3", LLAMA_PARIS, "", [PARIS]),
    ("llama3", f"\n<|python_tag|>{LLAMA_PARIS}; {WRITTEN_ROME}", "", [PARIS, ROME]),
    ("llama3", '{"city": "Paris"}', '{"city": "Paris"}', []),
    ("llama3", f"It is {LLAMA_PARIS}", f"It is {LLAMA_PARIS}", []),
    ("llama3", " <|python", " <|python", []),
    ("llama3", '{"name": "f", "parameters": "{\\"a\\": 1}"}', "", [ToolCall("f", '{"a": 1}')]),
    ("llama3", "{" * 5000, "{" * 5000, []),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_calls_are_told_from_text(
    kind: ToolCallFormat, text: str, content: str, calls: list[ToolCall]
) -> None:
    assert split_tool_calls(text, kind) == ToolAnswer(content, tuple(calls))
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from(CASES[:-1]), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_where_a_stream_is_cut_changes_nothing(
    case: tuple[ToolCallFormat, str, str, list[ToolCall]], cuts: list[int]
) -> None:
    kind, text, content, calls = case
    stream = ToolCallStream(kind)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [stream.push(text[start:end]) for start, end in itertools.pairwise(places)]
    parts.append(stream.end())
    assert "".join(part.content for part in parts) == content
    assert [call for part in parts for call in part.calls] == calls


def test_text_is_given_out_at_once_and_a_call_when_it_is_whole() -> None:
    stream = ToolCallStream("hermes")
    assert stream.push("I look <").content == "I look "
    assert stream.push("b> it <tool_").content == "<b> it "
    assert stream.push(f"call>{WRITTEN_PARIS}</tool_call") == ToolAnswer("", ())
    assert stream.push("> and") == ToolAnswer(" and", (PARIS,))
    assert ToolCallStream("llama3").push("It").content == "It"


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("For each call return <tool_call></tool_call> tags {{ messages }}", "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{- '<|python_tag|>' + x }}", "llama3"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_a_template_says_how_calls_are_written(template: str | None, kind: str | None) -> None:
    assert tool_call_format(template) == kind
