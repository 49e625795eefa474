"""Qwen3: a Llama whose heads of q and k are normed before they rotate.

Source: transformers' modeling_qwen3.py.
"""

from dataclasses import replace

from noria.loading.fields import JsonFields
from noria.loading.gguf_config import GgufFields, common_gguf_config
from noria.loading.hf_config import common_config
from noria.models import llama, qwen2
from noria.models.config import ModelConfig
from noria.models.family import Family


def _read_hf(fields: JsonFields) -> ModelConfig:
    config = common_config(fields, architecture="Qwen3ForCausalLM", head_dim=128)
    has_bias = fields.boolean("attention_bias", False)
    return replace(
        config,
        qkv_bias=has_bias,
        output_bias=has_bias,
        has_qk_norm=True,
        windows=qwen2.windows(fields, config.num_layers),
    )


def _read_gguf(fields: GgufFields) -> ModelConfig:
    return replace(common_gguf_config(fields, architecture="Qwen3ForCausalLM"), has_qk_norm=True)


FAMILY = Family(
    title="Qwen3",
    architectures=("Qwen3ForCausalLM",),
    gguf_architecture="qwen3",
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    gguf_modules=llama.GGUF_MODULES | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    network=llama.Llama,
)
