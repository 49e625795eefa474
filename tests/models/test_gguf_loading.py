"""GGUF models: a tiny Llama written as llama.cpp's converter does, and files that ask for what is not run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from dense_reference import dense_logits
from gguf import GGMLQuantizationType as Kind
from paged_steps import Harness
from safetensors.torch import load_file, save_file
from tiny_llama import llama_config, save_llama, token_ids

from noria.errors import ModelError
from noria.loading import read_model_config
from noria.loading.gguf import gguf_name
from noria.models import RopeConfig, load_model
from noria.models.registry import GGUF_ARCHITECTURES

CPU = torch.device("cpu")
HEADS, KV_HEADS, LAYERS, HIDDEN, INTERMEDIATE = 6, 2, 2, 96, 160
Metadata = dict[str, Any]


def save_source(directory: Path, **changes: Any) -> None:
    """Sizes are multiples of 32, the block of Q8_0."""
    config = llama_config(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS, **changes
    )
    save_llama(directory, config, dtype=torch.float32)


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """As LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def metadata(**changes: Any) -> Metadata:
    """Keys under `llama.`; ... leaves one out."""
    values: Metadata = {
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
    }
    return values | changes


def write_gguf(
    directory: Path,
    kind: Kind = Kind.F32,
    values: Metadata | None = None,
    change: Callable[[dict[str, np.ndarray]], object] | None = None,
    architecture: str = "llama",
) -> Path:
    """Converts a directory's model; its safetensors become what the quantised file holds, exactly."""
    tensors = {name: tensor.numpy() for name, tensor in load_file(directory / "model.safetensors").items()}
    if change:
        change(tensors)
    writer = gguf.GGUFWriter(str(directory / "model.gguf"), architecture)
    for key, value in (values or metadata()).items():
        if value is ...:
            continue
        name = key if key.startswith(("split.", "tokenizer.")) else f"{architecture}.{key}"
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            list: writer.add_array,
        }
        add[type(value)](name, value)
    rounded = {}
    for name, tensor in tensors.items():
        heads = HEADS if ".q_proj." in name else KV_HEADS if ".k_proj." in name else None
        there = (
            name
            if name.startswith(("rope_freqs", "foreign"))
            else gguf_name(name, GGUF_ARCHITECTURES["llama"])
        )
        tensor = tensor if heads is None else permuted(tensor, heads)
        used = kind if tensor.ndim == 2 else Kind.F32
        data = gguf.quants.quantize(tensor, used)
        writer.add_tensor(there, data, raw_dtype=used)
        back = gguf.quants.dequantize(data, used).copy()
        if heads is not None:
            back = back.reshape(heads, -1, 2, *back.shape[1:]).swapaxes(1, 2).reshape(back.shape).copy()
        rounded[name] = torch.from_numpy(back)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(rounded, directory / "model.safetensors")
    return directory / "model.gguf"


def logits_of(path: Path, ids: list[int]) -> torch.Tensor:
    harness = Harness(load_model(path, dtype=torch.float64, device=CPU))
    return harness.prefill(harness.add(ids), 30)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_converted_model_computes_what_its_dequantised_weights_say(
    tmp_path: Path, kind: Kind, is_tied: bool
) -> None:
    save_source(tmp_path, tie_word_embeddings=is_tied)
    path = write_gguf(tmp_path, kind)
    config = read_model_config(path)
    assert config.tie_word_embeddings == is_tied
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 6, 2, 16)
    ids = token_ids(50, 0)
    torch.testing.assert_close(logits_of(path, ids), dense_logits(tmp_path, ids), rtol=0, atol=1e-6)


def test_biases_are_permuted_and_used(tmp_path: Path) -> None:
    save_source(tmp_path, attention_bias=True, mlp_bias=True)
    path = write_gguf(tmp_path)
    ids = token_ids(50, 0)
    torch.testing.assert_close(logits_of(path, ids), dense_logits(tmp_path, ids), rtol=0, atol=1e-6)


