"""How logits become weights, and which tokens top-k keeps, as one logit a row: those not below it.

Nothing sorts a whole row. The largest `k` values of a row lie in the `k` chunks with the largest maxima: one
pass finds these chunks, and only their members are ranked.
"""

from dataclasses import dataclass

import torch

_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Weighing:
    """How logits become weights; one entry a row, `[n, 1]`, in the logits' dtype; None where no row asks.

    Attributes:
        row_max: each row's largest logit: its weight is 1.
        inverse_temperature: 1 / temperature.
        min_weight: smaller weights are dropped (min-p); 0 drops none.
        min_logit: smaller logits are dropped (top-k); −inf drops none.
    """

    row_max: torch.Tensor
    inverse_temperature: torch.Tensor | None
    min_weight: torch.Tensor | None
    min_logit: torch.Tensor | None

    def weights(self, logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Weights of logits `[n, k]`, written to `out`; the floors are not applied."""
        torch.sub(logits, self.row_max, out=out)  # at most 0 whatever the logits' size: no exp overflows
        if self.inverse_temperature is not None:
            out.mul_(self.inverse_temperature)
        return out.exp_()


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """The `k` largest values of each row.

    Args:
        values: `[n, size]`.
        k: 1 to `size`.

    Returns:
        `[n, k]`, in descending order.
    """
    chunks = _largest_chunks(values, k)
    if chunks is None:
        return values.topk(k, dim=1).values
    return _members(values, chunks).topk(k, dim=1).values


def largest_with_ids(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and where they are: `[n, k]` each."""
    chunks = _largest_chunks(values, k)
    if chunks is None:
        top = values.topk(k, dim=1)
        return top.values, top.indices
    top = _members(values, chunks).topk(k, dim=1)
    num_listed = chunks.shape[1] * _CHUNK
    in_chunk = chunks.gather(1, (top.indices // _CHUNK).clamp_max_(chunks.shape[1] - 1)) * _CHUNK
    rest = values.shape[1] // _CHUNK * _CHUNK - num_listed  # members past the chunks are the row's last
    ids = torch.where(top.indices < num_listed, in_chunk + top.indices % _CHUNK, top.indices + rest)
    return top.values, ids


def _largest_chunks(values: torch.Tensor, k: int) -> torch.Tensor | None:
    """`[n, k]`: chunks that hold the `k` largest; None where a row has too few for that to help."""
    num_rows, size = values.shape
    num_chunks = size // _CHUNK
    if 2 * k > num_chunks:
        return None
    whole = values[:, : num_chunks * _CHUNK].view(num_rows, num_chunks, _CHUNK)
    # A value among the k largest is outranked by fewer than k chunk maxima, so its chunk is among these, or
    # chunks with as many values equal to it are.
    return whole.amax(2).topk(k, dim=1, sorted=False).indices


def _members(values: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """`[n, k * 64 + rest]`: the values in chunks `[n, k]`, then those past the last whole chunk."""
    num_rows, size = values.shape
    num_chunks = size // _CHUNK
    whole = values[:, : num_chunks * _CHUNK].reshape(-1, _CHUNK)
    of_row = chunks + torch.arange(num_rows, device=values.device)[:, None] * num_chunks
    members = whole.index_select(0, of_row.flatten()).view(num_rows, -1)
    if num_chunks * _CHUNK < size:
        members = torch.cat((members, values[:, num_chunks * _CHUNK :]), dim=1)
    return members


def top_k_threshold(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """The `top_k`-th largest logit of each row.

    Args:
        logits: `[n, vocab_size]`.
        top_k: `[n]` int64, 1 to `max_top_k`.
        max_top_k: at most `vocab_size`.

    Returns:
        `[n, 1]`.
    """
    return largest(logits, max_top_k).gather(1, top_k[:, None] - 1)
