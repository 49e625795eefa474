"""The reference attention: gathers K and V from their blocks, then torch's scaled dot product.

Rows of like lengths are attended together, padded to the longest of their group, so that a step costs a few
calls a layer and one long row does not pad all others. A long chunk with a context before it is cut in tiles
of queries first: a tile reads only what lies before its end, and masks stay small. A row from its beginning
on needs no mask.

A position beyond a row's context reads slot 0, which is zero: what an earlier owner left in a block, be it
NaN, never reaches a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from noria.backends.ops import StepInputs
from noria.kv_cache import KvCache

_TILE = 256
"""Queries that are attended together in a row with an earlier context."""
_GATHER_BYTES = 32 << 20
"""K (and V) gathered at once, at most, unless one row alone needs more."""
_FREE_WASTE = 1024
"""Padded slots of a group of decode rows that cost less than another call."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Pieces of rows, each `[num_tiles]`.

    Attributes:
        row: which row.
        first: its first token in the stream.
        count: its tokens.
        start: tokens of the row before it, in this step and in the cache.
    """

    row: Ints
    first: Ints
    count: Ints
    start: Ints

    def __getitem__(self, chosen: Ints) -> "_Tiles":
        return _Tiles(self.row[chosen], self.first[chosen], self.count[chosen], self.start[chosen])


@dataclass(frozen=True, slots=True)
class _Scattered:
    """Where the tokens of a padded group are.

    Attributes:
        tokens: `[R * n]`: which token is each query; padding queries are token 0.
        kept: `[m]`: queries that are no padding.
        targets: `[m]`: their tokens.
    """

    tokens: torch.Tensor
    kept: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Group:
    """Tiles that are attended by one call.

    Attributes:
        num_tiles: R.
        max_count: queries of each, padded: n.
        max_context: keys of each, padded: c.
        slots: `[R * c]`; slot 0 beyond a tile's end.
        mask: `[R, 1, n, c]`, added to the scores; None where nothing is masked but by `is_causal`.
        is_causal: each query sees the keys up to its own index.
        place: the tokens: a slice where they follow each other without padding.
    """

    num_tiles: int
    max_count: int
    max_context: int
    slots: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool
    place: slice | _Scattered

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`[R * n, num_heads * head_dim]` of `query` `[num_tokens, num_heads, head_dim]`."""
        _, _, num_kv_heads, head_dim = keys.shape
        num_heads = query.shape[1]
        shape = (self.num_tiles, self.max_context, num_kv_heads, head_dim)
        k = keys.view(-1, num_kv_heads * head_dim).index_select(0, self.slots).view(shape).transpose(1, 2)
        v = values.view(-1, num_kv_heads * head_dim).index_select(0, self.slots).view(shape).transpose(1, 2)
        place = self.place
        q = query[place] if isinstance(place, slice) else query.index_select(0, place.tokens)
        if self.max_count == 1:
            # The query heads of one KV head are as many queries of it: K and V are not repeated.
            q = q.reshape(self.num_tiles, num_kv_heads, num_heads // num_kv_heads, head_dim)
            o = scaled_dot_product_attention(
                q, k, v, self.mask
            )  # [R, num_kv_heads, heads / kv_heads, head_dim]
            return o.reshape(self.num_tiles, num_heads * head_dim)
        q = q.reshape(self.num_tiles, self.max_count, num_heads, head_dim).transpose(1, 2)
        o = scaled_dot_product_attention(
            q, k, v, self.mask, is_causal=self.is_causal, enable_gqa=num_heads != num_kv_heads
        )  # [R, num_heads, n, head_dim]
        return o.transpose(1, 2).reshape(self.num_tiles * self.max_count, num_heads * head_dim)


class SdpaStep:
    """A step's groups; see `noria.backends.attention.StepAttention`."""

    def __init__(self, groups: list[_Group], num_tokens: int) -> None:
        self._groups = groups
        self._covers_all = len(groups) == 1 and groups[0].place == slice(0, num_tokens)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, num_heads * head_dim]`; tokens of no group (an empty context) get zeros."""
        if self._covers_all:
            return self._groups[0].attend(query, keys, values)
        out = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        for group in self._groups:
            result = group.attend(query, keys, values)
            if isinstance(group.place, slice):
                out[group.place] = result
            else:
                out.index_copy_(0, group.place.targets, result.index_select(0, group.place.kept))
        return out


class SdpaAttention:
    """See `noria.backends.attention.Attention`."""

    def begin(self, inputs: StepInputs, kv: KvCache) -> SdpaStep:
        """Groups a step's rows.

        Lengths are read on the host, so on a GPU a step with anything but decode rows waits for the device.
        """
        keys, _ = kv.layer(0)
        max_slots = max(1, _GATHER_BYTES // (keys.shape[2] * keys.shape[3] * keys.element_size()))
        num_rows = inputs.num_rows
        if inputs.context_lens.device.type != "cpu" and inputs.num_decode_rows == num_rows:
            rows = np.arange(num_rows, dtype=np.int64)
            size = max(1, max_slots // max(inputs.max_context, 1))
            groups = [
                _decode_group(inputs, kv.dtype, slice(at, min(at + size, num_rows)))
                for at in range(0, len(rows), size)
            ]
            return SdpaStep(groups, inputs.num_tokens)
        tiles = _tiles(
            inputs.cu_seqlens_q.cpu().numpy().astype(np.int64),
            inputs.context_lens.cpu().numpy().astype(np.int64),
        )
        groups = [_group(inputs, kv.dtype, tiles[chosen]) for chosen in _grouped(tiles, max_slots)]
        return SdpaStep(groups, inputs.num_tokens)


def _host(lengths: torch.Tensor) -> Ints:
    return lengths.cpu().numpy().astype(np.int64)


def _tiles(cu_seqlens_q: Ints, context_lens: Ints) -> _Tiles:
    """Cuts rows in tiles; rows without tokens or without a context have none."""
    counts = np.where(context_lens > 0, np.diff(cu_seqlens_q), 0)
    size = np.where(context_lens > counts, _TILE, np.maximum(counts, 1))  # of a row's tiles
    num_tiles = -(-counts // size)
    row = np.repeat(np.arange(len(counts)), num_tiles)
    place = np.arange(len(row)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)  # in its row
    before = place * size[row]
    return _Tiles(
        row=row,
        first=cu_seqlens_q[row] + before,
        count=np.minimum(counts[row] - before, size[row]),
        start=context_lens[row] - counts[row] + before,
    )


def _grouped(tiles: _Tiles, max_slots: int) -> Iterator[Ints]:
    """Which tiles go together: like counts and like contexts, both within a factor of √2."""
    context = tiles.start + tiles.count
    count_class = np.ceil(2 * np.log2(tiles.count)).astype(np.int64)
    context_class = np.ceil(2 * np.log2(context)).astype(np.int64)
    is_single = tiles.count == 1
    singles = context[is_single]
    if singles.size:
        waste = singles.size * singles.max() - singles.sum()
        if waste <= max(_FREE_WASTE, singles.sum() // 4):
            context_class[is_single] = 0
    is_first = (tiles.start == 0) & ~is_single
    _, class_of = np.unique((count_class * 128 + context_class) * 2 + is_first, return_inverse=True)
    for index in range(class_of.max(initial=-1) + 1):
        members = np.nonzero(class_of == index)[0]
        size = max(1, int(max_slots // context[members].max()))
        for at in range(0, len(members), size):
            yield members[at : at + size]


def _group(inputs: StepInputs, dtype: torch.dtype, tiles: _Tiles) -> _Group:
    device = inputs.positions.device
    num_tiles, n = len(tiles.row), int(tiles.count.max())
    contexts = tiles.start + tiles.count
    c = int(contexts.max())

    def moved(values: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    is_causal = n > 1 and not tiles.start.any()
    is_masked = not is_causal and not (n == 1 and (contexts == c).all())
    start = moved(tiles.start)
    slots = _slots(inputs, inputs.row_seats[moved(tiles.row)], moved(contexts), c)
    mask = _mask(start, n, c, dtype) if is_masked else None
    if (tiles.first == tiles.first[0] + n * np.arange(num_tiles)).all() and (tiles.count == n).all():
        span = slice(int(tiles.first[0]), int(tiles.first[0]) + num_tiles * n)
        return _Group(num_tiles, n, c, slots, mask, is_causal, span)
    place = np.arange(n)
    is_query = place < tiles.count[:, None]  # [R, n]
    tokens = np.where(is_query, tiles.first[:, None] + place, 0).reshape(-1)
    kept = np.nonzero(is_query.reshape(-1))[0]
    scattered = _Scattered(moved(tokens), moved(kept), moved(tokens[kept]))
    return _Group(num_tiles, n, c, slots, mask, is_causal, scattered)


def _decode_group(inputs: StepInputs, dtype: torch.dtype, rows: slice) -> _Group:
    """Decode rows, one token each, without reading a length on the host."""
    contexts = inputs.context_lens[rows].to(torch.int64)
    c = inputs.max_context
    slots = _slots(inputs, inputs.row_seats[rows], contexts, c)
    mask = _mask(contexts - 1, 1, c, dtype)
    return _Group(rows.stop - rows.start, 1, c, slots, mask, False, rows)


def _slots(inputs: StepInputs, seats: torch.Tensor, contexts: torch.Tensor, c: int) -> torch.Tensor:
    """`[R * c]`: the slot of each position of each row, 0 from its context on."""
    size = inputs.block_size
    blocks = inputs.block_tables[seats, : -(-c // size)].to(torch.int64)  # [R, blocks]
    slots = (blocks[:, :, None] * size + torch.arange(size, device=blocks.device)).flatten(1)[:, :c]
    return torch.where(torch.arange(c, device=blocks.device) < contexts[:, None], slots, 0).flatten()


def _mask(start: torch.Tensor, n: int, c: int, dtype: torch.dtype) -> torch.Tensor:
    """`[R, 1, n, c]`: query i of a row sees positions up to start + i.

    Padding queries see some too, if only zeros: no softmax is empty, so none is NaN.
    """
    device = start.device
    last_seen = start[:, None, None, None] + torch.arange(n, device=device)[:, None]  # [R, 1, n, 1]
    is_hidden = torch.arange(c, device=device) > last_seen
    return torch.zeros(is_hidden.shape, dtype=dtype, device=device).masked_fill_(is_hidden, -torch.inf)
