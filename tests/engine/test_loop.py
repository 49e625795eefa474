"""The loop over the null runner: every answer is the script's, whatever the schedule was."""

from collections.abc import Callable

import numpy as np
import pytest
from null_harness import EOS, NullRequest, NullRun, random_prompt, small_config

from noria import _core
from noria.config import ADMISSIONS, SCHEDULING_POLICIES
from noria.engine import EngineDeadError
from noria.errors import MaxTokensError, NeverFitsError, PromptTooLongError, TokenOutOfRangeError
from noria.runner.base import Drafts, SeatInit
from noria.sampling.params import SamplingParams

MakeRun = Callable[..., NullRun]


def random_requests(rng: np.random.Generator, num: int, *, shared: int = 0) -> list[NullRequest]:
    """`num` requests of up to 40 own prompt tokens after `shared` common ones, and up to 30 output tokens."""
    prefix = random_prompt(rng, shared)
    return [
        NullRequest(
            seed=int(rng.integers(0, 2**62)),
            prompt=prefix + random_prompt(rng, int(rng.integers(1, 41))),
            max_tokens=int(rng.integers(1, 31)),
        )
        for _ in range(num)
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("runner", ["thread", "eager", "lazy"])
@pytest.mark.parametrize("seed", range(6))
def test_answers_are_the_scripts_for_random_mixes(
    make_run: MakeRun, depth: int, runner: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 24, shared=int(rng.integers(0, 10)))
    run = make_run(
        small_config(
            depth=depth,
            max_num_seqs=int(rng.integers(1, 7)),
            num_kv_blocks=int(rng.integers(25, 60)),
            max_partial_prefills=int(rng.integers(1, 4)),
            long_prefill_token_threshold=int(rng.choice([0, 1, 7])),
            enable_prefix_caching=bool(rng.integers(0, 2)),
            scheduling_policy=str(rng.choice(SCHEDULING_POLICIES)),
            admission=str(rng.choice(ADMISSIONS)),
        ),
        eos_positions={request.seed: int(rng.integers(0, 30)) for request in requests[::3]},
        runner=runner,
    )
    for request in requests:
        request.priority = int(rng.integers(-2, 3))
        run.submit(request)
    run.assert_all_as_scripted(run.finish_all())
    run.assert_nothing_is_left()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_small_pool_preempts_and_changes_no_answer(make_run: MakeRun, depth: int) -> None:
    rng = np.random.default_rng(1)
    run = make_run(small_config(depth=depth, num_kv_blocks=24, enable_prefix_caching=False))
    for _ in range(8):
        run.submit(NullRequest(int(rng.integers(2**62)), random_prompt(rng, 16), max_tokens=60))
    finished = run.finish_all()
    run.assert_all_as_scripted(finished)
    run.assert_nothing_is_left()
    stats = run.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_resumed == stats.num_preemptions
    assert sum(answer.num_preemptions for answer in finished) == stats.num_preemptions


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prompts_that_begin_alike_share_their_blocks(make_run: MakeRun, depth: int) -> None:
    rng = np.random.default_rng(2)
    run = make_run(small_config(depth=depth))
    for request in random_requests(rng, 12, shared=16):
        run.submit(request)
    finished = run.finish_all()
    run.assert_all_as_scripted(finished)
    run.assert_nothing_is_left()
    assert sum(answer.num_cached_tokens for answer in finished) >= 11 * 16
    assert run.engine.stats().num_prefix_hit_tokens >= 11 * 16


@pytest.mark.parametrize("batching", ["padded", "gang"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_static_batches_give_the_same_answers(make_run: MakeRun, batching: str, depth: int) -> None:
    rng = np.random.default_rng(3)
    requests = random_requests(rng, 12)
    run = make_run(
        small_config(depth=depth, batching=batching, max_num_batched_tokens=64, num_kv_blocks=120),
        eos_positions={request.seed: 3 for request in requests[::4]},
    )
    for request in requests:
        run.submit(request)
    run.assert_all_as_scripted(run.finish_all())
    run.assert_nothing_is_left()
    stats = run.engine.stats()
    assert (stats.num_ghost_rows > 0) == (batching == "padded")
    assert (stats.num_padding_tokens > 0) == (batching == "padded")
    assert (stats.num_padding_rows > 0) == (batching == "padded")
    assert stats.num_useful_rows == stats.num_rows - stats.num_ghost_rows - stats.num_padding_rows


def test_statistics_count_what_was_done(make_run: MakeRun) -> None:
    run = make_run(small_config(depth=1, enable_prefix_caching=False))
    run.submit(NullRequest(1, [1, 2, 3], max_tokens=4))
    run.submit(NullRequest(2, [4, 5, 6, 8], max_tokens=2))
    run.assert_all_as_scripted(run.finish_all())
    stats = run.engine.stats()
    assert (stats.num_steps, stats.num_decode_steps) == (4, 4)
    assert (stats.num_prefill_tokens, stats.num_output_tokens, stats.num_wasted_tokens) == (7, 6, 0)
    assert (stats.num_rows, stats.num_useful_rows, stats.num_seat_rows) == (6, 6, 4)
    assert (stats.num_admitted, stats.num_finished) == (2, 2)
    assert stats.seat_occupancy == (2 + 2 + 1 + 1) / (4 * 4)
    assert (stats - stats).num_steps == 0


def test_statistics_outlive_the_cores_ring_of_records(make_run: MakeRun) -> None:
    run = make_run(small_config(max_num_seqs=1), max_model_len=10_000)
    run.executor.forward = run.executor.inner.forward  # type: ignore[method-assign]  checking grows with the context
    run.submit(NullRequest(1, [1, 2, 3], max_tokens=6_000))
    while run.engine.has_work:
        run.turn()
    stats = run.engine.stats()
    assert stats.num_output_tokens == 6_000
    assert stats.num_decode_steps == 6_000
    assert len(run.core.records()) < 6_000


def test_a_stop_found_by_the_core_wastes_at_most_depth_less_one_tokens(make_run: MakeRun) -> None:
    for depth in (1, 2, 3):
        run = make_run(small_config(depth=depth), eos_positions={5: 6})
        run.submit(NullRequest(5, [1, 2, 3], max_tokens=30))
        run.assert_all_as_scripted(run.finish_all())
        assert run.engine.stats().num_wasted_tokens == depth - 1


def test_nothing_is_done_while_there_is_nothing_to_do(make_run: MakeRun) -> None:
    run = make_run()
    assert run.engine.turn() is None
    assert not run.engine.has_work
    run.submit(NullRequest(1, [1], max_tokens=1, parked=True))
    assert not run.engine.has_work
    assert run.engine.turn() is None
    assert run.engine.unpark(run.requests[0].handle)
    run.assert_all_as_scripted(run.finish_all())
    run.assert_nothing_is_left()


def test_requests_can_come_at_any_turn(make_run: MakeRun) -> None:
    rng = np.random.default_rng(4)
    later = random_requests(rng, 20)
    run = make_run()
    answers: dict[int, list[int]] = {}
    while later or run.engine.has_work:
        if later:
            answers[run.submit(later.pop())] = []
        events = run.engine.turn()
        if events is not None:
            for handle, kind, token, position in events.rows.tolist():
                if kind == _core.TOKEN:
                    assert position == len(answers[handle])
                    answers[handle].append(token)
        run.core.check()
    assert [answers[request.handle] for request in run.requests] == [run.expected(r)[0] for r in run.requests]
    run.assert_nothing_is_left()


def test_seat_handles_say_who_holds_a_seat(make_run: MakeRun) -> None:
    run = make_run(small_config(depth=1))
    handles = [run.submit(NullRequest(seed, [1, 2], max_tokens=3 + seed)) for seed in range(3)]
    run.turn()
    assert sorted(run.engine.seat_handles.tolist()) == sorted([-1, *handles])
    for _ in range(2):
        run.turn()
    assert sorted(run.engine.seat_handles.tolist()) == sorted([-1, -1, *handles[1:]])
    run.finish_all()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error"),
    [
        ([1, 50], 1, TokenOutOfRangeError),
        ([-1], 1, TokenOutOfRangeError),
        ([2**40], 1, TokenOutOfRangeError),
        ([1.5], 1, TokenOutOfRangeError),
        ([1] * 96, 1, PromptTooLongError),
        ([1], 0, MaxTokensError),
        ([1] * 60, 36, NeverFitsError),
    ],
)
def test_a_bad_request_is_refused_and_the_others_go_on(
    make_run: MakeRun, prompt: list[int], max_tokens: int, error: type[Exception]
) -> None:
    run = make_run(small_config(num_kv_blocks=20))
    run.submit(NullRequest(1, [1, 2, 3], max_tokens=20))
    run.turn()
    with pytest.raises(error):
        run.engine.submit(prompt, SeatInit(SamplingParams(), 9, len(prompt)), max_tokens)
    assert run.engine.num_requests == 1
    while run.engine.has_work:
        run.turn()
    run.assert_nothing_is_left()


def test_a_closed_engine_refuses_work_in_one_sentence(make_run: MakeRun) -> None:
    run = make_run()
    run.submit(NullRequest(1, [1, 2, 3], max_tokens=20))
    run.turn()
    run.engine.close()
    run.engine.close()
    with pytest.raises(EngineDeadError, match="takes no more work: it was closed"):
        run.engine.submit([1], SeatInit(SamplingParams(), 1, 1), 1)
    with pytest.raises(EngineDeadError):
        run.turn()


def draft_for_everyone(run: NullRun, rng: np.random.Generator, *, listed: bool) -> Drafts:
    """Up to three drafts for each unfinished request; listed ones are mostly what the script will answer."""
    counts = rng.integers(0, 4, len(run.requests)).astype(np.int32)
    handles = np.array([request.handle for request in run.requests], dtype=np.int64)
    ids = rng.integers(0, 50, int(counts.sum())).astype(np.int32) if listed else None
    return Drafts(handles, counts, ids)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("listed", [False, True])
def test_drafts_change_no_answer(make_run: MakeRun, depth: int, listed: bool) -> None:
    rng = np.random.default_rng(5)
    requests = random_requests(rng, 12)
    run = make_run(
        small_config(depth=depth, num_kv_blocks=60),
        max_drafts=3,
        eos_positions={request.seed: 5 for request in requests[::4]},
        draft_provider=lambda: draft_for_everyone(run, rng, listed=listed),
        accept_drafts=accept_none if listed else accept_some,
    )
    for request in requests:
        run.submit(request)
    run.assert_all_as_scripted(run.finish_all())
    run.assert_nothing_is_left()
    stats = run.engine.stats()
    # Listed drafts are for rows with nothing in flight, which decodes of deeper engines always have.
    assert (stats.num_draft_tokens > 0) == (not listed or depth == 1)
    if not listed:
        assert stats.num_seat_rows < stats.num_output_tokens, "no draft was accepted"


def accept_none(seeds: np.ndarray, positions: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    return np.zeros_like(num_drafts)  # what a listed draft stores is not what the script says


def accept_some(seeds: np.ndarray, positions: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    return (seeds + positions) % (num_drafts + 1)


def test_the_end_of_sequence_token_comes_only_where_it_is_scripted(make_run: MakeRun) -> None:
    run = make_run(eos_positions={3: 4})
    assert EOS not in run.script.answer(2, 500)
    assert run.script.answer(3, 500).count(EOS) == 1
    assert set(run.script.answer(2, 2000)) == set(range(50)) - {EOS}
