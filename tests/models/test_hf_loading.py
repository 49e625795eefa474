"""Hugging Face directories: every spelling of a configuration, shards, and files that are broken."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint
from paged_steps import Harness
from safetensors.torch import load_file, save_file
from tiny_llama import llama_config, save_llama, token_ids
from transformers import LlamaForCausalLM

from noria.errors import ConfigError, ModelError
from noria.loading import read_model_config
from noria.models import RopeConfig, load_model

CPU = torch.device("cpu")
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_llama(tmp_path, llama_config(num_hidden_layers=1), dtype=torch.float32)
    return tmp_path


def edit_config(directory: Path, **changes: Any) -> None:
    """Sets keys of config.json; ... removes one."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def load(directory: Path) -> None:
    load_model(directory, dtype=torch.float32, device=CPU)


def test_a_configuration_is_read_without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    config = read_model_config(directory)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (1, 6, 2, 8)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (48, 80, 97)
    assert config.max_position_embeddings == 512
    assert config.rope == RopeConfig(theta=10000.0)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(theta=5e5)),
        ({"rope_parameters": ..., "rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": ...}, RopeConfig(theta=1e4)),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4}},
            RopeConfig("linear", 5e5, 4.0),
        ),
        (
            {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            RopeConfig("linear", 5e5, 4.0),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig("llama3", 5e5, 8.0, None, 64, 1.0, 4.0),
        ),
        (
            {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig("llama3", 5e5, 8.0, None, 64, 1.0, 4.0),
        ),
    ],
)
def test_both_spellings_of_rope_are_read(directory: Path, changes: dict[str, Any], rope: RopeConfig) -> None:
    edit_config(directory, **changes)
    assert read_model_config(directory).rope == rope


def test_the_old_spelling_of_rope_computes_the_same(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    made = checkpoint(rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3})
    for file in made.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_config(
        tmp_path, rope_parameters=..., rope_theta=500.0, rope_scaling={"rope_type": "llama3", **LLAMA3}
    )
    harness = Harness(load_model(tmp_path, dtype=torch.float64, device=CPU))
    ids = token_ids(80, 0)
    torch.testing.assert_close(harness.prefill(harness.add(ids)), made.dense(ids), rtol=0, atol=1e-9)


def test_every_end_of_an_answer_is_kept_once(directory: Path) -> None:
    edit_config(directory, eos_token_id=[5, 2])
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert read_model_config(directory).eos_token_ids == (5, 2, 7)


