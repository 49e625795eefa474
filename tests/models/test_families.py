"""Every family against our dense float64 reference and against transformers."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint
from near_ties import Agreement
from paged_steps import Harness, Sequence
from tiny_models import token_ids

from noria.loading import read_model_config
from noria.models import Model, load_model

CPU = torch.device("cpu")
EXACT = 1e-9
"""Against our reference in float64: rounding alone."""
PEER = 2e-3
"""Against transformers, whose norm and RoPE compute in float32 even in float64."""
"""Two best logits this close may come in either order."""

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12, "tie_word_embeddings": True}
NESTED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral with a window": ("mistral", {"sliding_window": 9}),
    "mistral without": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 with biases and windows": (
        "qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": MIXED,
        },
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3 with a window, a part rotating": (
        "phi3",
        {
            "sliding_window": 9,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "gemma2": ("gemma2", {**GEMMA, "head_dim": 8, "sliding_window": 9, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "head_dim": 16, "sliding_window": 9, "layer_types": MIXED}),
    "gemma3 with two ropes": (
        "gemma3_text",
        {**GEMMA, "head_dim": 8, "sliding_window": 4, "layer_types": MIXED, "rope_parameters": NESTED},
    ),
}
MakeCheckpoint = Callable[..., Checkpoint]


def made(checkpoint: MakeCheckpoint, name: str) -> Checkpoint:
    family, changes = FAMILIES[name]
    return checkpoint(family, **changes)


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float64) -> Model:
    return load_model(checkpoint.directory, dtype=dtype, device=CPU)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_prefill_gives_the_logits_of_both_references(checkpoint: MakeCheckpoint, name: str) -> None:
    tiny = made(checkpoint, name)
    ids = token_ids(80, 0)
    harness = Harness(load(tiny))
    logits = harness.prefill(harness.add(ids))
    assert_close(logits, tiny.dense(ids), EXACT)
    assert_close(logits, tiny.transformers(ids), PEER)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_early_token_moves_the_last_logits_by_far_more_than_the_tolerance(
    checkpoint: MakeCheckpoint, name: str
) -> None:
    """Through a window too: two layers of one reach past it, three past two of them."""
    tiny = made(checkpoint, name)
    ids = token_ids(9, 0)
    other = [(ids[0] + 1) % 97, *ids[1:]]
    assert (tiny.transformers(ids)[-1] - tiny.transformers(other)[-1]).abs().max() > 10 * PEER


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_nothing(checkpoint: MakeCheckpoint, name: str, chunk: int) -> None:
    tiny = made(checkpoint, name)
    ids = token_ids(80, 0)
    harness = Harness(load(tiny))
    assert_close(harness.prefill(harness.add(ids), chunk), tiny.dense(ids), EXACT)


@pytest.mark.parametrize("name", [name for name in FAMILIES if "window" in name or "gemma" in name])
def test_any_mix_of_rows_around_a_window_is_right(checkpoint: MakeCheckpoint, name: str) -> None:
    """Random chunks, decodes and padding, in rows shorter and longer than the window and than a block."""
    tiny = made(checkpoint, name)
    model = load(tiny)
    window = min(window for window in model.config.windows if window)
    for seed, block_size in enumerate((1, 3, 4)):
        generator = random.Random(seed)
        harness = Harness(model, seed=seed, block_size=block_size, max_blocks=128)
        sequences = [harness.add(token_ids(80, 0)[: generator.randint(1, 60)]) for _ in range(8)]
        assert any(len(sequence.token_ids) < window for sequence in sequences) or window < 6
        num_mixed = 0
        while left := [s for s in sequences if s.num_computed < len(s.token_ids)]:
            generator.shuffle(left)
            decodes: list[Sequence] = []
            chunks: list[tuple[Sequence, int]] = []
            for sequence in left[: generator.randint(1, 8)]:
                if sequence.num_computed and generator.random() < 0.5:
                    decodes.append(sequence)
                else:
                    most = len(sequence.token_ids) - sequence.num_computed
                    chunks.append((sequence, generator.randint(1, min(most, generator.choice([1, 7, 40])))))
            padding = [generator.randint(1, 9) for _ in range(generator.choice([0, 1]))]
            num_mixed += bool(decodes and chunks and padding)
            rows = [*decodes, *(sequence for sequence, _ in chunks)]
            for sequence, logits in zip(rows, harness.step(decodes, chunks, padding), strict=True):
                end = sequence.num_computed
                assert_close(logits, tiny.dense(token_ids(80, 0))[end - len(logits) : end], EXACT)
        assert num_mixed


def test_rows_longer_than_a_tile_of_queries_are_right_with_a_window(checkpoint: MakeCheckpoint) -> None:
    tiny = checkpoint("mistral", sliding_window=300, num_hidden_layers=1)
    ids = token_ids(500, 1)
    harness = Harness(load(tiny), num_seats=4, max_blocks=128)
    wanted = tiny.dense(ids)
    assert_close(harness.prefill(harness.add(ids)), wanted, EXACT)
    assert_close(wanted, tiny.transformers(ids), PEER)
    first, second = harness.add(ids), harness.add(ids[:320])
    harness.step(chunks=[(first, 10)])
    rows = harness.step(chunks=[(first, 480), (second, 320)])
    assert_close(rows[0], wanted[10:490], EXACT)
    assert_close(rows[1], wanted[:320], EXACT)


def test_layers_without_a_row_past_their_window_share_the_plain_plan(checkpoint: MakeCheckpoint) -> None:
    tiny = made(checkpoint, "gemma3")
    harness = Harness(load(tiny))
    sequence = harness.add(token_ids(12, 0))
    harness.step(chunks=[(sequence, 9)])
    for count, windows in ((8, {None}), (9, {None}), (10, {None, 9})):
        other = harness.add(token_ids(12, 0))
        inputs = harness.inputs([], [(other, count)], [])
        step = harness.model.attention.begin(inputs, harness.kv)
        for scope in harness.model.network.scopes:
            step.attend(torch.zeros(count, 6, 16, dtype=torch.float64), *harness.kv.layer(0), scope)
        assert step._plans.keys() == windows


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_but_for_near_ties(
    checkpoint: MakeCheckpoint, name: str
) -> None:
    tiny = made(checkpoint, name)
    harness = Harness(load(tiny, torch.float32))
    ids = token_ids(5, 3)
    sequence = harness.add(list(ids))
    logits = harness.prefill(sequence)[-1]
    for _ in range(40):
        harness.extend(sequence, int(logits.argmax()))
        logits = harness.step(decodes=[sequence])[0][0]
    wanted = tiny.transformers(sequence.token_ids[:-1])[4:]
    Agreement().add(sequence.token_ids[5:], wanted)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "phi3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 1.5)])
def test_lower_precisions_stay_near_the_reference(
    checkpoint: MakeCheckpoint, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    tiny = made(checkpoint, name)
    ids = token_ids(80, 0)
    harness = Harness(load(tiny, dtype))
    sequence, shorter = harness.add(ids), harness.add(ids[:30])
    harness.prefill(shorter)
    harness.extend(shorter, ids[30])
    decoded, whole = harness.step(decodes=[shorter], chunks=[(sequence, 80)], padding=[2])
    assert_close(whole, tiny.dense(ids), tolerance)
    assert_close(decoded[0], tiny.dense(ids)[30], tolerance)


# ---- a RoPE whose frequencies hang on the context

SHORT = [1.0, 1.1, 1.2, 1.5]
LONG = [1.0, 2.0, 4.0, 8.0]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 8,
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_yarn_is_that_of_both_references(checkpoint: MakeCheckpoint, family: str) -> None:
    tiny = checkpoint(family, rope_parameters=YARN, head_dim=16)
    model = load(tiny)
    assert model.network.rope.scale != 1
    ids = token_ids(80, 0)
    harness = Harness(model)
    logits = harness.prefill(harness.add(ids), 50)
    assert_close(logits, tiny.dense(ids), EXACT)
    assert_close(logits, tiny.transformers(ids), PEER)


def test_a_context_stated_before_yarn_or_dynamic_is_extended(checkpoint: MakeCheckpoint) -> None:
    tiny = checkpoint("qwen2", rope_parameters=YARN | {"original_max_position_embeddings": 512})
    assert read_model_config(tiny.directory).max_position_embeddings == 2048
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    tiny = checkpoint("llama", rope_parameters=dynamic, max_position_embeddings=40)
    assert read_model_config(tiny.directory).max_position_embeddings == 80


@pytest.mark.parametrize("length", [40, 41, 64, 80])
def test_dynamic_frequencies_are_those_of_the_longest_context(
    checkpoint: MakeCheckpoint, length: int
) -> None:
    """transformers chooses by the text at hand: the same, where that is as long as the context."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    tiny = checkpoint("llama", rope_parameters=dynamic, max_position_embeddings=40)
    ids = token_ids(length, 0)
    harness = Harness(load_model(tiny.directory, dtype=torch.float64, device=CPU, max_model_len=length))
    logits = harness.prefill(harness.add(ids), 25)
    assert_close(logits, tiny.dense(ids, length), EXACT)
    assert_close(logits, tiny.transformers(ids), PEER)


