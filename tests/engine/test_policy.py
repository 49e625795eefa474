"""A scheduling policy of one's own, deadlines and targets through the engine."""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from null_harness import NullRequest, NullRun, random_prompt, small_config

from noria import _core
from noria.config import EngineConfig
from noria.errors import ConfigError, RejectedError
from noria.hints import SchedulingHints
from noria.policy import WaitingRequests
from noria.runner.base import SeatInit
from noria.sampling.params import SamplingParams

MakeRun = Callable[..., NullRun]


def longest_prompt_first(requests: WaitingRequests) -> npt.NDArray[np.int64]:
    """Lower goes first."""
    return -requests.num_prompt_tokens


def requests_of(lengths: list[int], max_tokens: int = 3) -> list[NullRequest]:
    rng = np.random.default_rng(0)
    return [
        NullRequest(seed=seed, prompt=random_prompt(rng, length), max_tokens=max_tokens)
        for seed, length in enumerate(lengths)
    ]


def order_of_admission(run: NullRun) -> list[int]:
    rows = np.concatenate([events.rows for events in run.events])
    return [int(handle) for handle in rows[rows[:, 1] == _core.ADMITTED, 0]]


def test_a_function_orders_the_line_and_is_asked_once_about_each_request(make_run: MakeRun) -> None:
    asked: list[int] = []

    def policy(requests: WaitingRequests) -> npt.NDArray[np.int64]:
        asked.extend(requests.handle.tolist())
        return longest_prompt_first(requests)

    run = make_run(small_config(max_num_seqs=1, policy=policy))
    requests = requests_of([4, 9, 6, 12])
    handles = [run.submit(request) for request in requests]
    run.assert_all_as_scripted(run.finish_all())
    assert order_of_admission(run) == [handles[at] for at in (3, 1, 2, 0)]
    assert sorted(asked) == sorted(handles)
    stats = run.engine.stats()
    assert stats.num_policy_requests == 4
    assert stats.policy_us > 0


def test_a_preempted_request_is_asked_about_again_and_a_replay_is_the_same(make_run: MakeRun) -> None:
    outputs: list[int] = []

    def policy(requests: WaitingRequests) -> npt.NDArray[np.int64]:
        outputs.extend(requests.num_output_tokens.tolist())
        return requests.num_remaining - 5 * requests.num_output_tokens

    run = make_run(
        small_config(policy=policy, num_kv_blocks=25, admission="optimistic", max_num_seqs=6), record=True
    )
    for request in requests_of([20, 21, 22, 23, 24, 25, 26, 27], max_tokens=30):
        run.submit(request)
    run.assert_all_as_scripted(run.finish_all())
    assert run.engine.stats().num_preemptions > 0
    assert any(outputs)
    digests = _core.replay(run.core.recording())
    assert len(digests) == run.engine.stats().num_steps


@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        (lambda requests: 1 / 0, "the policy failed: ZeroDivisionError"),
        (lambda requests: np.zeros(len(requests.handle)), "float64"),
        (lambda requests: [1, 2, 3, 4, 5], "shape [5]"),
    ],
)
def test_a_policy_that_fails_ends_those_that_it_was_asked_about(
    make_run: MakeRun, policy: Callable[[WaitingRequests], npt.ArrayLike], cause: str
) -> None:
    is_broken = [False]

    def sometimes(requests: WaitingRequests) -> npt.ArrayLike:
        return policy(requests) if is_broken[0] else requests.arrival

    run = make_run(small_config(max_num_seqs=1, policy=sometimes))
    first, second, third = requests_of([5, 6, 7])
    run.submit(first)
    run.turn()
    is_broken[0] = True
    broken = run.submit(second)
    while run.engine.num_requests > 1:
        run.turn()
    assert cause in str(run.engine.take_cause(broken))
    is_broken[0] = False
    run.submit(third)
    while run.engine.num_requests:
        run.turn()
    rows = np.concatenate([events.rows for events in run.events])
    finished = rows[rows[:, 1] == _core.FINISHED]
    assert [int(reason) for reason in finished[:, 2]].count(_core.ERROR) == 1


def test_a_request_expires_with_what_it_has(make_run: MakeRun) -> None:
    run = make_run(small_config(max_num_seqs=1))
    (request,) = requests_of([5], max_tokens=30)
    run.executor.prompts[request.seed] = request.prompt
    params = SamplingParams(seed=request.seed, max_tokens=30)
    init = SeatInit(params, request.seed, 5)

    def submit(seconds: float, *, parked: bool = False) -> int:
        hints = SchedulingHints(expires_at=time.time() + seconds)
        return run.engine.submit(request.prompt, init, 30, hints=hints, parked=parked)

    late, waiting, parked = submit(3600), submit(-5), submit(0, parked=True)
    run.turn()
    rows = run.events[0].rows
    ends = {int(row[0]): (int(row[2]), int(row[3])) for row in rows[rows[:, 1] == _core.FINISHED]}
    assert ends == {waiting: (_core.EXPIRED, 0), parked: (_core.EXPIRED, 0)}
    seconds = run.engine.seconds_to_expiry
    assert seconds is not None
    assert 3500 < seconds <= 3600
    run.engine.abort(late)
    while run.engine.num_requests:
        run.turn()
    assert run.engine.seconds_to_expiry is None


def test_what_a_policy_or_a_hint_may_not_be_is_said() -> None:
    with pytest.raises(ConfigError, match="policy is 3; it must be a function"):
        EngineConfig(model="m", policy=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give one of them"):
        EngineConfig(model="m", policy=longest_prompt_first, scheduling_policy="sjf")
    with pytest.raises(ConfigError, match="share is 'all'; it must be one of decode-first, prefill-first"):
        EngineConfig(model="m", share="all")
    with pytest.raises(ConfigError, match="step_target_ms is -1; it must be a number from 0 to"):
        EngineConfig(model="m", step_target_ms=-1)
    with pytest.raises(RejectedError, match="expires_at is 'soon'; it must be a number from 0 to"):
        SchedulingHints(expires_at="soon")  # type: ignore[arg-type]
    with pytest.raises(RejectedError, match="adapter is 3; it must be a text"):
        SchedulingHints(adapter=3)  # type: ignore[arg-type]
