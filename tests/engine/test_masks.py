"""Rows whose logits the host edits between forward and sample."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
from null_harness import EOS, VOCAB_SIZE, NullRequest, NullRun, small_config

from noria import _core
from noria.errors import RejectedError
from noria.runner.base import HostMasks, MaskRequest, SeatInit
from noria.sampling.params import SamplingParams

MakeRun = Callable[..., NullRun]


class EvenThenOdd:
    """Allows even ids at even output positions and odd ones at odd; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[MaskRequest] = []
        self.num_seen: dict[int, int] = {}  # tokens given out, by handle

    def __call__(self, request: MaskRequest) -> HostMasks:
        self.asked.append(request)
        for handle, position in zip(request.handles.tolist(), request.output_positions.tolist(), strict=True):
            assert position == self.num_seen.get(handle, 0), (
                "a mask was wanted before the tokens it depends on"
            )
        allowed = np.arange(VOCAB_SIZE) % 2 == request.output_positions[:, None] % 2
        allowed[:, EOS] = False
        return HostMasks(request.rows, allowed)

    def see(self, rows: np.ndarray) -> None:
        for handle, kind, _, position in rows.tolist():
            if kind == _core.TOKEN:
                assert position == self.num_seen.get(handle, 0)
                self.num_seen[handle] = position + 1


def run_all(run: NullRun, masks: EvenThenOdd) -> dict[int, list[int]]:
    """Tokens by handle, each turn's events shown to `masks` before the next turn."""
    answers: dict[int, list[int]] = {request.handle: [] for request in run.requests}
    while run.engine.has_work:
        events = run.engine.turn()
        assert events is not None
        masks.see(events.rows)
        for handle, kind, token, _ in events.rows.tolist():
            if kind == _core.TOKEN:
                answers[handle].append(token)
        run.core.check()
    return answers


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("runner", ["thread", "eager", "lazy"])
def test_masked_rows_obey_their_masks_and_others_are_untouched(
    make_run: MakeRun, depth: int, runner: str
) -> None:
    masks = EvenThenOdd()
    run = make_run(
        small_config(depth=depth, num_kv_blocks=40), mask_provider=masks, runner=runner, max_model_len=64
    )
    run.executor.forward = run.executor.inner.forward  # type: ignore[method-assign]  masked tokens are off-script
    for seed in range(9):
        run.submit(NullRequest(seed, [1, 2, seed], max_tokens=5 + seed, host_masked=seed % 3 != 0))
    answers = run_all(run, masks)
    for request in run.requests:
        ids = answers[request.handle]
        if request.host_masked:
            assert [token % 2 for token in ids] == [place % 2 for place in range(request.max_tokens)]
            scripted = run.script.answer(request.seed, request.max_tokens)
            assert all(
                mine == theirs
                for place, (mine, theirs) in enumerate(zip(ids, scripted, strict=True))
                if theirs % 2 == place % 2
            )
        else:
            assert ids == run.expected(request)[0]
    assert sum(len(request.rows) for request in masks.asked) == sum(
        request.max_tokens for request in run.requests if request.host_masked
    )
    assert run.core.num_held_blocks == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_the_next_forward_is_launched_before_its_masks_are_wanted(make_run: MakeRun, depth: int) -> None:
    masks = EvenThenOdd()
    run = make_run(small_config(depth=depth), mask_provider=masks, runner="lazy")
    run.executor.forward = run.executor.inner.forward  # type: ignore[method-assign]
    order: list[str] = []
    runner, core = run.engine._runner, run.engine._core
    forward, sample = runner.forward, runner.sample

    class LoggingCore:
        def __getattr__(self, name: str) -> object:
            return getattr(core, name)

        def commit(self, step: int, *args: object) -> int:
            order.append(f"commit {step}")
            return core.commit(step, *args)  # type: ignore[arg-type]

    run.engine._core = LoggingCore()  # type: ignore[assignment]
    runner.forward = lambda step, *args: (order.append(f"forward {step}"), forward(step, *args))  # type: ignore
    runner.sample = lambda step, *args: (order.append(f"sample {step}"), sample(step, *args))  # type: ignore
    run.submit(NullRequest(1, [1, 2, 3], max_tokens=6, host_masked=True))
    run_all(run, masks)
    for step in range(1, 6):
        place = order.index(f"forward {step + 1}")
        assert order[place : place + 3] == [f"forward {step + 1}", f"commit {step}", f"sample {step + 1}"]


