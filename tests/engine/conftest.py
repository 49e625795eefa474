"""Makes the folder's own helpers importable, and watches for threads that stay behind."""

import gc
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

# Folders of their own: with this one on the path, `import conftest` would find this file.
sys.path.append(str(Path(__file__).parent / "support"))
sys.path.append(str(Path(__file__).parents[1] / "models" / "support"))

from async_harness import Run, Use, run_engine
from null_harness import NullRun, build_run

from noria import LLM
from noria.models import Model, load_model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """A tiny model's operations are too small to share; a module with a real one has its own `one_thread`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    from tiny_llama import llama_config, save_llama  # transformers takes its time to import

    directory = tmp_path_factory.mktemp("engine-llama")
    save_llama(directory, llama_config(num_hidden_layers=2))
    return directory


@pytest.fixture(scope="session")
def tiny_model(tiny_directory: Path) -> Model:
    """The same, loaded in float64."""
    return load_model(tiny_directory, dtype="float64", device=torch.device("cpu"))


@pytest.fixture(scope="session")
def worded_directory(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with a tokenizer whose token 5 is the word `w5`; 1 begins a text, 2 ends a sequence."""
    from tiny_llama import VOCAB_SIZE

    directory = tmp_path_factory.mktemp("worded-llama")
    shutil.copytree(tiny_directory, directory, dirs_exist_ok=True)
    words = {f"w{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    words["<s>"], words["</s>"] = words.pop("w1"), words.pop("w2")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return directory


@pytest.fixture
def run_async(worded_directory: Path) -> Iterator[Run]:
    """`run_engine` on the worded model; asserts that no thread stays behind."""
    before = set(threading.enumerate())

    def run(use: Use, *, is_dead: bool = False, **options: Any) -> None:
        run_engine(worded_directory, use, is_dead=is_dead, **options)

    yield run
    gc.collect()
    assert set(threading.enumerate()) <= before


@pytest.fixture
def make_llm(worded_directory: Path) -> Iterator[Callable[..., LLM]]:
    before = set(threading.enumerate())
    made: list[LLM] = []

    def make(directory: Path = worded_directory, **options: Any) -> LLM:
        values = {
            "dtype": "float64",
            "max_num_seqs": 4,
            "num_kv_blocks": 40,
            "max_num_batched_tokens": 64,
        } | options
        made.append(LLM(directory, **values))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
    made.clear()
    assert set(threading.enumerate()) <= before


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()
