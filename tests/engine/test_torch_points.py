"""Failures, aborts and late stops at chosen points of a torch run: nobody else's tokens change."""

import logging

import numpy as np
import pytest
import torch
from torch_harness import Answer, Ask, TorchBench, TorchRun, Watched, answers_alone, make_asks, tiny_config

from noria import _core
from noria.errors import ConfigError
from noria.models import Model
from noria.outputs import Events
from noria.runner.base import HostMasks, PendingIds
from noria.runner.step import StepView
from noria.runner.torch_runner import TorchExecutor

ASKS = make_asks(9, longest=60, max_tokens=24, seed=5)
NUM_POINTS = 18


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="noria")


@pytest.fixture(scope="module")
def alone(tiny_model: Model) -> list[Answer]:
    return answers_alone(tiny_model, ASKS)


def pressed_bench(model: Model, depth: int, wrap: object = None) -> TorchBench:
    """Three seats and a pool that preempts, prefix hits, chunks of 16 tokens."""
    config = tiny_config(
        depth=depth, max_num_seqs=3, max_num_batched_tokens=24, num_kv_blocks=21, block_size=4, watermark=0.0
    )
    return TorchBench(model, config, wrap=wrap)  # type: ignore[arg-type]


class FailsOnce(Watched):
    """Fails one phase of one step, after spoiling all the KV that the step was to store."""

    def __init__(self, inner: TorchExecutor, step: int, phase: str) -> None:
        super().__init__(inner)
        self.step = step
        self.phase = phase
        self.has_failed = False

    def _fail(self, phase: str, view: StepView) -> None:
        if (view.step, phase) != (self.step, self.phase):
            return
        self.has_failed = True
        slots = torch.from_numpy(self.inner.expander.slot_mapping[: view.num_tokens])
        for index in range(self.inner._model.config.num_layers):
            for part in self.inner._kv.layer(index):
                part.flatten(0, 1)[slots[slots >= 0]] = 1e3
        raise RuntimeError(f"injected in {phase}")

    def forward(self, view: StepView) -> None:
        self._fail("before forward", view)
        super().forward(view)
        self._fail("after forward", view)

    def sample(self, view: StepView, masks: HostMasks | None) -> PendingIds:
        self._fail("before sample", view)
        pending = super().sample(view, masks)
        self._fail("after sample", view)
        return pending


