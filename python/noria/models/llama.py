"""Llama 2 and 3, SmolLM2, and any model of the same blocks: RMS norm, rotary GQA, SiLU-gated MLP.

Source: transformers' modeling_llama.py.
"""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from noria.backends.ops import Heads, Ops, Scope, Weights
from noria.loading.fields import JsonFields
from noria.loading.gguf_config import GgufFields, common_gguf_config
from noria.loading.hf_config import common_config
from noria.models.config import ModelConfig
from noria.models.family import Family

A = TypeVar("A")
P = TypeVar("P")
L = TypeVar("L")

GGUF_MODULES = {
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


@dataclass(frozen=True, slots=True)
class Layer(Generic[P, L]):
    """Parameters of one layer; those of one input are fused."""

    attention_norm: P
    qkv: L
    qk_norms: tuple[P, P] | None
    output: L
    mlp_norm: P
    gate_up: L
    down: L


class Llama(Generic[P, L]):
    """A Llama's parameters, and its forward over ops.

    Families that differ by a bias, a norm of q and k, or a window run it too, as their configuration says.
    """

    def __init__(self, config: ModelConfig, weights: Weights[P, L]) -> None:
        c = config
        self.eps = c.rms_norm_eps
        self.heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        self.scopes = [Scope(c.head_dim**-0.5, window) for window in c.layer_windows]
        self.embedding = weights.table("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        self.rope = weights.rope(c.rope)
        self.layers = [self._layer(c, weights, f"model.layers.{index}") for index in range(c.num_layers)]
        self.norm = weights.vector("model.norm.weight", c.hidden_size)
        if c.tie_word_embeddings:
            self.head = weights.tied_linear("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        else:
            self.head = weights.linear([("lm_head", c.vocab_size)], c.hidden_size, False)

    def _layer(self, c: ModelConfig, weights: Weights[P, L], at: str) -> Layer[P, L]:
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        if c.is_fused:
            qkv = [(f"{attention}.qkv_proj", q + 2 * kv)]
            gate_up = [(f"{mlp}.gate_up_proj", 2 * c.intermediate_size)]
        else:
            qkv = [(f"{attention}.q_proj", q), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv)]
            gate_up = [(f"{mlp}.gate_proj", c.intermediate_size), (f"{mlp}.up_proj", c.intermediate_size)]
        norms = [f"{attention}.{name}_norm.weight" for name in ("q", "k")] if c.has_qk_norm else []
        qk_norms = [weights.vector(name, c.head_dim) for name in norms]
        return Layer(
            attention_norm=weights.vector(f"{at}.input_layernorm.weight", c.hidden_size),
            qkv=weights.linear(qkv, c.hidden_size, c.qkv_bias),
            qk_norms=(qk_norms[0], qk_norms[1]) if qk_norms else None,
            output=weights.linear([(f"{attention}.o_proj", c.hidden_size)], q, c.output_bias),
            mlp_norm=weights.vector(f"{at}.post_attention_layernorm.weight", c.hidden_size),
            gate_up=weights.linear(gate_up, c.hidden_size, c.mlp_bias),
            down=weights.linear([(f"{mlp}.down_proj", c.hidden_size)], c.intermediate_size, c.mlp_bias),
        )

    def forward(self, ops: Ops[A, P, L]) -> A:
        """One step's logits, `[num_logits, vocab_size]`."""
        x = ops.embed(self.embedding)  # [num_tokens, hidden_size]
        for index, layer in enumerate(self.layers):
            qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, self.eps), layer.qkv)
            if layer.qk_norms is not None:
                qkv = ops.qk_norm(qkv, *layer.qk_norms, self.eps, self.heads)
            qkv = ops.rope(qkv, self.rope, self.heads)
            attended = ops.attention(qkv, index, self.heads, self.scopes[index])
            x = ops.add(x, ops.linear(attended, layer.output))
            gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, self.eps), layer.gate_up)
            x = ops.add(x, ops.linear(ops.silu_mul(gate_up), layer.down))
        return ops.logits(ops.rms_norm(x, self.norm, self.eps), self.head)


def _read_hf(fields: JsonFields) -> ModelConfig:
    has_bias = fields.boolean("attention_bias", False)
    return replace(
        common_config(fields, architecture="LlamaForCausalLM"),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _read_gguf(fields: GgufFields) -> ModelConfig:
    return replace(
        common_gguf_config(fields, architecture="LlamaForCausalLM"),
        output_bias=fields.has_tensor("blk.0.attn_output.bias"),
        mlp_bias=fields.has_tensor("blk.0.ffn_up.bias"),
    )


FAMILY = Family(
    title="Llama 2 and 3, SmolLM2",
    architectures=("LlamaForCausalLM",),
    gguf_architecture="llama",
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    gguf_modules=GGUF_MODULES,
    network=Llama,
    gguf_permutes_qk=True,
)
