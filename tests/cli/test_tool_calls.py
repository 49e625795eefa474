"""Tool calls by `LLM.chat`, `AsyncEngine.chat` and `noria batch`; a grammar makes the model write them."""

import asyncio
import json
import re
import shutil

import pytest

from noria import LLM, AsyncEngine, EngineConfig, SamplingParams, StructuredOutputsParams

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments.a }}{% endfor %}</s>{% endfor %}{{ tools }}<s>assistant: "
)
CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": [0-9]\}\}</tool_call>'
RULE = SamplingParams(
    temperature=1,
    seed=3,
    n=2,
    max_tokens=200,
    structured_outputs=StructuredOutputsParams(regex=f"So: {CALL}{CALL}"),
)


@pytest.fixture(scope="module")
def with_template(tiny_llama, tmp_path_factory):
    """The tiny model, with a chat template that tells of calls by a sign."""

    def make(sign):
        folder = tmp_path_factory.mktemp("tools") / "model"
        shutil.copytree(tiny_llama, folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = sign + TEMPLATE
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture(scope="module")
def hermes(with_template):
    return with_template("<tool_call>")


def test_chat_reads_calls_where_tools_are_offered(hermes):
    with LLM(hermes) as llm:
        (output,) = llm.chat(MESSAGES, RULE, tools=TOOLS)
        (without,) = llm.chat(MESSAGES, RULE)
        history = [
            *MESSAGES,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 7}'}}],
            },
        ]
        (asked,) = llm.chat(history, SamplingParams(max_tokens=1), tools=TOOLS)
    for answer in output.outputs:
        assert re.fullmatch(f"So: {CALL}{CALL}", answer.text)
        assert answer.content == "So: "
        digits = re.findall(r'"a": ([0-9])', answer.text)
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [
            ("add", f'{{"a": {digit}}}') for digit in digits
        ]
    assert [(answer.tool_calls, answer.content) for answer in without.outputs] == [(None, None)] * 2
    assert "assistant: 7</s>" in asked.prompt  # arguments given as text are read for the template


def test_a_stream_gives_a_call_when_it_is_whole(hermes):
    async def main():
        async with AsyncEngine(EngineConfig(model=str(hermes))) as engine:
            params = {"sampling_params": RULE, "tools": TOOLS}
            last = await engine.chat(MESSAGES, **params).last()
            texts, contents, calls, early = ["", ""], ["", ""], [[], []], 0
            async for output in engine.chat(MESSAGES, **params, output_kind="delta"):
                for answer in output.outputs:
                    texts[answer.index] += answer.text
                    contents[answer.index] += answer.content
                    calls[answer.index] += answer.tool_calls
                    early += bool(answer.tool_calls) and answer.finish_reason is None
            grown = [output async for output in engine.chat(MESSAGES, **params)]
        assert early > 0
        assert texts == [answer.text for answer in last.outputs]
        assert contents == [answer.content for answer in last.outputs] == ["So: ", "So: "]
        assert calls == [answer.tool_calls for answer in last.outputs]
        assert grown[-1].outputs == last.outputs
        for output in grown:
            for answer, whole in zip(output.outputs, last.outputs, strict=False):
                assert whole.content.startswith(answer.content)
                assert whole.tool_calls[: len(answer.tool_calls)] == answer.tool_calls

    asyncio.run(main())


def test_a_batch_tells_calls_in_openai_s_shape(noria, with_template, tmp_path):
    schema = {"const": {"name": "add", "parameters": {"a": 1}}}
    body = {
        "messages": MESSAGES,
        "max_tokens": 100,
        "tools": TOOLS,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    line = {"method": "POST", "url": "/v1/chat/completions"}
    asked = {
        "calls": body,
        "none": body | {"tool_choice": "none"},
        "forced": body | {"tool_choice": "required"},
        "bad": body | {"tools": [{"type": "function"}]},
    }
    lines = [json.dumps(line | {"custom_id": name, "body": body}) for name, body in asked.items()]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    finished = noria("batch", with_template("<|python_tag|>"), tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert finished.code == 0, finished.err
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    bodies = {result["custom_id"]: result["response"]["body"] for result in results}
    (choice,) = bodies["calls"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a": 1}'})
    assert call["id"]
    (choice,) = bodies["none"]["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"]) == schema["const"]
    assert "tool_choice is 'required'; it must be auto or none" in bodies["forced"]["error"]["message"]
    assert "tools[0] must be" in bodies["bad"]["error"]["message"]
