"""`noria generate`, `noria demo` and `noria env` on a tiny random model."""

import io
import json
import re
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from noria import LLM, SamplingParams
from noria.cli.seats import one_line


@pytest.fixture(scope="module")
def llm(tiny_llama):
    with LLM(tiny_llama) as llm:
        yield llm


def answer(llm, prompt, **params):
    (output,) = llm.generate([prompt], SamplingParams(**({"temperature": 0.0, "max_tokens": 24} | params)))
    return output.outputs[0]


def test_one_prompt_is_streamed_as_the_library_answers_it(noria, llm, tiny_llama):
    finished = noria("generate", tiny_llama, "the wheel", "--max-tokens", "24")
    assert finished.code == 0, finished.err
    expected = answer(llm, "the wheel")
    assert finished.out == expected.text + "\n"
    assert f"{len(expected.token_ids)} output tokens" in finished.err
    assert f"finish reason: {expected.finish_reason}" in finished.err


def test_token_ids_are_a_prompt_too(noria, llm, tiny_llama):
    finished = noria("generate", tiny_llama, "--prompt-token-ids", "5,6,7", "--max-tokens", "24")
    assert finished.out == answer(llm, [5, 6, 7]).text + "\n"


def test_a_seed_makes_sampling_repeatable(noria, llm, tiny_llama):
    argv = ("generate", tiny_llama, "water", "--temperature", "1.5", "--seed", "3", "--max-tokens", "24")
    expected = answer(llm, "water", temperature=1.5, seed=3)
    assert noria(*argv).out == noria(*argv).out == expected.text + "\n"


def test_the_token_that_stops_an_answer_is_no_part_of_its_text(noria, llm, tiny_llama):
    stop_id = answer(llm, "the wheel", ignore_eos=True).token_ids[5]
    expected = answer(llm, "the wheel", ignore_eos=True, stop_token_ids=[stop_id])
    assert expected.finish_reason == "stop"
    finished = noria(
        *("generate", tiny_llama, "the wheel", "--max-tokens", "24", "--ignore-eos"),
        *("--stop-token-ids", str(stop_id)),
    )
    assert finished.out == expected.text + "\n"


def test_several_prompts_are_answered_in_their_order(noria, llm, tiny_llama):
    finished = noria(
        *("generate", tiny_llama, "the wheel", "water falls", "--max-tokens", "8"),
        *("--prompt-token-ids", "5,6,7"),
    )
    assert finished.code == 0, finished.err
    places = [
        finished.out.index(head) for head in ("[1/3] the wheel", "[2/3] water falls", "[3/3] token ids 5,6,7")
    ]
    assert places == sorted(places)
    assert finished.out.count("(8 tokens, length)") + finished.out.count(" tokens, stop)") == 3


def test_chat_puts_the_prompt_through_the_template(noria, llm, tiny_llama):
    finished = noria("generate", tiny_llama, "--chat", "--system", "be kind", "hello", "--max-tokens", "24")
    text = "<s>system: be kind</s><s>user: hello</s><s>assistant: "
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    assert finished.out == answer(llm, ids).text + "\n"


@pytest.fixture(scope="module")
def demo_flags(tiny_llama):
    return ("demo", "--model", tiny_llama, "--num-prompts", "10", "--max-num-seqs", "3")


def test_the_demo_answers_on_seats_and_compares_the_three_batchings(noria, demo_flags):
    finished = noria(*demo_flags)
    assert finished.code == 0, finished.err
    for number in range(10):
        assert f"#{number:02d} seat " in finished.out
    assert "seats 0:" in finished.out
    for word in ("continuous", "gang", "padded", "decode steps", "ghost rows", "E[longest of 3]"):
        assert word in finished.out


def test_the_demo_can_stop_before_the_comparison(noria, demo_flags):
    finished = noria(*demo_flags, "--no-compare")
    assert finished.code == 0, finished.err
    assert "padded" not in finished.out


def test_what_a_terminal_would_obey_is_not_shown_on_the_seats():
    assert one_line("a\n b\x1b[2J\x07c") == "a b·[2J·c"


def test_env_says_what_auto_means_and_why(noria, tmp_path):
    path = tmp_path / "env.json"
    finished = noria("env", "--output-json", path)
    assert finished.code == 0, finished.err
    facts = json.loads(path.read_text())
    for name in (
        "noria",
        "cpu",
        "instruction sets",
        "cores usable",
        "memory",
        "torch",
        "gpu",
        "dtype 'auto'",
    ):
        assert facts[name]
        assert name in finished.out
    assert facts["dtype 'auto'"].startswith(("float32", "bfloat16"))


