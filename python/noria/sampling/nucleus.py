"""Top-p without a sort: draw, then look whether what was drawn is among the tokens that top-p keeps.

A token is kept if the tokens more likely than it hold less than `top_p` of the mass. They lie in the chunks
whose largest weight is above the token's own: of a row that is not flat, a few. A token that is not kept is
drawn again, without it and all that are no more likely: those that are kept are. So each draw is from fewer
tokens than the one before, every kept token stays among them, and what comes out has exactly the
distribution of top-p. A share of 1 − `top_p` of the first draws is in vain, and each that is halves what is
left to lose, so a row costs little more than one pass at most, however flat it is.
"""

import itertools

import torch

from noria.sampling.draw import CHUNK, draw, masses
from noria.sampling.scratch import Scratch, Use

_MARGIN = 1 + 2**-20
"""A chunk's largest weight is computed apart from the weights, and may be rounded otherwise."""


def draw_nucleus(
    ids: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    maxima: torch.Tensor,
    total: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    scratch: Scratch,
) -> torch.Tensor:
    """Draws again what top-p does not keep.

    Args:
        ids: `[n]` int64: the first draw, from all tokens.
        weights: `[num_rows, vocab_size]`, each from 0 to 1; not modified.
        rows: `[n]` int64: the rows of `weights` that were drawn from.
        maxima: `[n, num_chunks]`: no chunk of them has a larger weight, but for rounding.
        total: `[n]` int64: their masses.
        top_p: `[n]` float64, above 0; 1 keeps all.
        seeds: `[n]` int64.
        positions: `[n]` int64: output positions.
        scratch: `Use.MASK` and `Use.PART` of it are overwritten.

    Returns:
        `[n]` int64.
    """
    ids = ids.clone()
    wanted = top_p * total.double()
    maxima = maxima * _MARGIN
    pending = torch.arange(len(ids), device=ids.device)
    for attempt in itertools.count(1):
        at = rows[pending]
        drawn = weights.view(-1)[at * weights.shape[1] + ids[pending]][:, None]
        chunks = _masses_above(weights, at, drawn, maxima[pending], scratch)
        held = chunks.sum(1)
        # A row without meaning holds nothing, and ends here too.
        is_out = (held > 0) & (held.double() >= wanted[pending])
        (out,) = is_out.nonzero(as_tuple=True)  # read on the host: how many are left
        if len(out) == 0:
            return ids
        pending = pending[out]
        ids[pending] = draw(
            weights, chunks[out], seeds[pending], positions[pending], attempt, rows[pending], drawn[out]
        )
    raise AssertionError  # the loop ends by its return


def _masses_above(
    weights: torch.Tensor, rows: torch.Tensor, floor: torch.Tensor, maxima: torch.Tensor, scratch: Scratch
) -> torch.Tensor:
    """`chunk_masses` of some rows, where weights that are not above `floor` `[n, 1]` count as 0.

    Only chunks that have a weight above it are looked at.
    """
    size = weights.shape[1]
    num_whole = size // CHUNK
    found = torch.zeros_like(maxima, dtype=torch.int64)
    if num_whole:
        row, chunk = (maxima[:, :num_whole] > floor).nonzero(as_tuple=True)  # [m] each
        # Every place begins a window of its own; those that begin chunks are copied whole.
        windows = weights.view(-1).unfold(0, CHUNK, 1)
        members = scratch.take_chunks(Use.PART, len(row), CHUNK, weights.dtype)  # [m, 256]
        torch.index_select(windows, 0, rows[row] * size + chunk * CHUNK, out=members)
        above = scratch.take_chunks(Use.MASK, len(row), CHUNK, weights.dtype)
        torch.gt(members, floor[row], out=above).mul_(members)
        found[row, chunk] = masses(above.sum(1))
    if num_whole * CHUNK < size:
        rest = weights[:, num_whole * CHUNK :][rows]
        found[:, num_whole] = masses((rest * (rest > floor)).sum(1))
    return found
