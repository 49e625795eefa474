"""Where every layer has a window, KV behind it is given back, and no token changes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_llama import llama_config, save_llama
from torch_harness import Answer, TorchBench, Watched, answers_alone, make_asks, reference_answer, tiny_config

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.models import Model, load_model
from noria.runner.step import StepView

WINDOW = 21
ASKS = make_asks(13, longest=150, max_tokens=60, seed=5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral."""
    directory = tmp_path_factory.mktemp("mistral")
    save_llama(directory, llama_config("mistral", sliding_window=WINDOW, num_hidden_layers=2))
    return directory


@pytest.fixture(scope="module")
def mistral(directory: Path) -> Model:
    return load_model(directory, dtype="float64", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def alone(mistral: Model) -> list[Answer]:
    """Nothing is given back."""
    return answers_alone(mistral, ASKS)


class Poisoner(Watched):
    """Fills every block that is in no seat's table with NaN before a step computes."""

    num_poisoned = 0

    def forward(self, view: StepView) -> None:
        executor = self.inner
        kv = executor._kv
        unused = np.setdiff1d(np.arange(1, kv.num_blocks + 1), executor.expander.block_tables)
        kv.memory[:, :, unused] = torch.nan
        self.num_poisoned += len(unused)
        super().forward(view)


def test_one_at_a_time_they_are_the_dense_references(
    directory: Path, mistral: Model, alone: list[Answer]
) -> None:
    for ask, (ids, _) in zip(ASKS, alone, strict=True):
        assert ids == reference_answer(directory, mistral, ask, ids)
    assert any(len(ask.prompt) + len(ids) > 4 * WINDOW for ask, (ids, _) in zip(ASKS, alone, strict=True))


@pytest.mark.parametrize(("depth", "block_size"), [(1, 4), (2, 1), (2, 16), (3, 4)])
def test_what_lies_behind_the_window_is_given_back_and_never_read(
    mistral: Model, alone: list[Answer], depth: int, block_size: int
) -> None:
    poisoners: list[Poisoner] = []

    def wrap(executor: object) -> Poisoner:
        poisoners.append(Poisoner(executor))  # type: ignore[arg-type]
        return poisoners[0]

    config = tiny_config(
        depth=depth,
        block_size=block_size,
        num_kv_blocks=240 // block_size,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
    )
    run = TorchBench(mistral, config, wrap=wrap).run(ASKS)
    assert run.answers == alone
    assert run.stats.num_window_blocks > 0
    assert poisoners[0].num_poisoned > 0
    longest = max(len(ask.prompt) + len(ids) for ask, (ids, _) in zip(ASKS, alone, strict=True))
    assert longest > 150


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefixes_are_found_by_their_last_window(mistral: Model, alone: list[Answer], depth: int) -> None:
    config = tiny_config(depth=depth, block_size=4, num_kv_blocks=34, max_num_batched_tokens=32)
    run = TorchBench(mistral, config).run([*ASKS, *ASKS])
    assert run.answers == [*alone, *alone]
    assert run.stats.num_window_blocks > 0
    assert run.stats.num_prefix_hit_tokens > 0
    assert run.stats.num_preemptions > 0


def test_moves_and_windows_go_together(mistral: Model, alone: list[Answer]) -> None:
    config = tiny_config(block_size=4, num_kv_blocks=200)
    run = TorchBench(mistral, config, forced_moves=2).run(ASKS)
    assert run.answers == alone
    assert run.stats.num_window_blocks > 0
    assert run.stats.num_moves >= run.stats.num_steps


def test_a_request_may_be_longer_than_the_cache(mistral: Model) -> None:
    config = EngineConfig(
        model="tiny", num_kv_blocks=8, block_size=16, max_num_batched_tokens=64, max_model_len=512
    )
    resolved = config.resolve(mistral.config, mistral.dtype)
    assert (resolved.max_model_len, resolved.window) == (512, WINDOW)
    assert any("more than 21 tokens back is given back" in note for note in resolved.notes)
    wide = EngineConfig(model="tiny", num_kv_blocks=8, max_num_batched_tokens=256, max_model_len=512)
    with pytest.raises(ConfigError, match="max_model_len is 512; the KV cache of 8 blocks"):
        wide.resolve(mistral.config, mistral.dtype)


def test_a_model_with_a_layer_that_sees_all_keeps_its_kv(tiny_model: Model, mistral: Model) -> None:
    mixed = replace(mistral.config, windows=(WINDOW, None))
    resolved = EngineConfig(model="tiny", num_kv_blocks=40).resolve(mixed, mistral.dtype)
    assert resolved.window == 0
    assert any("as 1 of 2 layers see all tokens" in note for note in resolved.notes)
    resolved = EngineConfig(model="tiny", num_kv_blocks=40).resolve(tiny_model.config, tiny_model.dtype)
    assert resolved.window == 0
    assert not any("window" in note for note in resolved.notes)
