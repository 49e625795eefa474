"""The sampler: one token for each row of a step, by tensor operations over the whole step.

Ties. Greedy rows take the lowest of the equally likely ids. Top-k keeps every token that ties with the
k-th, and top-p every token that ties with the last it needs: what is kept depends on the logits alone, not on
how a device happens to rank equals. A draw is by inverse transform in id order; what top-p does not keep is
drawn again.

A row's token is a function of its own logits, parameters, seed and output position: not of the other rows,
and not of the number of threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from noria.sampling.context import NO_CONTEXT, SeatContext
from noria.sampling.draw import CHUNK, chunk_masses, chunk_maxima, draw
from noria.sampling.edits import LogitsEdits
from noria.sampling.logprobs import TokenLogprobs, token_logprobs
from noria.sampling.nucleus import draw_nucleus
from noria.sampling.params import SamplingParams
from noria.sampling.scratch import Scratch, Use
from noria.sampling.thresholds import Weighing, top_k_threshold

_SMALL_TOP_K = 256
"""Rows with a larger top_k are ranked apart, so that one of them does not make all others rank as many."""

Rows = slice | torch.Tensor
"""All rows of a step (the whole slice: nothing is copied), or the indices of some, `[n]` int64."""

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What `Sampler.sample` gives.

    Attributes:
        ids: `[n]` int64; 0, which any model can embed, where nothing could be sampled.
        ok: `[n]` bool; False where the row's largest logit is NaN or infinite, so that it means nothing.
        logprob_rows: `[m]` int64, on the host: the rows whose requests ask for log probabilities.
        logprobs: theirs; None if there are none.
    """

    ids: torch.Tensor
    ok: torch.Tensor
    logprob_rows: npt.NDArray[np.int64] | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class _HostState:
    """What decides which operations a step needs, by seat; on the host, so that no device is waited for."""

    is_random: npt.NDArray[np.bool_]
    has_temperature: npt.NDArray[np.bool_]
    has_min_p: npt.NDArray[np.bool_]
    has_top_p: npt.NDArray[np.bool_]
    top_k: npt.NDArray[np.int64]
    num_logprobs: npt.NDArray[np.int64]
    """−1 for none."""
    is_plain: npt.NDArray[np.bool_]
    """Greedy, without log probabilities or edits."""


@dataclass(frozen=True, slots=True)
class _DeviceState:
    """The values themselves, by seat; `[max_num_seqs]`."""

    inverse_temperature: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor


