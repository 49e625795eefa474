"""Log probabilities on their way to the host, and those of prompt tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from noria import _core
from noria._core import Expander
from noria.backends.torch.linear import Linear
from noria.backends.torch.ops import TorchOps
from noria.runner.base import SeatInit, TokenScores
from noria.runner.step import StepView
from noria.sampling.logprobs import TokenLogprobs, token_logprobs

_CHUNK_BYTES = 2**26
"""A prompt's logits are made in chunks of this size: 2,048 tokens of a large vocabulary would take 1.2 GB."""
_RECOMPUTED_BYTES = 3 * 2**27
"""The same where each chunk costs the step's forward again: 2,048 tokens of SmolLM2's vocabulary are one."""


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, begun and perhaps not done."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PendingScores:
    """What `TokenScores` holds, of which the log probabilities may still be on the device."""

    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    logprobs: TokenLogprobs

    @staticmethod
    def of(
        rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], logprobs: TokenLogprobs
    ) -> "PendingScores":
        """Begins the copy to the host."""
        copies = TokenLogprobs(to_host(logprobs.ids), to_host(logprobs.values), to_host(logprobs.ranks))
        return PendingScores(rows, positions, copies)

    def wait(self) -> TokenScores:
        """To be called when the device has come so far."""
        logprobs = self.logprobs
        return TokenScores(
            self.rows,
            self.positions,
            logprobs.ids.numpy(),
            logprobs.values.numpy(),
            logprobs.ranks.numpy(),
        )


