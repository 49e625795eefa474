"""Where a mass falls in a row of weights, and inverse transform sampling with it.

A row is cut into chunks of consecutive places. The chunk is found from the chunks' sums, then the place
inside it, both in integers: their prefix sums are exact, so the order in which a device scans cannot move a
boundary. Cost: one pass over the weights; the rest is on `[n, size / 256]`.
"""

import torch

from noria import _core
from noria.sampling.noise import uniform

CHUNK = 256
_SCALE = 2.0**42
"""Units to a weight of 1. A row's sum stays in int64 up to 2**20 weights; a chunk that holds less than 2**-43
of the largest weight is never drawn."""


def masses(weights: torch.Tensor) -> torch.Tensor:
    """Weights from 0 to 1 as int64, in units of 2**-42: their sums are exact in any order."""
    return (weights.double() * _SCALE).round_().long()


def chunk_masses(weights: torch.Tensor) -> torch.Tensor:
    """Sums over chunks of consecutive places.

    Args:
        weights: `[n, size]`, each from 0 to 1.

    Returns:
        `[n, ceil(size / 256)]` int64, in units of 2**-42.
    """
    num_rows, size = weights.shape
    num_chunks = size // CHUNK
    whole = num_chunks * CHUNK
    sums = weights[:, :whole].view(num_rows, num_chunks, CHUNK).sum(2)
    if whole < size:
        sums = torch.cat((sums, weights[:, whole:].sum(1, keepdim=True)), dim=1)
    return masses(sums)


def chunk_maxima(values: torch.Tensor) -> torch.Tensor:
    """The largest value of each chunk of consecutive places.

    Args:
        values: `[n, size]`.

    Returns:
        `[n, ceil(size / 256)]`.
    """
    num_rows, size = values.shape
    num_chunks = size // CHUNK
    whole = num_chunks * CHUNK
    maxima = values[:, :whole].view(num_rows, num_chunks, CHUNK).amax(2)
    if whole < size:
        maxima = torch.cat((maxima, values[:, whole:].amax(1, keepdim=True)), dim=1)
    return maxima


def place_of(
    weights: torch.Tensor,
    rows: torch.Tensor,
    chunks: torch.Tensor,
    target: torch.Tensor,
    floor: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first place of each row up to which, it included, lies more than `target`.

    Args:
        weights: `[num_rows, size]`, each from 0 to 1.
        rows: `[n]` int64: rows of `weights`; some of each is above 0 (else its place means nothing).
        chunks: `[n, num_chunks]` int64: the `chunk_masses` of these rows.
        target: `[n, 1]` int64, from 0 to the row's mass − 1.
        floor: `[n, 1]`: weights that are not above it count as 0, and do so in `chunks`.

    Returns:
        `[n, 1]` int64, from 0 to `size` − 1; never a place of weight 0.
    """
    size = weights.shape[1]
    upto = chunks.cumsum(1)  # [n, num_chunks]
    chunk = (upto <= target).sum(1, keepdim=True).clamp_max(chunks.shape[1] - 1)  # [n, 1]
    mass = chunks.gather(1, chunk)
    inside = target - (upto.gather(1, chunk) - mass)  # [n, 1], from 0 to mass - 1

    places = chunk * CHUNK + torch.arange(CHUNK, device=weights.device)  # [n, 256]
    at = places.clamp_max(size - 1) + rows[:, None] * size
    members = weights.view(-1).gather(0, at.flatten()).view_as(at).masked_fill_(places >= size, 0.0)
    if floor is not None:
        members.mul_(members > floor)
    members = members.double()
    # A chunk may hold little of its row, so its own largest weight is the unit inside it; the target is what
    # the search over chunks left over, in that unit.
    upto = masses(members / members.amax(1, keepdim=True)).cumsum(1)
    total = upto[:, -1:]
    target = ((inside.double() + 0.5) / mass.double() * total.double()).long()
    place = (upto <= torch.minimum(target, total - 1)).sum(1, keepdim=True)
    return (chunk * CHUNK + place).clamp_(0, size - 1)


def draw(
    weights: torch.Tensor,
    chunks: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    attempt: int = 0,
    rows: torch.Tensor | None = None,
    floor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draws one id a row, with a probability in proportion to its weight, by inverse transform in id order.

    Args:
        weights: `[num_rows, vocab_size]`, as for `place_of`.
        chunks: `[n, num_chunks]` int64: the `chunk_masses` of the rows.
        seeds: `[n]` int64.
        positions: `[n]` int64: output positions.
        attempt: which draw of this position it is, from 0.
        rows: `[n]` int64; None: all of `weights`.
        floor: as for `place_of`.

    Returns:
        `[n]` int64; an id of weight 0 is never drawn.
    """
    if weights.device.type == "cpu" and weights.dtype == torch.float32:
        # The same bits by one call: the small operations below take longer here than a pass over the weights.
        drawn = _core.draw(
            weights.numpy(),
            chunks.numpy(),
            seeds.numpy(),
            positions.numpy(),
            attempt,
            None if rows is None else rows.numpy(),
            None if floor is None else floor.numpy().ravel(),
        )
        return torch.from_numpy(drawn)
    if rows is None:
        rows = torch.arange(len(weights), device=weights.device)
    total = chunks.sum(1, keepdim=True)
    # noise < 1, but the product may round up to the total.
    noise = uniform(seeds, positions, attempt)[:, None]
    target = torch.minimum((noise * total.double()).long(), total - 1)
    return place_of(weights, rows, chunks, target, floor).squeeze(1)
