"""Models that transformers runs over noria's paged attention, against transformers alone."""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint
from paged_steps import Harness, Sequence
from tiny_models import save_model, tiny_config, token_ids

from noria.errors import ModelError
from noria.loading import read_model_config
from noria.models import Model, load_model

CPU = torch.device("cpu")
EXACT = 2e-5
"""transformers' norms and rotations compute in float32; where rows lie in a batch moves their last bits."""
FLOAT32 = 5e-3
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "olmo2": ("olmo2", {}),
    "gpt2": (
        "gpt2",
        {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512, "num_key_value_heads": None},
    ),
    "cohere2 with windows": ("cohere2", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "a mixture of experts": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
}
MakeCheckpoint = Callable[..., Checkpoint]


def made(checkpoint: MakeCheckpoint, name: str) -> Checkpoint:
    family, changes = FAMILIES[name]
    return checkpoint(family, **changes)


def load(tiny: Checkpoint) -> tuple[Model, float]:
    """A model, and its tolerance; torch multiplies experts in float32 at most."""
    has_experts = hasattr(tiny.peer.config, "num_experts")
    dtype = torch.float32 if has_experts else torch.float64
    tiny.peer.to(dtype)
    model = load_model(tiny.directory, dtype=dtype, device=CPU)
    return model, FLOAT32 if has_experts else EXACT


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_whole_prompts_give_transformers_logits(checkpoint: MakeCheckpoint, name: str) -> None:
    tiny = made(checkpoint, name)
    model, tolerance = load(tiny)
    assert model.config.is_foreign
    assert model.implementation == (
        f"transformers' own {type(tiny.peer).__name__}, over noria's paged attention"
    )
    ids = token_ids(60, 0)
    wanted = tiny.transformers(ids)
    moved = tiny.transformers([(ids[0] + 1) % 97, *ids[1:]])
    assert (wanted[-1] - moved[-1]).abs().max() > 20 * tolerance
    harness = Harness(model)
    for chunk in (None, 7, 1):
        found = harness.prefill(harness.add(ids), chunk)
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_mix_of_rows_is_right(checkpoint: MakeCheckpoint, name: str) -> None:
    tiny = made(checkpoint, name)
    ids = token_ids(60, 0)
    wanted = tiny.transformers(ids)
    generator = random.Random(0)
    model, tolerance = load(tiny)
    harness = Harness(model, block_size=3)
    sequences = [harness.add(ids[: generator.randint(1, 60)]) for _ in range(8)]
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
                chunks.append((sequence, generator.randint(1, min(most, 20))))
        padding = [generator.randint(1, 9) for _ in range(generator.choice([0, 1]))]
        num_mixed += bool(decodes and chunks and padding)
        rows = [*decodes, *(sequence for sequence, _ in chunks)]
        for sequence, logits in zip(rows, harness.step(decodes, chunks, padding), strict=True):
            end = sequence.num_computed
            torch.testing.assert_close(logits, wanted[end - len(logits) : end], rtol=0, atol=tolerance)
    assert num_mixed


def test_a_step_that_wants_no_logits_gives_none(checkpoint: MakeCheckpoint) -> None:
    harness = Harness(load(made(checkpoint, "olmo2"))[0])
    sequence = harness.add(token_ids(20, 0))
    logits = harness.model.forward(harness.inputs([], [(sequence, 12)], [], logits="none"), harness.kv)
    assert logits.shape == (0, 97)


def test_the_file_is_read_without_weights(checkpoint: MakeCheckpoint) -> None:
    config = read_model_config(made(checkpoint, "gpt2").directory)
    assert (config.num_layers, config.num_kv_heads, config.head_dim, config.vocab_size) == (3, 6, 8, 97)
    assert (config.max_position_embeddings, config.eos_token_ids, config.bos_token_id) == (512, (2,), 1)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "gpt_neox",
            {
                "rotary_pct": 1.0,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
            "RoPE kind 'dynamic' is not supported in a model that transformers runs",
        ),
        ("bloom", {"n_layer": 2, "n_head": 6}, "takes no positions, so it cannot run ragged"),
    ],
)
def test_what_cannot_be_paged_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    save_model(tmp_path, tiny_config(family, **changes))
    with pytest.raises(ModelError, match=message) as caught:
        load_model(tmp_path, dtype=torch.float64, device=CPU)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_without_transformers_the_extra_is_named(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = made(checkpoint, "olmo2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"'Olmo2ForCausalLM' is not supported; .*noria\[hf\]"):
        read_model_config(tiny.directory)
