"""`LLM.generate` with stop strings, several answers, log probabilities and edits, on a model of words."""

import dataclasses
import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense_reference import dense_logits

from noria import LLM, RejectedError, SamplingParams, SamplingParamsError

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
WORDS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, skip_special_tokens=False)


def make(directory: Path, **options: Any) -> LLM:
    values = {"dtype": "float64", "max_num_seqs": 4, "num_kv_blocks": 60, "max_num_batched_tokens": 64}
    return LLM(directory, **(values | options))


@pytest.fixture(scope="module", params=[1, 3])
def llm(worded_directory: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with make(worded_directory, depth=request.param) as made:
        yield made


def test_a_stop_string_cuts_text_ids_and_usage(llm: LLM) -> None:
    free = llm.generate([[5, 6, 7]], WORDS)[0].outputs[0]
    words = free.text.split(" ")
    assert free.text.startswith(" ")
    # From the middle of one word into the next: no token is the string.
    at = 6
    stop = words[at][1:] + " " + words[at + 1][:2]
    start = free.text.index(stop)
    num_tokens = len(free.text[: start + len(stop)].strip().split(" "))
    before = llm.stats()
    for includes in (False, True):
        params = dataclasses.replace(WORDS, stop=stop, include_stop_str_in_output=includes)
        output = llm.generate([[5, 6, 7]], params)[0].outputs[0]
        assert output.text == free.text[: start + (len(stop) if includes else 0)]
        assert output.token_ids == free.token_ids[:num_tokens]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert (llm.stats() - before).num_output_tokens < 2 * 20
    core = llm.engine.core
    core.check()
    assert (core.num_running, core.num_held_blocks) == (0, 0)


def test_the_stop_string_that_ends_first_wins(llm: LLM) -> None:
    text = llm.generate([[5, 6, 7]], WORDS)[0].outputs[0].text
    early, late = text[9:12], text[20:25]
    params = dataclasses.replace(WORDS, stop=[late, "nowhere", early])
    output = llm.generate([[5, 6, 7]], params)[0].outputs[0]
    assert output.stop_reason == early
    assert output.text == text[: text.index(early)]


def test_a_stop_string_in_the_last_token_beats_the_length(llm: LLM) -> None:
    free = llm.generate([[5, 6, 7]], WORDS)[0].outputs[0]
    last = " " + free.text.split(" ")[-1]
    if free.text.count(last) > 1:
        last = free.text[-8:]
    output = llm.generate([[5, 6, 7]], dataclasses.replace(WORDS, stop=[last]))[0].outputs[0]
    assert (output.finish_reason, output.stop_reason, len(output.token_ids)) == ("stop", last, 20)
    assert output.text + last == free.text


def test_nothing_stops_before_the_least_length(llm: LLM) -> None:
    free = llm.generate([[5, 6, 7]], WORDS)[0].outputs[0]
    params = dataclasses.replace(WORDS, stop=["w"], min_tokens=7)
    output = llm.generate([[5, 6, 7]], params)[0].outputs[0]
    assert len(output.token_ids) == 8
    assert free.text.startswith(output.text)
    banned = SamplingParams(
        temperature=0, max_tokens=20, min_tokens=7, ignore_eos=True, stop_token_ids=range(0, 97, 2)
    )
    output = llm.generate([[5, 6, 7]], banned)[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids) > 7) == ("stop", True)
    assert all(token % 2 for token in output.token_ids[:7])
    assert output.stop_reason == output.token_ids[-1]


def test_a_stop_token_is_kept_in_the_text_if_asked(llm: LLM) -> None:
    free = llm.generate([[5, 6, 7]], WORDS)[0].outputs[0]
    stop = free.token_ids[4]
    words = free.text.split()
    at = free.token_ids.index(stop)
    for includes in (False, True):
        params = dataclasses.replace(
            WORDS,
            stop_token_ids=[stop],
            stop=["nowhere"] if includes else None,
            include_stop_str_in_output=includes,
        )
        output = llm.generate([[5, 6, 7]], params)[0].outputs[0]
        assert output.text.split() == words[: at + includes]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_held_back_text_is_given_out_at_the_end(llm: LLM) -> None:
    free = llm.generate([[5, 6, 7]], WORDS)[0].outputs[0]
    output = llm.generate([[5, 6, 7]], dataclasses.replace(WORDS, stop=[free.text + "more"]))[0].outputs[0]
    assert (output.text, output.finish_reason) == (free.text, "length")


