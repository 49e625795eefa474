"""A step that fails, at every step and phase and in flight beside every other, loses nobody's tokens."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
from null_harness import NullRequest, NullRun, random_prompt, small_config

from noria import _core
from noria.engine import EngineDeadError
from noria.runner.base import DeviceLostError, SeatInit
from noria.runner.null_runner import Phase
from noria.runner.step import StepView
from noria.sampling.params import SamplingParams

MakeRun = Callable[..., NullRun]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Each injected failure is logged with its traceback; hundreds of them drown a test's own output."""
    caplog.set_level(logging.CRITICAL, logger="noria")


class FailAt:
    """Raises at chosen calls of the executor, counted from 0 over all phases of all steps."""

    def __init__(self, *calls: int, error: type[Exception] = RuntimeError) -> None:
        self.calls = set(calls)
        self.error = error
        self.num_calls = 0
        self.num_raised = 0

    def __call__(self, phase: Phase, view: StepView) -> Exception | None:
        call, self.num_calls = self.num_calls, self.num_calls + 1
        if call not in self.calls:
            return None
        self.num_raised += 1
        return self.error(f"injected in {phase} of step {view.step}")


def small_scenario(
    make_run: MakeRun, fault: FailAt, *, depth: int, runner: str, masked: bool = False
) -> NullRun:
    """Five requests on three seats: chunked prefills, a shared prefix, a stop, and a pool that preempts."""
    rng = np.random.default_rng(7)
    prefix = random_prompt(rng, 8)
    run = make_run(
        small_config(depth=depth, max_num_seqs=3, max_num_batched_tokens=12, num_kv_blocks=11),
        eos_positions={2: 3},
        fault=fault,
        runner=runner,
        max_model_len=40,
    )
    for seed, length, max_tokens in ((1, 11, 9), (2, 3, 30), (3, 17, 6), (4, 2, 14), (5, 1, 1)):
        run.submit(NullRequest(seed, prefix + random_prompt(rng, length), max_tokens))
    return run


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("runner", ["eager", "lazy"])
def test_a_failure_at_any_call_changes_no_answer(make_run: MakeRun, depth: int, runner: str) -> None:
    nothing = FailAt()
    run = small_scenario(make_run, nothing, depth=depth, runner=runner)
    run.assert_all_as_scripted(run.finish_all())
    stats = run.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hit_tokens > 0
    assert nothing.num_calls > 40
    for call in range(nothing.num_calls):
        fault = FailAt(call)
        run = small_scenario(make_run, fault, depth=depth, runner=runner)
        run.assert_all_as_scripted(run.finish_all())
        run.assert_nothing_is_left()
        assert fault.num_raised == 1
        assert 1 <= run.engine.stats().num_failed_steps <= depth


@pytest.mark.parametrize("depth", [2, 3])
def test_a_failure_on_the_thread_changes_no_answer(make_run: MakeRun, depth: int) -> None:
    for call in range(0, 60, 2):
        fault = FailAt(call)
        run = small_scenario(make_run, fault, depth=depth, runner="thread")
        run.assert_all_as_scripted(run.finish_all())
        run.assert_nothing_is_left()
        run.engine.close()
        assert fault.num_raised == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("runner", ["eager", "lazy"])
def test_failures_may_follow_one_another(make_run: MakeRun, depth: int, runner: str) -> None:
    rng = np.random.default_rng(11)
    for _ in range(60):
        calls = np.cumsum(rng.integers(1, 12, size=6)).tolist()
        fault = FailAt(*calls)
        run = small_scenario(make_run, fault, depth=depth, runner=runner)
        finished = run.finish_all()
        run.assert_nothing_is_left()
        # A request that failed alone has ended with an error; what it had until then is right.
        for request, answer in zip(run.requests, finished, strict=True):
            ids, reason = run.expected(request)
            if answer.reason == _core.ERROR:
                assert answer.token_ids.tolist() == ids[: len(answer.token_ids)]
                assert "injected" in (run.engine.take_cause(request.handle) or "")
            else:
                assert (answer.token_ids.tolist(), answer.reason) == (ids, reason)


