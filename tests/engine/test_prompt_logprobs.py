"""Log probabilities of prompts against transformers, on heads of every kind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model, tiny_config, token_ids

from noria import LLM, SamplingParams
from noria.runner import scores

HEADS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 5.0, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt_neox": {"rotary_pct": 0.5},
}


@pytest.mark.parametrize(
    ("family", "backend"),
    [("llama", "torch"), ("gemma2", "torch"), ("gpt_neox", "torch"), ("llama", "cpu"), ("gemma2", "cpu")],
)
def test_prompts_are_scored_in_chunks_of_steps_and_of_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, backend: str
) -> None:
    peer = save_model(tmp_path, tiny_config(family, **HEADS[family]))
    prompts = [token_ids(70, 0), token_ids(41, 1), token_ids(1, 2)]
    monkeypatch.setattr(scores, "_CHUNK_BYTES", 7 * 4 * 97)  # seven tokens at a time
    monkeypatch.setattr(scores, "_RECOMPUTED_BYTES", 17 * 4 * 97)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    with LLM(
        tmp_path,
        dtype="float64" if backend == "torch" else "float32",
        backend=backend,
        skip_tokenizer_init=True,
        num_kv_blocks=40,
        max_num_seqs=4,
        max_num_batched_tokens=32,
    ) as llm:
        plain = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        outputs = llm.generate(prompts, params)
        assert llm.stats().num_steps > 8
    for prompt, output, free in zip(prompts, outputs, plain, strict=True):
        assert output.outputs[0].token_ids == free.outputs[0].token_ids
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        with torch.inference_mode():
            rows = peer(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        for row, token, told in zip(rows, prompt[1:], output.prompt_logprobs[1:], strict=False):
            assert told is not None
            assert list(told) == list(dict.fromkeys([token, *row.topk(2).indices.tolist()]))
            for token_id, logprob in told.items():
                assert logprob.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
                assert logprob.rank == 1 + int((row > row[token_id]).sum())