def test_shards_and_a_single_file_give_the_same_model(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    made = checkpoint()
    save_llama(tmp_path, llama_config(), max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert not (tmp_path / "model.safetensors").exists()
    harness = Harness(load_model(tmp_path, dtype=torch.float64, device=CPU))
    ids = token_ids(80, 0)
    torch.testing.assert_close(harness.prefill(harness.add(ids)), made.dense(ids), rtol=0, atol=1e-9)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_a_checkpoint_of_any_dtype_is_converted(tmp_path: Path, source: torch.dtype) -> None:
    save_llama(tmp_path, llama_config(), dtype=source)
    peer = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    model = load_model(tmp_path, dtype=torch.float64, device=CPU)
    ids = token_ids(20, 0)
    harness = Harness(model)
    found = harness.prefill(harness.add(ids))
    with torch.inference_mode():
        wanted = peer(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)


def test_a_tied_checkpoint_that_carries_its_head_too_loads(tmp_path: Path) -> None:
    save_llama(tmp_path, llama_config(tie_word_embeddings=True))
    ids = token_ids(20, 0)

    def logits() -> torch.Tensor:
        harness = Harness(load_model(tmp_path, dtype=torch.float64, device=CPU))
        return harness.prefill(harness.add(ids))

    wanted = logits()

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(tmp_path, add_head)
    assert torch.equal(logits(), wanted)
    edit_tensors(tmp_path, lambda tensors: tensors["lm_head.weight"].mul_(2))
    torch.testing.assert_close(logits(), 2 * wanted, rtol=0, atol=1e-9)


def test_old_checkpoints_may_carry_rotary_buffers(directory: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(directory, lambda tensors: tensors.update({name: torch.ones(4)}))
    load(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported: LlamaFor"),
        ({"architectures": ...}, "'architectures' should be a list of names, no such key"),
        ({"hidden_size": ...}, "'hidden_size' should be a whole number of at least 1, no such key"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' should be a whole number of at least 1, found 0"),
        ({"vocab_size": "97"}, "'vocab_size' should be a whole number of at least 1, found '97'"),
        ({"num_attention_heads": True}, "'num_attention_heads' should be a whole number"),
        ({"num_key_value_heads": 4}, "'num_key_value_heads' should be a divisor of num_attention_heads = 6"),
        ({"head_dim": 7}, "head_dim should be even, found 7"),
        (
            {"head_dim": ..., "hidden_size": 49},
            "'hidden_size' should be a multiple of num_attention_heads = 6",
        ),
        ({"max_position_embeddings": ...}, "'max_position_embeddings' should be a whole number"),
        ({"rms_norm_eps": -1e-5}, "'rms_norm_eps' should be a number above 0, found -1e-05"),
        ({"hidden_act": "gelu"}, "'hidden_act' should be 'silu'"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' should be true or false, found 'no'"),
        ({"quantization_config": {"bits": 4}}, "quantised checkpoints are not supported"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' should be a token id or a list of them, found '</s>'"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 4.0}}, "RoPE kind 'ntk' is not supported"),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "'rope_parameters.factor' should be a number of at least 1",
        ),
        ({"rope_parameters": [1]}, "'rope_parameters' should be an object"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0}},
            "'rope_scaling.low_freq_factor' should be a num",
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "'rope_scaling.low_freq_factor' should be below high_freq_factor = 4.0, found 4.0",
        ),
        ({"partial_rotary_factor": 1.5}, "'partial_rotary_factor' should be at most 1, found 1.5"),
        (
            {"partial_rotary_factor": 0.4},
            "head_dim times partial_rotary_factor = 0.4 should be even, found 3",
        ),
    ],
)
def test_a_configuration_that_cannot_be_run_is_refused_by_its_key(
    directory: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(directory, **changes)
    with pytest.raises(ModelError) as caught:
        read_model_config(directory)
    assert message in str(caught.value)
    assert str(directory / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "null", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(directory: Path, text: str) -> None:
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json: (not valid JSON|a JSON object was expected)"):
        read_model_config(directory)


def test_a_path_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        read_model_config(tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"a model is a Hugging Face directory or a \.gguf file"):
        read_model_config(tmp_path / "model.bin")


def test_a_context_beyond_the_models_own_is_refused(directory: Path) -> None:
    assert load_model(directory, dtype=torch.float32, device=CPU, max_model_len=512).max_model_len == 512
    with pytest.raises(ConfigError, match="max_model_len is 513; the model's context is 512 tokens"):
        load_model(directory, dtype=torch.float32, device=CPU, max_model_len=513)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_named(directory: Path, name: str) -> None:
    edit_tensors(directory, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"tensor '{name}' is missing"):
        load(directory)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(directory: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(80, 47)}))
    with pytest.raises(ModelError, match=rf"'{name}' should have shape \[80, 48\], found \[80, 47\]"):
        load(directory)


def test_a_huge_configuration_allocates_nothing_before_shapes_are_checked(directory: Path) -> None:
    edit_config(directory, vocab_size=10**12, hidden_size=6 * 10**9)
    with pytest.raises(
        ModelError, match=r"should have shape \[1000000000000, 6000000000\], found \[97, 48\]"
    ):
        load(directory)


def test_a_tensor_that_is_no_float_is_refused(directory: Path) -> None:
    name = "model.norm.weight"
    edit_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=f"'{name}' should be of F64, F32, F16, BF16, found I8"):
        load(directory)


def test_a_tensor_that_the_configuration_has_no_place_for_is_refused(directory: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(48)}))
    with pytest.raises(ModelError, match=f"tensor '{name}' has no place in a LlamaForCausalLM"):
        load(directory)


def test_a_directory_without_safetensors_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(directory)


def test_a_safetensors_file_cut_anywhere_is_refused(directory: Path) -> None:
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for length in [
        0,
        1,
        7,
        8,
        9,
        header // 2,
        header - 1,
        header,
        header + 1,
        len(whole) // 2,
        len(whole) - 1,
    ]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors: truncated or not a safetensors file"):
            load(directory)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_in_a_files_place_is_called_one(directory: Path, name: str) -> None:
    (directory / name).unlink()
    (directory / name).mkdir()
    with pytest.raises(ModelError, match=rf"{name}: (it is a folder|cannot be read \(Is a directory\))"):
        load_model(directory, dtype=torch.float32, device=torch.device("cpu"))


def test_a_safetensors_file_with_a_corrupt_header_is_refused(directory: Path) -> None:
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    for changed in [
        struct.pack("<Q", 2**63) + whole[8:],
        whole[:8] + b"\xff" + whole[9:],
        whole.replace(b'"F32"', b'"F99"', 1),
        whole.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1),
    ]:
        assert changed != whole
        path.write_bytes(changed)
        with pytest.raises(ModelError, match=r"model\.safetensors: truncated or not a safetensors file"):
            load(directory)


def test_an_index_is_checked_against_its_shards(tmp_path: Path) -> None:
    save_llama(tmp_path, llama_config(), dtype=torch.float32, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    shards = sorted(set(whole["weight_map"].values()))

    def refused(weight_map: object, message: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=message):
            load(tmp_path)

    misplaced = whole["weight_map"] | {"model.norm.weight": shards[0]}
    refused(
        misplaced,
        rf"{shards[0]}: tensor 'model\.norm\.weight' is missing, which the index places there",
    )
    refused(
        whole["weight_map"] | {"x": "../elsewhere.safetensors"}, "should be a file name in this directory"
    )
    refused(whole["weight_map"] | {"x": 3}, "should be a file name in this directory")
    refused(None, "'weight_map' should be an object")
    (tmp_path / shards[1]).unlink()
    refused(whole["weight_map"], f"{shards[1]}: the file is missing")
