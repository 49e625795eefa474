"""Top-p without a sort: draw, then look whether what was drawn is among the tokens that top-p keeps.

A token is kept if the tokens more likely than it hold less than `top_p` of the mass, which one pass over the
row says. A token that is not kept is drawn again, without it and all that are no more likely: those that are
kept are. So each draw is from fewer tokens than the one before, every kept token stays among them, and what
comes out has exactly the distribution of top-p. A share of 1 − `top_p` of the first draws is in vain, and
each that is halves what is left to lose, so a row costs little more than one pass, however flat it is.
"""

import itertools

import torch

from noria.sampling.draw import chunk_masses, draw
from noria.sampling.noise import uniform
from noria.sampling.scratch import Scratch, Use


def draw_nucleus(
    ids: torch.Tensor,
    weights: torch.Tensor,
    chunks: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    scratch: Scratch,
) -> torch.Tensor:
    """Draws again what top-p does not keep.

    Args:
        ids: `[n]` int64: the first draw, from all tokens.
        weights: `[n, vocab_size]`, each from 0 to 1; not modified.
        chunks: `[n, num_chunks]` int64: `chunk_masses(weights)`.
        top_p: `[n]` float64, above 0; 1 keeps all.
        seeds: `[n]` int64.
        positions: `[n]` int64: output positions.
        scratch: `Use.MASK` and `Use.PART` of it are overwritten.

    Returns:
        `[n]` int64.
    """
    ids = ids.clone()
    wanted = top_p * chunks.sum(1).double()
    pending = torch.arange(len(ids), device=ids.device)
    of_pending = weights
    for attempt in itertools.count(1):
        drawn = of_pending.gather(1, ids[pending, None])
        likelier = scratch.take(Use.MASK, len(pending), weights.dtype)
        torch.gt(of_pending, drawn, out=likelier).mul_(of_pending)
        chunks = chunk_masses(likelier)  # [num_pending, num_chunks]
        held = chunks.sum(1)
        # A row without meaning holds nothing, and ends here too.
        is_out = (held > 0) & (held.double() >= wanted[pending])
        (out,) = is_out.nonzero(as_tuple=True)  # read on the host: how many are left
        if len(out) == 0:
            return ids
        pending = pending[out]
        of_pending = scratch.select(Use.PART, likelier, out)
        ids[pending] = draw(of_pending, chunks[out], uniform(seeds[pending], positions[pending], attempt))
    raise AssertionError  # the loop ends by its return
