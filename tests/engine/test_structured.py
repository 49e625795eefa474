"""Structured outputs on a tiny random model with a real vocabulary: the rules alone make sense of it."""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tiny_llama import llama_config, save_llama

from noria import LLM, RejectedError, SamplingParams, SamplingParamsError
from noria.sampling import StructuredOutputsParams
from noria.text.tokenizer import load_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    tokenizer = load_tokenizer(smollm2_path)
    directory = tmp_path_factory.mktemp("tokenized-llama")
    save_llama(directory, llama_config(vocab_size=49152, max_position_embeddings=2048))
    (directory / "tokenizer.json").write_text(tokenizer.to_json())
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with LLM(directory, dtype="float32", num_kv_blocks=2000, max_num_seqs=32) as made:
        yield made


@pytest.fixture(scope="module")
def closing(llm: LLM) -> dict[int, float]:
    """A bias to what ends strings, lists and objects: the model is random, and would babble in a string."""
    assert llm.tokenizer is not None
    texts = ('"', '",', '"}', "]", "}", "],", "},", '"]', "}}", '":', '"},')
    ids = [llm.tokenizer.token_id(text) for text in texts]
    return {token_id: 12.0 for token_id in ids if token_id is not None}


def params(rule: StructuredOutputsParams, **changes: Any) -> SamplingParams:
    values: dict[str, Any] = {"temperature": 1.0, "max_tokens": 300, "seed": 1}
    return SamplingParams(structured_outputs=rule, **(values | changes))


def test_an_answer_obeys_its_rule(llm: LLM, closing: dict[int, float]) -> None:
    rules = [
        StructuredOutputsParams(json=PERSON),
        StructuredOutputsParams(json=json.dumps(PERSON)),
        StructuredOutputsParams(regex=r"[a-f]{3}-\d{4}"),
        StructuredOutputsParams(choice=["no", "yes", "naïve 日本"]),
        StructuredOutputsParams(grammar='start: "(" start ")" | "x"'),
        StructuredOutputsParams(grammar='root ::= "x" digit+ "."\ndigit ::= [0-9]'),
    ]
    outputs = llm.generate(
        ["Say:"] * 24, [params(rules[i % 6], seed=i, logit_bias=closing) for i in range(24)]
    )
    for index, output in enumerate(outputs):
        answer, kind = output.outputs[0], index % 6
        assert output.error is None
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None), answer
        if kind < 2:
            jsonschema.validate(json.loads(answer.text), PERSON)
        elif kind == 2:
            assert re.fullmatch(r"[a-f]{3}-\d{4}", answer.text)
        elif kind == 3:
            assert answer.text in ("no", "yes", "naïve 日本")
        elif kind == 4:
            assert re.fullmatch(r"(\(*)x(\)*)", answer.text)
            assert answer.text.count("(") == answer.text.count(")")
        else:
            assert re.fullmatch(r"x\d+\.", answer.text)
    assert len({output.outputs[0].text for output in outputs}) > 8


def test_keys_by_their_patterns_are_obeyed(llm: LLM, closing: dict[int, float]) -> None:
    numbered: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
    schemas: list[dict[str, Any]] = [
        {"patternProperties": {"^[ab]{1,3}$": numbered}, "additionalProperties": False},
        {"patternProperties": {"^a": numbered, "^b": {"enum": ["x"]}}, "required": ["ab", "ba"]},
        {
            "properties": {"ab": {"type": "integer"}},
            "required": ["ab"],
            "patternProperties": {"^a": numbered},
        },
        {"patternProperties": {"^[^a]{0,3}$": {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
    ]
    rules = [StructuredOutputsParams(json={"type": "object", **schema}) for schema in schemas]
    outputs = llm.generate(
        ["Say:"] * 32, [params(rules[i % 4], seed=i, logit_bias=closing) for i in range(32)]
    )
    keys = set()
    for index, output in enumerate(outputs):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop", (output.error, answer.text)
        read = json.loads(answer.text)
        jsonschema.validate(read, {"type": "object", **schemas[index % 4]})
        keys |= {(index % 4, key[:1]) for key in read}
    assert {(0, "a"), (1, "a"), (1, "b"), (2, "a")} < keys


def test_a_rule_is_obeyed_among_others_and_by_itself_alike(llm: LLM, closing: dict[int, float]) -> None:
    asked = params(StructuredOutputsParams(json=PERSON), seed=5, logit_bias=closing)
    alone = llm.generate("Say:", asked)[0].outputs[0].token_ids
    free = [SamplingParams(seed=i, max_tokens=20 + i) for i in range(10)]
    among = llm.generate(["Say:"] * 11, [*free[:5], asked, *free[5:]])
    assert among[5].outputs[0].token_ids == alone
    assert [len(output.outputs[0].token_ids) for output in among[:5]] == [20, 21, 22, 23, 24]


def test_a_rule_the_length_cuts_says_so(llm: LLM) -> None:
    answer = llm.generate("a", params(StructuredOutputsParams(regex="[ab]{500}"), max_tokens=9))[0].outputs[0]
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 9)
    assert set(answer.text) <= {"a", "b"}


def test_several_answers_each_obey(llm: LLM) -> None:
    rule = StructuredOutputsParams(regex="[0-9]{6}")
    answers = llm.generate("a", params(rule, n=5, temperature=5.0))[0].outputs
    assert [answer.index for answer in answers] == [0, 1, 2, 3, 4]
    assert all(re.fullmatch("[0-9]{6}", answer.text) for answer in answers)
    assert len({answer.text for answer in answers}) == 5


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            {"json": {"type": "object", "patternProperties": {"a": {}, "b": {}}}},
            "json is refused: patternProperty .*not disjoint",
        ),
        (
            {"json": {"type": "object", "minProperties": 3}},
            "'minProperties' at its top, .* up to .*, 0; got 3",
        ),
        (
            {"json": {"properties": {"minProperties": {"minProperties": 2, "required": ["a"]}}}},
            "'minProperties' at /properties/minProperties, .* up to .*, 1; got 2",
        ),
        ({"json": {"type": "array", "uniqueItems": True}}, "keyword 'uniqueItems', which is not supported"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "keyword 'oneOf' with choices that"),
        ({"json": {"type": "string", "format": "xyz"}}, "json is refused: Unknown format: xyz"),
        ({"json": {"type": "objec"}}, "json is refused: Invalid type: objec"),
        ({"regex": "(a"}, "regex is refused: .*unclosed group"),
        ({"grammar": "start: foo"}, "grammar is refused: .*unknown name"),
        ({"grammar": "root ::= ("}, "grammar is refused: "),
    ],
)
def test_a_bad_rule_is_refused_at_submit_by_one_sentence(llm: LLM, rule: dict[str, Any], text: str) -> None:
    num_steps = llm.stats().num_steps
    with pytest.raises(RejectedError, match=f"^prompt 1: structured_outputs.*{text}") as raised:
        llm.generate(["a", "b"], [SamplingParams(), params(StructuredOutputsParams(**rule))])
    assert "\n" not in str(raised.value)
    assert llm.stats().num_steps == num_steps


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({}, "exactly one of json, .*; got none"),
        ({"json": {}, "regex": "a"}, "exactly one of .*; got json and regex"),
        ({"json": "{"}, "a JSON schema, and it is not valid JSON"),
        ({"json": 3}, "json must be a JSON schema; got 3"),
        ({"json": {"enum": {1, 2}}}, "a JSON schema, and it is no JSON"),
        ({"json": {"const": float("nan")}}, "a JSON schema, and it is no JSON"),
        ({"json": "[" * 100_000}, "json is nested too deeply"),
        ({"choice": []}, "choice must be a list of texts, at least one"),
        ({"choice": ["a", ""]}, r"choice\[1\] must be a text that is not empty"),
        ({"regex": ""}, "regex must be a text that is not empty"),
    ],
)
def test_what_is_no_rule_is_refused(rule: dict[str, Any], text: str) -> None:
    with pytest.raises(SamplingParamsError, match=text):
        StructuredOutputsParams(**rule)