@pytest.mark.parametrize("runner", ["eager", "lazy", "thread"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_that_breaks_every_step_ends_alone(make_run: MakeRun, runner: str, depth: int) -> None:
    run: NullRun

    def poisoned(phase: Phase, view: StepView) -> Exception | None:
        seeds = run.executor.seeds[view.row_seat] if phase == "sample" else ()
        return ValueError("poison") if 3 in seeds else None

    run = make_run(small_config(depth=depth), fault=poisoned, runner=runner)
    for seed in range(1, 7):
        run.submit(NullRequest(seed, [seed] * seed, max_tokens=8))
    finished = run.finish_all()
    run.assert_nothing_is_left()
    for request, answer in zip(run.requests, finished, strict=True):
        if request.seed == 3:
            assert (answer.token_ids.tolist(), answer.reason) == ([], _core.ERROR)
            assert run.engine.take_cause(request.handle) == "its step failed: ValueError: poison"
            assert run.engine.take_cause(request.handle) is None
        else:
            assert (answer.token_ids.tolist(), answer.reason) == run.expected(request)


@pytest.mark.parametrize("runner", ["eager", "lazy", "thread"])
def test_an_executor_that_always_fails_ends_every_request(make_run: MakeRun, runner: str) -> None:
    def broken(phase: Phase, view: StepView) -> Exception | None:
        return RuntimeError("broken") if phase == "forward" else None

    run = make_run(fault=broken, runner=runner)
    for seed in range(6):
        run.submit(NullRequest(seed, [1, 2, seed], max_tokens=4))
    finished = run.finish_all()
    assert [answer.reason for answer in finished] == [_core.ERROR] * 6
    assert run.engine.is_usable
    assert run.core.num_held_blocks == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("call", [0, 1, 2, 7, 20])
def test_a_lost_device_ends_every_request(make_run: MakeRun, depth: int, call: int) -> None:
    fault = FailAt(call, error=DeviceLostError)
    run = small_scenario(make_run, fault, depth=depth, runner="thread")
    finished = run.finish_all()
    assert run.core.num_held_blocks == 0
    for request, answer in zip(run.requests, finished, strict=True):
        ids, reason = run.expected(request)
        if answer.reason == _core.ERROR:
            assert answer.token_ids.tolist() == ids[: len(answer.token_ids)]
            assert "DeviceLostError: injected" in (run.engine.take_cause(request.handle) or "")
        else:
            assert (answer.token_ids.tolist(), answer.reason) == (ids, reason)
    assert any(answer.reason == _core.ERROR for answer in finished)
    assert not run.engine.is_usable
    with pytest.raises(EngineDeadError, match="injected"):
        run.engine.submit([1], SeatInit(SamplingParams(), 1, 1), 1)


def test_a_lost_device_ends_more_requests_than_a_turn_has_room_for(make_run: MakeRun) -> None:
    run = make_run(fault=FailAt(3, error=DeviceLostError))
    for seed in range(3000):
        run.submit(NullRequest(seed, [1, 2, 3], max_tokens=8))
    assert [answer.reason for answer in run.finish_all()] == [_core.ERROR] * 3000


def test_many_requests_can_be_aborted_at_once(make_run: MakeRun) -> None:
    run = make_run()
    for seed in range(3000):
        run.submit(NullRequest(seed, [1, 2, 3], max_tokens=8))
    run.turn()
    for request in run.requests[:-1]:
        assert run.engine.abort(request.handle)
    finished = run.finish_all()
    assert [answer.reason for answer in finished[:-1]] == [_core.ABORT] * 2999
    assert finished[-1].token_ids.tolist() == run.expected(run.requests[-1])[0]
    run.assert_nothing_is_left()
