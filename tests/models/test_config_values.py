"""Odd values in configurations: each is read as meant, or refused by one sentence that names it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint
from paged_steps import Harness
from safetensors.torch import load_file, save_file
from tiny_models import token_ids

from noria.errors import ModelError
from noria.loading import read_model_config
from noria.models import load_model
from noria.models.registry import FAMILIES

MakeCheckpoint = Callable[..., Checkpoint]
CPU = torch.device("cpu")


def edited(tiny: Checkpoint, to: Path, **changes: Any) -> Path:
    """A copy of a checkpoint's config.json with keys changed; ... removes one."""
    values = json.loads((tiny.directory / "config.json").read_text()) | changes
    kept = {key: value for key, value in values.items() if value is not ...}
    (to / "config.json").write_text(json.dumps(kept))
    return to


ROPE = {"rope_type": "default", "rope_theta": 1e4}
LONGROPE = ROPE | {"rope_type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"rope_parameters": ROPE | {"rope_theta": 10**400}},
            "rope_theta' should be a number that a",
        ),
        (
            "llama",
            {"rope_parameters": ROPE | {"rope_theta": float("inf")}},
            "rope_theta' should be a number of",
        ),
        (
            "llama",
            {"rope_parameters": ROPE | {"rope_theta": float("nan")}},
            "rope_theta' should be a number of",
        ),
        ("llama", {"rope_parameters": ROPE | {"rope_theta": 1e-300}}, "at least 2, found 1e-300"),
        ("llama", {"rope_parameters": ROPE | {"rope_theta": "1e4"}}, "at least 2, found '1e4'"),
        (
            "llama",
            {"num_hidden_layers": 10**9},
            "'num_hidden_layers' should be at most 4096, found 1000000000",
        ),
        (
            "llama",
            {"num_hidden_layers": 2.5},
            "'num_hidden_layers' should be a whole number of at least 1, found 2.5",
        ),
        ("llama", {"head_dim": 10**6}, "'head_dim' should be at most 65536, found 1000000"),
        ("llama", {"vocab_size": 10**400}, "'vocab_size' should be at most 1099511627776, found 1000000"),
        ("llama", {"max_position_embeddings": 2**31}, "should be at most 1073741824, found 2147483648"),
        (
            "mistral",
            {"sliding_window": 0},
            "'sliding_window' should be a whole number of at least 1, found 0",
        ),
        ("mistral", {"sliding_window": "all"}, "'sliding_window' should be a whole number of at least 1"),
        ("qwen2", {"use_sliding_window": "yes", "sliding_window": 4}, "should be true or false, found 'yes'"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"]},
            "'layer_types' should be a list of num_hidden_layers = 3 names, found ['full_attention']",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked_attention"] * 3},
            "('chunked_attention' is not)",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "should be false (a causal decoder"),
        ("gemma3_text", {"hidden_activation": "relu"}, "'hidden_activation' should be 'gelu_pytorch_tanh'"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "'query_pre_attn_scalar' should be a number above 0"),
        (
            "phi3",
            {"rope_parameters": LONGROPE | {"long_factor": [1.0, 2.0]}},
            "'rope_parameters.long_factor' should be a list of 4 numbers above 0, found [1.0, 2.0]",
        ),
        (
            "phi3",
            {"rope_parameters": LONGROPE | {"short_factor": [1.0, 2.0, -3.0, 1.0]}},
            "'rope_parameters.short_factor[2]' should be a number above 0, found -3.0",
        ),
        (
            "llama",
            {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 0.5}},
            "'rope_parameters.factor' should be a number of at least 1, found 0.5",
        ),
        (
            "llama",
            {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}},
            "'rope_parameters.beta_fast' should be at least beta_slow = 2, found 1",
        ),
    ],
)
def test_a_value_that_cannot_be_is_named(
    checkpoint: MakeCheckpoint, tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read_model_config(edited(checkpoint(family, sliding_window=9), tmp_path, **changes))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_whole_numbers_may_be_written_as_floats(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    config = read_model_config(edited(checkpoint("llama"), tmp_path, num_hidden_layers=3.0))
    assert config == read_model_config(checkpoint("llama").directory)
    assert isinstance(config.num_layers, int)


def test_a_window_that_is_off_is_none(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    tiny = checkpoint("qwen2")
    off = {"use_sliding_window": False, "sliding_window": 4, "layer_types": ["sliding_attention"] * 3}
    assert read_model_config(edited(tiny, tmp_path, **off)).windows == ()
    on = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": ...}
    assert read_model_config(edited(tiny, tmp_path, **on)).windows == (4, 4, 4)
    null = {"use_sliding_window": True, "sliding_window": None, "layer_types": ...}
    assert read_model_config(edited(tiny, tmp_path, **null)).windows == ()


def test_generation_defaults_and_ends_are_read(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    edited(checkpoint("qwen3"), tmp_path, eos_token_id=2)
    path = tmp_path / "generation_config.json"
    path.write_text(
        '{"do_sample": true, "eos_token_id": [5, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "x": 1}'
    )
    config = read_model_config(tmp_path)
    assert config.eos_token_ids == (2, 5)
    assert config.default_sampling_params == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    path.write_text('{"do_sample": false, "temperature": 0.6, "repetition_penalty": 1.1}')
    greedy = {"temperature": 0.0, "repetition_penalty": 1.1}
    assert read_model_config(tmp_path).default_sampling_params == greedy
    path.write_text('{"temperature": "hot"}')
    with pytest.raises(ModelError, match=r"'temperature' should be a number of at least 0, found 'hot'"):
        read_model_config(tmp_path)


def test_the_text_part_of_a_model_that_sees_images_runs(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    tiny = checkpoint(
        "gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        head_dim=8,
        sliding_window=9,
        tie_word_embeddings=True,
    )
    ids = token_ids(40, 0)
    text = json.loads((tiny.directory / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text | {"eos_token_id": None},
        "vision_config": {"hidden_size": 8},
        "eos_token_id": [1, 106],
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tiny.directory / "model.safetensors")
    vision = {"vision_tower.x": torch.zeros(3), "multi_modal_projector.y": torch.zeros(3)}
    for here in ("language_model.model.", "model.language_model."):
        renamed = {here + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        before = "model." if here.startswith("model.") else ""
        save_file(renamed | {before + n: t for n, t in vision.items()}, tmp_path / "model.safetensors")
        model = load_model(tmp_path, dtype=torch.float64, device=CPU)
        assert model.config.eos_token_ids == (1, 106)
        harness = Harness(model)
        torch.testing.assert_close(harness.prefill(harness.add(ids)), tiny.dense(ids), rtol=0, atol=1e-9)


def test_no_two_families_have_one_name() -> None:
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names)) >= 7
