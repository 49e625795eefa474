"""`LLM` while it runs, and its end: events, Ctrl-C, threads, processes."""

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llm_harness import GREEDY, MakeLLM, assert_nothing_is_left, ids

from noria import (
    LLM,
    EngineDeadError,
    NoriaError,
    SamplingParams,
    _core,
)
from noria.interrupts import HeldInterrupts
from noria.outputs import Events


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