def test_several_answers_have_noise_of_their_own_and_the_first_is_the_one_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=6, ignore_eos=True, seed=3)
    alone = llm.generate([[5, 6, 7]], params)[0]
    several = llm.generate([[5, 6, 7], [8]], dataclasses.replace(params, n=5))
    assert [[answer.index for answer in output.outputs] for output in several] == [[0, 1, 2, 3, 4]] * 2
    answers = [tuple(answer.token_ids) for answer in several[0].outputs]
    assert answers[0] == tuple(alone.outputs[0].token_ids)
    assert len(set(answers)) == 5
    again = llm.generate([[5, 6, 7]], dataclasses.replace(params, n=3))[0]
    assert [tuple(answer.token_ids) for answer in again.outputs] == answers[:3]
    assert several[0].request_id != several[1].request_id
    seen: set[int] = set()
    llm.generate(
        [[5], [6]], dataclasses.replace(params, n=3), on_events=lambda _, at: seen.update(at.tolist())
    )
    assert seen == {0, 1}


def test_logprobs_have_vllms_shape(llm: LLM, tiny_directory: Path) -> None:
    params = dataclasses.replace(WORDS, logprobs=2, prompt_logprobs=1, stop=["w1"], max_tokens=12)
    prompt = list(range(40, 75))
    first = llm.generate([prompt], params)[0]
    # The second run could take the prompt from the prefix cache, but must not.
    output = llm.generate([prompt, prompt[:3]], params)[0]
    assert output.metrics is not None
    assert output.metrics.num_cached_tokens == 0
    assert output.prompt_logprobs == first.prompt_logprobs
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert output.prompt_logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    text = [*prompt, *answer.token_ids]
    rows = dense_logits(tiny_directory, text[:-1]).log_softmax(-1)
    for at, told in enumerate([*output.prompt_logprobs, *answer.logprobs]):
        if told is None:
            continue
        token, best = text[at], rows[at - 1].topk(2 if at >= len(prompt) else 1).indices.tolist()
        assert list(told) == list(dict.fromkeys([token, *best]))
        assert told[token].logprob == pytest.approx(float(rows[at - 1, token]), abs=1e-5)
        assert told[best[0]].rank == 1
        assert told[token].decoded_token == llm.tokenizer.decode([token], False, after_prompt=True)  # type: ignore[union-attr]
    assert answer.cumulative_logprob == pytest.approx(
        sum(told[token].logprob for told, token in zip(answer.logprobs, answer.token_ids, strict=True))
    )
    plain = llm.generate([prompt], WORDS)[0]
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (
        None,
    ) * 3


def test_edits_by_their_names(llm: LLM) -> None:
    free = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    only = llm.generate([[5, 6, 7]], dataclasses.replace(GREEDY, allowed_token_ids=[30, 31]))[0].outputs[0]
    assert set(only.token_ids) <= {30, 31}
    biased = llm.generate([[5, 6, 7]], dataclasses.replace(GREEDY, logit_bias={44: 100}))[0].outputs[0]
    assert set(biased.token_ids) == {44}
    banned = f"w{free[2]} w{free[3]}"
    output = llm.generate([[5, 6, 7]], dataclasses.replace(GREEDY, bad_words=[banned, f"w{free[0]}"]))[0]
    ids = output.outputs[0].token_ids
    assert free[0] not in ids
    assert all((a, b) != (free[2], free[3]) for a, b in itertools.pairwise(ids))
    penalised = dataclasses.replace(
        GREEDY, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1e6
    )
    ids = llm.generate([[5, 6, 7]], penalised)[0].outputs[0].token_ids
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"allowed_token_ids": [5, 97]}, "allowed_token_ids has the token id 97; the model has 97 tokens"),
        ({"logit_bias": {4000: 1.0}}, "logit_bias has the token id 4000; the model has 97 tokens"),
        ({"logprobs": 98}, "logprobs is 98; the model has 97 tokens"),
        ({"prompt_logprobs": 98}, "prompt_logprobs is 98; the model has 97 tokens"),
    ],
)
def test_what_the_model_does_not_have_is_refused(llm: LLM, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SamplingParamsError, match=f"^prompt 0: {text}"):
        llm.generate([[5]], dataclasses.replace(GREEDY, **changes))


