"""The tiny Llamas that tests share."""

from tiny_models import VOCAB_SIZE, token_ids
from tiny_models import save_model as save_llama
from tiny_models import tiny_config as llama_config

__all__ = ["VOCAB_SIZE", "llama_config", "save_llama", "token_ids"]
