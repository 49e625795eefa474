"""Makes the folder's own helpers importable, and keeps tiny models for the tests that share them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent / "support"))

from checkpoints import Checkpoint
from tiny_models import save_model, tiny_config


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """`checkpoint(family, **config changes)`: a tiny model, made once for each set of changes."""
    made: dict[str, Checkpoint] = {}

    def make(family: str = "llama", **changes: Any) -> Checkpoint:
        key = family + repr(sorted(changes.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = Checkpoint(directory, save_model(directory, tiny_config(family, **changes)))
        return made[key]

    return make
