"""Text to tokens and back: tokenizers, incremental decoding, chat templates."""

from noria.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
