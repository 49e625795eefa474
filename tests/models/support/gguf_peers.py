"""transformers' reading of real GGUF files.

What `from_pretrained(gguf_file=...)` builds, by the same functions, without its need of accelerate.
"""

from pathlib import Path

from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def smollm2_peer(path: Path) -> PreTrainedModel:
    """SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    return _with_weights(LlamaForCausalLM(config), path)


def gemma3_270m_peer(path: Path) -> PreTrainedModel:
    """Gemma 3 270M."""
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
    return _with_weights(Gemma3ForCausalLM(config), path)


def _with_weights(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"]  # tied
    assert not unexpected
    return model.eval()
