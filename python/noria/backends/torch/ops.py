"""The ops of `noria.backends.ops`, run eagerly by torch on any device."""

import torch
from torch.nn import functional

from noria.backends.attention import Attention
from noria.backends.ops import Heads, Rope, Scope, StepInputs
from noria.backends.torch.linear import Linear
from noria.kv_cache import KvCache
from noria.kv_format import packed


class TorchOps:
    """One step's ops. What layers share is made once: rotations, and what the attention kernel plans."""

    def __init__(self, inputs: StepInputs, kv: KvCache, attention: Attention) -> None:
        self.inputs = inputs
        self._kv = kv
        self._attention = attention.begin(inputs, kv)
        self._num_stored = inputs.num_tokens - inputs.num_padding_tokens
        self._stored_slots = inputs.slot_mapping[: self._num_stored]
        self._rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def embed(self, table: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden_size]`."""
        return functional.embedding(self.inputs.input_ids, table)

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """In place: `x` is what `embed` has just made."""
        return x.mul_(torch.tensor(factor, dtype=x.dtype))

    def linear(self, x: torch.Tensor, weights: Linear) -> torch.Tensor:
        """`[num_tokens, out_features]`."""
        return weights.apply(x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As transformers has it: float32 inside, rounded before a weight of the same dtype is applied."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        if weight.dtype == x.dtype:
            return normed.to(x.dtype).mul_(weight)
        return normed.mul_(weight).to(x.dtype)

    def qk_norm(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, heads: Heads
    ) -> torch.Tensor:
        """In place: `qkv` is what `linear` has just made."""
        first = 0
        for count, weight in ((heads.num_heads, q_weight), (heads.num_kv_heads, k_weight)):
            part = qkv[:, first : first + count * heads.head_dim].view(-1, count, heads.head_dim)
            part.copy_(self.rms_norm(part, weight, eps))
            first += count * heads.head_dim
        return qkv

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`x + y`."""
        return x + y

    def rope(self, qkv: torch.Tensor, rope: Rope[torch.Tensor], heads: Heads) -> torch.Tensor:
        """In place: `qkv` is what `linear` has just made."""
        cos, sin = self._cos_sin(rope)
        num_rotated = heads.num_heads + heads.num_kv_heads
        half = cos.shape[-1]
        rotated = qkv[:, : num_rotated * heads.head_dim].view(-1, num_rotated, heads.head_dim)
        if 2 * half < heads.head_dim:
            rotated = rotated[..., : 2 * half]
        rotated = rotated.unflatten(-1, (2, half))
        wide = rotated.to(cos.dtype)
        rotated.copy_((wide * cos).addcmul_(wide.flip(2), sin))
        return qkv

    def attention(self, qkv: torch.Tensor, layer: int, heads: Heads, scope: Scope) -> torch.Tensor:
        """Stores, then attends: `[num_tokens, num_heads * head_dim]`."""
        q_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        query, key, value = torch.split(qkv, [q_size, kv_size, kv_size], dim=1)
        per_head = (-1, heads.head_dim)
        query, key, value = (part.unflatten(1, per_head) for part in (query, key, value))
        return self.attend(query, key, value, layer, scope)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scope: Scope
    ) -> torch.Tensor:
        """As `attention`, of q, k and v `[num_tokens, heads, head_dim]`."""
        keys, values = self._kv.layer(layer)
        for cache, new in ((keys, key), (values, value)):
            slots = cache.view(-1, cache.shape[2] * cache.shape[3])
            stored = packed(new[: self._num_stored], cache.dtype)
            slots.index_copy_(0, self._stored_slots, stored.flatten(1))
        return self._attention.attend(query, keys, values, scope)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, intermediate_size]`."""
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, intermediate_size]`."""
        gate, up = gate_up.chunk(2, dim=1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """In place: `x` is what `logits` has just made."""
        return x.div_(cap).tanh_().mul_(cap)

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        """`[num_logits, vocab_size]`, float32 or float64."""
        logits = self.linear(x.index_select(0, self.inputs.logits_indices), head)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _cos_sin(self, rope: Rope[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """`cos` `[num_tokens, 1, 1, rotary_dim / 2]`, `(-sin, sin)` `[num_tokens, 1, 2, rotary_dim / 2]`."""
        found = self._rotations.get(id(rope))
        if found is None:
            angles = self.inputs.positions[:, None].to(rope.frequencies.dtype) * rope.frequencies
            cos, sin = angles.cos(), angles.sin()
            if rope.scale != 1:
                cos, sin = cos.mul_(rope.scale), sin.mul_(rope.scale)
            found = cos[:, None, None], torch.stack((-sin, sin), 1)[:, None]
            self._rotations[id(rope)] = found
        return found
