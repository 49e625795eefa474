"""Qwen2 and Qwen2.5: a Llama with biases on q, k and v, and a window over its last layers where that is on.

Source: transformers' modeling_qwen2.py.
"""

from dataclasses import replace

from noria.loading.fields import JsonFields
from noria.loading.gguf_config import GgufFields, common_gguf_config
from noria.loading.hf_config import common_config, read_windows
from noria.models import llama
from noria.models.config import ModelConfig
from noria.models.family import Family


def windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window; none, whatever else the file says, where `use_sliding_window` is off."""
    if not fields.boolean("use_sliding_window", False) or not fields.has("sliding_window"):
        return ()
    num_full = min(fields.integer("max_window_layers", 28, least=0), num_layers)
    types = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    return read_windows(fields, num_layers, types)


def _read_hf(fields: JsonFields) -> ModelConfig:
    config = common_config(fields, architecture="Qwen2ForCausalLM")
    return replace(config, qkv_bias=True, windows=windows(fields, config.num_layers))


def _read_gguf(fields: GgufFields) -> ModelConfig:
    return replace(common_gguf_config(fields, architecture="Qwen2ForCausalLM"), qkv_bias=True)


FAMILY = Family(
    title="Qwen2 and Qwen2.5",
    architectures=("Qwen2ForCausalLM",),
    gguf_architecture="qwen2",
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    gguf_modules=llama.GGUF_MODULES,
    network=llama.Llama,
)
