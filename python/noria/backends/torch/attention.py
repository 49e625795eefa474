"""The reference attention: gathers K and V from their blocks, then torch's scaled dot product.

Rows of like lengths are attended together, padded to the longest of their group, so that a step costs a few
calls a layer and one long row does not pad all others. A long chunk with a context before it is cut in tiles
of queries first: a tile reads only what lies before its end, and masks stay small. A row from its beginning
on needs no mask.

A layer with a window gathers what its tiles' windows reach, and no more; where no row is longer than the
window it is attended as if there were none.

A position beyond a row's context reads slot 0, which is zero: what an earlier owner left in a block, be it
NaN, never reaches a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from noria.backends.ops import Scope, StepInputs
from noria.kv_cache import KvCache
from noria.kv_format import unpacked

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
        low: the row's first position that a query of it sees.
        start: positions from there to its first query.
    """

    row: Ints
    first: Ints
    count: Ints
    low: Ints
    start: Ints

    def __getitem__(self, chosen: Ints) -> "_Tiles":
        return _Tiles(
            self.row[chosen], self.first[chosen], self.count[chosen], self.low[chosen], self.start[chosen]
        )


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

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """`[R * n, num_heads * head_dim]` of `query` `[num_tokens, num_heads, head_dim]`."""
        num_kv_heads = keys.shape[2]
        _, num_heads, head_dim = query.shape
        k, v = self._gathered(keys, query.dtype), self._gathered(values, query.dtype)
        place = self.place
        q = query[place] if isinstance(place, slice) else query.index_select(0, place.tokens)
        if self.max_count == 1:
            # The query heads of one KV head are as many queries of it: K and V are not repeated.
            q = q.reshape(self.num_tiles, num_kv_heads, num_heads // num_kv_heads, head_dim)
            o = self._attended(q, k, v, scope)  # [R, num_kv_heads, heads / kv_heads, head_dim]
            return o.reshape(self.num_tiles, num_heads * head_dim)
        q = q.reshape(self.num_tiles, self.max_count, num_heads, head_dim).transpose(1, 2)
        o = self._attended(q, k, v, scope)  # [R, num_heads, n, head_dim]
        return o.transpose(1, 2).reshape(self.num_tiles * self.max_count, num_heads * head_dim)

    def _gathered(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tiles' K or V, `[R, num_kv_heads, c, head_dim]`."""
        heads = stored.shape[2:]
        found = stored.view(-1, heads.numel()).index_select(0, self.slots)
        return unpacked(found.view(self.num_tiles, self.max_context, *heads), dtype).transpose(1, 2)

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scope: Scope) -> torch.Tensor:
        """`[R, heads of q, queries, head_dim]`; K and V may have fewer heads."""
        is_grouped = q.shape[1] != k.shape[1]
        if scope.softcap is None:
            return scaled_dot_product_attention(
                q, k, v, self.mask, is_causal=self.is_causal, scale=scope.scale, enable_gqa=is_grouped
            )
        # Which torch's own kernels know nothing of. Scores in float32 at least, as their softmax is.
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.matmul(q, k.transpose(2, 3)).mul_(scope.scale / scope.softcap).tanh_()
        scores = scores.mul_(scope.softcap)
        wide = scores if scores.dtype == torch.float64 else scores.float()
        if self.mask is not None:
            wide = wide + self.mask
        elif self.is_causal:
            hidden = torch.ones(wide.shape[2:], dtype=torch.bool, device=wide.device).triu_(1)
            wide = wide.masked_fill(hidden, -torch.inf)
        return torch.matmul(wide.softmax(-1).to(v.dtype), v)


class _Plan:
    """The groups of a step for one window."""

    def __init__(self, groups: list[_Group], num_tokens: int) -> None:
        self._groups = groups
        self._covers_all = len(groups) == 1 and groups[0].place == slice(0, num_tokens)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """`[num_tokens, num_heads * head_dim]`; tokens of no group (an empty context) get zeros."""
        if self._covers_all:
            return self._groups[0].attend(query, keys, values, scope)
        out = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        for group in self._groups:
            result = group.attend(query, keys, values, scope)
            if isinstance(group.place, slice):
                out[group.place] = result
            else:
                out.index_copy_(0, group.place.targets, result.index_select(0, group.place.kept))
        return out


class SdpaStep:
    """A step, grouped anew for each window; see `noria.backends.attention.StepAttention`.

    Lengths are read on the host, so on a GPU a step with anything but decode rows waits for the device.
    """

    def __init__(self, inputs: StepInputs, kv: KvCache) -> None:
        self._inputs = inputs
        self._num_kv_heads = kv.memory.shape[-2]
        is_decode = inputs.num_decode_rows == inputs.num_rows
        self._lengths: tuple[Ints, Ints] | None = None
        if inputs.context_lens.device.type == "cpu" or not is_decode:
            self._lengths = _host(inputs.cu_seqlens_q), _host(inputs.context_lens)
        self._plans: dict[int | None, _Plan] = {}

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """`[num_tokens, num_heads * head_dim]`."""
        # A window that no row outgrows hides nothing.
        is_wide = scope.window is None or scope.window >= self._inputs.max_context
        window = None if is_wide else scope.window
        if window not in self._plans:
            groups = self._groups(window, query.shape[2], query.dtype)
            self._plans[window] = _Plan(groups, self._inputs.num_tokens)
        return self._plans[window].attend(query, keys, values, scope)

    def _groups(self, window: int | None, head_dim: int, dtype: torch.dtype) -> list[_Group]:
        inputs = self._inputs
        max_slots = max(1, _GATHER_BYTES // (self._num_kv_heads * head_dim * dtype.itemsize))
        if self._lengths is None:
            num_rows = inputs.num_rows
            longest = inputs.max_context if window is None else window
            size = max(1, max_slots // max(longest, 1))
            return [
                _decode_group(inputs, dtype, slice(at, min(at + size, num_rows)), window)
                for at in range(0, num_rows, size)
            ]
        tiles = _tiles(*self._lengths, window)
        return [_group(inputs, dtype, tiles[chosen], window) for chosen in _grouped(tiles, max_slots)]


class SdpaAttention:
    """See `noria.backends.attention.Attention`."""

    def begin(self, inputs: StepInputs, kv: KvCache) -> SdpaStep:
        """A step's attention."""
        return SdpaStep(inputs, kv)


def _host(lengths: torch.Tensor) -> Ints:
    return lengths.cpu().numpy().astype(np.int64)


def _tiles(cu_seqlens_q: Ints, context_lens: Ints, window: int | None) -> _Tiles:
    """Cuts rows in tiles; rows without tokens or without a context have none."""
    counts = np.where(context_lens > 0, np.diff(cu_seqlens_q), 0)
    is_whole = context_lens == counts
    if window is not None:
        is_whole &= counts <= window
    size = np.where(is_whole, np.maximum(counts, 1), _TILE)  # of a row's tiles
    num_tiles = -(-counts // size)
    row = np.repeat(np.arange(len(counts)), num_tiles)
    place = np.arange(len(row)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)  # in its row
    before = place * size[row]
    start = context_lens[row] - counts[row] + before
    low = np.zeros_like(start) if window is None else np.maximum(start - (window - 1), 0)
    return _Tiles(
        row=row,
        first=cu_seqlens_q[row] + before,
        count=np.minimum(counts[row] - before, size[row]),
        low=low,
        start=start - low,
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


def _group(inputs: StepInputs, dtype: torch.dtype, tiles: _Tiles, window: int | None) -> _Group:
    device = inputs.positions.device
    num_tiles, n = len(tiles.row), int(tiles.count.max())
    contexts = tiles.start + tiles.count
    c = int(contexts.max())

    def moved(values: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    is_hiding = window is not None and c > window  # a key is in reach of one query, not of another
    is_causal = n > 1 and not tiles.start.any() and not is_hiding
    is_masked = not is_causal and not (n == 1 and (contexts == c).all())
    start = moved(tiles.start)
    low = moved(tiles.low) if tiles.low.any() else None
    slots = _slots(inputs, inputs.row_seats[moved(tiles.row)], low, moved(contexts), c)
    mask = _mask(start, n, c, dtype, window if is_hiding else None) if is_masked else None
    if (tiles.first == tiles.first[0] + n * np.arange(num_tiles)).all() and (tiles.count == n).all():
        span = slice(int(tiles.first[0]), int(tiles.first[0]) + num_tiles * n)
        return _Group(num_tiles, n, c, slots, mask, is_causal, span)
    place = np.arange(n)
    is_query = place < tiles.count[:, None]  # [R, n]
    tokens = np.where(is_query, tiles.first[:, None] + place, 0).reshape(-1)
    kept = np.nonzero(is_query.reshape(-1))[0]
    scattered = _Scattered(moved(tokens), moved(kept), moved(tokens[kept]))
    return _Group(num_tiles, n, c, slots, mask, is_causal, scattered)


def _decode_group(inputs: StepInputs, dtype: torch.dtype, rows: slice, window: int | None) -> _Group:
    """Decode rows, one token each, without reading a length on the host."""
    contexts = inputs.context_lens[rows].to(torch.int64)
    c, low = inputs.max_context, None
    if window is not None:
        c, low = window, (contexts - window).clamp_(min=0)
        contexts = contexts - low
    slots = _slots(inputs, inputs.row_seats[rows], low, contexts, c)
    mask = _mask(contexts - 1, 1, c, dtype, None)
    return _Group(rows.stop - rows.start, 1, c, slots, mask, False, rows)


def _slots(
    inputs: StepInputs, seats: torch.Tensor, low: torch.Tensor | None, contexts: torch.Tensor, c: int
) -> torch.Tensor:
    """`[R * c]`: the slot of each position of each row from its `low` on, 0 from its context on."""
    size = inputs.block_size
    places = torch.arange(c, device=seats.device)
    if low is None:
        blocks = inputs.block_tables[seats, : -(-c // size)].to(torch.int64)  # [R, blocks]
        slots = (blocks[:, :, None] * size + torch.arange(size, device=seats.device)).flatten(1)[:, :c]
    else:
        width = inputs.block_tables.shape[1]
        positions = low[:, None] + places  # [R, c]
        columns = torch.div(positions, size, rounding_mode="floor").clamp_(max=width - 1)
        blocks = inputs.block_tables[seats[:, None], columns].to(torch.int64)
        slots = blocks * size + positions % size
    return torch.where(places < contexts[:, None], slots, 0).flatten()


def _mask(start: torch.Tensor, n: int, c: int, dtype: torch.dtype, window: int | None) -> torch.Tensor:
    """`[R, 1, n, c]`: query i of a row sees positions up to start + i, or the last `window` of them.

    Padding queries see some too, if only zeros: no softmax is empty, so none is NaN.
    """
    device = start.device
    last_seen = start[:, None, None, None] + torch.arange(n, device=device)[:, None]  # [R, 1, n, 1]
    places = torch.arange(c, device=device)
    is_hidden = places > last_seen
    if window is not None:
        is_hidden |= places <= last_seen - window
    return torch.zeros(is_hidden.shape, dtype=dtype, device=device).masked_fill_(is_hidden, -torch.inf)
