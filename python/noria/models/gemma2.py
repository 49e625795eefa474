"""Gemma 2: norms before and after each block, scaled embeddings, GeGLU, scores and logits with soft bounds.

Every second layer has a window. `Gemma` is the forward of Gemma 3 too.

Source: transformers' modeling_gemma2.py; llama.cpp's src/models/gemma2.cpp.
"""

import math
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from noria.backends.ops import Heads, Ops, Scope, Weights
from noria.loading.fields import JsonFields
from noria.loading.gguf_config import GgufFields, common_gguf_config
from noria.loading.hf_config import common_config, read_windows
from noria.models import llama
from noria.models.config import ModelConfig
from noria.models.family import Family

A = TypeVar("A")
P = TypeVar("P")
L = TypeVar("L")

ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_new")
HEAD_DIM = 256
GGUF_MODULES = llama.GGUF_MODULES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass(frozen=True, slots=True)
class Layer(Generic[P, L]):
    """Parameters of one layer; those of one input are fused."""

    attention_norm: P
    qkv: L
    qk_norms: tuple[P, P] | None
    output: L
    output_norm: P
    mlp_norm: P
    gate_up: L
    down: L
    down_norm: P


class Gemma(Generic[P, L]):
    """A Gemma's parameters, and its forward over ops."""

    def __init__(self, config: ModelConfig, weights: Weights[P, L]) -> None:
        c = config
        self.eps = c.rms_norm_eps
        self.embedding_scale = c.hidden_size**0.5
        self.logits_softcap = c.logits_softcap
        self.heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
        self.scopes = [Scope(scale, window, c.attention_softcap) for window in c.layer_windows]
        self.embedding = weights.table("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        rope = weights.rope(c.rope)
        local_rope = rope if c.local_rope is None else weights.rope(c.local_rope)
        self.ropes = [rope if window is None else local_rope for window in c.layer_windows]
        self.layers = [self._layer(c, weights, f"model.layers.{index}") for index in range(c.num_layers)]
        self.norm = weights.vector("model.norm.weight", c.hidden_size, plus_one=True)
        if c.tie_word_embeddings:
            self.head = weights.tied_linear("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        else:
            self.head = weights.linear([("lm_head", c.vocab_size)], c.hidden_size, False)

    def _layer(self, c: ModelConfig, weights: Weights[P, L], at: str) -> Layer[P, L]:
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        qkv = [(f"{attention}.q_proj", q), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv)]
        gate_up = [(f"{mlp}.gate_proj", c.intermediate_size), (f"{mlp}.up_proj", c.intermediate_size)]

        def norm(name: str, size: int = c.hidden_size) -> P:
            return weights.vector(f"{at}.{name}.weight", size, plus_one=True)

        return Layer(
            attention_norm=norm("input_layernorm"),
            qkv=weights.linear(qkv, c.hidden_size, c.qkv_bias),
            qk_norms=(norm("self_attn.q_norm", c.head_dim), norm("self_attn.k_norm", c.head_dim))
            if c.has_qk_norm
            else None,
            output=weights.linear([(f"{attention}.o_proj", c.hidden_size)], q, c.output_bias),
            output_norm=norm("post_attention_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"),
            gate_up=weights.linear(gate_up, c.hidden_size, False),
            down=weights.linear([(f"{mlp}.down_proj", c.hidden_size)], c.intermediate_size, False),
            down_norm=norm("post_feedforward_layernorm"),
        )

    def forward(self, ops: Ops[A, P, L]) -> A:
        """One step's logits, `[num_logits, vocab_size]`."""
        x = ops.scale(ops.embed(self.embedding), self.embedding_scale)  # [num_tokens, hidden_size]
        for index, layer in enumerate(self.layers):
            qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, self.eps), layer.qkv)
            if layer.qk_norms is not None:
                qkv = ops.qk_norm(qkv, *layer.qk_norms, self.eps, self.heads)
            qkv = ops.rope(qkv, self.ropes[index], self.heads)
            attended = ops.linear(ops.attention(qkv, index, self.heads, self.scopes[index]), layer.output)
            x = ops.add(x, ops.rms_norm(attended, layer.output_norm, self.eps))
            gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, self.eps), layer.gate_up)
            mlp = ops.linear(ops.gelu_mul(gate_up), layer.down)
            x = ops.add(x, ops.rms_norm(mlp, layer.down_norm, self.eps))
        logits = ops.logits(ops.rms_norm(x, self.norm, self.eps), self.head)
        return logits if self.logits_softcap is None else ops.softcap(logits, self.logits_softcap)


def gemma_config(fields: JsonFields, config: ModelConfig, num_in_pattern: int) -> ModelConfig:
    """A configuration with what Gemma 2 and 3 have in common.

    Args:
        fields: the text model's part of config.json.
        config: what all families have in common.
        num_in_pattern: every such layer has no window.
    """
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false (a causal decoder is what noria runs)")
    types = [
        "full_attention" if (index + 1) % num_in_pattern == 0 else "sliding_attention"
        for index in range(config.num_layers)
    ]
    has_bias = fields.boolean("attention_bias", False)
    return replace(
        config,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
        qkv_bias=has_bias,
        output_bias=has_bias,
        windows=read_windows(fields, config.num_layers, types),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
    )


def _read_hf(fields: JsonFields) -> ModelConfig:
    config = common_config(
        fields, architecture="Gemma2ForCausalLM", activations=ACTIVATIONS, head_dim=HEAD_DIM
    )
    # A null in the file is "none"; a missing key is the family's own value.
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    attention, final = (
        None if key in fields.values and not fields.has(key) else fields.number(key, default)
        for key, default in caps.items()
    )
    config = gemma_config(fields, config, num_in_pattern=2)
    return replace(config, attention_softcap=attention, logits_softcap=final)


def gguf_scale(config: ModelConfig, num_layers_of_27b: int) -> float:
    """The file does not say; as in llama.cpp, the largest model of a family is known by its layers."""
    is_27b = config.num_layers == num_layers_of_27b
    return 1 / math.sqrt(config.hidden_size / config.num_heads if is_27b else config.head_dim)


def _read_gguf(fields: GgufFields) -> ModelConfig:
    config = common_gguf_config(fields, architecture="Gemma2ForCausalLM")
    window = fields.integer("attention.sliding_window", 4096)
    return replace(
        config,
        windows=tuple(None if index % 2 else window for index in range(config.num_layers)),
        attention_scale=gguf_scale(config, 46),
        attention_softcap=fields.number("attn_logit_softcapping", 50.0),
        logits_softcap=fields.number("final_logit_softcapping", 30.0),
    )


FAMILY = Family(
    title="Gemma 2",
    architectures=("Gemma2ForCausalLM",),
    gguf_architecture="gemma2",
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    gguf_modules=GGUF_MODULES,
    network=Gemma,
    gguf_adds_one=True,
)
