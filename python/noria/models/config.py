"""What a model is, whatever file it came from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        kind: how frequencies are scaled: not at all; all by `factor`; by a base that grows with the context
            (dynamic); the low ones only (yarn, llama3); or each by a factor of its own (longrope).
        theta: the base.
        factor: what scaled frequencies are divided by.
        scale: of cosines and sines; None: what `kind` derives from `factor`.
        original_max_position_embeddings: (all but default and linear) the context before the model's
            extension, in tokens.
        low_freq_factor: (llama3) wavelengths above `original_max_position_embeddings` over this are scaled.
        high_freq_factor: (llama3) those below `original_max_position_embeddings` over this are not; between
            the two the scaling fades.
        beta_fast: (yarn) frequencies that turn more often than this in the original context stay.
        beta_slow: (yarn) those that turn less often are scaled; between the two the scaling fades.
        is_truncated: (yarn) the bounds of the fading are whole pairs of dimensions.
        divisors: of each frequency, `rotary_dim / 2` of them; empty: none.
        long_divisors: (longrope) instead of `divisors` where the engine's context exceeds the original one.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    scale: float | None = None
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model.

    Attributes:
        architecture: the registry's name of it, as `architectures` in a config.json spells it.
        max_position_embeddings: the longest context, in tokens, RoPE scaling included.
        rotary_dim: dimensions of a head that rotate, the first ones.
        rope: of all layers; of those without a window where `local_rope` is given.
        tie_word_embeddings: the output head is the embedding table.
        eos_token_ids: tokens that end an answer.
        bos_token_id: the token that starts a text, if there is one.
        qkv_bias: the projections to q, k and v have biases.
        output_bias: attention's output projection has one.
        mlp_bias: the three of the MLP have.
        has_qk_norm: each head of q and k is normed before it rotates.
        is_fused: the checkpoint keeps q, k and v as one tensor, gate and up as another.
        local_rope: of layers with a window; None: `rope`.
        windows: tokens that a token of each layer sees, itself included, None being all; empty: no layer has
            a window.
        attention_scale: of q · k; None: `head_dim ** -0.5`.
        attention_softcap: bound of attention scores; None: none.
        logits_softcap: bound of logits; None: none.
        is_foreign: transformers' own modules run it; of the fields from `rotary_dim` on, only `vocab_size`,
            `max_position_embeddings` and the special tokens are then its own.
        default_sampling_params: what the model's authors sample with, under the names of `SamplingParams`.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False
    is_fused: bool = False
    local_rope: RopeConfig | None = None
    windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    is_foreign: bool = False
    default_sampling_params: Mapping[str, float] = field(default_factory=dict)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """As `windows`, one for each layer always."""
        return self.windows or (None,) * self.num_layers
