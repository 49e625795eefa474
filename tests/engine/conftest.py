"""Makes the folder's own helpers importable, and watches for threads that stay behind."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# A folder of their own: with this one on the path, `import conftest` would find this file.
sys.path.append(str(Path(__file__).parent / "support"))
sys.path.append(str(Path(__file__).parents[1] / "models"))

from null_harness import NullRun, build_run
from tiny_llama import llama_config, save_llama

from noria.models import Model, load_model


@pytest.fixture
def make_run() -> Iterator[Callable[..., NullRun]]:
    """`build_run`; closes what it made, and asserts that no thread stays behind."""
    before = set(threading.enumerate())
    runs: list[NullRun] = []

    def make(*args: object, **options: object) -> NullRun:
        runs.append(build_run(*args, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.engine.close()
    assert set(threading.enumerate()) <= before


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in float64, without a tokenizer."""
    directory = tmp_path_factory.mktemp("engine-llama")
    save_llama(directory, llama_config(num_hidden_layers=2))
    return directory


@pytest.fixture(scope="session")
def tiny_model(tiny_directory: Path) -> Model:
    """The same, loaded in float64."""
    return load_model(tiny_directory, dtype="float64", device=torch.device("cpu"))