def test_schemas_that_nobody_here_wrote_are_obeyed(llm: LLM, closing: dict[int, float]) -> None:
    """Those of the Hugging Face hub's inference API, as pydantic derives them from its dataclasses."""
    types = pytest.importorskip("huggingface_hub.inference._generated.types")
    pydantic = pytest.importorskip("pydantic")
    schemas = [
        pydantic.TypeAdapter(made).json_schema()
        for _, made in sorted(vars(types).items())
        if inspect.isclass(made) and dataclasses.is_dataclass(made)
    ]
    assert len(schemas) >= 100
    outputs = llm.generate(
        ["JSON:"] * len(schemas),
        [
            params(StructuredOutputsParams(json=schema), seed=index, logit_bias=closing, temperature=0.7)
            for index, schema in enumerate(schemas)
        ],
    )
    num_cut = 0
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "length":
            num_cut += 1
            continue
        assert answer.finish_reason == "stop", output.error
        jsonschema.validate(json.loads(answer.text), schema)
    assert num_cut <= len(schemas) * 0.05


def test_processors_edit_their_own_rows(llm: LLM) -> None:
    seen: list[list[int]] = []

    def counts_up(output_ids: list[int], logits: Any) -> Any:
        seen.append(list(output_ids))
        logits[:] = -float("inf")
        logits[100 + len(output_ids)] = 0.0
        return logits

    def fails(output_ids: list[int], logits: Any) -> Any:
        if len(output_ids) == 2:
            raise ValueError("no more")
        return logits

    free = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    outputs = llm.generate(
        ["a", "a", "a", "a"],
        [
            free,
            dataclasses.replace(free, logits_processors=[counts_up]),
            dataclasses.replace(free, logits_processors=[fails]),
            dataclasses.replace(free, logits_processors=[lambda ids, row: row[:5]]),
        ],
    )
    assert outputs[1].outputs[0].token_ids == [100, 101, 102, 103, 104, 105]
    assert seen == [list(range(100, 100 + num)) for num in range(6)]
    assert (outputs[2].outputs[0].finish_reason, len(outputs[2].outputs[0].token_ids)) == ("error", 2)
    assert outputs[2].error == "its logits processor failed: ValueError: no more"
    assert outputs[3].outputs[0].finish_reason == "error"
    assert outputs[3].error is not None
    assert outputs[3].error.endswith("it gave [5] logits where it must give [49152] logits")
    assert outputs[0].outputs[0].token_ids[:2] == outputs[2].outputs[0].token_ids
    both = SamplingParams(
        max_tokens=20,
        structured_outputs=StructuredOutputsParams(regex="[ab]{8}"),
        logits_processors=[lambda ids, row: row.index_fill(0, a_ids, -float("inf"))],
    )
    import torch

    assert llm.tokenizer is not None
    a_ids = torch.tensor([i for i in range(49152) if "a" in llm.tokenizer.decode([i])])
    assert llm.generate("x", both)[0].outputs[0].text == "bbbbbbbb"


def test_a_closed_engine_leaves_no_compiler_behind(llm: LLM) -> None:
    import threading

    assert [thread.name for thread in threading.enumerate()].count("noria-grammar_0") == 1
    assert llm.engine.core.num_parked == 0
