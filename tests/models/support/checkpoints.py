"""A tiny model on disk, and what the references make of it."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from dense_reference import dense_logits
from transformers import PreTrainedModel


@dataclass
class Checkpoint:
    """A tiny model on disk, and what it should compute."""

    directory: Path
    peer: PreTrainedModel
    _dense: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def dense(self, token_ids: list[int], seq_len: int = 0) -> torch.Tensor:
        """Our reference's logits, `[len(token_ids), vocab_size]`; the longest of a prefix is kept."""
        key = (seq_len, *token_ids)
        for known, logits in self._dense.items():
            if known[: len(key)] == key:
                return logits[: len(token_ids)]
        logits = dense_logits(self.directory, token_ids, seq_len)
        self._dense[key] = logits
        return logits

    def transformers(self, token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.peer(torch.tensor([token_ids])).logits[0].double()
