"""Every family written as llama.cpp's converter does, against the dense reference of the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import Checkpoint
from dense_reference import load_tensors
from gguf import GGMLQuantizationType as Kind
from paged_steps import Harness
from tiny_models import token_ids

from noria.errors import ModelError
from noria.loading import read_model_config
from noria.loading.gguf import gguf_name
from noria.models import load_model
from noria.models.registry import GGUF_ARCHITECTURES

CPU = torch.device("cpu")
# Each family's own tensors, written out again: the table under test must not be its own witness.
NAMES = {
    "phi3": {"self_attn.qkv_proj.weight": "attn_qkv.weight", "mlp.gate_up_proj.weight": "ffn_up.weight"},
    "qwen2": {"self_attn.q_proj.bias": "attn_q.bias", "post_attention_layernorm.weight": "ffn_norm.weight"},
    "qwen3": {"self_attn.q_norm.weight": "attn_q_norm.weight", "mlp.down_proj.weight": "ffn_down.weight"},
    "gemma2": {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    },
    "gemma3": {
        "self_attn.k_norm.weight": "attn_k_norm.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    },
}
GEMMA = {"query_pre_attn_scalar": 8, "head_dim": 8, "tie_word_embeddings": True, "num_hidden_layers": 4}
SHORT, LONG = [1.0, 1.1, 1.2, 1.5], [1.0, 2.0, 4.0, 8.0]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.25,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", "qwen2", {}, {}),
    "qwen2, yarn": (
        "qwen2",
        "qwen2",
        {"rope_parameters": YARN},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        },
    ),
    "qwen3": (
        "qwen3",
        "qwen3",
        {"head_dim": 16},
        {"attention.key_length": 16, "attention.value_length": 16},
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 9}, {"attention.sliding_window": 9}),
    "phi3, longrope": (
        "phi3",
        "phi3",
        {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
        {
            "attention.sliding_window": 0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 1.25,
        },
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {**GEMMA, "sliding_window": 9},
        {
            "attention.sliding_window": 9,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "attention.key_length": 8,
            "attention.value_length": 8,
        },
    ),
    "gemma3": (
        "gemma3_text",
        "gemma3",
        {**GEMMA, "sliding_window": 9, "num_hidden_layers": 6},
        {
            "attention.sliding_window": 9,
            "attention.key_length": 8,
            "attention.value_length": 8,
            "rope.freq_base": 1e6,
        },
    ),
}
MakeCheckpoint = Callable[..., Checkpoint]


def write_gguf(tiny: Checkpoint, path: Path, architecture: str, keys: dict[str, Any]) -> None:
    config = tiny.peer.config
    values: dict[str, Any] = {
        "context_length": 512,
        "embedding_length": 48,
        "feed_forward_length": 80,
        "block_count": config.num_hidden_layers,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | keys
    family = GGUF_ARCHITECTURES[architecture]
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in values.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{key}", value)
    for name, tensor in load_tensors(tiny.directory).items():
        there = gguf_name(name, family)
        for module, expected in NAMES[architecture].items():
            if name.endswith(module) and name.startswith("model.layers."):
                assert there == f"blk.{name.split('.')[2]}.{expected}"
        data = tensor.float().numpy()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        writer.add_tensor(there, data)
    if "rope.scaling.attn_factor" in keys:
        writer.add_tensor("rope_factors_short.weight", np.array(SHORT, np.float32))
        writer.add_tensor("rope_factors_long.weight", np.array(LONG, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_computes_what_its_checkpoint_says(
    checkpoint: MakeCheckpoint, tmp_path: Path, case: str
) -> None:
    family, architecture, changes, keys = CASES[case]
    tiny = checkpoint(family, **changes)
    path = tmp_path / "model.gguf"
    write_gguf(tiny, path, architecture, keys)
    found, wanted = read_model_config(path), read_model_config(tiny.directory)
    same = ("windows", "head_dim", "rotary_dim", "has_qk_norm", "qkv_bias", "is_fused", "tie_word_embeddings")
    assert [getattr(found, name) for name in same] == [getattr(wanted, name) for name in same]
    ids = token_ids(60, 0)
    harness = Harness(load_model(path, dtype=torch.float64, device=CPU))
    logits = harness.prefill(harness.add(ids), 25)
    torch.testing.assert_close(logits, tiny.dense(ids, 512), rtol=0, atol=2e-5)  # eps and weights are float32


# ---- every quantisation

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"]
K_BLOCKS = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
"""Bytes of a block of 256; the `gguf` package reads these and does not write them."""


def random_k_blocks(kind: str, num_blocks: int) -> np.ndarray:
    """Random codes under small finite scales."""
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (num_blocks, K_BLOCKS[kind]), dtype=np.uint8)
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for at in scales:
        values = generator.uniform(0.5e-3, 2e-3, num_blocks).astype(np.float16)
        blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
    return blocks


def plain_k_block(kind: str, block: np.ndarray) -> list[float]:
    """One block by the loops of ggml's dequantize_row_*, an element at a time."""
    b = [int(byte) for byte in block]

    def half(at: int) -> float:
        return float(block[at : at + 2].view(np.float16)[0])

    def packed_scale(scales: list[int], j: int) -> tuple[int, int]:
        """get_scale_min_k4."""
        if j < 4:
            return scales[j] & 63, scales[j + 4] & 63
        return (
            (scales[j + 4] & 0xF) | ((scales[j - 4] >> 6) << 4),
            (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4),
        )

    values = []
    if kind == "Q2_K":
        d, dmin, scales, qs = half(80), half(82), b[:16], b[16:80]
        for i in range(256):
            part, rest = divmod(i, 128)
            q = (qs[32 * part + rest % 32] >> (2 * (rest // 32))) & 3
            scale = scales[i // 16]
            values.append(d * (scale & 0xF) * q - dmin * (scale >> 4))
    elif kind == "Q3_K":
        hmask, qs, packed, d = b[:32], b[32:96], b[96:108], half(108)
        for i in range(256):
            part, rest = divmod(i, 128)
            q = (qs[32 * part + rest % 32] >> (2 * (rest // 32))) & 3
            is_high = (hmask[i % 32] >> (i // 32)) & 1
            j = i // 16
            low = packed[j % 8] & 0xF if j < 8 else packed[j % 8] >> 4
            scale = low | (((packed[8 + j % 4] >> (2 * (j // 4))) & 3) << 4)
            values.append(d * (scale - 32) * (q - (0 if is_high else 4)))
    elif kind in ("Q4_K", "Q5_K"):
        d, dmin, scales = half(0), half(2), b[4:16]
        qh, qs = (b[16:48], b[48:176]) if kind == "Q5_K" else ([0] * 32, b[16:144])
        for i in range(256):
            j = i // 32
            byte = qs[32 * (j // 2) + i % 32]
            q = (byte & 0xF if j % 2 == 0 else byte >> 4) + 16 * ((qh[i % 32] >> j) & 1)
            scale, least = packed_scale(scales, j)
            values.append(d * scale * q - dmin * least)
    else:
        ql, qh, scales, d = b[:128], b[128:192], block[192:208].view(np.int8), half(208)
        for i in range(256):
            part, rest = divmod(i, 128)
            quarter, at = divmod(rest, 32)
            byte = ql[64 * part + at + (32 if quarter % 2 else 0)]
            low = byte & 0xF if quarter < 2 else byte >> 4
            q = (low | (((qh[32 * part + at] >> (2 * quarter)) & 3) << 4)) - 32
            values.append(d * int(scales[8 * part + rest // 16]) * q)
    return values


@pytest.mark.parametrize("kind", [*QUANTISED, *K_BLOCKS])
def test_every_common_quantisation_loads_as_its_formula_says(tmp_path: Path, kind: str) -> None:
    rows, columns = 512, 512
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    if kind in K_BLOCKS:
        data = random_k_blocks(kind, rows * columns // 256)
        wanted = np.array([plain_k_block(kind, block) for block in data[:40]], np.float32)
        data = data.reshape(rows, -1)
    else:
        values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
        data = gguf.quants.quantize(values, Kind[kind])
        wanted = values
    writer.add_tensor("token_embd.weight", data, raw_dtype=Kind[kind])
    for key, value in {"context_length": 64, "embedding_length": columns, "block_count": 1}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.feed_forward_length", 32)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    from noria.loading.gguf import GgufWeights
    from noria.loading.gguf_file import GgufFile

    file = GgufFile(path)
    out = torch.empty(rows, columns)
    with GgufWeights(file, read_model_config(path)) as weights:
        weights.copy_into("model.embed_tokens.weight", out)
    if kind in K_BLOCKS:
        found = out.flatten()[: wanted.size].view(wanted.shape).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    else:
        step = {"Q4_0": 0.6, "Q4_1": 0.4, "Q5_0": 0.3, "Q5_1": 0.2, "Q8_0": 0.03, "BF16": 0.02, "F16": 2e-3}
        assert np.abs(out.numpy() - wanted).max() <= step.get(kind, 0.0)
        np.testing.assert_array_equal(out.numpy(), gguf.quants.dequantize(data, Kind[kind]))


# ---- what does not fit


def test_half_a_longrope_is_refused(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    tiny = checkpoint("phi3", sliding_window=None)
    path = tmp_path / "model.gguf"
    write_gguf(tiny, path, "phi3", {"rope.scaling.type": "longrope", "attention.sliding_window": 0})
    with pytest.raises(ModelError, match=r"'rope_factors_short\.weight' is missing, which longrope needs"):
        read_model_config(path)
