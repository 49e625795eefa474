"""Mistral 7B, Nemo and Small: a Llama whose layers may all have a window.

A GGUF file of one is of the architecture `llama`, and says nothing of a window.

Source: transformers' modeling_mistral.py.
"""

from dataclasses import replace

from noria.loading.fields import JsonFields
from noria.loading.hf_config import common_config, window_of_all_layers
from noria.models import llama
from noria.models.config import ModelConfig
from noria.models.family import Family


def _read_hf(fields: JsonFields) -> ModelConfig:
    config = common_config(fields, architecture="MistralForCausalLM")
    return replace(config, windows=window_of_all_layers(fields, config.num_layers))


FAMILY = Family(
    title="Mistral",
    architectures=("MistralForCausalLM",),
    gguf_architecture="llama",
    read_hf=_read_hf,
    read_gguf=llama.FAMILY.read_gguf,
    gguf_modules=llama.GGUF_MODULES,
    network=llama.Llama,
    gguf_permutes_qk=True,
)
