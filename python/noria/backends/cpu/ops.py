"""The ops of `noria.backends.ops`, recorded instead of run.

What an op makes is the number of a value in the program, and parameters are numbers too: a forward over these
ops records itself, and nothing is computed.
"""

import numpy as np
import numpy.typing as npt
import torch

from noria._core import CpuBuilder
from noria.backends.ops import Heads, Rope, Scope


class RecordingOps:
    """Ops that add themselves to a program."""

    def __init__(self, builder: CpuBuilder) -> None:
        self._builder = builder
        self._vectors: dict[int, int] = {}

    def embed(self, table: torch.Tensor) -> int:
        """The table's rows of a step's tokens."""
        return self._builder.embed(self._builder.table(_numbers(table)))

    def linear(self, x: int, weights: int) -> int:
        """`x @ weight.T (+ bias)`."""
        return self._builder.linear(x, weights)

    def rms_norm(self, x: int, weight: torch.Tensor, eps: float) -> int:
        """`x / sqrt(mean(x ** 2) + eps) * weight`."""
        return self._builder.rms_norm(x, self._vector(weight), eps)

    def qk_norm(
        self, qkv: int, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, heads: Heads
    ) -> int:
        """`rms_norm` of each head of q and of k, in place."""
        q, k = self._vector(q_weight), self._vector(k_weight)
        return self._builder.qk_norm(qkv, q, k, eps, _heads(heads))

    def add(self, x: int, y: int) -> int:
        """`x + y`."""
        return self._builder.add(x, y)

    def scale(self, x: int, factor: float) -> int:
        """`x * factor`."""
        return self._builder.scale(x, factor)

    def rope(self, qkv: int, rope: Rope[torch.Tensor], heads: Heads) -> int:
        """Rotates q and k in place."""
        return self._builder.rope(qkv, self._vector(rope.frequencies), rope.scale, _heads(heads))

    def attention(self, qkv: int, layer: int, heads: Heads, scope: Scope) -> int:
        """Stores k and v, then attends."""
        return self._builder.attention(
            qkv, layer, _heads(heads), scale=scope.scale, window=scope.window, softcap=scope.softcap
        )

    def silu_mul(self, gate_up: int) -> int:
        """`silu(gate) * up`."""
        return self._builder.silu_mul(gate_up)

    def gelu_mul(self, gate_up: int) -> int:
        """`gelu(gate) * up`."""
        return self._builder.gelu_mul(gate_up)

    def logits(self, x: int, head: int) -> int:
        """Logits of the wanted tokens."""
        return self._builder.logits(x, head)

    def softcap(self, x: int, cap: float) -> int:
        """`cap * tanh(x / cap)`."""
        return self._builder.softcap(x, cap)

    def _vector(self, vector: torch.Tensor) -> int:
        """Layers share what is one tensor to them."""
        if id(vector) not in self._vectors:
            self._vectors[id(vector)] = self._builder.vector(_numbers(vector))
        return self._vectors[id(vector)]


def _heads(heads: Heads) -> tuple[int, int, int]:
    return heads.num_heads, heads.num_kv_heads, heads.head_dim


def _numbers(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(tensor.float().numpy())
