"""A request's tokens do not depend on what shares its batch, nor on chunks, preemption, hits or depth."""

from pathlib import Path

import numpy as np
import pytest
import torch
from near_ties import Agreement
from torch_harness import (
    Answer,
    Ask,
    TorchBench,
    answers_alone,
    expected_reason,
    make_asks,
    reference_answer,
    tiny_config,
)
from transformers import LlamaForCausalLM

from noria import _core
from noria.models import Model

ASKS = make_asks(23, longest=300, max_tokens=24, seed=0)


@pytest.fixture(scope="module")
def alone(tiny_model: Model) -> list[Answer]:
    return answers_alone(tiny_model, ASKS)


def test_the_requests_are_of_every_kind() -> None:
    lengths = sorted(len(ask.prompt) for ask in ASKS)
    assert (lengths[0], lengths[-1], len(ASKS)) == (1, 300, 24)
    assert 5 < sum(ask.params.temperature == 0 for ask in ASKS) < 20


def test_one_at_a_time_they_are_the_dense_references(
    tiny_directory: Path, tiny_model: Model, alone: list[Answer]
) -> None:
    for ask, (ids, reason) in zip(ASKS, alone, strict=True):
        assert ids == reference_answer(tiny_directory, tiny_model, ask, ids)
        assert reason == expected_reason(ask, ids)
        assert len(ids) == ask.params.max_tokens or ids[-1] in ask.stop_token_ids
        assert not set(ids[:-1]) & set(ask.stop_token_ids)
    assert any(reason == _core.STOP for _, reason in alone)
    assert len({token for ids, _ in alone for token in ids}) > 40, "a model that repeats itself hides faults"


def test_greedy_ones_are_transformers_but_for_near_ties(tiny_directory: Path, alone: list[Answer]) -> None:
    peer = LlamaForCausalLM.from_pretrained(tiny_directory, dtype=torch.float64)
    agreed = Agreement()
    for ask, (ids, _) in zip(ASKS, alone, strict=True):
        if ask.params.temperature > 0:
            continue
        text = torch.tensor([[*ask.prompt, *ids[:-1]]])
        with torch.inference_mode():
            logits = peer(text).logits[0, len(ask.prompt) - 1 :].double()
        agreed.add(ids, logits)
    print(agreed)
    assert agreed.num_same > agreed.num_near_ties


@pytest.mark.parametrize("chunk", [1, 7, 64, 0])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_chunks_and_depth_change_no_token(
    tiny_model: Model, alone: list[Answer], chunk: int, depth: int
) -> None:
    config = tiny_config(
        depth=depth,
        long_prefill_token_threshold=chunk,
        max_partial_prefills=4,
        max_num_batched_tokens=64 if chunk else 512,
    )
    run = TorchBench(tiny_model, config).run(ASKS)
    assert run.answers == alone
    num_chunk_rows = run.stats.num_rows - run.stats.num_sample_rows  # rows of a prompt's parts but its last
    if chunk:
        computed = run.stats.num_prefill_tokens
        assert num_chunk_rows >= computed // chunk - 2 * len(ASKS)
    else:
        assert num_chunk_rows < len(ASKS)  # only where the budget ends


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preemption_changes_no_token(tiny_model: Model, alone: list[Answer], depth: int) -> None:
    config = tiny_config(depth=depth, num_kv_blocks=22, enable_prefix_caching=False, watermark=0.0)
    run = TorchBench(tiny_model, config).run(ASKS)
    assert run.answers == alone
    assert run.stats.num_preemptions > 0
    assert run.stats.num_resumed == run.stats.num_preemptions


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefix_hits_change_no_token(tiny_model: Model, alone: list[Answer], depth: int) -> None:
    bench = TorchBench(tiny_model, tiny_config(depth=depth, num_kv_blocks=60))
    run = bench.run([*ASKS, *ASKS])
    assert run.answers == [*alone, *alone]
    assert run.stats.num_prefix_hit_tokens > 300
    assert sum(answer.num_cached_tokens for answer in run.finished) > 300


@pytest.mark.parametrize("batching", ["padded", "gang"])
def test_static_batches_change_no_token(tiny_model: Model, alone: list[Answer], batching: str) -> None:
    config = tiny_config(batching=batching, max_num_batched_tokens=2048)
    run = TorchBench(tiny_model, config).run(ASKS)
    assert run.answers == alone
    assert (run.stats.num_ghost_rows > 0, run.stats.num_padding_tokens > 0) == (batching == "padded",) * 2


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_the_block_size_changes_no_token(tiny_model: Model, alone: list[Answer], block_size: int) -> None:
    config = tiny_config(block_size=block_size, num_kv_blocks=1200 // block_size, max_num_batched_tokens=50)
    run = TorchBench(tiny_model, config).run(ASKS)
    assert run.answers == alone


def test_what_lies_in_unused_blocks_changes_no_token(tiny_model: Model, alone: list[Answer]) -> None:
    run = TorchBench(tiny_model, tiny_config(), fill_kv=float("nan")).run(ASKS)
    assert run.answers == alone


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_arrival_changes_no_token(tiny_model: Model, alone: list[Answer], seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(ASKS)).tolist()
    waiting = [ASKS[place] for place in order]
    bench = TorchBench(tiny_model, tiny_config(depth=1 + seed % 3, num_kv_blocks=40))
    late = waiting[4:]
    run = bench.run(waiting[:4], on_turn=lambda turn, _: late_submit(bench, late, turn))
    assert not late
    by_place = dict(zip(order, run.answers, strict=True))
    assert [by_place[place] for place in range(len(ASKS))] == alone


def late_submit(bench: TorchBench, late: list[Ask], turn: int) -> None:
    """One more every other turn."""
    if late and turn % 2:
        bench.submit(late.pop(0))
