"""Preemption by swap changes no token, and computes none again; without room it falls back, and says so."""

from collections.abc import Callable

import pytest
import torch
from torch_harness import Answer, TorchBench, TorchRun, Watched, answers_alone, make_asks, tiny_config

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.kv_cache import KvCache
from noria.models import Model
from noria.runner.step import StepView

ASKS = make_asks(11, longest=90, max_tokens=40, seed=9)
CROWDED = {"num_kv_blocks": 20, "block_size": 8, "watermark": 0.0}
"""A pool that one request can fill."""


@pytest.fixture(scope="module")
def alone(tiny_model: Model) -> list[Answer]:
    return answers_alone(tiny_model, ASKS)


@pytest.mark.parametrize(("depth", "enable_prefix_caching"), [(1, False), (2, True), (2, False), (3, False)])
def test_swaps_change_no_token_and_compute_none_again(
    tiny_model: Model, alone: list[Answer], depth: int, enable_prefix_caching: bool
) -> None:
    config = tiny_config(
        depth=depth, num_swap_blocks=100, enable_prefix_caching=enable_prefix_caching, **CROWDED
    )
    run = TorchBench(tiny_model, config).run(ASKS)
    assert run.answers == alone
    stats = run.stats
    assert stats.num_preemptions == stats.num_resumed > 1
    assert stats.num_swapped_out >= stats.num_swapped_in > 4
    assert (stats.num_swap_misses, stats.num_preempted_tokens) == (0, 0)
    if not enable_prefix_caching:
        assert stats.num_swapped_out == stats.num_swapped_in
        # Each prompt once, and the last token of each that came back.
        assert stats.num_prefill_tokens == sum(len(ask.prompt) for ask in ASKS) + stats.num_resumed


def test_a_full_host_falls_back_to_computing_again_and_counts_it(
    tiny_model: Model, alone: list[Answer]
) -> None:
    run = TorchBench(tiny_model, tiny_config(num_swap_blocks=5, **CROWDED)).run(ASKS)
    assert run.answers == alone
    assert run.stats.num_swapped_in > 0
    assert run.stats.num_swap_misses > 0
    assert run.stats.num_preempted_tokens > 0


def test_swaps_go_together_with_moves_every_step(tiny_model: Model, alone: list[Answer]) -> None:
    config = tiny_config(num_swap_blocks=100, **CROWDED)
    run = TorchBench(tiny_model, config, forced_moves=2).run(ASKS)
    assert run.answers == alone
    assert run.stats.num_swapped_in > 0
    assert run.stats.num_moves > 0


class Failing(Watched):
    """Fails some of the steps that swap: before they have done anything, or when they have copied."""

    def __init__(self, inner: object, is_picked: Callable[[int], bool]) -> None:
        super().__init__(inner)  # type: ignore[arg-type]
        self._is_picked = is_picked
        self._num_seen = 0
        self.num_failed = {"expand": 0, "forward": 0}
        self._fails_next = False

    def expand(self, view: StepView, inits: object) -> None:
        if len(view.swap_out) or len(view.swap_in):
            self._num_seen += 1
            if self._is_picked(self._num_seen):
                if self._num_seen % 2:
                    self.num_failed["expand"] += 1
                    raise RuntimeError("a fault before the copies")
                self._fails_next = True
        super().expand(view, inits)  # type: ignore[arg-type]

    def forward(self, view: StepView) -> None:
        if self._fails_next:
            self._fails_next = False
            self.num_failed["forward"] += 1
            raise RuntimeError("a fault behind the copies")
        super().forward(view)


@pytest.mark.parametrize("depth", [1, 3])
def test_steps_that_fail_amid_swaps_change_no_token(
    tiny_model: Model, alone: list[Answer], depth: int
) -> None:
    wrapped: list[Failing] = []

    def wrap(executor: object) -> Failing:
        wrapped.append(Failing(executor, lambda num_seen: num_seen in (1, 4, 7, 8)))
        return wrapped[0]

    config = tiny_config(depth=depth, num_swap_blocks=100, **CROWDED)
    run: TorchRun = TorchBench(tiny_model, config, wrap=wrap).run(ASKS)
    assert run.answers == alone
    assert run.stats.num_failed_steps >= sum(wrapped[0].num_failed.values())  # and those behind them
    assert all(wrapped[0].num_failed.values())
    assert run.stats.num_swapped_in > 0


def test_blocks_are_copied_to_the_host_and_back(tiny_model: Model) -> None:
    kv = KvCache(tiny_model.config, 6, 4, torch.float64, torch.device("cpu"), num_swap_blocks=3)
    torch.manual_seed(0)
    kv.memory[:, :, 1:] = torch.randn(kv.memory[:, :, 1:].shape, dtype=torch.float64)
    before = kv.memory.clone()
    kv.swap_out(torch.tensor([5, 2]), torch.tensor([0, 2]))
    kv.memory[:, :, 1:] = 7.0
    kv.swap_in(torch.tensor([2, 0]), torch.tensor([1, 6]))
    assert torch.equal(kv.memory[:, :, [1, 6]], before[:, :, [2, 5]])
    assert bool((kv.memory[:, :, 2:6] == 7).all())


@pytest.mark.parametrize(
    "changes", [{"contiguous": True, "enable_prefix_caching": False}, {"batching": "gang"}]
)
def test_swap_blocks_without_preemptions_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^num_swap_blocks is 4; it must be 0 where"):
        EngineConfig(model="tiny", num_swap_blocks=4, **changes)  # type: ignore[arg-type]