def test_without_a_tokenizer_what_needs_one_is_refused(tiny_directory: Path) -> None:
    with make(tiny_directory, skip_tokenizer_init=True) as llm:
        for changes in ({"stop": ["a"]}, {"bad_words": ["a"]}):
            with pytest.raises(RejectedError, match=f"{next(iter(changes))} needs a tokenizer"):
                llm.generate([[5]], dataclasses.replace(GREEDY, **changes))  # type: ignore[arg-type]
        output = llm.generate([[5]], dataclasses.replace(GREEDY, logprobs=1))[0].outputs[0]
        assert output.logprobs is not None
        assert output.logprobs[0][output.token_ids[0]].decoded_token is None


def test_stops_and_penalties_survive_preemption(worded_directory: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, 30).tolist() for _ in range(12)]
    params = [
        SamplingParams(
            temperature=0.9,
            seed=index,
            max_tokens=60,
            ignore_eos=True,
            stop=["w96"],
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            logprobs=1,
        )
        for index in range(12)
    ]
    with make(worded_directory, max_num_seqs=1) as llm:
        expected = llm.generate(prompts, params)
    with make(worded_directory, num_kv_blocks=12, enable_prefix_caching=False, admission="optimistic") as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats().num_preemptions > 3
    for one, other in zip(expected, outputs, strict=True):
        mine, theirs = one.outputs[0], other.outputs[0]
        assert (mine.text, mine.token_ids, mine.stop_reason) == (
            theirs.text,
            theirs.token_ids,
            theirs.stop_reason,
        )
        assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop", "length"}


def test_a_conversation_is_answered_through_the_models_template(
    worded_directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(worded_directory, tmp_path, dirs_exist_ok=True)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if tools %}w9 {% endif %}{{ more }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 7, "eos_token_id": 2}')
    with make(tmp_path) as llm:
        assert llm.default_sampling_params == SamplingParams(temperature=0.0, top_k=7)
        one = [
            {"role": "user", "content": "w5"},
            {"role": "user", "content": [{"type": "text", "text": "w6"}]},
        ]
        (output,) = llm.chat(one, tools=[{}], chat_template_kwargs={"more": "w8"})
        assert (output.prompt, output.prompt_token_ids) == ("w5 w6 w9 w8", [5, 6, 9, 8])
        assert output.outputs == llm.generate([[5, 6, 9, 8]])[0].outputs
        several = llm.chat([one, one[:1]], GREEDY)
        assert [output.prompt_token_ids for output in several] == [[5, 6], [5]]
        with pytest.raises(
            RejectedError, match="prompt 1: part 0 of message 0 is of type 'image'; only text"
        ):
            llm.chat([one, [{"role": "user", "content": [{"type": "image"}]}]])
        for bad in ("w5", [5], {"role": "user"}):
            with pytest.raises(RejectedError, match="must be a list of messages"):
                llm.chat(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), ValueError("no")])
def test_a_processor_that_raises_ends_its_own_answer_and_tells_why(llm: LLM, error: BaseException) -> None:
    def fails(_ids: list[int], _row: Any) -> Any:
        raise error

    free = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    broken = dataclasses.replace(free, logits_processors=[fails])
    outputs = llm.generate([[5], [6], [7]], [free, broken, free])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    said = f": {error}" if str(error) else ""
    assert outputs[1].error == f"its logits processor failed: {type(error).__name__}{said}"
    assert [outputs[0].error, outputs[2].error] == [None, None]


@pytest.mark.parametrize(
    ("gives", "told"),
    [
        (lambda row: row[:3], r"failed: it gave \[3\] logits where it must give \[97\] logits"),
        (lambda row: None, r"failed: it gave NoneType where it must give \[97\] logits"),
        (lambda row: row * float("nan"), "its logits are not finite"),
    ],
)
def test_a_processor_that_gives_no_logits_is_told_what_it_gave(
    llm: LLM, gives: Callable[[Any], Any], told: str
) -> None:
    params = SamplingParams(max_tokens=5, logits_processors=[lambda ids, row: gives(row)])
    (output,) = llm.generate([[5]], params)
    assert output.error is not None
    assert re.search(told, output.error)


def test_an_interrupt_in_a_processor_reaches_the_caller_and_leaves_the_engine_whole(llm: LLM) -> None:
    def interrupts(ids: list[int], row: Any) -> Any:
        if len(ids) == 2:
            raise KeyboardInterrupt
        return row

    free = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    expected = llm.generate([[5]], free)[0].outputs[0].token_ids
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], [free, dataclasses.replace(free, logits_processors=[interrupts])])
    assert llm.generate([[5]], free)[0].outputs[0].token_ids == expected
