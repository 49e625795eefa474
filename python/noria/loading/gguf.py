"""GGUF files: their configuration, and their tensors under the names of a Hugging Face checkpoint.

Quantised tensors are dequantised as they are read, a slab at a time, straight into the model's own dtype.

Source of names and of the permuted q and k rows: llama.cpp's convert_hf_to_gguf.py, gguf's tensor_mapping.py.
"""

import math
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from noria.errors import ModelError
from noria.loading.gguf_file import GgufFile
from noria.models.config import ModelConfig, RopeConfig
from noria.models.registry import known_gguf_architecture

if TYPE_CHECKING:
    import torch

_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_FREQUENCY_FACTORS = "rope_freqs.weight"
_SLAB_ELEMENTS = 4 << 20
"""Dequantised at once: 16 MiB of float32, which stays near the cores."""


def gguf_name(name: str) -> str:
    """What a GGUF file calls a tensor of a Hugging Face checkpoint."""
    if name in _OUTER:
        return _OUTER[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_INNER[module]}.{kind}"


class _Metadata:
    """Metadata under one architecture's prefix."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self._file = file
        self._prefix = prefix

    def error(self, key: str, expected: str) -> ModelError:
        found = self._file.metadata.get(f"{self._prefix}.{key}")
        return ModelError(f"{self._file.path}: '{self._prefix}.{key}' should be {expected}, found {found!r}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._file.value(f"{self._prefix}.{key}", int, default)
        if value < 1:
            raise self.error(key, "at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._file.value(f"{self._prefix}.{key}", float, default)
        if not 0 < value < math.inf:
            raise self.error(key, "a number above 0")
        return value

    def text(self, key: str, default: str) -> str:
        return self._file.value(f"{self._prefix}.{key}", str, default)

    def has(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self._file.metadata

    def same_integer(self, key: str, default: int | None = None) -> int:
        """An integer, or an array of one integer repeated (a value for each layer)."""
        values = self._file.metadata.get(f"{self._prefix}.{key}")
        if not isinstance(values, list):
            return self.integer(key, default)
        if not values or not all(isinstance(v, int) and v == values[0] and v >= 1 for v in values):
            raise self.error(key, "the same for every layer")
        return int(values[0])


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration in a GGUF file's metadata.

    Raises:
        ModelError: a key or a tensor is missing, of the wrong kind, or asks for what noria does not run.
    """
    name = file.value("general.architecture", str)
    architecture = known_gguf_architecture(file.path, name)
    meta = _Metadata(file, name)
    if file.value("split.count", int, 1) > 1:
        raise ModelError(f"{file.path}: a GGUF file in parts is not supported; merge them by gguf-split")
    if meta.has("expert_count") and file.value(f"{name}.expert_count", int) > 0:
        raise meta.error("expert_count", "0 (mixtures of experts are not supported)")
    num_heads = meta.same_integer("attention.head_count")
    num_kv_heads = meta.same_integer("attention.head_count_kv", num_heads)
    hidden_size = meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", max(hidden_size // num_heads, 1))
    if not meta.has("attention.key_length") and hidden_size % num_heads:
        raise meta.error("embedding_length", f"a multiple of the {num_heads} heads")
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise meta.error("attention.value_length", f"the key length, {head_dim}")
    if meta.integer("rope.dimension_count", head_dim) != head_dim:
        raise meta.error("rope.dimension_count", f"{head_dim}, the head's (rotating a part is not supported)")
    if num_heads % num_kv_heads:
        raise meta.error("attention.head_count_kv", f"a divisor of the {num_heads} heads")
    if head_dim % 2:
        raise ModelError(f"{file.path}: the head dimension should be even, found {head_dim}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing")
    return ModelConfig(
        architecture=architecture,
        num_layers=meta.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=meta.same_integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=embedding.shape[0],  # the metadata key is optional, and may leave padding out
        max_position_embeddings=meta.integer("context_length"),
        rms_norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        rope=_read_rope(file, meta),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        eos_token_ids=_token_ids(file, "eos", "eot", "eom"),
        bos_token_id=next(iter(_token_ids(file, "bos")), None),
    )


def _token_ids(file: GgufFile, *kinds: str) -> tuple[int, ...]:
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in kinds)
    return tuple(dict.fromkeys(file.value(key, int) for key in keys if key in file.metadata))


