"""A tiny model on disk, and what the references make of it."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from dense_reference import dense_logits
from transformers import LlamaForCausalLM


@dataclass
class Checkpoint:
    """A tiny model on disk, and what it should compute."""

    directory: Path
    peer: LlamaForCausalLM
    _dense: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def dense(self, token_ids: list[int]) -> torch.Tensor:
        """Our reference's logits, `[len(token_ids), vocab_size]`; the longest of a prefix is kept."""
        for known, logits in self._dense.items():
            if list(known[: len(token_ids)]) == token_ids:
                return logits[: len(token_ids)]
        logits = dense_logits(self.directory, token_ids)
        self._dense[tuple(token_ids)] = logits
        return logits

    def transformers(self, token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.peer(torch.tensor([token_ids])).logits[0].double()
