"""What a model is, whatever file it came from."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        kind: how frequencies are scaled: not at all, all by `factor`, or the low ones (Llama 3.1).
        theta: the base.
        factor: what scaled frequencies are divided by.
        low_freq_factor: (llama3) wavelengths above `original_max_position_embeddings` over this are scaled.
        high_freq_factor: (llama3) those below `original_max_position_embeddings` over this are not; between
            the two the scaling fades.
        original_max_position_embeddings: (llama3) the context before the model's extension, in tokens.
        has_frequency_factors: the file carries a divisor for each frequency (GGUF keeps llama3 scaling so).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    has_frequency_factors: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model.

    Attributes:
        architecture: the registry's name of it, as `architectures` in a config.json spells it.
        max_position_embeddings: the longest context, in tokens.
        eos_token_ids: tokens that end an answer.
        bos_token_id: the token that starts a text, if there is one.
        tie_word_embeddings: the output head is the embedding table.
        attention_bias: the four projections of attention have biases.
        mlp_bias: the three of the MLP have.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
