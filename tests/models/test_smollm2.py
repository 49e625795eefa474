"""SmolLM2-135M-Instruct, a real model in a wheel, against transformers' own reading of the same GGUF file."""

from pathlib import Path

import torch
from gguf_peers import smollm2_peer
from paged_steps import Harness

from noria.models import load_model

PROMPT = [504, 9041, 8115, 284, 1239, 8452, 43, 27049, 7158, 418, 260, 1627, 288, 5416, 1197, 260, 2904, 30]


def test_logits_of_a_prompt_are_those_of_transformers(smollm2_path: Path) -> None:
    model = load_model(smollm2_path, dtype=torch.float32, device=torch.device("cpu"))
    config = model.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    harness = Harness(model, num_seats=2, max_blocks=8, block_size=16)
    found = harness.prefill(harness.add(PROMPT), 7)

    with torch.inference_mode():
        wanted = smollm2_peer(smollm2_path)(torch.tensor([PROMPT])).logits[0].double()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
    assert (found.argmax(-1) == wanted.argmax(-1)).all()