def test_a_row_without_its_mask_ends_its_request_alone(make_run: MakeRun) -> None:
    full = EvenThenOdd()

    def forgets_odd_handles(request: MaskRequest) -> HostMasks:
        masks = full(request)
        kept = request.handles != forgotten
        return HostMasks(masks.rows[kept], masks.allowed[kept])

    run = make_run(mask_provider=forgets_odd_handles)
    run.executor.forward = run.executor.inner.forward  # type: ignore[method-assign]
    for seed in range(3):
        run.submit(NullRequest(seed, [1, seed], max_tokens=4, host_masked=True))
    run.submit(NullRequest(9, [1, 9], max_tokens=4))
    forgotten = run.requests[1].handle
    answers = run_all(run, full)
    assert [len(answers[request.handle]) for request in run.requests] == [4, 0, 4, 4]
    assert "mask is missing" in (run.engine.take_cause(forgotten) or "")


def test_a_mask_that_allows_nothing_ends_its_request_alone(make_run: MakeRun) -> None:
    run = make_run(
        mask_provider=lambda request: HostMasks(
            request.rows, np.zeros((len(request.rows), VOCAB_SIZE), dtype=np.bool_)
        )
    )
    run.submit(NullRequest(1, [1], max_tokens=4, host_masked=True))
    run.submit(NullRequest(2, [2], max_tokens=4))
    finished = run.finish_all()
    assert [answer.reason for answer in finished] == [_core.ERROR, _core.LENGTH]


def test_a_provider_that_raises_ends_the_requests_it_was_asked_about(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(request: MaskRequest) -> HostMasks:
        raise ValueError("no grammar")

    run = make_run(mask_provider=raises)
    run.submit(NullRequest(1, [1], max_tokens=4, host_masked=True))
    run.submit(NullRequest(2, [2], max_tokens=4))
    with caplog.at_level(logging.WARNING, logger="noria"):
        finished = run.finish_all()
    assert [answer.reason for answer in finished] == [_core.ERROR, _core.LENGTH]
    assert "no grammar" in caplog.text
    cause = run.engine.take_cause(run.requests[0].handle)
    assert cause == "its mask provider failed: ValueError: no grammar"
    run.assert_nothing_is_left()


def test_no_mask_is_wanted_for_a_finished_request(make_run: MakeRun) -> None:
    masks = EvenThenOdd()
    run = make_run(small_config(depth=3), mask_provider=masks)
    run.executor.forward = run.executor.inner.forward  # type: ignore[method-assign]
    run.submit(NullRequest(1, [1], max_tokens=20, host_masked=True))
    run.submit(NullRequest(2, [2], max_tokens=20, host_masked=True))
    num_turns = 0
    while run.engine.has_work:
        events = run.engine.turn()
        assert events is not None
        masks.see(events.rows)
        num_turns += 1
        if num_turns == 5:
            run.engine.abort(run.requests[0].handle)
            num_asked = len(masks.asked)
    assert all(run.requests[0].handle not in request.handles for request in masks.asked[num_asked:])
    assert len(masks.asked) > num_asked


def test_a_masked_request_needs_a_provider(make_run: MakeRun) -> None:
    run = make_run()
    with pytest.raises(RejectedError, match="no mask_provider"):
        run.engine.submit([1], SeatInit(SamplingParams(), 1, 1), 4, host_masked=True)