class Sampler:
    """Sampling state by seat, and the sampling of a step.

    Args:
        max_num_seqs: number of seats.
        vocab_size: width of the logits; at most 2**20.
        device: where the logits are.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        if not 1 <= vocab_size <= 2**20:
            raise ValueError(f"vocab_size must be from 1 to {2**20}; got {vocab_size}")
        self.vocab_size = vocab_size
        self.device = device
        self._scratch = Scratch(vocab_size, device)
        self._host = _HostState(
            is_random=np.zeros(max_num_seqs, dtype=np.bool_),
            has_temperature=np.zeros(max_num_seqs, dtype=np.bool_),
            has_min_p=np.zeros(max_num_seqs, dtype=np.bool_),
            has_top_p=np.zeros(max_num_seqs, dtype=np.bool_),
            top_k=np.zeros(max_num_seqs, dtype=np.int64),
            num_logprobs=np.full(max_num_seqs, -1, dtype=np.int64),
            is_plain=np.ones(max_num_seqs, dtype=np.bool_),
        )
        self._edits = LogitsEdits(max_num_seqs, vocab_size, device)
        self._state = _DeviceState(
            inverse_temperature=torch.ones(max_num_seqs, dtype=torch.float64, device=device),
            min_p=torch.zeros(max_num_seqs, dtype=torch.float64, device=device),
            top_p=torch.ones(max_num_seqs, dtype=torch.float64, device=device),
            top_k=torch.zeros(max_num_seqs, dtype=torch.int64, device=device),
            seed=torch.zeros(max_num_seqs, dtype=torch.int64, device=device),
        )

    def set_seats(
        self,
        seats: Sequence[int],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        contexts: Sequence[SeatContext] | None = None,
    ) -> None:
        """Takes over the parameters of requests that gained a seat; an earlier step's are forgotten.

        Args:
            seats: each once.
            params: one a seat.
            seeds: one a seat, signed 64-bit: the request's own, or the one that the engine chose for it.
            contexts: one a seat, for requests whose logits are edited.
        """
        if not len(seats) == len(params) == len(seeds):
            raise ValueError(f"{len(seats)} seats, {len(params)} params and {len(seeds)} seeds were given")
        if len(seats) == 0:
            return
        seat = np.asarray(seats, dtype=np.int64)
        temperature = np.array([p.temperature for p in params])
        is_random = np.array([not p.is_greedy for p in params])
        top_k = np.array([p.top_k if 0 < p.top_k < self.vocab_size else 0 for p in params], dtype=np.int64)
        top_p = np.array([p.top_p for p in params])
        min_p = np.array([p.min_p for p in params])
        host = self._host
        host.is_random[seat] = is_random
        host.has_temperature[seat] = temperature != 1.0
        host.has_min_p[seat] = min_p > 0.0
        host.has_top_p[seat] = top_p < 1.0
        host.top_k[seat] = top_k
        host.num_logprobs[seat] = [self._num_logprobs(p) for p in params]
        self._edits.set_seats(seat, params, contexts or [NO_CONTEXT] * len(params))
        host.is_plain[seat] = ~(is_random | (host.num_logprobs[seat] >= 0) | self._edits.asks[seat])
        index = self._to_device(seat)
        state = self._state
        state.inverse_temperature[index] = self._to_device(1.0 / np.where(is_random, temperature, 1.0))
        state.min_p[index] = self._to_device(min_p)
        state.top_p[index] = self._to_device(top_p)
        state.top_k[index] = self._to_device(top_k)
        state.seed[index] = self._to_device(np.array(seeds, dtype=np.int64))

    @property
    def is_plain(self) -> npt.NDArray[np.bool_]:
        """`[max_num_seqs]`: seats whose token is the most likely one, and nothing else is to be done."""
        return self._host.is_plain

    def _num_logprobs(self, params: SamplingParams) -> int:
        if params.logprobs is None:
            return -1
        return self.vocab_size if params.logprobs < 0 else min(params.logprobs, self.vocab_size)

    def sample(
        self, logits: torch.Tensor, seats: torch.Tensor, output_positions: torch.Tensor
    ) -> SampledTokens:
        """Samples one token a row.

        Args:
            logits: `[n, vocab_size]` float32 or float64, on the sampler's device; rows whose requests edit
                theirs are modified.
            seats: `[n]` int64. Best on the host: which operations a step needs is decided there.
            output_positions: `[n]` int64: from 0, the first output token; on any device.
        """
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size:
            raise ValueError(
                f"logits must be [n, {self.vocab_size}], one column a token; got {list(logits.shape)}"
            )
        if logits.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"logits must be float32 or float64; got {logits.dtype}")
        logits = logits.contiguous()
        seats_on_host = seats.cpu().numpy()
        seats, output_positions = seats.to(self.device), output_positions.to(self.device)
        logprob_rows = np.flatnonzero(self._host.num_logprobs[seats_on_host] >= 0)
        raw = None
        if len(logprob_rows):
            raw = logits.index_select(0, self._to_device(logprob_rows))  # before the edits
        if self._edits.are_asked(seats_on_host):
            self._edits.apply(logits, seats_on_host, output_positions)
        sampled = self._choose(logits, seats_on_host, seats, output_positions)
        self._edits.append(seats_on_host, sampled.ids)
        if raw is None:
            return sampled
        k = int(self._host.num_logprobs[seats_on_host[logprob_rows]].max())
        logprobs = token_logprobs(raw, sampled.ids[self._to_device(logprob_rows)], k)
        return SampledTokens(sampled.ids, sampled.ok, logprob_rows, logprobs)

    def _choose(
        self,
        logits: torch.Tensor,  # [n, vocab_size]
        seats_on_host: npt.NDArray[np.int64],
        seats: torch.Tensor,
        output_positions: torch.Tensor,
    ) -> SampledTokens:
        """The most likely token of greedy rows, a drawn one of the others."""
        is_random = self._host.is_random[seats_on_host]
        if not is_random.any():
            return _greedy(logits)
        rows = self._rows(is_random)
        drawn = self._draw(
            self._select(Use.LOGITS, logits, rows),
            seats_on_host[is_random],
            _part(seats, rows),
            _part(output_positions, rows),
        )
        if isinstance(rows, slice):
            return drawn
        greedy_rows = self._to_device(np.flatnonzero(~is_random))
        greedy = _greedy(self._scratch.select(Use.LOGITS, logits, greedy_rows))
        ids = torch.empty_like(seats)
        ok = torch.empty_like(seats, dtype=torch.bool)
        ids[rows], ok[rows] = drawn.ids, drawn.ok
        ids[greedy_rows], ok[greedy_rows] = greedy.ids, greedy.ok
        return SampledTokens(ids, ok)

    def _draw(
        self,
        logits: torch.Tensor,  # [n, vocab_size]
        seats_on_host: npt.NDArray[np.int64],
        seats: torch.Tensor,
        output_positions: torch.Tensor,
    ) -> SampledTokens:
        """Temperature, min-p, top-k, top-p in vLLM's order, each on the rows that ask for it."""
        host, state = self._host, self._state
        maxima = chunk_maxima(logits)  # [n, num_chunks]
        weighing = self._weighing(logits, maxima.amax(1, keepdim=True), seats_on_host, seats)
        weights = weighing.weights(logits, self._scratch.take(Use.WEIGHTS, len(logits), logits.dtype))
        if weighing.min_weight is not None:
            rows = self._rows(host.has_min_p[seats_on_host])
            self._drop_below(weights, rows, weights, weighing.min_weight)
        if weighing.min_logit is not None:
            rows = self._rows(host.top_k[seats_on_host] > 0)
            self._drop_below(weights, rows, logits, weighing.min_logit)
        chunks = chunk_masses(weights)
        seeds = state.seed[seats]
        ids = draw(weights, chunks, seeds, output_positions)
        has_top_p = host.has_top_p[seats_on_host]
        if has_top_p.any():
            rows = self._rows(has_top_p)
            ids[rows] = draw_nucleus(
                _part(ids, rows),
                weights,
                _part(torch.arange(len(weights), device=weights.device), rows),
                _part(weighing.weights(maxima, torch.empty_like(maxima)), rows),
                _part(chunks.sum(1), rows),
                state.top_p[_part(seats, rows)],
                _part(seeds, rows),
                _part(output_positions, rows),
                self._scratch,
            )
        ok = weighing.row_max.squeeze(1).isfinite()
        return SampledTokens(ids.masked_fill_(~ok, 0), ok)

    def _weighing(
        self,
        logits: torch.Tensor,
        row_max: torch.Tensor,
        seats_on_host: npt.NDArray[np.int64],
        seats: torch.Tensor,
    ) -> Weighing:
        host, state, dtype = self._host, self._state, logits.dtype
        inverse_temperature = min_weight = None
        if host.has_temperature[seats_on_host].any():
            # Not 0 even for a huge temperature: -inf · 0 is NaN.
            smallest = torch.finfo(dtype).tiny
            inverse_temperature = state.inverse_temperature[seats, None].to(dtype).clamp_min_(smallest)
        if host.has_min_p[seats_on_host].any():
            min_weight = state.min_p[seats, None].to(dtype)
        return Weighing(
            row_max=row_max,
            inverse_temperature=inverse_temperature,
            min_weight=min_weight,
            min_logit=self._top_k_floor(logits, host.top_k[seats_on_host], state.top_k[seats]),
        )

    def _top_k_floor(
        self, logits: torch.Tensor, top_k_on_host: npt.NDArray[np.int64], top_k: torch.Tensor
    ) -> torch.Tensor | None:
        has_top_k = top_k_on_host > 0
        if not has_top_k.any():
            return None
        floor = logits.new_full((len(logits), 1), -torch.inf)
        is_small = top_k_on_host <= _SMALL_TOP_K
        for asks in (has_top_k & is_small, has_top_k & ~is_small):
            if asks.any():
                rows = self._rows(asks)
                of_rows = self._select(Use.LOGITS_OF_ROWS, logits, rows)
                floor[rows] = top_k_threshold(of_rows, top_k[rows], int(top_k_on_host[asks].max()))
        return floor

    def _drop_below(
        self, weights: torch.Tensor, rows: Rows, values: torch.Tensor, floor: torch.Tensor
    ) -> None:
        """Sets `weights` of `rows` to 0 where `values` is below `floor` `[n, 1]`."""
        kept = self._select(Use.PART, weights, rows)
        of_rows = kept if values is weights else self._select(Use.LOGITS_OF_ROWS, values, rows)
        # A mask of floats and a product take half the time of a boolean mask and a fill.
        mask = self._scratch.take(Use.MASK, len(kept), kept.dtype)
        kept.mul_(torch.ge(of_rows, floor[rows], out=mask))
        if not isinstance(rows, slice):
            weights.index_copy_(0, rows, kept)

    def _select(self, use: Use, values: torch.Tensor, rows: Rows) -> torch.Tensor:
        return values if isinstance(rows, slice) else self._scratch.select(use, values, rows)

    def _rows(self, asks: npt.NDArray[np.bool_]) -> Rows:
        return _ALL if asks.all() else self._to_device(np.flatnonzero(asks))

    def _to_device(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def _part(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    return values if isinstance(rows, slice) else values[rows]


def _greedy(logits: torch.Tensor) -> SampledTokens:
    """The most likely token of each row, and the lowest such id.

    `argmax` compares one by one; maxima over chunks are vectorised, and then one chunk is searched.
    """
    vocab_size = logits.shape[1]
    maxima = chunk_maxima(logits)
    largest, chunk = maxima.max(1, keepdim=True)  # of equals the first, as argmax below
    members = chunk * CHUNK + torch.arange(CHUNK, device=logits.device)  # [n, 256]
    place = logits.gather(1, members.clamp_max_(vocab_size - 1)).argmax(1)
    ok = largest.squeeze(1).isfinite()
    return SampledTokens((chunk.squeeze(1) * CHUNK + place).masked_fill_(~ok, 0), ok)
