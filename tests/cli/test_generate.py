"""`noria generate`, `noria demo` and `noria env` on a tiny random model."""

import json

import pytest

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
