"""Log probabilities of sampled tokens, and of the most likely ones beside them, from the unedited logits."""

from dataclasses import dataclass

import torch

from noria.sampling.thresholds import largest_with_ids


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token a row, and the most likely ones beside it.

    Attributes:
        ids: `[n, 1 + k]` int64: the token, then the most likely in descending order.
        values: `[n, 1 + k]` float32: their log probabilities.
        ranks: `[n]` int64: the token's rank, from 1; equals share the worst.
    """

    ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> TokenLogprobs:
    """Log probabilities of some rows.

    Args:
        logits: `[n, vocab_size]`.
        token_ids: `[n]` int64.
        k: 0 to `vocab_size`.
    """
    total = logits.logsumexp(1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    # A mask of floats is summed four times as fast as one of booleans, and exactly up to 2**24 ids.
    ranks = torch.ge(logits, chosen, out=torch.empty_like(logits)).sum(1).long()
    ids, best = token_ids[:, None], chosen
    if k:
        values, most_likely = largest_with_ids(logits, k)
        ids = torch.cat((ids, most_likely), dim=1)
        best = torch.cat((best, values), dim=1)
    return TokenLogprobs(ids, (best - total).float(), ranks)
