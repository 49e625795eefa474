"""Tiny random models of each family, saved by transformers as any checkpoint is."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 97
SIZES: dict[str, Any] = {
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
    "pad_token_id": None,
}


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    """A configuration of a `model_type` of transformers."""
    return CONFIG_MAPPING[family](**(SIZES | changes))


def save_model(
    directory: Path,
    config: Any,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    max_shard_size: str = "5GB",
) -> PreTrainedModel:
    """A random model whose last logits hang on every token.

    With the small weights of a fresh model it repeats one token whatever went before, and position bugs pass
    unseen; these are drawn so that a head's softmax is neither flat nor a single spike.
    """
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    is_gemma = config.model_type.startswith("gemma")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("bias"):
                value = 0.5 * noise
            elif parameter.ndim == 1:
                value = 0.3 * noise if is_gemma else 1 + 0.3 * noise
            elif "embed" in name:
                value = noise / config.hidden_size**0.5 if is_gemma else noise
            else:
                value = 1.5 * noise / parameter.shape[-1] ** 0.5
            parameter.copy_(value.to(dtype))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def token_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    ids: list[int] = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids
