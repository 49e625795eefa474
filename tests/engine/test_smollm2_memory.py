"""A real model whose KV moves: each way of moving it happens, and changes no token."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch_harness import Answer, Ask, TorchBench, answers_alone, tiny_config

from noria.config import EngineConfig
from noria.models import Model, load_model, model
from noria.sampling.params import SamplingParams
from noria.text.tokenizer import load_tokenizer

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain photosynthesis to a child, step by step.",
    "Why is the sky blue?",
    "List the planets of the solar system, and say of each how large it is and how far from the sun.",
    "How do I boil an egg?",
]
WINDOW = 40


def load(path: Path) -> Model:
    return load_model(path, dtype="float32", device=torch.device("cpu"), backend="cpu")


@pytest.fixture(scope="module")
def asks(smollm2_path: Path) -> list[Ask]:
    tokenizer = load_tokenizer(smollm2_path)
    asks = []
    for seed, question in enumerate(QUESTIONS):
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        params = SamplingParams(temperature=0.7 * (seed % 2), seed=seed, max_tokens=16, ignore_eos=True)
        asks.append(Ask(tuple(tokenizer.encode(text, add_special_tokens=False)), params))
    return asks


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Model:
    return load(smollm2_path)


@pytest.fixture(scope="module")
def alone(smollm2: Model, asks: list[Ask]) -> list[Answer]:
    return answers_alone(smollm2, asks)


@pytest.fixture(scope="module")
def windowed(smollm2_path: Path) -> Iterator[Model]:
    """The same weights, with a window in every layer."""
    read = model.read_gguf_config

    def with_windows(*arguments: object) -> object:
        config = read(*arguments)  # type: ignore[arg-type]
        return replace(config, windows=(WINDOW,) * config.num_layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "read_gguf_config", with_windows)
        yield load(smollm2_path)


def config(**changes: object) -> EngineConfig:
    return tiny_config(**{"depth": 2, "max_model_len": 128, "block_size": 8, "num_kv_blocks": 120, **changes})


def test_a_forced_move_every_step(smollm2: Model, asks: list[Ask], alone: list[Answer]) -> None:
    run = TorchBench(smollm2, config(), forced_moves=2).run(asks)
    assert run.answers == alone
    assert run.stats.num_moves >= run.stats.num_steps


def test_swaps(smollm2: Model, asks: list[Ask], alone: list[Answer]) -> None:
    run = TorchBench(smollm2, config(num_kv_blocks=20, num_swap_blocks=100, watermark=0.0)).run(asks)
    assert run.answers == alone
    assert run.stats.num_swapped_in > 0
    assert run.stats.num_preempted_tokens == 0


def test_resizes(smollm2: Model, asks: list[Ask], alone: list[Answer]) -> None:
    bench = TorchBench(smollm2, config(num_kv_blocks=60, watermark=0.0))
    sizes = {3: 18, 14: 70, 20: 17}
    reached = []

    def on_turn(turn: int, _: object) -> None:
        if turn in sizes:
            bench.engine.resize_kv_cache(sizes[turn])
            bench.num_blocks = sizes[turn]
        if bench.kv.num_blocks not in reached:
            reached.append(bench.kv.num_blocks)

    run = bench.run(asks, on_turn)
    assert run.answers == alone
    assert reached == [60, 18, 70, 17]


def test_what_lies_behind_a_window_is_given_back(windowed: Model, asks: list[Ask]) -> None:
    run = TorchBench(windowed, config(enable_prefix_caching=False), fill_kv=float("nan")).run(asks)
    assert run.answers == answers_alone(windowed, asks)
    assert run.stats.num_window_blocks > 0
