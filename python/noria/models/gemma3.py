"""Gemma 3's text model: Gemma 2's blocks with normed q and k, no soft bounds, and a RoPE for each layer kind.

Five layers of six have a window. The larger models also see images: their text part is what runs here.

Source: transformers' modeling_gemma3.py; llama.cpp's src/models/gemma3.cpp.
"""

from dataclasses import replace

from noria.loading.fields import JsonFields
from noria.loading.gguf_config import GgufFields, common_gguf_config
from noria.loading.hf_config import common_config, read_rope
from noria.models import gemma2
from noria.models.config import ModelConfig, RopeConfig
from noria.models.family import Family

_PATTERN = 6
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4
# What google/gemma-3-4b-it leaves out of its text_config.
_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "sliding_window": 4096,
}


def _read_hf(fields: JsonFields) -> ModelConfig:
    text = fields.object("text_config")
    if text is not None:
        # What ends an answer, and whether the head is tied, may stand outside.
        outer = ("eos_token_id", "bos_token_id", "tie_word_embeddings")
        fields = text.changed(**{key: fields.values[key] for key in outer if fields.has(key)})
    fields = fields.with_defaults(_DEFAULTS)
    rope = fields.object("rope_parameters")
    nested = rope if rope is not None and not rope.has("rope_type") else None
    config = common_config(
        fields.changed(rope_parameters=None) if nested else fields,
        architecture="Gemma3ForCausalLM",
        activations=gemma2.ACTIVATIONS,
        head_dim=gemma2.HEAD_DIM,
    )
    pattern = next((k for k in ("sliding_window_pattern", "_sliding_window_pattern") if fields.has(k)), None)
    config = gemma2.gemma_config(fields, config, fields.integer(pattern) if pattern else _PATTERN)
    return replace(
        config,
        rope=_rope(fields, nested, "full_attention", config, _GLOBAL_THETA),
        local_rope=_rope(fields, nested, "sliding_attention", config, _LOCAL_THETA),
        has_qk_norm=True,
        attention_softcap=_softcap(fields, "attn_logit_softcapping"),
        logits_softcap=_softcap(fields, "final_logit_softcapping"),
    )


def _softcap(fields: JsonFields, key: str) -> float | None:
    return fields.number(key) if fields.has(key) else None


def _rope(
    fields: JsonFields, nested: JsonFields | None, kind: str, config: ModelConfig, theta: float
) -> RopeConfig:
    """Of one kind of layer; before transformers 5 a scaling was the global layers' alone."""
    is_local = kind == "sliding_attention"
    none = JsonFields(fields.path, {})
    if nested is not None:
        own, outer = nested.object(kind) or none, none
    elif is_local:
        own = none
        outer = JsonFields(fields.path, {"rope_theta": fields.values.get("rope_local_base_freq")})
    else:
        own, outer = fields.object("rope_scaling") or fields.object("rope_parameters") or none, fields
    return read_rope(outer, own, config.rotary_dim, config.max_position_embeddings, theta)


def _read_gguf(fields: GgufFields) -> ModelConfig:
    config = common_gguf_config(fields, architecture="Gemma3ForCausalLM", theta=_GLOBAL_THETA)
    window = fields.integer("attention.sliding_window")
    pattern = fields.integer("attention.sliding_window_pattern", _PATTERN)
    return replace(
        config,
        local_rope=RopeConfig(theta=fields.number("rope.freq_base_swa", _LOCAL_THETA)),
        windows=tuple(window if (index + 1) % pattern else None for index in range(config.num_layers)),
        has_qk_norm=True,
        attention_scale=gemma2.gguf_scale(config, 62),
    )


FAMILY = Family(
    title="Gemma 3 (text)",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    gguf_architecture="gemma3",
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    gguf_modules=gemma2.GGUF_MODULES | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    network=gemma2.Gemma,
    gguf_adds_one=True,
    hf_prefixes=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    hf_ignored=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)
