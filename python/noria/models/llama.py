"""Llama 2 and 3, SmolLM2, and any model of the same blocks: RMS norm, rotary GQA, SiLU-gated MLP.

Source: transformers' modeling_llama.py.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from noria.backends.ops import Heads, Ops, Weights
from noria.models.config import ModelConfig

A = TypeVar("A")
P = TypeVar("P")
L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Layer(Generic[P, L]):
    """Parameters of one layer; those of one input are fused."""

    attention_norm: P
    qkv: L
    output: L
    mlp_norm: P
    gate_up: L
    down: L


class Llama(Generic[P, L]):
    """A Llama's parameters, and its forward over ops."""

    def __init__(self, config: ModelConfig, weights: Weights[P, L]) -> None:
        c = config
        self.eps = c.rms_norm_eps
        self.heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        self.embedding = weights.table("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        self.frequencies = weights.rope_frequencies()
        self.layers = [self._layer(c, weights, f"model.layers.{index}") for index in range(c.num_layers)]
        self.norm = weights.vector("model.norm.weight", c.hidden_size)
        if c.tie_word_embeddings:
            self.head = weights.tied_linear("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        else:
            self.head = weights.linear([("lm_head", c.vocab_size)], c.hidden_size, False)

    def _layer(self, c: ModelConfig, weights: Weights[P, L], at: str) -> Layer[P, L]:
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        qkv = [(f"{attention}.q_proj", q), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv)]
        gate_up = [(f"{mlp}.gate_proj", c.intermediate_size), (f"{mlp}.up_proj", c.intermediate_size)]
        return Layer(
            attention_norm=weights.vector(f"{at}.input_layernorm.weight", c.hidden_size),
            qkv=weights.linear(qkv, c.hidden_size, c.attention_bias),
            output=weights.linear([(f"{attention}.o_proj", c.hidden_size)], q, c.attention_bias),
            mlp_norm=weights.vector(f"{at}.post_attention_layernorm.weight", c.hidden_size),
            gate_up=weights.linear(gate_up, c.hidden_size, c.mlp_bias),
            down=weights.linear([(f"{mlp}.down_proj", c.hidden_size)], c.intermediate_size, c.mlp_bias),
        )

    def forward(self, ops: Ops[A, P, L]) -> A:
        """One step's logits, `[num_logits, vocab_size]`."""
        x = ops.embed(self.embedding)  # [num_tokens, hidden_size]
        for index, layer in enumerate(self.layers):
            qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, self.eps), layer.qkv)
            qkv = ops.rope(qkv, self.frequencies, self.heads)
            x = ops.add(x, ops.linear(ops.attention(qkv, index, self.heads), layer.output))
            gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, self.eps), layer.gate_up)
            x = ops.add(x, ops.linear(ops.silu_mul(gate_up), layer.down))
        return ops.logits(ops.rms_norm(x, self.norm, self.eps), self.head)


NETWORK = Llama
