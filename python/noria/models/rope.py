"""Frequencies of the rotary position embedding.

Source: transformers' modeling_rope_utils.py. In float32 the operations and their order are the same, so that
the frequencies are bit for bit those of transformers.
"""

import math

import torch

from noria.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Radians per position of each pair of a head's dimensions, `[head_dim / 2]`.

    Args:
        rope: its kind and numbers.
        head_dim: even.
        dtype: float64 for a float64 model, else float32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    is_low = wavelengths > original / rope.low_freq_factor
    is_high = wavelengths < original / rope.high_freq_factor
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    faded = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return torch.where(is_high, frequencies, torch.where(is_low, frequencies / rope.factor, faded))
