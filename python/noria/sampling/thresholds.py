"""Which tokens top-k and top-p keep, as one logit a row: a token is kept if its logit is not below it.

Nothing sorts a whole row unless its kept set may be that large. The largest `k` values of a row lie in the
`k` chunks with the largest maxima: one pass finds these chunks, and only their members are ranked.
"""

from dataclasses import dataclass

import torch

from noria.sampling.draw import chunk_masses, masses, place_of
from noria.sampling.scratch import Scratch, Use

_CHUNK = 64
_TOP_P_CANDIDATES = (64, 256)
"""How many of the most likely tokens top-p looks at, before it ranks all of them."""


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

    def select(self, rows: torch.Tensor | slice) -> "Weighing":
        """The same for some of the rows."""
        return Weighing(
            self.row_max[rows],
            None if self.inverse_temperature is None else self.inverse_temperature[rows],
            None if self.min_weight is None else self.min_weight[rows],
            None if self.min_logit is None else self.min_logit[rows],
        )

    def weights(self, logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Weights of logits `[n, k]`, written to `out`; the floors are not applied."""
        torch.sub(logits, self.row_max, out=out)  # at most 0 whatever the logits' size: no exp overflows
        if self.inverse_temperature is not None:
            out.mul_(self.inverse_temperature)
        return out.exp_()

    def floored(self, logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The same, and 0 where a floor drops the token."""
        weights = self.weights(logits, out)
        if self.min_weight is not None:
            weights.masked_fill_(weights < self.min_weight, 0.0)
        if self.min_logit is not None:
            weights.masked_fill_(logits < self.min_logit, 0.0)
        return weights


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """The `k` largest values of each row.

    Args:
        values: `[n, size]`.
        k: 1 to `size`.

    Returns:
        `[n, k]`, in descending order.
    """
    num_rows, size = values.shape
    num_chunks = size // _CHUNK
    if 2 * k > num_chunks:
        return values.topk(k, dim=1).values
    whole = values[:, : num_chunks * _CHUNK].view(num_rows, num_chunks, _CHUNK)
    # A value among the k largest is outranked by fewer than k chunk maxima, so its chunk is among these, or
    # chunks with as many values equal to it are.
    chunk = whole.amax(2).topk(k, dim=1, sorted=False).indices  # [n, k]
    chunk += torch.arange(num_rows, device=values.device)[:, None] * num_chunks
    members = whole.reshape(-1, _CHUNK).index_select(0, chunk.flatten()).view(num_rows, -1)  # [n, k * 64]
    if num_chunks * _CHUNK < size:
        members = torch.cat((members, values[:, num_chunks * _CHUNK :]), dim=1)
    return members.topk(k, dim=1).values


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


def top_p_threshold(
    logits: torch.Tensor, weighing: Weighing, top_p: torch.Tensor, total: torch.Tensor, scratch: Scratch
) -> torch.Tensor:
    """The logit of the last token that top-p keeps.

    A token is kept if the tokens more likely than it hold less than `top_p` of the mass; tokens of equal
    logits are kept or dropped together.

    Args:
        logits: `[n, vocab_size]`.
        weighing: of these rows; what its floors drop has no mass.
        top_p: `[n, 1]` float64, above 0.
        total: `[n, 1]` int64: mass of all tokens that the floors keep.
        scratch: `Use.PART` and `Use.MASK` of it are overwritten.

    Returns:
        `[n, 1]`.
    """
    num_rows, vocab_size = logits.shape
    threshold = torch.empty_like(weighing.row_max)
    wanted = top_p * total.double()
    pending = torch.arange(num_rows, device=logits.device)
    for num_candidates in _TOP_P_CANDIDATES:
        if num_candidates > vocab_size:
            break
        of_pending = logits if len(pending) == num_rows else scratch.select(Use.PART, logits, pending)
        candidates = largest(of_pending, num_candidates)  # [num_pending, num_candidates]
        mass = masses(weighing.select(pending).floored(candidates, torch.empty_like(candidates)))
        upto = mass.cumsum(1)
        # The masses before each candidate ascend, so what is kept is a prefix, and it is never empty.
        num_kept = ((upto - mass).double() < wanted[pending]).sum(1, keepdim=True).clamp_min(1)
        threshold[pending] = candidates.gather(1, num_kept - 1)
        # Read on the host: more candidates are ranked for those rows alone that these do not cover.
        pending = pending[(upto[:, -1:].double() < wanted[pending]).squeeze(1)]
        if len(pending) == 0:
            return threshold
    rest = _ascending(scratch.select(Use.PART, logits, pending))
    threshold[pending] = _top_p_of_sorted(rest, weighing.select(pending), top_p[pending], scratch)
    return threshold


def _ascending(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":
        # numpy sorts values without their indices, by SIMD: ten times as fast as torch.
        values.numpy().sort(axis=1)
        return values
    return values.sort(dim=1).values


def _top_p_of_sorted(
    logits: torch.Tensor, weighing: Weighing, top_p: torch.Tensor, scratch: Scratch
) -> torch.Tensor:
    """`top_p_threshold` of rows in ascending order: cuts 1 − `top_p` of the mass off their lower end."""
    weights = weighing.floored(logits, scratch.take(Use.MASK, len(logits), logits.dtype))
    chunks = chunk_masses(weights)
    total = chunks.sum(1, keepdim=True)
    cut = (total.double() * (1.0 - top_p)).long()
    return logits.gather(1, place_of(weights, chunks, torch.minimum(cut, total - 1)))