def test_a_stop_string_ends_the_stream_as_it_ends_the_answer(noria, llm, tiny_llama):
    whole = answer(llm, "the wheel", ignore_eos=True).text
    stop = whole[5:8]
    expected = answer(llm, "the wheel", ignore_eos=True, stop=[stop])
    assert expected.finish_reason == "stop"
    finished = noria(
        "generate",
        tiny_llama,
        "the wheel",
        "--max-tokens",
        "24",
        "--ignore-eos",
        "--stop",
        stop,
        "--stop",
        "#",
    )
    assert finished.out == expected.text + "\n"


def test_penalties_and_biases_are_those_of_the_library(noria, llm, tiny_llama):
    first = answer(llm, "the wheel").token_ids[0]
    asked = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 20}
    expected = answer(llm, "the wheel", logit_bias={first: -100.0, 7: 2.5}, **asked)
    flags = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    finished = noria(
        *("generate", tiny_llama, "the wheel", "--max-tokens", "24", *flags),
        *("--logit-bias", f"{first}:-100,7:2.5"),
    )
    assert finished.out == expected.text + "\n"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--logit-bias", "a:1"), "--logit-bias: 'a:1' is not ID:BIAS, such as 13:-100"),
        (("--logit-bias", "5"), "--logit-bias: '5' is not ID:BIAS"),
        (("--logit-bias", "5:1,5:2"), "--logit-bias: token id 5 comes twice"),
        (("--repetition-penalty", "0"), "repetition_penalty"),
        (("--stop", ""), "stop"),
    ],
)
def test_a_bad_sampling_flag_is_one_sentence(noria, tiny_llama, flags, text):
    assert text in noria("generate", tiny_llama, "the wheel", *flags).complaint


