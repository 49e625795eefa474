"""Frequencies of the rotary position embedding.

Where transformers chooses by the length of the text at hand (dynamic, longrope), noria chooses by the longest
context that the engine will run, once, when the model is loaded: K in the cache stays right.

Source: transformers' modeling_rope_utils.py. In float32 the operations and their order are the same, so that
the frequencies are bit for bit those of transformers.
"""

import math

import torch

from noria.models.config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, rotary_dim: int, dtype: torch.dtype, max_model_len: int
) -> torch.Tensor:
    """Radians per position of each pair of a head's dimensions, `[rotary_dim / 2]`.

    Args:
        rope: its kind and numbers.
        rotary_dim: even.
        dtype: float64 for a float64 model, else float32.
        max_model_len: the longest context that will be run.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(dtype) / rotary_dim
    powers = _base(rope, rotary_dim, max_model_len) ** exponents
    divisors = rope.long_divisors if is_long(rope, max_model_len) else rope.divisors
    if divisors:
        powers = torch.tensor(divisors, dtype=dtype) * powers
    frequencies = 1.0 / powers
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(powers, rope)
    return frequencies


def is_long(rope: RopeConfig, max_model_len: int) -> bool:
    """Whether a context needs the extended frequencies of dynamic or longrope."""
    is_chosen = rope.kind in ("dynamic", "longrope")
    return is_chosen and max_model_len > rope.original_max_position_embeddings


def rotation_scale(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by."""
    if rope.scale is not None:
        return rope.scale
    if rope.factor <= 1:
        return 1.0
    if rope.kind == "yarn":
        return 0.1 * math.log(rope.factor) + 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
    return 1.0


def _base(rope: RopeConfig, rotary_dim: int, max_model_len: int) -> float:
    if rope.kind != "dynamic" or rotary_dim <= 2:
        return rope.theta
    stretch = max(max_model_len / rope.original_max_position_embeddings, 1.0)
    growth: float = (rope.factor * stretch - (rope.factor - 1)) ** (rotary_dim / (rotary_dim - 2))
    return rope.theta * growth


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    is_low = wavelengths > original / rope.low_freq_factor
    is_high = wavelengths < original / rope.high_freq_factor
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    faded = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return torch.where(is_high, frequencies, torch.where(is_low, frequencies / rope.factor, faded))


def _yarn(powers: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    dim = 2 * len(powers)

    def pair(num_turns: float) -> float:
        """The pair of dimensions that turns this often in the original context."""
        turns = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    scaled = ((torch.arange(dim // 2, dtype=powers.dtype) - low) / (high - low)).clamp(0, 1)
    kept = 1 - scaled
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
