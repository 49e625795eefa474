"""`LLM` on a tiny model: shapes of prompts, answers, errors, Ctrl-C, and its end."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from noria import (
    LLM,
    ConfigError,
    EmptyPromptError,
    EngineDeadError,
    MaxTokensError,
    ModelError,
    NoriaError,
    PromptTooLongError,
    QueueFullError,
    RejectedError,
    RequestOutput,
    SamplingParams,
    SchedulingHints,
    TokenizerError,
    TokenOutOfRangeError,
    _core,
)
from noria.interrupts import HeldInterrupts
from noria.outputs import Events
from noria.progress import ProgressBar

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm(worded_directory: Path) -> Iterator[MakeLLM]:
    before = set(threading.enumerate())
    made: list[LLM] = []

    def make(directory: Path = worded_directory, **options: Any) -> LLM:
        values = {
            "dtype": "float64",
            "max_num_seqs": 4,
            "num_kv_blocks": 40,
            "max_num_batched_tokens": 64,
        } | options
        made.append(LLM(directory, **values))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
    made.clear()
    assert set(threading.enumerate()) <= before


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm()


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_nothing_is_left(llm: LLM) -> None:
    core = llm.engine.core
    core.check()
    assert (core.num_running, core.num_waiting, core.num_in_flight, core.num_held_blocks) == (0, 0, 0, 0)
    assert not llm.engine.has_work


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


# ---- errors


BAD = [
    ([], GREEDY, EmptyPromptError),
    ([5, 97], GREEDY, TokenOutOfRangeError),
    ([-1], GREEDY, TokenOutOfRangeError),
    ([2**33], GREEDY, TokenOutOfRangeError),
    ([2**80, 1], GREEDY, TokenOutOfRangeError),
    (np.array([2**63], dtype=np.uint64), GREEDY, TokenOutOfRangeError),
    ([5] * 100, GREEDY, PromptTooLongError),
    ({"prompt_token_ids": [5.5]}, GREEDY, RejectedError),
    ("lone \ud800 surrogate", GREEDY, RejectedError),
    ({"text": "w5"}, GREEDY, RejectedError),
]


@pytest.mark.parametrize(("prompt", "params", "error"), BAD)
def test_one_bad_prompt_is_named_and_none_is_run(
    make_llm: MakeLLM, prompt: Any, params: SamplingParams, error: type[RejectedError]
) -> None:
    llm = make_llm(max_model_len=100)
    with pytest.raises(error, match=r"^prompt 1: "):
        llm.generate([[5], prompt, [6]], [GREEDY, params, GREEDY])
    assert llm.stats().num_steps == 0
    assert_nothing_is_left(llm)
    outputs = llm.generate([[5], prompt, [6]], [GREEDY, params, GREEDY], on_error="return")
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error
    assert outputs[1].metrics is None
    assert ids([outputs[0], outputs[2]]) == ids(llm.generate([[5], [6]], GREEDY))


def test_numbers_of_arguments_must_agree(llm: LLM) -> None:
    with pytest.raises(RejectedError, match="2 sampling_params were given for 3 prompts"):
        llm.generate([[5], [6], [7]], [GREEDY, GREEDY])
    with pytest.raises(RejectedError, match="1 priorities were given for 2 prompts"):
        llm.generate([[5], [6]], GREEDY, priority=[1])
    with pytest.raises(ConfigError, match="on_error is 'ignore'"):
        llm.generate([[5]], GREEDY, on_error="ignore")  # type: ignore[arg-type]


def test_a_request_that_breaks_its_step_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(llm.generate([[5], [6]], GREEDY))
    network = llm.model.network
    forward = network.forward

    def breaks_on_96(ops: Any) -> Any:
        if (ops.inputs.input_ids == 96).any():
            raise ValueError("token 96 is poison")
        return forward(ops)

    monkeypatch.setattr(network, "forward", breaks_on_96)
    outputs = llm.generate([[5], [96, 4], [6]], GREEDY)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].error == "its step failed: ValueError: token 96 is poison"
    kept = [answer for answer in ids([outputs[0], outputs[2]]) if 96 not in answer]
    assert kept == [answer for answer in expected if 96 not in answer]
    assert_nothing_is_left(llm)


def test_a_model_without_a_tokenizer_takes_ids_alone(make_llm: MakeLLM, tiny_directory: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        make_llm(tiny_directory)
    llm = make_llm(tiny_directory, skip_tokenizer_init=True)
    assert llm.tokenizer is None
    with pytest.raises(RejectedError, match=r"prompt 0: it is a text, but the engine has no tokenizer"):
        llm.generate("w5")
    output = llm.generate([5], GREEDY)[0].outputs[0]
    assert (len(output.token_ids), output.text) == (8, "")


def test_a_model_that_is_none_is_one_sentence() -> None:
    with pytest.raises(ModelError, match=r"model 'org/name' is (neither|not) a path"):
        LLM("org/name")
    with pytest.raises(ConfigError, match="model is ''; give a model's folder"):
        LLM("")
    with pytest.raises(ConfigError, match="depth is 9"):
        LLM("org/name", depth=9)


# ---- while it runs


def test_events_tell_of_every_token_and_its_prompt(llm: LLM) -> None:
    seen: list[list[int]] = [[], [], []]
    finished: list[int] = []

    def watch(events: Events, prompts: npt.NDArray[np.int64]) -> None:
        for prompt, kind, value in zip(
            prompts.tolist(), events.kinds.tolist(), events.rows[:, 2].tolist(), strict=True
        ):
            if kind == _core.TOKEN:
                seen[prompt].append(value)
            elif kind == _core.FINISHED:
                finished.append(prompt)

    # The second is refused: the others keep their places.
    outputs = llm.generate([[5], [], [7]], GREEDY, on_events=watch, on_error="return")
    assert seen == ids(outputs)
    assert sorted(finished) == [0, 2]


def test_generate_is_not_called_from_within(llm: LLM) -> None:
    def again(events: Events, prompts: npt.NDArray[np.int64]) -> None:
        llm.generate([[5]])

    with pytest.raises(NoriaError, match="already running"):
        llm.generate([[5]], GREEDY, on_events=again)
    assert_nothing_is_left(llm)
    assert len(ids(llm.generate([[5]], GREEDY))[0]) == 8


@pytest.mark.parametrize("turn", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 3])
def test_ctrl_c_ends_all_requests_and_the_engine_goes_on(make_llm: MakeLLM, turn: int, depth: int) -> None:
    llm = make_llm(depth=depth)
    expected = ids(llm.generate([[5], [6]], GREEDY))
    num_turns = 0

    def interrupt(events: Events, prompts: npt.NDArray[np.int64]) -> None:
        nonlocal num_turns
        num_turns += 1
        if num_turns == turn:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[seed] for seed in range(5, 15)], GREEDY, on_events=interrupt)
    assert num_turns == turn
    assert_nothing_is_left(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ids(llm.generate([[5], [6]], GREEDY)) == expected


def test_ctrl_c_while_a_step_runs_waits_for_the_step(llm: LLM) -> None:
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        generate_for_ever(llm, params)
    timer.join()
    assert llm.engine.is_usable
    assert_nothing_is_left(llm)


def test_a_second_ctrl_c_does_not_wait_for_a_step_that_hangs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, held, ends = threading.Event(), threading.Event(), threading.Event()
    on_interrupt = HeldInterrupts._on_interrupt

    def noted(interrupts: HeldInterrupts, *args: Any) -> None:
        held.set()
        on_interrupt(interrupts, *args)

    def hang(ops: Any) -> Any:
        hangs.set()
        ends.wait(60)
        raise RuntimeError("it was hanging")

    def interrupt_twice() -> None:
        main = threading.main_thread().ident or 0
        hangs.wait(60)
        signal.pthread_kill(main, signal.SIGINT)
        held.wait(60)  # two at once would be one
        signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(HeldInterrupts, "_on_interrupt", noted)
    monkeypatch.setattr(llm.model.network, "forward", hang)
    thread = threading.Thread(target=interrupt_twice)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5]], GREEDY)
    thread.join()
    assert not ends.is_set()
    assert llm.engine.is_usable
    ends.set()
    monkeypatch.undo()
    assert len(ids(llm.generate([[5]], GREEDY))[0]) == 8
    assert_nothing_is_left(llm)


def generate_for_ever(llm: LLM, params: SamplingParams) -> None:
    while True:
        llm.generate([[5], [6]], params)


def test_what_a_watcher_raises_ends_all_requests(llm: LLM) -> None:
    def fail(events: Events, prompts: npt.NDArray[np.int64]) -> None:
        raise RuntimeError("watcher")

    with pytest.raises(RuntimeError, match="watcher"):
        llm.generate([[5], [6]], GREEDY, on_events=fail)
    assert_nothing_is_left(llm)


def test_a_call_from_a_second_thread_is_told_so(llm: LLM) -> None:
    refused: list[str] = []

    def call() -> None:
        try:
            llm.generate([[5]], GREEDY)
        except NoriaError as error:
            refused.append(str(error))

    def watch(events: Events, prompts: npt.NDArray[np.int64]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    llm.generate([[5]], SamplingParams(max_tokens=1), on_events=watch)
    assert set(refused) == {
        "generate is already running in another thread; one LLM answers one call at a time"
    }


def test_a_forked_child_is_told_to_make_its_own(llm: LLM) -> None:
    llm.generate([[5]], GREEDY)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate([[5]], GREEDY)
            os.write(write, b"it answered")
        except EngineDeadError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:  # noqa: PTH123  a descriptor
        told = pipe.read().decode()
    os.waitpid(child, 0)
    assert told.startswith(f"the engine takes no more work: it belongs to process {os.getpid()}")


def test_it_works_outside_the_main_thread(llm: LLM) -> None:
    expected = ids(llm.generate([[5], [6]], GREEDY))
    answers: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: answers.append(ids(llm.generate([[5], [6]], GREEDY))))
    thread.start()
    thread.join()
    assert answers == [expected]


# ---- its end


def test_a_closed_one_takes_no_work(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        llm.generate([[5]], GREEDY)
    llm.close()
    with pytest.raises(EngineDeadError, match="it was closed"):
        llm.generate([[5]], GREEDY)


def test_one_that_is_dropped_leaves_no_thread(worded_directory: Path) -> None:
    before = threading.active_count()
    llm = LLM(worded_directory, dtype="float64", num_kv_blocks=20)
    llm.generate([[5]], GREEDY)
    assert threading.active_count() == before + 1
    del llm
    gc.collect()
    assert threading.active_count() == before


def test_the_size_of_the_cache_is_printed(make_llm: MakeLLM, capfd: pytest.CaptureFixture[str]) -> None:
    make_llm()
    assert (
        "KV cache: 2 · 2 layers · 2 kv heads · 8 · 8 bytes · 640 tokens = 0.31 MiB" in capfd.readouterr().err
    )


# ---- progress


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


def test_max_tokens_below_one_is_refused_by_its_own_error() -> None:
    with pytest.raises(RejectedError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    assert issubclass(MaxTokensError, RejectedError)


@pytest.mark.parametrize("bad", ["a", 1.5, None, 2**31, True])
def test_a_bad_priority_is_refused_by_name_and_leaves_nothing_queued(llm: LLM, bad: object) -> None:
    with pytest.raises(RejectedError, match="prompt 1: its priority is"):
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=5), priority=[0, bad])  # type: ignore[list-item]
    assert not llm.engine.has_work
