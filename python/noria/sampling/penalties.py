"""Penalties: which tokens a seat's prompt and output have, and how often the output has them.

A seat keeps the distinct ids that it has met and their counts, not one count for each id of the vocabulary: a
step then touches as many logits as there are tokens in the contexts, whatever the vocabulary. Both are kept
on the device and in the order of steps, so a step need not wait for the host to see the tokens before it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from noria.sampling.context import SeatContext
from noria.sampling.params import SamplingParams
from noria.sampling.seat_lists import places

_NO_ID = -1
_MIN_CAPACITY = 64


class Penalties:
    """Tokens met by seat, for the seats that ask for a penalty.

    Args:
        num_seats: seats there are.
        device: where the logits are.

    Attributes:
        has: `[num_seats]` bool, on the host: who asks.
    """

    def __init__(self, num_seats: int, device: torch.device) -> None:
        self.has: npt.NDArray[np.bool_] = np.zeros(num_seats, dtype=np.bool_)
        self._device = device
        # A seat's first `_num` entries are ids, each once; the others are `_NO_ID` and 0.
        self._ids = torch.full((num_seats, 0), _NO_ID, dtype=torch.int64, device=device)
        self._counts = torch.zeros((num_seats, 0), dtype=torch.int64, device=device)  # in the output
        self._num = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self._max_num = np.zeros(num_seats, dtype=np.int64)  # no less than `_num`, known without a look at it
        # repetition, presence, frequency
        self._strengths = torch.zeros((num_seats, 3), dtype=torch.float64, device=device)

    def set_seats(
        self, seats: npt.NDArray[np.int64], params: Sequence[SamplingParams], contexts: Sequence[SeatContext]
    ) -> None:
        """Takes over the requests that gained seats."""
        self.has[seats] = [asked.has_penalty for asked in params]
        for seat, asked, context in zip(seats.tolist(), params, contexts, strict=True):
            if asked.has_penalty:
                self._set_seat(seat, asked, context)

    def _set_seat(self, seat: int, params: SamplingParams, context: SeatContext) -> None:
        output, counts = np.unique(context.output_token_ids, return_counts=True)
        ids = output
        if params.repetition_penalty != 1.0:  # the others look at the output alone
            ids = np.concatenate((output, np.setdiff1d(context.prompt_token_ids, output)))
        self._reserve(len(ids) + 1)
        self._ids[seat] = _NO_ID
        self._counts[seat] = 0
        self._ids[seat, : len(ids)] = torch.from_numpy(ids)
        self._counts[seat, : len(counts)] = torch.from_numpy(counts)
        self._num[seat] = len(ids)
        self._max_num[seat] = len(ids)
        strengths = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self._strengths[seat] = torch.tensor(strengths, dtype=torch.float64)

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        seats: torch.Tensor,
        seats_on_host: npt.NDArray[np.int64],
    ) -> None:
        """Penalises some rows of logits, in place.

        Args:
            logits: `[num_rows, vocab_size]`.
            rows: `[n]` int64: the rows.
            seats: `[n]` int64: theirs; each `has` a penalty.
            seats_on_host: the same.
        """
        width = int(self._max_num[seats_on_host].max())
        if width == 0:
            return
        ids = self._ids[seats, :width]
        counts = self._counts[seats, :width]
        # Padding becomes the seat's first entry, written twice with one value; a seat without any writes back
        # what its token 0 has, for its only strengths then are those that look at counts.
        is_padding = ids == _NO_ID
        ids = torch.where(is_padding, ids[:, :1].clamp_min(0), ids)
        counts = torch.where(is_padding, counts[:, :1], counts)
        repetition, presence, frequency = (
            self._strengths[seats].to(logits.dtype).split(1, dim=1)
        )  # [n, 1] each
        at = places(logits, rows, ids)
        values = logits.view(-1).gather(0, at).view_as(ids)
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts + presence * (counts > 0)
        logits.view(-1).scatter_(0, at, values.flatten())

    def append(
        self, seats: torch.Tensor, seats_on_host: npt.NDArray[np.int64], token_ids: torch.Tensor
    ) -> None:
        """Counts one more output token of each seat; `[n]` each."""
        self._max_num[seats_on_host] += 1
        width = int(self._max_num[seats_on_host].max())
        self._reserve(width + 1)
        ids, counts = self._ids[seats, :width], self._counts[seats, :width]
        is_met = ids == token_ids[:, None]
        counts += is_met
        is_new = ~is_met.any(dim=1)
        at = self._num[seats]
        # Of a token met before, this writes padding over padding.
        place = torch.arange(width, device=self._device) == at[:, None]
        self._ids[seats, :width] = torch.where(place & is_new[:, None], token_ids[:, None], ids)
        self._counts[seats, :width] = counts + (place & is_new[:, None])
        self._num[seats] = at + is_new

    def _reserve(self, width: int) -> None:
        if width <= self._ids.shape[1]:
            return
        more = max(width, 2 * self._ids.shape[1], _MIN_CAPACITY) - self._ids.shape[1]
        num_seats = len(self.has)
        ids = torch.full((num_seats, more), _NO_ID, dtype=torch.int64, device=self._device)
        self._ids = torch.cat((self._ids, ids), dim=1)
        self._counts = torch.cat((self._counts, torch.zeros_like(ids)), dim=1)
