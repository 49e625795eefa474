"""The configuration in a GGUF file's metadata: what families have in common.

Source of the keys: gguf's constants.py; what llama.cpp makes of them: src/llama-model.cpp.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from noria.errors import ModelError
from noria.loading.fields import shown
from noria.loading.gguf_file import GgufFile
from noria.models.config import ModelConfig, RopeConfig

ROPE_DIVISORS = "rope_freqs.weight"
"""llama3's scaling, as the converter keeps it."""
ROPE_SHORT_DIVISORS = "rope_factors_short.weight"
ROPE_LONG_DIVISORS = "rope_factors_long.weight"

_MAX_INTEGER = 2**40
_MAX_LAYERS = 4096
_MAX_HEAD_DIM = 1 << 16
_MAX_CONTEXT = 1 << 30
_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class GgufFields:
    """Metadata under one architecture's prefix, each value checked as it is read."""

    def __init__(self, file: GgufFile) -> None:
        self.path: Path = file.path
        self.file = file
        self.architecture = file.value("general.architecture", str)

    def error(self, key: str, expected: str) -> ModelError:
        """That a key's value is not what it should be."""
        found = shown(self.file.metadata.get(f"{self.architecture}.{key}"))
        return ModelError(f"{self.path}: '{self.architecture}.{key}' should be {expected}, found {found}")

    def count(self, key: str, default: int | None = None, *, most: int = _MAX_INTEGER) -> int:
        """A whole number from 0 to `most`."""
        value = self.file.value(f"{self.architecture}.{key}", int, default)
        if not 0 <= value <= most:
            raise self.error(key, f"from 0 to {most}")
        return value

    def integer(self, key: str, default: int | None = None, *, most: int = _MAX_INTEGER) -> int:
        """A whole number from 1 to `most`."""
        value = self.file.value(f"{self.architecture}.{key}", int, default)
        if value < 1:
            raise self.error(key, "at least 1")
        if value > most:
            raise self.error(key, f"at most {most}")
        return value

    def number(self, key: str, default: float | None = None, *, least: float | None = None) -> float:
        """A finite number above 0, and not below `least`."""
        value = self.file.value(f"{self.architecture}.{key}", float, default)
        if not 0 < value < math.inf or (least is not None and value < least):
            raise self.error(key, "a number above 0" if least is None else f"a number of at least {least:g}")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        return self.file.value(f"{self.architecture}.{key}", str, default)

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return f"{self.architecture}.{key}" in self.file.metadata

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self.file.tensors

    def same_integer(self, key: str, default: int | None = None) -> int:
        """An integer, or an array of one integer repeated (a value for each layer)."""
        values = self.file.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(values, list):
            return self.integer(key, default)
        if not values or not all(isinstance(v, int) and v == values[0] and v >= 1 for v in values):
            raise self.error(key, "the same for every layer")
        return int(values[0])

    def numbers(self, tensor: str, size: int) -> tuple[float, ...]:
        """A small float32 tensor's values, `size` of them, finite and above 0; none where it is missing."""
        info = self.file.tensors.get(tensor)
        if info is None:
            return ()
        if info.shape != (size,) or info.nbytes != 4 * size:
            raise ModelError(
                f"{self.path}: tensor {tensor!r} should have shape [{size}] of float32, "
                f"found {list(info.shape)} of {info.nbytes} bytes"
            )
        values = np.frombuffer(self.file.tensor_bytes(tensor), dtype="<f4")
        if not (np.isfinite(values) & (values > 0)).all():
            raise ModelError(f"{self.path}: tensor {tensor!r} should be of finite numbers above 0")
        return tuple(values.tolist())


