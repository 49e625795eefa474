"""Bad words: the last token of one is banned where the output already has the others before it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from noria.sampling.context import SeatContext
from noria.sampling.seat_lists import places

_ANY = -1
"""In a word's beginning: matches whatever was there; words are aligned at their ends."""
_NOTHING = -2
"""In a seat's recent tokens: before its output began."""
_NEVER = -3
"""In a word's beginning: matches nothing, so the word is padding."""


class BadWords:
    """Bad words and recent output tokens by seat.

    Args:
        num_seats: seats there are.
        device: where the logits are.

    Attributes:
        has: `[num_seats]` bool, on the host: who has bad words.
    """

    def __init__(self, num_seats: int, device: torch.device) -> None:
        self.has: npt.NDArray[np.bool_] = np.zeros(num_seats, dtype=np.bool_)
        self._device = device
        self._starts = torch.full((num_seats, 1, 1), _NEVER, dtype=torch.int64, device=device)
        self._ends = torch.zeros((num_seats, 1), dtype=torch.int64, device=device)
        self._recent = torch.full((num_seats, 1), _NOTHING, dtype=torch.int64, device=device)

    def set_seats(self, seats: npt.NDArray[np.int64], contexts: Sequence[SeatContext]) -> None:
        """Takes over the requests that gained seats."""
        self.has[seats] = [len(context.bad_words) > 0 for context in contexts]
        for seat, context in zip(seats.tolist(), contexts, strict=True):
            if context.bad_words:
                self._set_seat(seat, context)

    def _set_seat(self, seat: int, context: SeatContext) -> None:
        words = context.bad_words
        self._reserve(len(words), max(len(word) for word in words) - 1)
        num_words, length = self._starts.shape[1:]
        starts = np.full((num_words, length), _NEVER, dtype=np.int64)
        ends = np.full(num_words, words[0][-1], dtype=np.int64)
        for index, word in enumerate(words):
            starts[index] = _ANY
            starts[index, length - len(word) + 1 :] = word[:-1]
            ends[index] = word[-1]
        recent = np.full(length, _NOTHING, dtype=np.int64)
        kept = context.output_token_ids[-length:]
        recent[length - len(kept) :] = kept
        self._starts[seat] = torch.from_numpy(starts)
        self._ends[seat] = torch.from_numpy(ends)
        self._recent[seat] = torch.from_numpy(recent)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, seats: torch.Tensor) -> None:
        """Bans what would complete a word, in place.

        Args:
            logits: `[num_rows, vocab_size]`.
            rows: `[n]` int64: the rows.
            seats: `[n]` int64: theirs; each `has` bad words.
        """
        starts = self._starts[seats]  # [n, num_words, length]
        is_match = ((starts == self._recent[seats][:, None]) | (starts == _ANY)).all(dim=2)  # [n, num_words]
        # Added, not written: two words may end alike, and only one of them match.
        banned = torch.zeros_like(is_match, dtype=logits.dtype).masked_fill_(is_match, -torch.inf)
        logits.view(-1).scatter_add_(0, places(logits, rows, self._ends[seats]), banned.flatten())

    def append(self, seats: torch.Tensor, token_ids: torch.Tensor) -> None:
        """One more output token of each seat; `[n]` each."""
        self._recent[seats] = torch.cat((self._recent[seats][:, 1:], token_ids[:, None]), dim=1)

    def _reserve(self, num_words: int, length: int) -> None:
        num_seats, old_words, old_length = self._starts.shape
        num_words, length = max(num_words, old_words), max(length, old_length)
        if (num_words, length) == (old_words, old_length):
            return
        starts = self._starts.new_full((num_seats, num_words, length), _NEVER)
        # What a longer start has before the old one matches anything, but padding words stay padding.
        is_word = self._starts[:, :, :1] != _NEVER
        starts[:, :old_words] = torch.where(is_word, _ANY, _NEVER)
        starts[:, :old_words, length - old_length :] = self._starts
        ends = self._ends[:, :1].repeat(1, num_words)
        ends[:, :old_words] = self._ends
        recent = self._recent.new_full((num_seats, length), _NOTHING)
        recent[:, length - old_length :] = self._recent
        self._starts, self._ends, self._recent = starts, ends, recent
