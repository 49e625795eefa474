"""Families through the whole engine, with preemptions and prefix hits, against transformers."""

from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import Checkpoint
from near_ties import Agreement
from tiny_models import token_ids

from noria import LLM, SamplingParams

GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 8, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": GEMMA | {"sliding_window": 9, "sliding_window_pattern": 3},
    "mistral": {"sliding_window": 7},
    "qwen3": {"head_dim": 16},
    "gpt_neox": {"rotary_pct": 0.5},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_transformers_through_preemptions_and_prefix_hits(
    checkpoint: Callable[..., Checkpoint], family: str
) -> None:
    tiny = checkpoint(family, **FAMILIES[family])
    prompts = [[*token_ids(12, 0), *token_ids(3 + seed, seed)] for seed in range(12)]
    with LLM(
        tiny.directory,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        block_size=4,
        num_kv_blocks=30,
        admission="optimistic",  # what preempts
        skip_tokenizer_init=True,
    ) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hit_tokens > 0
    agreed = Agreement()
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output.outputs[0].token_ids
        agreed.add(ids, tiny.transformers([*prompt, *ids[:-1]])[len(prompt) - 1 :])
    assert agreed.num_near_ties <= 2
