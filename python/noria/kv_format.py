"""How K and V are stored: in a dtype of torch, or in 8 bits with a scale for each head of a token.

The CPU backend stores the same bits: noria-cpu's `rowwise.rs` does what `packed` does.
"""

import torch

SCALE_BYTES = 4
"""Before a head's 8-bit numbers stands what they are multiplied by: a float32."""

_LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny


def kv_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Of the KV cache, by its name.

    Args:
        kv_cache_dtype: one of `noria.config.KV_CACHE_DTYPES`.
        dtype: of the model, which `auto` takes.
    """
    if kv_cache_dtype == "auto":
        return dtype
    found = getattr(torch, kv_cache_dtype)
    assert isinstance(found, torch.dtype)
    return found


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that a head of a token takes; a scale counts as four."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def stored_formula(head_dim: int, dtype: torch.dtype) -> str:
    """Bytes of a head of a token, in words."""
    if dtype == torch.int8:
        return f"({head_dim} + {SCALE_BYTES}) bytes"
    return f"{head_dim} · {dtype.itemsize} bytes"


def packed(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Heads as the cache holds them: a head's own numbers alone decide its bits.

    In 8 bits its largest magnitude becomes 127, the others the nearest whole numbers, ties to even. A head
    with a number that is not finite has the scale NaN.

    Args:
        heads: `[..., head_dim]`.
        dtype: of the cache.

    Returns:
        `[..., stored_size(head_dim, dtype)]`.
    """
    if dtype != torch.int8:
        return heads.to(dtype)
    wide = heads.float()
    # At least the smallest normal number, whose inverse is finite.
    scales = (wide.abs().amax(-1, keepdim=True) * (1 / _LARGEST)).clamp_(min=_TINY)
    is_finite = torch.isfinite(scales)
    scales.masked_fill_(~is_finite, torch.nan)
    numbers = (wide * scales.reciprocal()).round_().masked_fill_(~is_finite, 0).to(torch.int8)
    return torch.cat((scales.view(torch.int8), numbers), -1)


def unpacked(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `packed` made, as numbers to compute with.

    Args:
        stored: `[..., stored_size(head_dim, its dtype)]`.
        dtype: of the numbers.

    Returns:
        `[..., head_dim]`.
    """
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    wide = dtype if dtype == torch.float64 else torch.float32
    scales = stored[..., :SCALE_BYTES].contiguous().view(torch.float32)  # [..., 1]
    return (stored[..., SCALE_BYTES:].to(wide) * scales).to(dtype)