def test_standard_input_is_a_prompt(noria, llm, tiny_llama, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the wheel\nturns\n"))
    finished = noria("generate", tiny_llama, "-", "--max-tokens", "24")
    assert finished.out == answer(llm, "the wheel\nturns").text + "\n"


def test_lines_of_json_go_in_and_out(noria, llm, tiny_llama, monkeypatch):
    lines = ['"the wheel"', "", "[5, 6, 7]", '{"prompt": "water\\nfalls"}', "[1000000]"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    finished = noria("generate", tiny_llama, "turns", "-", "--json-lines", "--max-tokens", "24")
    assert finished.code == 1, "the last prompt is none"
    assert "noria: prompt 5 (token ids 1000000): " in finished.err
    told = [json.loads(line) for line in finished.out.splitlines()]
    prompts = ["turns", "the wheel", [5, 6, 7], "water\nfalls"]
    assert [one["prompt"] for one in told] == [*prompts, [1000000]]
    for one, prompt in zip(told, prompts, strict=False):
        expected = answer(llm, prompt)
        assert one["text"] == expected.text
        assert (one["num_output_tokens"], one["error"]) == (len(expected.token_ids), None)
    assert told[-1]["finish_reason"] == "error"
    assert "1000000" in told[-1]["error"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("flags", [(), ("--json-lines",)])
def test_what_is_no_text_is_no_standard_input(noria, tiny_llama, monkeypatch, errors, flags):
    stdin = io.TextIOWrapper(io.BytesIO(b"the \xff\xfe wheel"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    complaint = noria("generate", tiny_llama, "-", *flags).complaint
    assert complaint == "noria: standard input is not UTF-8 text"


def test_a_stop_token_outside_the_vocabulary_is_refused(noria, tiny_llama):
    finished = noria("generate", tiny_llama, "the wheel", "--stop-token-ids", "999999")
    assert finished.code == 2
    assert "stop_token_ids has the token id 999999" in finished.err


@pytest.mark.parametrize(
    ("line", "text"),
    [("{torn", "line 1 of standard input is not valid JSON"), ("5", "must be a text, a list")],
)
def test_a_bad_line_of_json_is_one_sentence(noria, tiny_llama, monkeypatch, line, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(line))
    assert text in noria("generate", tiny_llama, "-", "--json-lines").complaint


@pytest.mark.parametrize("word", ["--typo", "--typo=4", "-x"])
def test_an_unknown_flag_is_no_prompt(noria, tiny_llama, word):
    assert f"Unknown option: {word}" in noria("generate", tiny_llama, "the wheel", word).complaint


def test_several_answers_and_their_log_probabilities_are_shown(noria, llm, tiny_llama):
    (output,) = llm.generate(
        ["the wheel"], SamplingParams(temperature=1.0, seed=3, n=2, logprobs=1, max_tokens=4)
    )
    argv = ("generate", tiny_llama, "the wheel", "--n", "2", "--logprobs", "1", "--temperature", "1")
    shown = noria(*argv, "--seed", "3", "--max-tokens", "4").out
    for index, completion in enumerate(output.outputs):
        assert f"[1/1] the wheel ({index + 1} of 2)\n{completion.text.strip()}" in shown
        for entry in completion.logprobs:
            chosen, *_ = entry.values()
            assert f"{chosen.logprob:9.3f}  {json.dumps(chosen.decoded_token, ensure_ascii=False)}" in shown
    lines = noria(*argv, "--seed", "3", "--max-tokens", "4", "--json-lines").out.splitlines()
    for line, completion in zip(map(json.loads, lines), output.outputs, strict=True):
        assert (line["index"], line["text"]) == (completion.index, completion.text)
        told = [entry[0]["token_id"] for entry in line["logprobs"]]
        assert told == completion.token_ids


def test_an_answer_obeys_the_rule_that_a_flag_gives(noria, tiny_llama, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["ab", 7]}')
    grammar.write_text('start: "(" ")"')
    flags = {
        ("--json-schema", schema): ('"ab"\n', "7\n"),
        ("--grammar", grammar): ("()\n",),
        ("--regex", "-?[ab]{3}c"): None,
        ("--choice", "yes", "--choice", "no"): ("yes\n", "no\n"),
    }
    for given, texts in flags.items():
        out = noria("generate", tiny_llama, "the wheel", *given).out
        assert re.fullmatch("-?[ab]{3}c\n", out) if texts is None else out in texts


def test_a_bad_rule_is_one_sentence(noria, tiny_llama, tmp_path):
    assert "--grammar: " in noria("generate", tiny_llama, "a", "--grammar", tmp_path / "none").complaint
    both = noria("generate", tiny_llama, "a", "--regex", "a", "--json-object").complaint
    assert "exactly one of json, regex" in both
    (tmp_path / "schema.json").write_text("{torn")
    torn = noria("generate", tiny_llama, "a", "--json-schema", tmp_path / "schema.json").complaint
    assert "not valid JSON" in torn


def test_a_misspelt_option_is_told_the_nearest_of_all_options(noria, tiny_llama):
    for word, meant in (("--json-shema", "--json-schema"), ("--systm", "--system"), ("--top-pp", "--top-p")):
        complaint = noria("generate", tiny_llama, "the wheel", word).complaint
        assert complaint.endswith(f"Unknown option: {word}. Did you mean {meant}?")


def test_all_answers_to_one_prompt_run_at_once(noria, tiny_llama):
    flags = ("--n", "3", "--temperature", "1", "--max-model-len", "64", "--max-tokens", "2")
    assert " 192 tokens = " in noria("generate", tiny_llama, "the wheel", *flags).err
    assert " 128 tokens = " in noria("generate", tiny_llama, "the wheel", *flags, "--max-num-seqs", "2").err


@pytest.mark.parametrize("value", ["0", "-5"])
def test_no_seat_is_refused(noria, tiny_llama, value):
    complaint = noria("generate", tiny_llama, "the wheel", "--max-num-seqs", value).complaint
    assert f"max_num_seqs is {value}; it must be" in complaint


@pytest.fixture(scope="module")
def broken_llama(tiny_llama, tmp_path_factory):
    """The same, whose logits are not finite."""
    folder = tmp_path_factory.mktemp("broken") / "llama"
    shutil.copytree(tiny_llama, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("prompts", [("the wheel",), ("the wheel", "water")])
@pytest.mark.parametrize("flags", [(), ("--json-lines",)])
def test_an_answer_that_fails_is_told_with_its_cause_and_exits_with_1(noria, broken_llama, prompts, flags):
    finished = noria("generate", broken_llama, *prompts, *flags)
    assert finished.code == 1
    for number, prompt in enumerate(prompts, start=1):
        assert f"noria: prompt {number} ({prompt}): no token could be sampled" in finished.err
    if flags:
        assert all("no token" in json.loads(line)["error"] for line in finished.out.splitlines())


def test_a_plain_answer_imports_nothing_that_it_does_not_need(tiny_llama):
    program = "import sys; from noria.cli import main; main(sys.argv[1:]); print(*sys.modules, sep=chr(10))"
    argv = ["generate", str(tiny_llama), "the wheel", "--max-tokens", "2"]
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines())
    assert {"torch", "noria.llm", "tokenizers"} <= modules
    needless = "transformers huggingface_hub fastapi pydantic llguidance jinja2 gguf requests scipy pandas"
    assert modules & set(needless.split()) == set()
