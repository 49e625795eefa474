"""Tokens over a rounded KV cache do not depend on what shares a batch, nor on where KV has been meanwhile.

Held against the same model and format alone. Every reader sees what is stored, the chunk that stores it too,
so nothing hangs on where a prompt is cut.
"""

from pathlib import Path

import pytest
import torch
from torch_harness import Answer, TorchBench, answers_alone, make_asks, tiny_config

from noria import LLM, SamplingParams
from noria.config import EngineConfig
from noria.models import Model, load_model

ASKS = make_asks(12, longest=150, max_tokens=24, seed=4)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["cpu", "torch"])
def model(request: pytest.FixtureRequest, tiny_directory: Path) -> Model:
    dtype = torch.float32 if request.param == "cpu" else torch.float64
    return load_model(tiny_directory, dtype=dtype, device=CPU, backend=request.param)


@pytest.fixture(scope="module", params=["float16", "int8"])
def stored(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(model: Model, stored: str) -> list[Answer]:
    return answers_alone(model, ASKS, kv_cache_dtype=stored)


def config_of(stored: str, **changes: object) -> EngineConfig:
    return tiny_config(kv_cache_dtype=stored, **changes)


@pytest.mark.parametrize("chunk", [1, 7, 0])
def test_batches_and_chunks_change_no_token(
    model: Model, stored: str, alone: list[Answer], chunk: int
) -> None:
    config = config_of(stored, depth=3, long_prefill_token_threshold=chunk, max_partial_prefills=4)
    bench = TorchBench(model, config, fill_kv=float("nan"))
    assert bench.kv.dtype == getattr(torch, stored)
    run = bench.run(ASKS)
    assert run.answers == alone
    assert run.stats.num_rows > run.stats.num_sample_rows, "no prompt was cut"


def test_preemption_and_hits_change_no_token(model: Model, stored: str, alone: list[Answer]) -> None:
    config = config_of(stored, num_kv_blocks=22, watermark=0.0)
    run = TorchBench(model, config).run([*ASKS, *ASKS])
    assert run.answers == [*alone, *alone]
    assert run.stats.num_preemptions > 0
    assert run.stats.num_prefix_hit_tokens > 0


def test_swaps_and_moves_change_no_token(model: Model, stored: str, alone: list[Answer]) -> None:
    config = config_of(stored, num_swap_blocks=100, num_kv_blocks=24, block_size=8, watermark=0.0)
    run = TorchBench(model, config, forced_moves=2).run(ASKS)
    assert run.answers == alone
    assert run.stats.num_swapped_in > 0
    assert run.stats.num_moves > 0


def test_resizes_change_no_token(model: Model, stored: str, alone: list[Answer]) -> None:
    bench = TorchBench(model, config_of(stored, num_kv_blocks=60, watermark=0.0))
    sizes = {3: 12, 12: 70, 16: 11}

    def on_turn(turn: int, _: object) -> None:
        if turn in sizes:
            bench.engine.resize_kv_cache(sizes[turn])
            bench.num_blocks = sizes[turn]

    run = bench.run(ASKS, on_turn)
    assert run.answers == alone
    assert bench.kv.num_blocks == 11
    assert run.stats.num_moves > 0


def test_an_llm_says_what_its_cache_is_and_answers(
    tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    for stored in ("bfloat16", "float16", "int8"):
        with LLM(
            tiny_directory, dtype="float32", kv_cache_dtype=stored, num_kv_blocks=20, skip_tokenizer_init=True
        ) as llm:
            (output,) = llm.generate([[5, 6, 7]], params)
            assert len(output.outputs[0].token_ids) == 5
            assert llm.resolved_config.kv_dtype == getattr(torch, stored)
        assert f"({stored}, as asked for)" in capsys.readouterr().err
