"""Edits of logits before a token is chosen, in vLLM's order.

Allowed ids, bad words, minimum length, bias, penalties. Each touches the rows that ask for it, and of them
the logits of the ids concerned.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from noria.sampling.bad_words import BadWords
from noria.sampling.context import SeatContext
from noria.sampling.params import SamplingParams
from noria.sampling.penalties import Penalties
from noria.sampling.seat_lists import SeatLists, places


class LogitsEdits:
    """What seats ask for, and what their edits remember.

    Args:
        num_seats: seats there are.
        vocab_size: width of the logits; ids past it are passed over.
        device: where the logits are.
    """

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._allowed = SeatLists(num_seats, device)
        self._bad_words = BadWords(num_seats, device)
        self._stops = SeatLists(num_seats, device)
        self._min_tokens = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self._bias = SeatLists(num_seats, device)
        self._penalties = Penalties(num_seats, device)
        self.asks: npt.NDArray[np.bool_] = np.zeros(num_seats, dtype=np.bool_)
        self._remembers: npt.NDArray[np.bool_] = np.zeros(num_seats, dtype=np.bool_)

    def set_seats(
        self, seats: npt.NDArray[np.int64], params: Sequence[SamplingParams], contexts: Sequence[SeatContext]
    ) -> None:
        """Takes over the requests that gained seats; what earlier ones left is forgotten."""
        self._allowed.set(seats, [self._known(asked.allowed_token_ids or ()) for asked in params])
        self._bad_words.set_seats(seats, contexts)
        self._stops.set(
            seats,
            [
                self._known(context.stop_token_ids) if asked.min_tokens else ()
                for asked, context in zip(params, contexts, strict=True)
            ],
        )
        min_tokens = np.array([asked.min_tokens for asked in params], dtype=np.int64)
        self._min_tokens[torch.from_numpy(seats).to(self._device)] = torch.from_numpy(min_tokens).to(
            self._device
        )
        biases = [
            {
                token_id: bias
                for token_id, bias in (asked.logit_bias or {}).items()
                if token_id < self._vocab_size
            }
            for asked in params
        ]
        self._bias.set(seats, [list(bias) for bias in biases], [list(bias.values()) for bias in biases])
        self._penalties.set_seats(seats, params, contexts)
        self._remembers[seats] = self._bad_words.has[seats] | self._penalties.has[seats]
        self.asks[seats] = (
            self._remembers[seats] | self._allowed.has[seats] | self._stops.has[seats] | self._bias.has[seats]
        )

    def are_asked(self, seats: npt.NDArray[np.int64]) -> bool:
        """Whether any of the seats asks for an edit."""
        return bool(self.asks[seats].any())

    def apply(
        self, logits: torch.Tensor, seats: npt.NDArray[np.int64], output_positions: torch.Tensor
    ) -> None:
        """Edits the rows that ask for it, in place.

        Args:
            logits: `[n, vocab_size]`.
            seats: `[n]`: one a row.
            output_positions: `[n]` int64, on the device of the logits.
        """
        if (has := self._allowed.has[seats]).any():
            rows, of_rows = self._rows(has, seats)
            ids, _ = self._allowed.of(of_rows, seats[has])
            at = places(logits, rows, ids)
            kept = logits.view(-1).gather(0, at)
            logits.index_fill_(0, rows, -torch.inf)
            logits.view(-1).scatter_(0, at, kept)
        if (has := self._bad_words.has[seats]).any():
            self._bad_words.apply(logits, *self._rows(has, seats))
        if (has := self._stops.has[seats]).any():
            rows, of_rows = self._rows(has, seats)
            ids, _ = self._stops.of(of_rows, seats[has])
            is_early = (output_positions[rows] < self._min_tokens[of_rows])[:, None]
            at = places(logits, rows, ids)
            values = logits.view(-1).gather(0, at).view_as(ids).masked_fill_(is_early, -torch.inf)
            logits.view(-1).scatter_(0, at, values.flatten())
        if (has := self._bias.has[seats]).any():
            rows, of_rows = self._rows(has, seats)
            ids, biases = self._bias.of(of_rows, seats[has])
            logits.view(-1).scatter_add_(0, places(logits, rows, ids), biases.to(logits.dtype).flatten())
        if (has := self._penalties.has[seats]).any():
            self._penalties.apply(logits, *self._rows(has, seats), seats[has])

    def append(self, seats: npt.NDArray[np.int64], token_ids: torch.Tensor) -> None:
        """Remembers the tokens that were sampled, `[n]`, where a later edit depends on them."""
        if not self._remembers[seats].any():
            return
        if (has := self._bad_words.has[seats]).any():
            rows, of_rows = self._rows(has, seats)
            self._bad_words.append(of_rows, token_ids[rows])
        if (has := self._penalties.has[seats]).any():
            rows, of_rows = self._rows(has, seats)
            self._penalties.append(of_rows, seats[has], token_ids[rows])

    def _rows(
        self, has: npt.NDArray[np.bool_], seats: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that `has` says, and their seats."""
        rows = np.flatnonzero(has)
        return torch.from_numpy(rows).to(self._device), torch.from_numpy(seats[rows]).to(self._device)

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        """Those that the model has a logit for."""
        return [token_id for token_id in dict.fromkeys(token_ids) if token_id < self._vocab_size]
