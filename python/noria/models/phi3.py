"""Phi-3, Phi-3.5 and Phi-4: a Llama whose checkpoint fuses q, k and v, and gate and up.

Its long versions have a divisor for each frequency (longrope), and Phi-4-mini rotates a part of a head.

Source: transformers' modeling_phi3.py; llama.cpp's convert_hf_to_gguf.py (Phi3MiniModel).
"""

from dataclasses import replace

from noria.loading.fields import JsonFields
from noria.loading.gguf_config import GgufFields, common_gguf_config
from noria.loading.hf_config import common_config, window_of_all_layers
from noria.models import llama
from noria.models.config import ModelConfig
from noria.models.family import Family


def _read_hf(fields: JsonFields) -> ModelConfig:
    config = common_config(fields, architecture="Phi3ForCausalLM", rms_norm_eps=1e-5)
    return replace(config, is_fused=True, windows=window_of_all_layers(fields, config.num_layers))


def _read_gguf(fields: GgufFields) -> ModelConfig:
    config = common_gguf_config(fields, architecture="Phi3ForCausalLM")
    # The converter writes 0 where there is none.
    window = fields.count("attention.sliding_window", 0)
    return replace(config, is_fused=True, windows=(window,) * config.num_layers if window else ())


FAMILY = Family(
    title="Phi-3, Phi-3.5 and Phi-4",
    architectures=("Phi3ForCausalLM",),
    gguf_architecture="phi3",
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    gguf_modules={
        "input_layernorm": "attn_norm",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    network=llama.Llama,
)