@pytest.mark.parametrize(("length", "is_long"), [(32, False), (33, True), (80, True)])
@pytest.mark.parametrize("attention_factor", [None, 1.3])
def test_longrope_divides_by_the_factors_of_the_longest_context(
    checkpoint: MakeCheckpoint, length: int, is_long: bool, attention_factor: float | None
) -> None:
    given = {} if attention_factor is None else {"attention_factor": attention_factor}
    tiny = checkpoint(
        "phi3",
        rope_parameters=LONGROPE | given,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        sliding_window=None,
    )
    ids = token_ids(length, 0)
    model = load_model(tiny.directory, dtype=torch.float64, device=CPU, max_model_len=length)
    harness = Harness(model)
    logits = harness.prefill(harness.add(ids), 25)
    assert_close(logits, tiny.dense(ids, length), EXACT)
    assert_close(logits, tiny.transformers(ids), PEER)
    # A shorter text in the same engine has the same frequencies: its K may be another's too.
    shorter = harness.prefill(harness.add(ids[:20]))
    assert_close(shorter, tiny.dense(ids[:20], length), EXACT)
    assert torch.equal(shorter, logits[:20]) or (shorter - logits[:20]).abs().max() < EXACT


def test_old_spellings_of_gemma_and_phi_are_read(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def respelled(tiny: Checkpoint, **changes: Any) -> Any:
        values = json.loads((tiny.directory / "config.json").read_text()) | changes
        kept = {key: value for key, value in values.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        return read_model_config(tmp_path)

    tiny = made(checkpoint, "gemma3 with two ropes")
    old = respelled(
        tiny,
        rope_parameters=...,
        rope_theta=5000.0,
        rope_local_base_freq=50.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )
    assert old == read_model_config(tiny.directory)
    tiny = made(checkpoint, "gemma3")
    defaults = respelled(tiny, rope_parameters=..., layer_types=..., sliding_window_pattern=2)
    assert (defaults.rope.theta, defaults.local_rope.theta) == (1e6, 1e4)
    assert defaults.windows == (9, None, 9)
    longrope = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
    phi = checkpoint("phi3", sliding_window=None)
    old = respelled(phi, rope_parameters=..., rope_scaling=longrope, original_max_position_embeddings=128)
    assert (old.rope.kind, old.rope.factor) == ("longrope", 4.0)
    assert (old.rope.divisors, old.rope.long_divisors) == (tuple(SHORT), tuple(LONG))