def _read_rope(file: GgufFile, meta: _Metadata) -> RopeConfig:
    theta = meta.number("rope.freq_base", 10000.0)
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0))
    kind = meta.text("rope.scaling.type", "linear" if factor != 1.0 else "none")
    has_factors = _FREQUENCY_FACTORS in file.tensors
    if kind == "none":
        return RopeConfig("default", theta, has_frequency_factors=has_factors)
    if kind == "linear":
        return RopeConfig("linear", theta, factor, has_frequency_factors=has_factors)
    raise meta.error("rope.scaling.type", "'none' or 'linear' (no other RoPE scaling is supported)")


class GgufWeights:
    """A GGUF file's tensors, by the names of a Hugging Face checkpoint."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.path = file.path
        self._file = file
        self._heads = {".self_attn.q_proj.": config.num_heads, ".self_attn.k_proj.": config.num_kv_heads}
        outer = {name: there for name, there in _OUTER.items() if there in file.tensors}
        inner = {there: here for here, there in _INNER.items()}
        self._names: dict[str, str] = dict(outer)  # Hugging Face's -> the file's
        self._foreign: set[str] = set()  # names that a Llama has no use for
        known = set(outer.values()) | {_FREQUENCY_FACTORS}
        for there in file.tensors.keys() - known:
            block, _, rest = there.removeprefix("blk.").partition(".")
            module, _, kind = rest.rpartition(".")
            if there.startswith("blk.") and module in inner:
                self._names[f"model.layers.{block}.{inner[module]}.{kind}"] = there
            else:
                self._foreign.add(there)

    def names(self) -> set[str]:
        """Tensors that a model should use up."""
        return set(self._names) | self._foreign

    def file_of(self, _name: str, /) -> Path:
        """The file to name in an error about this tensor."""
        return self.path

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None where there is no such tensor."""
        there = self._names.get(name)
        return None if there is None else self._file.tensors[there].shape

    def copy_into(self, name: str, out: "torch.Tensor") -> None:
        """Dequantises a tensor into `out`, of the same shape, its rows in Hugging Face's order.

        Raises:
            ModelError: it is of a type that cannot be dequantised.
        """
        there = self._names[name]
        heads = next((heads for part, heads in self._heads.items() if part in name), None)
        if heads is None:
            self._dequantise(there, out)
            return
        # The converter interleaves the two halves of each head's rotary pairs: [2, dim / 2] -> [dim / 2, 2].
        interleaved = out.new_empty(out.shape)
        self._dequantise(there, interleaved)
        pairs = interleaved.view(heads, -1, 2, *out.shape[1:])
        out.copy_(pairs.transpose(1, 2).reshape(out.shape))

    def frequency_factors(self, size: int) -> "torch.Tensor":
        """What each RoPE frequency is divided by, `[size]` float32.

        Raises:
            ModelError: there are more or fewer of them.
        """
        import torch

        found = self._file.tensors[_FREQUENCY_FACTORS].shape
        if found != (size,):
            raise ModelError(
                f"{self.path}: tensor {_FREQUENCY_FACTORS!r} should have shape [{size}], found {list(found)}"
            )
        factors = torch.empty(size, dtype=torch.float32)
        self._dequantise(_FREQUENCY_FACTORS, factors)
        return factors

    def _dequantise(self, there: str, out: "torch.Tensor") -> None:
        import numpy as np
        import torch
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self._file.tensors[there]
        kind = GGMLQuantizationType(info.ggml_type)
        rows = math.prod(info.shape[:-1])
        data = np.frombuffer(self._file.tensor_bytes(there), dtype=np.uint8).reshape(rows, -1)
        flat = out.reshape(rows, info.shape[-1]) if out.is_contiguous() else None
        if flat is None:
            raise ValueError("out must be contiguous")
        slab = max(1, _SLAB_ELEMENTS // info.shape[-1])
        try:
            for first in range(0, rows, slab):
                part = data[first : first + slab]
                values = part.view(np.float64) if kind == GGMLQuantizationType.F64 else dequantize(part, kind)
                # Copied where it is a view of the file, which torch takes for memory that it may write.
                owned = values if values.flags.writeable else values.copy()
                flat[first : first + slab] = torch.from_numpy(owned)
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {there!r} is of type {kind.name}, which cannot be dequantised"
            ) from None

    def __enter__(self) -> "GgufWeights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The mapping goes with the last view of it."""
