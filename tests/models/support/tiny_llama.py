"""Tiny random Llamas, saved by transformers as any checkpoint is."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 97


def llama_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    return LlamaConfig(**(values | changes))


def save_llama(
    directory: Path,
    config: LlamaConfig,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    max_shard_size: str = "5GB",
) -> LlamaForCausalLM:
    """A random Llama whose last logits hang on every token.

    With the small weights of a fresh model it repeats one token whatever went before, and position bugs pass
    unseen; these are drawn so that a head's softmax is neither flat nor a single spike.
    """
    model = LlamaForCausalLM(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("norm.weight"):
                value = 1 + 0.3 * noise
            elif name.endswith("bias"):
                value = 0.5 * noise
            else:
                value = 1.5 * noise / parameter.shape[1] ** 0.5 if "embed" not in name else noise
            parameter.copy_(value.to(dtype))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def token_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    ids: list[int] = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids
