"""The runner's thread: order, discards in every state, fatal errors, and its end."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from noria import _core
from noria.errors import NoriaError
from noria.runner.base import DeviceLostError, HostMasks, SampledIds, SeatInit
from noria.runner.step import StepView
from noria.runner.thread import ThreadRunner

RING = 4
WAIT_S = 30.0


class Pending:
    def __init__(self, wait: Callable[[], SampledIds]) -> None:
        self.wait = wait


class ScriptedExecutor:
    """Notes what runs; stops at gates until they are opened; raises what it is told to."""

    def __init__(self, ring: Sequence[StepView]) -> None:
        self.index = {id(view): index for index, view in enumerate(ring)}
        self.ran: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.reached: dict[str, threading.Event] = {}
        self.errors: dict[str, BaseException] = {}
        self.wait_errors: dict[str, Exception] = {}

    def gate(self, name: str) -> threading.Event:
        """A job that will wait; `reached[name]` says that it runs."""
        self.reached[name] = threading.Event()
        self.gates[name] = threading.Event()
        return self.gates[name]

    def _run(self, phase: str, view: StepView) -> str:
        name = f"{phase} {self.index[id(view)]}"
        self.ran.append(name)
        if name in self.gates:
            self.reached[name].set()
            assert self.gates[name].wait(WAIT_S)
        if name in self.errors:
            raise self.errors.pop(name)
        return name

    def expand(self, view: StepView, inits: Sequence[SeatInit]) -> None:
        self._run("expand", view)

    def forward(self, view: StepView) -> None:
        self._run("forward", view)

    def sample(self, view: StepView, masks: HostMasks | None) -> Pending:
        name = self._run("sample", view)

        def wait() -> SampledIds:
            if name in self.wait_errors:
                raise self.wait_errors.pop(name)
            return SampledIds(np.zeros(0, np.int32), np.zeros(0, np.int32))

        return Pending(wait)


class Bench:
    def __init__(self) -> None:
        layout = _core.Core(num_blocks=8).layout
        self.ring = [StepView(layout) for _ in range(RING)]
        self.executor = ScriptedExecutor(self.ring)
        self.runner = ThreadRunner(self.executor, self.ring)

    def launch(self, step: int) -> None:
        self.runner.forward(step, step % RING, ())
        self.runner.sample(step)

    def steps(self, num: int) -> list[int]:
        results = [self.runner.next_result(block=True) for _ in range(num)]
        return [result.step for result in results if result is not None and result.error is None]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for gate in bench.executor.gates.values():
        gate.set()
    bench.runner.close()
    assert "noria-runner" not in {thread.name for thread in threading.enumerate()}


def test_jobs_run_in_order_and_results_come_in_order(bench: Bench) -> None:
    for step in (1, 2, 3):
        bench.launch(step)
    assert bench.steps(3) == [1, 2, 3]
    assert bench.executor.ran == [
        f"{phase} {step}" for step in (1, 2, 3) for phase in ("expand", "forward", "sample")
    ]
    assert bench.runner.next_result(block=False) is None


def test_a_sample_can_be_held_while_its_forward_runs(bench: Bench) -> None:
    gate = bench.executor.gate("forward 1")
    bench.runner.forward(1, 1, ())
    assert bench.executor.reached["forward 1"].wait(WAIT_S)
    gate.set()
    assert bench.runner.next_result(block=False) is None
    bench.runner.sample(1)
    assert bench.steps(1) == [1]


def test_only_the_last_forward_can_be_sampled(bench: Bench) -> None:
    bench.launch(1)
    bench.launch(2)
    with pytest.raises(NoriaError, match="step 1 cannot be sampled"):
        bench.runner.sample(1)


@pytest.mark.parametrize("phase", ["expand", "forward", "sample"])
def test_after_an_error_nothing_runs_until_the_discard(bench: Bench, phase: str) -> None:
    bench.executor.errors[f"{phase} 2"] = ValueError("no")
    for step in (1, 2, 3):
        bench.launch(step)
    assert bench.steps(1) == [1]
    result = bench.runner.next_result(block=True)
    assert result is not None
    assert (result.step, result.sampled, str(result.error), result.is_fatal) == (2, None, "no", False)
    assert bench.runner.next_result(block=False) is None
    bench.runner.discard_from(2)
    assert not any(name.endswith(" 3") for name in bench.executor.ran)
    bench.launch(4)
    assert bench.steps(1) == [4]


def test_jobs_enqueued_after_an_error_but_before_the_discard_never_run(bench: Bench) -> None:
    bench.executor.errors["forward 1"] = ValueError("no")
    bench.launch(1)
    result = bench.runner.next_result(block=True)
    assert result is not None
    assert result.error is not None
    bench.launch(2)
    bench.runner.discard_from(1)
    assert not any(name.endswith(" 2") for name in bench.executor.ran)
    bench.launch(3)
    assert bench.steps(1) == [3]


def test_an_error_that_the_device_reports_late_belongs_to_its_step(bench: Bench) -> None:
    bench.executor.wait_errors["sample 1"] = ValueError("late")
    bench.launch(1)
    bench.launch(2)
    result = bench.runner.next_result(block=True)
    assert result is not None
    assert (result.step, str(result.error)) == (1, "late")
    bench.runner.discard_from(1)
    assert bench.runner.next_result(block=False) is None
    bench.launch(3)
    assert bench.steps(1) == [3]


@pytest.mark.parametrize("running", ["expand 2", "forward 2", "sample 2"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_discard_waits_for_the_job_that_runs_and_drops_the_rest(
    bench: Bench, running: str, fails: bool
) -> None:
    gate = bench.executor.gate(running)
    if fails:
        bench.executor.errors[running] = ValueError("no")
    for step in (1, 2, 3):
        bench.launch(step)
    assert bench.executor.reached[running].wait(WAIT_S)
    discard = threading.Thread(target=bench.runner.discard_from, args=(2,))
    discard.start()
    discard.join(0.05)
    assert discard.is_alive(), "the buffer of a running step would be given back"
    gate.set()
    discard.join(WAIT_S)
    assert not discard.is_alive()
    num_ran = len(bench.executor.ran)
    assert bench.executor.ran[-1] in (running, "forward 2")  # expand and forward are one job
    assert bench.steps(1) == [1]
    assert bench.runner.next_result(block=False) is None
    bench.launch(4)
    assert bench.steps(1) == [4]
    assert bench.executor.ran[num_ran:] == ["expand 0", "forward 0", "sample 0"]


def test_a_discard_leaves_earlier_steps_alone(bench: Bench) -> None:
    gate = bench.executor.gate("forward 1")
    for step in (1, 2, 3):
        bench.launch(step)
    assert bench.executor.reached["forward 1"].wait(WAIT_S)
    discard = threading.Thread(target=bench.runner.discard_from, args=(3,))
    discard.start()
    gate.set()
    discard.join(WAIT_S)
    assert bench.steps(2) == [1, 2]
    assert not any(name.endswith(" 3") for name in bench.executor.ran)


def test_results_that_a_discard_overtakes_are_dropped(bench: Bench) -> None:
    for step in (1, 2):
        bench.launch(step)
    bench.launch(3)
    assert bench.steps(1) == [1]
    bench.runner.discard_from(2)  # by now the thread may have finished both
    bench.launch(4)
    assert bench.steps(1) == [4]


@pytest.mark.parametrize("error", [DeviceLostError("gone"), SystemExit()])
def test_what_no_step_can_be_blamed_for_is_fatal(bench: Bench, error: BaseException) -> None:
    bench.executor.errors["forward 1"] = error
    bench.launch(1)
    result = bench.runner.next_result(block=True)
    assert result is not None
    assert (result.is_fatal, result.error) == (True, error)


def test_times_are_measured_by_stage(bench: Bench) -> None:
    gate = bench.executor.gate("forward 1")
    bench.launch(1)
    bench.executor.reached["forward 1"].wait(WAIT_S)
    time.sleep(0.02)
    gate.set()
    result = bench.runner.next_result(block=True)
    assert result is not None
    assert result.forward_us >= 20_000 > result.sample_us
    assert result.device_us >= result.forward_us


def test_close_drops_what_was_not_begun(bench: Bench) -> None:
    gate = bench.executor.gate("forward 1")
    for step in (1, 2):
        bench.launch(step)
    assert bench.executor.reached["forward 1"].wait(WAIT_S)
    closing = threading.Thread(target=bench.runner.close)
    closing.start()
    gate.set()
    closing.join(WAIT_S)
    assert bench.executor.ran == ["expand 1", "forward 1"]
    bench.runner.close()
    with pytest.raises(NoriaError, match="closed"):
        bench.launch(3)
    with pytest.raises(NoriaError, match="closed"):
        bench.runner.next_result(block=True)


def test_a_runner_that_is_dropped_ends_its_thread() -> None:
    bench = Bench()
    bench.launch(1)
    thread = bench.runner._thread
    gone = weakref.ref(bench.runner)
    del bench
    gc.collect()
    assert gone() is None
    thread.join(WAIT_S)
    assert not thread.is_alive()
