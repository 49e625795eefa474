"""What a model takes, told from its headers, against what it takes once it is loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import Checkpoint

from noria.backends.cpu.linear import BLOCK_KINDS
from noria.loading import read_model_config
from noria.loading.sizes import Storage, num_parameters, stored_bytes
from noria.models import load_model


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text"])
def test_every_parameter_of_a_family_is_counted_once_and_a_packed_tied_head_again(
    checkpoint: Callable[..., Checkpoint], family: str
) -> None:
    directory = checkpoint(family).directory
    config = read_model_config(directory)
    count = num_parameters(directory, config)
    assert stored_bytes(directory, config, Storage("float64", "float64", packs=False)) == {
        "float64": 8 * count
    }
    head = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    packed = stored_bytes(directory, config, Storage("float32", "bfloat16"))
    assert packed["float32"] // 4 + packed["bfloat16"] // 2 == count + head
    narrow = stored_bytes(directory, config, Storage("bfloat16", "bfloat16"))
    assert narrow.get("float32", 0) // 4 + narrow["bfloat16"] // 2 == count + head


def test_quantised_blocks_are_counted_as_the_loaded_program_holds_them(smollm2_path: Path) -> None:
    config = read_model_config(smollm2_path)
    counted = stored_bytes(smollm2_path, config, Storage("float32", "float32", BLOCK_KINDS))
    assert set(counted) == {"float32", "Q4_1", "Q8_0"}
    loaded = load_model(smollm2_path, dtype=torch.float32, device=torch.device("cpu"), backend="cpu")
    assert loaded.program is not None
    assert sum(counted.values()) == pytest.approx(loaded.program.core.num_bytes, rel=0.01)
