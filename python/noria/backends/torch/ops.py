"""The ops of `noria.backends.ops`, run eagerly by torch on any device."""

import torch
from torch.nn import functional

from noria.backends.attention import Attention
from noria.backends.ops import Heads, StepInputs
from noria.backends.torch.linear import Linear
from noria.kv_cache import KvCache


class TorchOps:
    """One step's ops. What layers share is made once: rotations, and what the attention kernel plans."""

    def __init__(self, inputs: StepInputs, kv: KvCache, attention: Attention) -> None:
        self._inputs = inputs
        self._kv = kv
        self._attention = attention.begin(inputs, kv)
        self._num_stored = inputs.num_tokens - inputs.num_padding_tokens
        self._stored_slots = inputs.slot_mapping[: self._num_stored]
        self._rotation: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def embed(self, table: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden_size]`."""
        return functional.embedding(self._inputs.input_ids, table)

    def linear(self, x: torch.Tensor, weights: Linear) -> torch.Tensor:
        """`[num_tokens, out_features]`."""
        return weights.apply(x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As transformers has it: float32 inside, rounded before the weight is applied."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return (wide * scale).to(x.dtype).mul_(weight)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`x + y`."""
        return x + y

    def rope(self, qkv: torch.Tensor, frequencies: torch.Tensor, heads: Heads) -> torch.Tensor:
        """In place: `qkv` is what `linear` has just made."""
        cos, sin = self._cos_sin(frequencies)
        num_rotated = heads.num_heads + heads.num_kv_heads
        rotated = qkv[:, : num_rotated * heads.head_dim].view(-1, num_rotated, 2, heads.head_dim // 2)
        wide = rotated.to(cos.dtype)
        rotated.copy_((wide * cos).addcmul_(wide.flip(2), sin))
        return qkv

    def attention(self, qkv: torch.Tensor, layer: int, heads: Heads) -> torch.Tensor:
        """Stores, then attends: `[num_tokens, num_heads * head_dim]`."""
        q_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        query, key, value = torch.split(qkv, [q_size, kv_size, kv_size], dim=1)
        keys, values = self._kv.layer(layer)
        keys.view(-1, kv_size).index_copy_(0, self._stored_slots, key[: self._num_stored])
        values.view(-1, kv_size).index_copy_(0, self._stored_slots, value[: self._num_stored])
        return self._attention.attend(query.view(-1, heads.num_heads, heads.head_dim), keys, values)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, intermediate_size]`."""
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate).mul_(up)

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        """`[num_logits, vocab_size]`, float32 or float64."""
        logits = self.linear(x.index_select(0, self._inputs.logits_indices), head)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _cos_sin(self, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`cos` `[num_tokens, 1, 1, head_dim / 2]` and `(-sin, sin)` `[num_tokens, 1, 2, head_dim / 2]`."""
        if self._rotation is None or self._rotation[0] is not frequencies:
            angles = self._inputs.positions[:, None].to(frequencies.dtype) * frequencies
            sin = angles.sin()
            self._rotation = (frequencies, angles.cos()[:, None, None], torch.stack((-sin, sin), 1)[:, None])
        return self._rotation[1], self._rotation[2]
