"""The vocabulary of ops that a model is written in, and what a step gives to it.

A model's forward calls ops and nothing else: no tensor arithmetic of its own, no branch on data. So a backend
may run the ops as they come, or record them once and run the recording.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from noria.models.config import RopeConfig

A = TypeVar("A")
"""An activation: what an op makes and the next one takes."""
P = TypeVar("P", contravariant=True)
"""A plain parameter: a vector or an embedding table."""
L = TypeVar("L", contravariant=True)
"""A linear map's parameters, in whatever layout the backend multiplies fastest."""
Pco = TypeVar("Pco", covariant=True)
Lco = TypeVar("Lco", covariant=True)


@dataclass(frozen=True, slots=True)
class Heads:
    """How a fused `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]` row splits into q, k and v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Scope:
    """What a token of a layer attends to, and how scores are made.

    Attributes:
        scale: of q · k.
        window: a token sees this many, itself included; None: all that its row has.
        softcap: scaled scores s become `softcap * tanh(s / softcap)`; None: they stay.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Rope(Generic[Pco]):
    """A rotary embedding.

    Attributes:
        frequencies: radians per position, `[rotary_dim / 2]`; a head's first `rotary_dim` dimensions rotate.
        scale: of the cosines and sines.
    """

    frequencies: Pco
    scale: float


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, as a model reads it; DESIGN.md chapter 2.2 defines the arrays.

    All tensors lie on the model's device. Rows come in this order: decode rows, listed rows, padding rows;
    and so do their tokens.

    Attributes:
        input_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64.
        slot_mapping: `[num_tokens]` int64; -1 for padding.
        cu_seqlens_q: `[num_rows + 1]` int32.
        context_lens: `[num_rows]` int32; tokens in the cache once the row is stored; 0 for padding.
        row_seats: `[num_rows]` int64.
        block_tables: `[max_num_seqs, max_blocks_per_seq]` int32, by seat.
        logits_indices: `[num_logits]` int64; tokens whose logits are wanted.
        num_tokens: tokens of the step, padding included.
        num_rows: rows, padding included.
        num_decode_rows: the first rows, of one token each.
        max_context: the longest of `context_lens`.
        block_size: tokens of a KV block.
        num_padding_tokens: the last tokens, which are stored nowhere and whose attention is zero.
    """

    input_ids: "torch.Tensor"
    positions: "torch.Tensor"
    slot_mapping: "torch.Tensor"
    cu_seqlens_q: "torch.Tensor"
    context_lens: "torch.Tensor"
    row_seats: "torch.Tensor"
    block_tables: "torch.Tensor"
    logits_indices: "torch.Tensor"
    num_tokens: int
    num_rows: int
    num_decode_rows: int
    max_context: int
    block_size: int
    num_padding_tokens: int


class Weights(Protocol[Pco, Lco]):
    """Where a model takes its parameters from, by the names of a Hugging Face checkpoint.

    Each raises ModelError where a tensor is missing or of another shape.
    """

    def table(self, name: str, rows: int, columns: int) -> Pco:
        """An embedding table, `[rows, columns]`."""

    def vector(self, name: str, size: int, *, plus_one: bool = False) -> Pco:
        """A vector, `[size]`; `plus_one`: with 1 added, and float32 at least."""

    def rope(self, rope: "RopeConfig") -> Rope[Pco]:
        """A rotary embedding, its frequencies float32 at least."""

    def linear(self, parts: list[tuple[str, int]], in_features: int, has_bias: bool) -> Lco:
        """Linear maps of one input as one: `parts` are (module name, out_features), stacked in order."""

    def tied_linear(self, name: str, out_features: int, in_features: int) -> Lco:
        """A linear map that shares an embedding table."""


class Ops(Protocol[A, P, L]):
    """The ops of one step, bound to its inputs and its KV cache."""

    def embed(self, table: P) -> A:
        """The table's rows of this step's tokens, `[num_tokens, hidden_size]`."""

    def scale(self, x: A, factor: float) -> A:
        """`x * factor`, the factor rounded to x's dtype first; may change `x`."""

    def linear(self, x: A, weights: L) -> A:
        """`x @ weight.T (+ bias)`."""

    def rms_norm(self, x: A, weight: P, eps: float) -> A:
        """`x / sqrt(mean(x ** 2) + eps) * weight`, accumulated in float32 at least.

        A weight of x's dtype is applied after rounding to it, a wider one before.
        """

    def qk_norm(self, qkv: A, q_weight: P, k_weight: P, eps: float, heads: Heads) -> A:
        """`rms_norm` of each head of q and of k, `[head_dim]`; may change `qkv`."""

    def add(self, x: A, y: A) -> A:
        """`x + y`."""

    def rope(self, qkv: A, rope: Rope[P], heads: Heads) -> A:
        """Rotates q and k by their positions; may change `qkv`.

        The first half of a head's `rotary_dim` dimensions rotates with the second; the others stay.
        """

    def attention(self, qkv: A, layer: int, heads: Heads, scope: Scope) -> A:
        """Stores k and v, then attends: `[num_tokens, num_heads * head_dim]`.

        A token sees what its row has in the cache up to and including itself, within the scope's window.
        Padding gives zeros.
        """

    def silu_mul(self, gate_up: A) -> A:
        """`silu(gate) * up` of the two halves of each row."""

    def gelu_mul(self, gate_up: A) -> A:
        """`gelu(gate) * up` of the two halves of each row; gelu by its tanh formula."""

    def logits(self, x: A, head: L) -> A:
        """`[num_logits, vocab_size]` of the tokens whose logits are wanted; float32 at least."""

    def softcap(self, x: A, cap: float) -> A:
        """`cap * tanh(x / cap)`; may change `x`."""
