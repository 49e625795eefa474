"""config.json and generation_config.json of a Hugging Face directory: what families have in common."""

import math
from dataclasses import replace
from pathlib import Path

from noria.errors import ModelError
from noria.loading.fields import JsonFields
from noria.models.config import ModelConfig, RopeConfig

MAX_LAYERS = 4096
MAX_HEAD_DIM = 1 << 16
MAX_CONTEXT = 1 << 30

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def with_generation_defaults(config: ModelConfig, directory: Path) -> ModelConfig:
    """A configuration with what a directory's generation_config.json adds, if there is one.

    Raises:
        ModelError: the file is malformed.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return config
    fields = JsonFields.of_file(path)
    params = {key: fields.number(key, least=0) for key in _SAMPLING_KEYS if fields.has(key)}
    if "top_k" in params:
        params["top_k"] = fields.integer("top_k", least=0)
    if fields.has("do_sample") and not fields.boolean("do_sample", False):
        params = {key: value for key, value in params.items() if key == "repetition_penalty"}
        params["temperature"] = 0.0
    eos = dict.fromkeys((*config.eos_token_ids, *fields.token_ids("eos_token_id")))
    return replace(config, eos_token_ids=tuple(eos), default_sampling_params=params)


def common_config(
    fields: JsonFields,
    *,
    architecture: str,
    activations: tuple[str, ...] = ("silu", "swish"),
    rms_norm_eps: float = 1e-6,
    head_dim: int | None = None,
) -> ModelConfig:
    """What the families' config.json files say alike, in the spellings of transformers 4 and 5.

    Args:
        fields: the file, or the part of it that the text model has.
        architecture: the registry's name.
        activations: names of the one that the family's forward computes.
        rms_norm_eps: where the file does not say.
        head_dim: likewise; None: `hidden_size / num_attention_heads`.
    """
    named = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    if fields.text(named, activations[0]) not in activations:
        raise fields.error(named, f"{activations[0]!r} (no other activation is supported)")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    hidden_size = fields.integer("hidden_size")
    if head_dim is None and not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads = {num_heads}")
    head_dim = fields.integer("head_dim", head_dim or max(hidden_size // num_heads, 1), most=MAX_HEAD_DIM)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    rotary_dim = _rotary_dim(fields, head_dim)
    max_position_embeddings = fields.integer("max_position_embeddings", most=MAX_CONTEXT)
    rope = read_rope(fields, _rope_fields(fields), rotary_dim, max_position_embeddings)
    bos = fields.token_ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=extended_context(rope, max_position_embeddings),
        rms_norm_eps=fields.number("rms_norm_eps", rms_norm_eps),
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=tuple(dict.fromkeys(fields.token_ids("eos_token_id"))),
        bos_token_id=bos[0] if bos else None,
    )


def read_windows(fields: JsonFields, num_layers: int, layer_types: list[str]) -> tuple[int | None, ...]:
    """Each layer's window, from its type.

    Args:
        fields: it may have `layer_types`, and has `sliding_window` if one is sliding.
        num_layers: how many types there must be.
        layer_types: where the file does not say.
    """
    types = fields.names("layer_types") if fields.has("layer_types") else layer_types
    if len(types) != num_layers:
        raise fields.error("layer_types", f"a list of num_hidden_layers = {num_layers} names")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", f"full_attention and sliding_attention only ({kind!r} is not)")
    if "sliding_attention" not in types:
        return ()
    window = fields.integer("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def window_of_all_layers(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    """Where every layer has the file's `sliding_window`, if it has one."""
    return (fields.integer("sliding_window"),) * num_layers if fields.has("sliding_window") else ()


def read_rope(
    fields: JsonFields, rope: JsonFields, rotary_dim: int, max_position_embeddings: int, theta: float = 1e4
) -> RopeConfig:
    """A RoPE's kind and numbers.

    Args:
        fields: the file, where older spellings have some of them.
        rope: `rope_parameters` or `rope_scaling`, or a part of it.
        rotary_dim: dimensions that rotate.
        max_position_embeddings: the file's.
        theta: the base where nothing says.
    """
    # At 1 all frequencies are the same, and yarn's logarithm is 0.
    theta = rope.number("rope_theta", fields.number("rope_theta", theta, least=2), least=2)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig("linear", theta, rope.number("factor", least=1))
    if kind == "dynamic":
        factor = rope.number("factor", least=1)
        return RopeConfig("dynamic", theta, factor, original_max_position_embeddings=max_position_embeddings)
    # transformers gives the key beside the dictionary the last word.
    original = rope.integer("original_max_position_embeddings", max_position_embeddings, most=MAX_CONTEXT)
    original = fields.integer("original_max_position_embeddings", original, most=MAX_CONTEXT)
    scale = rope.number("attention_factor") if rope.has("attention_factor") else None
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error("low_freq_factor", f"below high_freq_factor = {high}")
        return RopeConfig(
            "llama3",
            theta,
            rope.number("factor", least=1),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if original < 2:
        raise rope.error("original_max_position_embeddings", "at least 2")
    ratio = max(max_position_embeddings / original, 1.0)
    if kind == "yarn":
        return _read_yarn(rope, theta, rope.number("factor", ratio, least=1), original, scale)
    if kind in ("longrope", "su"):
        return RopeConfig(
            "longrope",
            theta,
            rope.number("factor", ratio),
            scale,
            original,
            divisors=rope.numbers("short_factor", rotary_dim // 2),
            long_divisors=rope.numbers("long_factor", rotary_dim // 2),
        )
    raise ModelError(
        f"{fields.path}: RoPE kind {kind!r} is not supported; supported: default, linear, dynamic, yarn, "
        "longrope, llama3"
    )


def _read_yarn(
    rope: JsonFields, theta: float, factor: float, original: int, scale: float | None
) -> RopeConfig:
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast < slow:
        raise rope.error("beta_fast", f"at least beta_slow = {slow:g}")
    if scale is None and rope.has("mscale") and rope.has("mscale_all_dim") and factor > 1:
        both = (rope.number("mscale"), rope.number("mscale_all_dim"))
        mine, all_dim = (0.1 * mscale * math.log(factor) + 1 for mscale in both)
        scale = mine / all_dim
    return RopeConfig(
        "yarn",
        theta,
        factor,
        scale,
        original,
        beta_fast=fast,
        beta_slow=slow,
        is_truncated=rope.boolean("truncate", True),
    )


def extended_context(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The longest context, in tokens: yarn and dynamic files state the one before the extension."""
    if rope.kind in ("yarn", "dynamic"):
        extended = int(rope.original_max_position_embeddings * rope.factor)
        return min(max(extended, max_position_embeddings), MAX_CONTEXT)
    return max_position_embeddings


def _rope_fields(fields: JsonFields) -> JsonFields:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    return fields.object("rope_scaling") or fields.object("rope_parameters") or JsonFields(fields.path, {})


def _rotary_dim(fields: JsonFields, head_dim: int) -> int:
    rope = _rope_fields(fields)
    partial = rope if rope.has("partial_rotary_factor") else fields
    factor = partial.number("partial_rotary_factor", 1.0)
    if factor > 1:
        raise partial.error("partial_rotary_factor", "at most 1")
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        part = "" if factor == 1 else f" times partial_rotary_factor = {factor:g}"
        raise ModelError(f"{fields.path}: head_dim{part} should be even, found {rotary_dim}")
    return rotary_dim
