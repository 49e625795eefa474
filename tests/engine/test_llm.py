"""`LLM` on a tiny model: shapes of prompts, answers, and what a terminal shows."""

import time

import numpy as np
import pytest
from llm_harness import GREEDY, MakeLLM, ids

from noria import (
    LLM,
    QueueFullError,
    RejectedError,
    SamplingParams,
    SchedulingHints,
)
from noria.progress import ProgressBar


def test_prompts_of_every_shape_are_the_same_prompt(llm: LLM) -> None:
    expected = ids(llm.generate([[5, 6, 7]], GREEDY))
    assert len(expected[0]) == 8
    for prompt in (
        "w5 w6 w7",
        ["w5 w6 w7"],
        [5, 6, 7],
        (5, 6, 7),
        np.array([5, 6, 7]),
        {"prompt": "w5 w6 w7"},
        {"prompt_token_ids": [5, 6, 7]},
        [{"prompt": "w5 w6 w7"}],
    ):
        assert ids(llm.generate(prompt, GREEDY)) == expected
    assert llm.generate([], GREEDY) == []


def test_an_answer_tells_what_vllm_users_look_for(llm: LLM) -> None:
    before = time.perf_counter()
    text_output, ids_output = llm.generate(["w5 w6 w7", {"prompt_token_ids": [8] * 20}], GREEDY)
    assert (text_output.prompt, text_output.prompt_token_ids) == ("w5 w6 w7", [5, 6, 7])
    assert (ids_output.prompt, ids_output.prompt_token_ids) == (None, [8] * 20)
    assert text_output.finished
    assert text_output.error is None
    assert text_output.request_id != ids_output.request_id
    answer = text_output.outputs[0]
    assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
    assert answer.text.split() == [f"w{token}" for token in answer.token_ids if token not in (1, 2)]
    metrics = text_output.metrics
    assert metrics is not None
    times = (
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    )
    assert list(times) == sorted(times)
    assert before <= times[0]
    assert times[3] <= time.perf_counter()
    assert (metrics.num_preemptions, metrics.num_cached_tokens) == (0, 0)
    again = llm.generate([[8] * 20], GREEDY)[0]
    assert again.metrics is not None
    assert again.metrics.num_cached_tokens == 16


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    assert [len(answer) for answer in ids(llm.generate([[5], [6], [7]], params))] == [1, 5, 3]


def test_a_stop_token_ends_an_answer_and_is_no_part_of_its_text(llm: LLM) -> None:
    free = ids(llm.generate([[5, 6, 7]], GREEDY))[0]
    stop = free[4]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    answer = llm.generate([[5, 6, 7]], params)[0].outputs[0]
    assert answer.token_ids == free[: free.index(stop) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert len(answer.text.split()) == len([token for token in answer.token_ids[:-1] if token not in (1, 2)])


def test_the_end_of_sequence_ends_an_answer_unless_it_is_ignored(llm: LLM) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, 6).tolist() for _ in range(120)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    endless = llm.generate(prompts, params)
    ended = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, skip_special_tokens=False))
    num_ended = 0
    for free, output in zip(ids(endless), ended, strict=True):
        answer = output.outputs[0]
        if 2 in free:
            num_ended += 1
            assert answer.token_ids == free[: free.index(2) + 1]
            assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
            assert "</s>" not in answer.text
        else:
            assert answer.token_ids == free
            assert answer.finish_reason == "length"
    assert num_ended > 0
    assert {output.outputs[0].text for output in endless} == {""}


def test_tokens_are_the_same_in_every_engine_of_one_seed(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    first, second = make_llm(seed=5), make_llm(seed=5, depth=3, max_num_seqs=1)
    answers = ids(first.generate([[5], [5], [5]], params))
    assert answers == ids(second.generate([[5], [5], [5]], params))
    assert answers != ids(make_llm(seed=6).generate([[5], [5], [5]], params))
    assert len({tuple(answer) for answer in answers}) == 3
    seeded = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=9)
    assert len({tuple(answer) for answer in ids(first.generate([[5], [5]], seeded))}) == 1


def test_lower_priorities_run_first(make_llm: MakeLLM) -> None:
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
    outputs = llm.generate([[5], [6], [7]], GREEDY, priority=[2, 0, 1])
    finished = [output.metrics.finished_time for output in outputs if output.metrics is not None]
    assert finished[1] < finished[2] < finished[0]


def test_hints_order_requests_and_change_no_token(make_llm: MakeLLM) -> None:
    prompts = [[5], [6], [7]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = ids(make_llm().generate(prompts, params))
    llm = make_llm(scheduling_policy="sjf", max_num_seqs=1)
    hints = [SchedulingHints(tenant="a", expected_tokens=num) for num in (19, 3, 7)]
    outputs = llm.generate(prompts, params, hints=hints)
    assert ids(outputs) == expected
    finished = [output.metrics.finished_time for output in outputs if output.metrics is not None]
    assert finished[1] < finished[2] < finished[0]
    with pytest.raises(RejectedError, match="2 hints were given for 3 prompts"):
        llm.generate(prompts, params, hints=hints[:2])
    with pytest.raises(RejectedError, match="expected_tokens is 0"):
        SchedulingHints(expected_tokens=0)


def test_more_than_may_wait_is_refused_by_number(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=1, max_queued_requests=2)
    with pytest.raises(QueueFullError, match="prompt 2: 2 requests wait already"):
        llm.generate([[5]] * 3, GREEDY)
    llm = make_llm(max_num_seqs=1, max_queued_tokens=10)
    with pytest.raises(QueueFullError, match="prompt 1: 12 tokens would wait with this prompt, but 10 may"):
        llm.generate([[5] * 6] * 2, GREEDY)


def test_a_small_cache_preempts_and_says_so(make_llm: MakeLLM) -> None:
    prompts = [[seed] * 30 for seed in range(5, 11)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = ids(make_llm(max_num_seqs=1).generate(prompts, params))
    llm = make_llm(num_kv_blocks=10, enable_prefix_caching=False, admission="optimistic")
    outputs = llm.generate(prompts, params)
    assert ids(outputs) == expected
    preempted = sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None)
    assert preempted == llm.stats().num_preemptions > 0


def test_max_tokens_none_fills_the_context(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=48)
    output = llm.generate([[5] * 10], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (38, "length")


def test_no_bar_is_drawn_where_there_is_no_terminal(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    llm.generate([[5]] * 20, GREEDY)
    assert capfd.readouterr().err == ""


def test_long_work_on_a_terminal_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("noria.progress._QUIET_S", 0.0)
    with ProgressBar(10, is_shown=True) as bar:
        bar.update(3, 300)
        assert bar._progress is not None
        bar._progress.refresh()
    shown = capsys.readouterr().err
    assert "3/10" in shown
    assert "tok/s" in shown
    with ProgressBar(10, is_shown=False) as bar:
        bar.update(3, 300)
    assert capsys.readouterr().err == ""


def test_the_size_of_the_cache_is_printed(make_llm: MakeLLM, capfd: pytest.CaptureFixture[str]) -> None:
    make_llm()
    assert (
        "KV cache: 2 · 2 layers · 2 kv heads · 8 · 8 bytes · 640 tokens = 0.31 MiB" in capfd.readouterr().err
    )
