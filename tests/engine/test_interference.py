"""Aborts and late stops at every point between two verbs, with every number of steps in flight."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from null_harness import NullRequest, NullRun, random_prompt, small_config

from noria import _core

MakeRun = Callable[..., NullRun]


class WatchedCore:
    """The core, with a call before each plan and each commit: all points at which a caller can interfere."""

    def __init__(self, core: _core.Core, at_point: Callable[[int], None]) -> None:
        self._core = core
        self._at_point = at_point
        self.num_points = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def _point(self) -> None:
        point, self.num_points = self.num_points, self.num_points + 1
        self._at_point(point)

    def plan(self, now_us: int, buffer: npt.NDArray[np.int32]) -> _core.Plan:
        self._point()
        plan = self._core.plan(now_us, buffer)
        self._core.check()
        return plan

    def commit(self, *args: Any) -> int:
        self._point()
        num_events = self._core.commit(*args)
        self._core.check()
        return num_events


def scenario(make_run: MakeRun, depth: int, runner: str, at_point: Callable[[NullRun, int], None]) -> NullRun:
    """Four requests on three seats in a small pool; `at_point` interferes."""
    rng = np.random.default_rng(13)
    run = make_run(
        small_config(depth=depth, max_num_seqs=3, max_num_batched_tokens=8, num_kv_blocks=8),
        eos_positions={2: 5},
        runner=runner,
        max_model_len=32,
    )
    watched = WatchedCore(run.core, lambda point: at_point(run, point))
    run.engine._core = watched  # type: ignore[assignment]
    for seed, length, max_tokens in ((1, 9, 7), (2, 3, 20), (3, 13, 4), (4, 1, 12)):
        run.submit(NullRequest(seed, random_prompt(rng, length), max_tokens))
    return run


def count_points(make_run: MakeRun, depth: int, runner: str) -> int:
    run = scenario(make_run, depth, runner, lambda run, point: None)
    run.assert_all_as_scripted(run.finish_all())
    run.assert_nothing_is_left()
    assert run.engine.stats().num_preemptions > 0
    return int(run.engine._core.num_points)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("runner", ["eager", "lazy"])
@pytest.mark.parametrize("victim", range(4))
def test_an_abort_at_any_point_disturbs_nobody_else(
    make_run: MakeRun, depth: int, runner: str, victim: int
) -> None:
    num_points = count_points(make_run, depth, runner)
    assert num_points > 30
    num_aborted = 0
    for chosen in range(num_points):
        was_aborted = False

        def abort(run: NullRun, point: int, chosen: int = chosen) -> None:
            nonlocal was_aborted
            if point == chosen:
                was_aborted = run.engine.abort(run.requests[victim].handle)
                assert not run.engine.abort(run.requests[victim].handle)

        run = scenario(make_run, depth, runner, abort)
        finished = run.finish_all()
        run.assert_nothing_is_left()
        num_aborted += was_aborted
        for index, (request, answer) in enumerate(zip(run.requests, finished, strict=True)):
            ids, reason = run.expected(request)
            if index == victim and was_aborted:
                assert answer.reason == _core.ABORT
                assert answer.token_ids.tolist() == ids[: len(answer.token_ids)]
            else:
                assert (answer.token_ids.tolist(), answer.reason) == (ids, reason)
    assert num_aborted > 10


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("runner", ["eager", "lazy"])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_late_stop_at_any_point_cuts_where_it_says(
    make_run: MakeRun, depth: int, runner: str, lag: int
) -> None:
    """At a point, each request that has come so far is stopped `lag` tokens before its last committed one."""
    num_points = count_points(make_run, depth, runner)
    num_stopped = 0
    for chosen in range(num_points):
        cuts: dict[int, int] = {}
        committed: dict[int, int] = {}

        def stop(
            run: NullRun,
            point: int,
            chosen: int = chosen,
            cuts: dict[int, int] = cuts,
            committed: dict[int, int] = committed,
        ) -> None:
            if point != chosen:
                return
            for request in run.requests[::2]:
                keep = max(0, committed.get(request.handle, 0) - lag)
                if run.engine.finish(request.handle, keep, _core.STOP):
                    cuts[request.handle] = keep

        run = scenario(make_run, depth, runner, stop)
        finished = finish_counting(run, committed)
        run.assert_nothing_is_left()
        num_stopped += len(cuts)
        for request, answer in zip(run.requests, finished, strict=True):
            ids, reason = run.expected(request)
            if request.handle in cuts:
                ids, reason = ids[: cuts[request.handle]], _core.STOP
            assert (answer.token_ids.tolist(), answer.reason) == (ids, reason)
    assert num_stopped > 20


def finish_counting(run: NullRun, committed: dict[int, int]) -> list[Any]:
    """`finish_all`, keeping in `committed` how many tokens of each handle were given out."""
    core = run.engine._core
    commit = core.commit

    def counting_commit(*args: Any) -> int:
        num_events: int = commit(*args)
        for handle, kind, _, position in core.events[:num_events].tolist():
            if kind == _core.TOKEN:
                committed[handle] = position + 1
        return num_events

    core.commit = counting_commit
    return run.finish_all()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_found_a_token_late_wastes_at_most_depth_tokens(make_run: MakeRun, depth: int) -> None:
    run = make_run(small_config(depth=depth))
    handle = run.submit(NullRequest(1, [1, 2, 3], max_tokens=30))
    num_tokens = 0
    while run.engine.has_work:
        events = run.engine.turn()
        assert events is not None
        num_tokens += int(np.count_nonzero(events.kinds == _core.TOKEN))
        if num_tokens == 10:
            run.engine.finish(handle, 9, _core.STOP)
    assert run.engine.stats().num_wasted_tokens <= depth
    run.assert_nothing_is_left()


def test_a_stop_after_the_end_is_ignored(make_run: MakeRun) -> None:
    run = make_run()
    handle = run.submit(NullRequest(1, [1, 2, 3], max_tokens=3))
    run.finish_all()
    assert not run.engine.finish(handle, 1, _core.STOP)
    assert not run.engine.abort(handle)
    assert run.engine.turn() is None


def test_an_error_from_outside_keeps_its_cause(make_run: MakeRun) -> None:
    run = make_run()
    handle = run.submit(NullRequest(1, [1, 2, 3], max_tokens=30))
    run.turn()
    run.engine.finish(handle, 1, _core.ERROR, cause="its stop string is no string")
    assert run.finish_all()[0].reason == _core.ERROR
    assert run.engine.take_cause(handle) == "its stop string is no string"