class PromptScorer:
    """Scores the prompt tokens of the seats that ask for it.

    Args:
        num_seats: seats there are.
        vocab_size: width of the logits.
        device: where the model is.
    """

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._num_logprobs: npt.NDArray[np.int64] = np.full(
            num_seats, -1, dtype=np.int64
        )  # −1: not asked for
        self._num_prompt_tokens: npt.NDArray[np.int64] = np.zeros(num_seats, dtype=np.int64)
        self._prompts: npt.NDArray[np.int64] = np.zeros((num_seats, 0), dtype=np.int64)
        self._is_asked = False

    def set_seats(self, seats: npt.NDArray[np.int32], inits: Sequence[SeatInit]) -> None:
        """Takes over the requests that gained seats."""
        self._num_logprobs[seats] = -1
        for seat, init in zip(seats.tolist(), inits, strict=True):
            asked = init.sampling_params.prompt_logprobs
            if asked is None:
                continue
            ids = init.context.prompt_token_ids
            if len(ids) > self._prompts.shape[1]:
                more = len(ids) - self._prompts.shape[1]
                self._prompts = np.pad(self._prompts, ((0, 0), (0, more)))
            self._prompts[seat, : len(ids)] = ids
            self._num_prompt_tokens[seat] = len(ids)
            self._num_logprobs[seat] = self._vocab_size if asked < 0 else min(asked, self._vocab_size)
        self._is_asked = bool((self._num_logprobs >= 0).any())

    def targets(self, view: StepView, expander: Expander) -> "ScoredTokens | None":
        """The tokens of a step whose next one is to be scored; None if there are none."""
        if not self._is_asked:
            return None
        row_seats = expander.row_seats[: view.num_rows]
        asks = (self._num_logprobs[row_seats] >= 0) & ((view.row_flags & _core.PADDING) == 0)
        if not asks.any():
            return None
        rows = np.repeat(np.arange(view.num_rows), view.row_count)  # [num_tokens]
        seats = row_seats[rows]
        nexts = expander.positions[: view.num_tokens] + 1
        (tokens,) = np.nonzero(asks[rows] & (nexts < self._num_prompt_tokens[seats]))
        if not len(tokens):
            return None
        seats, nexts = seats[tokens], nexts[tokens]
        k = int(self._num_logprobs[seats].max())
        return ScoredTokens(rows[tokens], nexts, tokens, self._prompts[seats, nexts], k)

    def score(
        self, targets: "ScoredTokens", logits_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> PendingScores:
        """Scores them, a chunk of logits at a time.

        Args:
            targets: what is scored.
            logits_of: from indices of the step's tokens `[n]` to their logits `[n, vocab_size]`.
        """
        parts = []
        for chunk in self._chunks(0, len(targets.tokens), _CHUNK_BYTES):
            tokens = torch.from_numpy(targets.tokens[chunk]).to(self._device)
            parts.append(self._scored(targets, chunk, logits_of(tokens)))
        return self._pending(targets, parts)

    def score_recomputed(
        self,
        targets: "ScoredTokens",
        logits_indices: torch.Tensor,
        forward: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, PendingScores]:
        """Computes a step, and scores them, where logits come of whole forwards only.

        One forward gives the step's own logits and a large chunk of the prompt's; each further chunk takes
        one more, which writes the same K and V again.

        Args:
            targets: what is scored.
            logits_indices: `[num_logits]`: tokens whose logits the step samples from.
            forward: computes the step; from indices of its tokens `[n]` to their logits `[n, vocab_size]`.

        Returns:
            The logits of `logits_indices`, and the scores.
        """
        own: torch.Tensor | None = None
        parts = []
        for block in self._chunks(0, len(targets.tokens), _RECOMPUTED_BYTES):
            tokens = torch.from_numpy(targets.tokens[block]).to(self._device)
            if own is None:
                logits = forward(torch.cat([logits_indices, tokens]))
                # A copy: a part would keep all of it.
                own, logits = logits[: len(logits_indices)].clone(), logits[len(logits_indices) :]
            else:
                logits = forward(tokens)
            for chunk in self._chunks(block.start, block.stop, _CHUNK_BYTES):
                part = logits[chunk.start - block.start : chunk.stop - block.start]
                parts.append(self._scored(targets, chunk, part))
        assert own is not None  # there is at least one target
        return own, self._pending(targets, parts)

    def _chunks(self, start: int, stop: int, num_bytes: int) -> Iterator[slice]:
        """Ranges whose logits take so much memory at most, but for one token's."""
        num = max(1, num_bytes // (self._vocab_size * 4))
        for first in range(start, stop, num):
            yield slice(first, min(first + num, stop))

    def _scored(self, targets: "ScoredTokens", chunk: slice, logits: torch.Tensor) -> TokenLogprobs:
        return token_logprobs(logits, torch.from_numpy(targets.ids[chunk]).to(self._device), targets.k)

    def _pending(self, targets: "ScoredTokens", parts: Sequence[TokenLogprobs]) -> PendingScores:
        whole = TokenLogprobs(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.values for part in parts]),
            torch.cat([part.ranks for part in parts]),
        )
        return PendingScores.of(targets.rows, targets.positions, whole)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens of a step whose next token is known and is to be scored.

    Attributes:
        rows: `[n]` int64: theirs.
        positions: `[n]` int64: of the next tokens, in the prompt.
        tokens: `[n]` int64: which tokens of the step.
        ids: `[n]` int64: the next tokens.
        k: how many of the most likely ones are told.
    """

    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    k: int


class HeadTap(TorchOps):
    """Keeps what the model's head reads, so that more logits can be made of it than the step samples from."""

    hidden: torch.Tensor | None = None
    head: Linear | None = None

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        """As ever; and keeps `x` `[num_tokens, hidden_size]`."""
        self.hidden, self.head = x, head
        return super().logits(x, head)

    def logits_of(self, tokens: torch.Tensor, softcap: float | None) -> torch.Tensor:
        """`[n, vocab_size]` of tokens `[n]` of the step, once `logits` was called."""
        assert self.hidden is not None
        assert self.head is not None
        logits = self.linear(self.hidden.index_select(0, tokens), self.head)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if softcap is None else self.softcap(logits, softcap)