def common_gguf_config(fields: GgufFields, *, architecture: str, theta: float = 1e4) -> ModelConfig:
    """What the families' metadata say alike.

    Args:
        fields: the metadata.
        architecture: the registry's name.
        theta: RoPE's base where the file does not say.
    """
    file = fields.file
    if file.value("split.count", int, 1) > 1:
        raise ModelError(f"{fields.path}: a GGUF file in parts is not supported; merge them by gguf-split")
    if fields.has("expert_count") and fields.count("expert_count") > 0:
        raise fields.error("expert_count", "0 (mixtures of experts are not supported)")
    num_heads = fields.same_integer("attention.head_count")
    num_kv_heads = fields.same_integer("attention.head_count_kv", num_heads)
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", max(hidden_size // num_heads, 1), most=_MAX_HEAD_DIM)
    if not fields.has("attention.key_length") and hidden_size % num_heads:
        raise fields.error("embedding_length", f"a multiple of the {num_heads} heads")
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", f"the key length, {head_dim}")
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise fields.error("rope.dimension_count", f"even, and at most the key length, {head_dim}")
    if num_heads % num_kv_heads:
        raise fields.error("attention.head_count_kv", f"a divisor of the {num_heads} heads")
    if head_dim % 2:
        raise ModelError(f"{fields.path}: the head dimension should be even, found {head_dim}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{fields.path}: tensor 'token_embd.weight' is missing")
    context = fields.integer("context_length", most=_MAX_CONTEXT)
    return ModelConfig(
        architecture=architecture,
        num_layers=fields.integer("block_count", most=_MAX_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=fields.same_integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        vocab_size=embedding.shape[0],  # the metadata key is optional, and may leave padding out
        max_position_embeddings=context,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_read_rope(fields, theta, rotary_dim, context),
        tie_word_embeddings=not fields.has_tensor("output.weight"),
        eos_token_ids=_token_ids(file, "eos", "eot", "eom"),
        bos_token_id=next(iter(_token_ids(file, "bos")), None),
        qkv_bias=fields.has_tensor("blk.0.attn_q.bias"),
        default_sampling_params=_sampling_params(file),
    )


def _token_ids(file: GgufFile, *kinds: str) -> tuple[int, ...]:
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in kinds)
    return tuple(dict.fromkeys(file.value(key, int) for key in keys if key in file.metadata))


def _sampling_params(file: GgufFile) -> dict[str, float]:
    params: dict[str, float] = {}
    for there, here in _SAMPLING_KEYS.items():
        key = f"general.sampling.{there}"
        if key not in file.metadata:
            continue
        value = file.value(key, int) if here == "top_k" else file.value(key, float)
        if not 0 <= value < math.inf:
            raise ModelError(f"{file.path}: {key!r} should be a number of at least 0, found {value!r}")
        params[here] = value
    return params


def _read_rope(fields: GgufFields, theta: float, rotary_dim: int, context: int) -> RopeConfig:
    # At 1 all frequencies are the same, and yarn's logarithm is 0.
    theta = fields.number("rope.freq_base", theta, least=2)
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    short = fields.numbers(ROPE_SHORT_DIVISORS, rotary_dim // 2)
    long = fields.numbers(ROPE_LONG_DIVISORS, rotary_dim // 2)
    kind = fields.text("rope.scaling.type", "linear" if factor != 1.0 else "none")
    if short or long or kind == "longrope":
        return _longrope(fields, theta, context, short, long)
    divisors = fields.numbers(ROPE_DIVISORS, rotary_dim // 2)
    if kind == "none":
        return RopeConfig("default", theta, divisors=divisors)
    if kind == "linear":
        return RopeConfig("linear", theta, factor, divisors=divisors)
    if kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length", context, most=_MAX_CONTEXT)
        rope = RopeConfig("yarn", theta, fields.number("rope.scaling.factor", least=1), None, original)
        fast = fields.number("rope.scaling.yarn_beta_fast", 32.0)
        slow = fields.number("rope.scaling.yarn_beta_slow", 1.0)
        if fast < slow:
            raise fields.error("rope.scaling.yarn_beta_fast", f"at least yarn_beta_slow = {slow:g}")
        return replace(rope, beta_fast=fast, beta_slow=slow, scale=_yarn_scale(fields, rope.factor))
    raise fields.error("rope.scaling.type", "none, linear, yarn or longrope")


def _yarn_scale(fields: GgufFields, factor: float) -> float | None:
    """llama.cpp multiplies yarn's own scale by this one."""
    given = fields.number("rope.scaling.attn_factor", 1.0)
    return None if given == 1.0 else given * (0.1 * math.log(factor) + 1.0)


def _longrope(
    fields: GgufFields, theta: float, context: int, short: tuple[float, ...], long: tuple[float, ...]
) -> RopeConfig:
    for name, found in ((ROPE_SHORT_DIVISORS, short), (ROPE_LONG_DIVISORS, long)):
        if not found:
            raise ModelError(f"{fields.path}: tensor {name!r} is missing, which longrope needs")
    original = fields.integer("rope.scaling.original_context_length", context, most=_MAX_CONTEXT)
    if original < 2:
        raise fields.error("rope.scaling.original_context_length", "at least 2")
    scale = fields.number("rope.scaling.attn_factor") if fields.has("rope.scaling.attn_factor") else None
    return RopeConfig(
        "longrope", theta, max(context / original, 1.0), scale, original, divisors=short, long_divisors=long
    )