def test_an_explicit_key_length_is_the_head_dimension(tmp_path: Path) -> None:
    save_source(tmp_path, head_dim=32)
    changes = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}
    path = write_gguf(tmp_path, values=metadata(**changes))
    ids = token_ids(50, 0)
    torch.testing.assert_close(logits_of(path, ids), dense_logits(tmp_path, ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}],
)
def test_linear_rope_scaling_is_read_in_both_spellings(tmp_path: Path, changes: Metadata) -> None:
    save_source(tmp_path, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    path = write_gguf(tmp_path, values=metadata(**changes))
    assert read_model_config(path).rope == RopeConfig("linear", 10000.0, 4.0)
    ids = token_ids(50, 0)
    torch.testing.assert_close(logits_of(path, ids), dense_logits(tmp_path, ids), rtol=0, atol=1e-6)


def test_frequency_factors_are_the_llama3_scaling(tmp_path: Path) -> None:
    """The converter writes llama3's rule as a divisor for each frequency."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    save_source(tmp_path, rope_parameters=rope)
    from dense_reference import rope_frequencies

    scaled = np.array(rope_frequencies({"rope_parameters": rope}, 16))
    plain = np.array(rope_frequencies({"rope_parameters": {"rope_theta": 10000.0}}, 16))
    factors = (plain / scaled).astype(np.float32)
    assert factors.min() == 1.0
    assert factors.max() == 8.0
    path = write_gguf(tmp_path, change=lambda tensors: tensors.update({"rope_freqs.weight": factors}))
    ids = token_ids(50, 0)
    torch.testing.assert_close(logits_of(path, ids), dense_logits(tmp_path, ids), rtol=0, atol=1e-4)

    save_source(tmp_path, rope_parameters=rope)
    path = write_gguf(tmp_path, change=lambda tensors: tensors.update({"rope_freqs.weight": factors[:7]}))
    with pytest.raises(
        ModelError, match=r"'rope_freqs\.weight' should have shape \[8\] of float32, found \[7\]"
    ):
        load_model(path, dtype=torch.float32, device=CPU)


def test_a_large_tensor_is_dequantised_in_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_source(tmp_path)
    path = write_gguf(tmp_path, Kind.Q8_0)
    ids = token_ids(50, 0)
    whole = logits_of(path, ids)
    monkeypatch.setattr("noria.loading.gguf._SLAB_ELEMENTS", 5 * HIDDEN)
    assert torch.equal(logits_of(path, ids), whole)


def test_ends_of_an_answer_come_from_the_tokenizer_keys(tmp_path: Path) -> None:
    save_source(tmp_path)
    keys = {"eos": 2, "eot": 5, "bos": 1}
    path = write_gguf(
        tmp_path,
        values=metadata(**{f"tokenizer.ggml.{kind}_token_id": value for kind, value in keys.items()}),
    )
    config = read_model_config(path)
    assert config.eos_token_ids == (2, 5)
    assert config.bos_token_id == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": ...}, r"metadata key 'llama\.block_count' is missing"),
        ({"block_count": 0}, r"'llama\.block_count' should be at least 1, found 0"),
        ({"context_length": "many"}, r"'llama\.context_length' should be an integer, found a string"),
        ({"attention.layer_norm_rms_epsilon": ...}, r"layer_norm_rms_epsilon' is missing"),
        ({"attention.head_count_kv": 4}, "should be a divisor of the 6 heads, found 4"),
        ({"attention.head_count_kv": [2, 1]}, "should be the same for every layer"),
        (
            {"attention.key_length": 32, "attention.value_length": 16},
            "should be the key length, 32, found 16",
        ),
        ({"rope.dimension_count": 18}, "should be even, and at most the key length, 16, found 18"),
        ({"rope.scaling.type": "ntk"}, "should be none, linear, yarn or longrope, found 'ntk'"),
        ({"rope.freq_base": -1.0}, "should be a number of at least 2, found -1.0"),
        ({"expert_count": 8}, "mixtures of experts are not supported"),
        ({"embedding_length": 97}, "should be a multiple of the 6 heads"),
        ({"split.count": 2}, "GGUF file in parts is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_refused_by_its_key(
    tmp_path: Path, changes: Metadata, message: str
) -> None:
    save_source(tmp_path)
    path = write_gguf(tmp_path, values=metadata(**changes))
    with pytest.raises(ModelError, match=message) as caught:
        read_model_config(path)
    assert str(path) in str(caught.value)


def test_heads_given_for_each_layer_are_read_where_they_agree(tmp_path: Path) -> None:
    save_source(tmp_path)
    path = write_gguf(tmp_path, values=metadata(**{"attention.head_count_kv": [2, 2]}))
    assert read_model_config(path).num_kv_heads == 2


def test_an_unknown_architecture_is_named_with_what_is_supported(tmp_path: Path) -> None:
    save_source(tmp_path)
    path = write_gguf(tmp_path, architecture="mamba")
    with pytest.raises(
        ModelError,
        match="GGUF architecture 'mamba' is not supported; supported: gemma2, gemma3, llama, phi3, q",
    ):
        read_model_config(path)


def test_missing_misshapen_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    def refused(change: Callable[[dict[str, np.ndarray]], object], message: str) -> None:
        save_source(tmp_path)
        path = write_gguf(tmp_path, change=change)
        with pytest.raises(ModelError, match=message) as caught:
            load_model(path, dtype=torch.float32, device=CPU)
        assert str(path) in str(caught.value)

    name = "model.layers.1.mlp.up_proj.weight"
    refused(lambda tensors: tensors.pop(name), f"tensor '{name}' is missing")
    refused(lambda tensors: tensors.pop("model.embed_tokens.weight"), r"'token_embd\.weight' is missing")
    small = np.zeros((32, HIDDEN), np.float32)
    refused(
        lambda tensors: tensors.update({name: small}),
        rf"'{name}' should have shape \[160, 96\], found \[32, 96\]",
    )
    refused(lambda tensors: tensors.update({"foreign": small}), "tensor 'foreign' has no place in a Llama")


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    save_source(tmp_path)
    path = write_gguf(tmp_path)
    whole = path.read_bytes()
    at = whole.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path.write_bytes(whole[:at] + int(Kind.I32).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(
        ModelError, match=r"'output_norm\.weight' is of type I32, which cannot be dequantised"
    ):
        load_model(path, dtype=torch.float32, device=CPU)
