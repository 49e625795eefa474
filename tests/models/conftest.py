"""Makes the folder's own helpers importable, and keeps tiny models for the tests that share them."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

sys.path.append(str(Path(__file__).parent))

from dense_reference import dense_logits
from tiny_llama import llama_config, save_llama


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """`checkpoint(**config changes)`: a tiny Llama, made once for each set of changes."""
    made: dict[str, Checkpoint] = {}

    def make(**changes: Any) -> Checkpoint:
        key = repr(sorted(changes.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp("llama")
            made[key] = Checkpoint(directory, save_llama(directory, llama_config(**changes)))
        return made[key]

    return make