PHASES = ["before forward", "after forward", "before sample", "after sample"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failure_at_chosen_points_changes_no_token(
    tiny_model: Model, alone: list[Answer], depth: int
) -> None:
    undisturbed = pressed_bench(tiny_model, depth).run(ASKS)
    assert undisturbed.answers == alone
    assert undisturbed.stats.num_preemptions > 0
    assert undisturbed.stats.num_prefix_hit_tokens > 0
    rng = np.random.default_rng(depth)
    for step in np.sort(rng.choice(undisturbed.stats.num_steps, NUM_POINTS, replace=False)) + 1:
        failing: list[FailsOnce] = []

        def wrap(
            inner: TorchExecutor, step: int = int(step), failing: list[FailsOnce] = failing
        ) -> FailsOnce:
            failing.append(FailsOnce(inner, step, PHASES[step % 4]))
            return failing[0]

        run = pressed_bench(tiny_model, depth, wrap).run(ASKS)
        assert failing[0].has_failed
        assert run.answers == alone
        assert 1 <= run.stats.num_failed_steps <= depth
        assert run.causes == [None] * len(ASKS)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", ["abort", "late stop"])
def test_an_abort_or_a_late_stop_at_chosen_points_changes_no_other_token(
    tiny_model: Model, alone: list[Answer], depth: int, kind: str
) -> None:
    num_turns = pressed_bench(tiny_model, depth).run(ASKS).stats.num_steps
    rng = np.random.default_rng(10 + depth)
    num_ended = 0
    for turn in np.sort(rng.choice(num_turns, NUM_POINTS // 2, replace=False)).tolist():
        victim = int(rng.integers(len(ASKS)))
        bench = pressed_bench(tiny_model, depth)
        ended = Ending(bench, victim, turn, lag=None if kind == "abort" else int(rng.integers(0, 3)))
        run = bench.run(ASKS, on_turn=ended.on_turn)
        num_ended += ended.has_ended
        check_others(run, alone, victim, ended)
    assert num_ended > 0


class Ending:
    """Ends one request after one turn: aborts it, or stops it `lag` tokens before its last."""

    def __init__(self, bench: TorchBench, victim: int, turn: int, lag: int | None) -> None:
        self.bench = bench
        self.victim = victim
        self.turn = turn
        self.lag = lag
        self.num_tokens = 0
        self.num_kept: int | None = None
        self.has_ended = False

    def on_turn(self, turn: int, events: Events) -> None:
        handle = self.bench.handles[self.victim]
        self.num_tokens += int(np.count_nonzero((events.handles == handle) & (events.kinds == _core.TOKEN)))
        if turn != self.turn:
            return
        if self.lag is None:
            self.has_ended = self.bench.engine.abort(handle)
        else:
            self.num_kept = max(0, self.num_tokens - self.lag)
            self.has_ended = self.bench.engine.finish(handle, self.num_kept, _core.STOP)


def check_others(run: TorchRun, alone: list[Answer], victim: int, ending: Ending) -> None:
    for index, (got, wanted) in enumerate(zip(run.answers, alone, strict=True)):
        if index != victim or not ending.has_ended:
            assert got == wanted
        elif ending.num_kept is None:
            assert got == (wanted[0][: len(got[0])], _core.ABORT)
        else:
            assert got == (wanted[0][: ending.num_kept], _core.STOP)


# ---- rows that cannot be sampled


class SpoilsLogits(Watched):
    """Gives one request logits that mean nothing, at one output position."""

    def __init__(self, inner: TorchExecutor, seed: int, position: int, value: float) -> None:
        super().__init__(inner)
        self.seed, self.position, self.value = seed, position, value

    def sample(self, view: StepView, masks: HostMasks | None) -> PendingIds:
        expander = self.inner.expander
        seats = expander.row_seats[expander.sample_rows[: view.num_sample_rows]]
        last = expander.logits_indices[: view.num_logits]
        outputs = expander.positions[last] + 1 - expander.num_prompt_tokens[seats]
        seeds = self.inner._sampler._state.seed.numpy()[seats]
        hit = (seeds == self.seed) & (outputs == self.position)
        with torch.inference_mode():
            self.inner._logits[torch.from_numpy(hit)] = self.value
        return super().sample(view, masks)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_mean_nothing_end_their_own_request(
    tiny_model: Model, alone: list[Answer], value: float
) -> None:
    victim = next(index for index, (ids, _) in enumerate(alone) if len(ids) > 4)

    def wrap(inner: TorchExecutor) -> SpoilsLogits:
        return SpoilsLogits(inner, ASKS[victim].seed, 3, value)

    run = TorchBench(tiny_model, tiny_config(), wrap=wrap).run(ASKS)
    for index, (got, wanted) in enumerate(zip(run.answers, alone, strict=True)):
        assert got == ((wanted[0][:3], _core.ERROR) if index == victim else wanted)
    assert "not finite" in (run.causes[victim] or "")


# ---- masks and edits


def masked_asks() -> list[Ask]:
    return [Ask(ask.prompt, ask.params, (), host_masked=index % 2 == 0) for index, ask in enumerate(ASKS)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_masks_hold_for_their_rows_and_touch_no_other(
    tiny_model: Model, alone: list[Answer], depth: int
) -> None:
    vocab_size = tiny_model.config.vocab_size
    bench = TorchBench(
        tiny_model,
        tiny_config(depth=depth),
        mask_provider=lambda request: HostMasks(
            request.rows, np.arange(vocab_size) % 3 == request.output_positions[:, None] % 3
        ),
    )
    asks = masked_asks()
    run = bench.run(asks)
    for ask, (ids, _), (free, _) in zip(asks, run.answers, alone, strict=True):
        if ask.host_masked:
            assert [token % 3 for token in ids] == [place % 3 for place in range(ask.params.max_tokens or 0)]
        else:
            assert ids[: len(free)] == free  # here without stop ids


def test_an_edit_changes_its_row_and_one_that_raises_ends_its_request(tiny_model: Model) -> None:
    def raises(logits: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    def only_17(logits: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(len(logits)) == 17, 0.0, -torch.inf)

    bench = TorchBench(
        tiny_model,
        tiny_config(),
        mask_provider=lambda request: HostMasks(
            np.empty(0, dtype=np.int64),
            np.empty((0, 97), dtype=np.bool_),
            {
                row: raises if handle == bench.handles[0] else only_17
                for row, handle in zip(request.rows.tolist(), request.handles.tolist(), strict=True)
            },
        ),
    )
    run = bench.run(masked_asks()[:3:2])
    assert run.answers[0] == ([], _core.ERROR)
    assert set(run.answers[1][0]) == {17}
    assert run.causes[0] == "its logits processor failed: ValueError: no"


def test_drafts_are_refused(tiny_model: Model) -> None:
    config = tiny_config().resolve(tiny_model.config, tiny_model.dtype, 2**20)
    with pytest.raises(ConfigError, match="the torch runner verifies no drafts"):
        TorchExecutor(tiny_model, None, config.core(max_drafts=2).layout)  # type: ignore[arg-type]


def test_last_tokens_may_live_on_the_device_alone(tiny_model: Model, alone: list[Answer]) -> None:
    """What a GPU does, here on the host: the expander never hears of a sampled token."""

    def wrap(inner: TorchExecutor) -> TorchExecutor:
        inner._on_host = False
        inner._last_token = torch.zeros(inner._last_token.shape, dtype=torch.int64)
        return inner

    assert TorchBench(tiny_model, tiny_config(), wrap=wrap).run(ASKS).answers == alone
