"""The noise behind a sampled token: a pure function of (seed, output position).

No generator state exists, so a token does not depend on what shared its batch, on how often its request was
preempted or on how many steps were in flight. The hash is splitmix64's, in wrapping int64 arithmetic, which
gives the same bits on every device.
"""

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_SEED_TWEAK = 0xD1B54A32D192ED03 - 2**64
_ATTEMPT_TWEAK = 0xA0761D6478BD642F - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def mix64(bits: torch.Tensor) -> torch.Tensor:
    """Scrambles 64-bit words, one to one (the finaliser of splitmix64, Stafford's variant 13).

    Args:
        bits: int64, any shape; unsigned words in two's complement.
    """
    bits = (bits ^ _shifted_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shifted_right(bits, 27)) * _MIX_2
    return bits ^ _shifted_right(bits, 31)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, attempt: int = 0) -> torch.Tensor:
    """Uniform numbers, one a row.

    Args:
        seeds: `[n]` int64.
        positions: `[n]` int64: output positions, from 0.
        attempt: which of a position's numbers, from 0.

    Returns:
        `[n]` float64 in [0, 1): multiples of 2**-53.
    """
    # The seed is mixed first: with seed + position alone, neighbouring seeds would share their streams.
    key = mix64(seeds ^ _SEED_TWEAK)
    if attempt:
        key = mix64(key + (attempt * _ATTEMPT_TWEAK + 2**63) % 2**64 - 2**63)
    bits = mix64(key + (positions + 1) * _GOLDEN)
    return _shifted_right(bits, 11).double() * 2.0**-53


def _shifted_right(bits: torch.Tensor, num: int) -> torch.Tensor:
    # int64 shifts copy the sign bit; a logical shift clears what it brought in.
    return (bits >> num) & ((1 << (64 - num)) - 1)
