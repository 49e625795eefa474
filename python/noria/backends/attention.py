"""What the attention op of the torch backend asks of a kernel."""

from typing import Protocol

import torch

from noria.backends.ops import Scope, StepInputs
from noria.kv_cache import KvCache


class StepAttention(Protocol):
    """Attention over the paged cache, for the rows of one step."""

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """Attends with one layer, whose K and V of this step are stored already.

        Args:
            query: `[num_tokens, num_heads, head_dim]`; may be a view with gaps between tokens.
            keys: `[num_blocks + 1, block_size, num_kv_heads, stored_size]`, as `kv_format.packed` makes them.
            values: likewise.
            scope: the layer's scale, window and bound.

        Returns:
            `[num_tokens, num_heads * head_dim]`. Token i of a row of `count` tokens sees the row's first
            `context_len - count + i + 1` tokens, or the last `window` of those; a token of a row with an
            empty context gets zeros.
        """


class Attention(Protocol):
    """A kernel."""

    def begin(self, inputs: StepInputs, kv: KvCache) -> StepAttention:
        """What layers of a step share (indices, masks), made once for each window that one of them has."""
