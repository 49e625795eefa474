"""The noise is uniform, and neighbours in seed or position share nothing."""

import numpy as np
import pytest
import torch

from noria.sampling.noise import mix64, uniform

_MASK = 2**64 - 1


def _plain_mix64(bits: int) -> int:
    """splitmix64's finaliser on Python integers."""
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def _grid(num_seeds: int, num_positions: int, first_seed: int = 0) -> np.ndarray:
    seeds = torch.arange(first_seed, first_seed + num_seeds)[:, None].expand(-1, num_positions).flatten()
    positions = torch.arange(num_positions).repeat(num_seeds)
    return uniform(seeds, positions).view(num_seeds, num_positions).numpy()


def _chi_square(u: np.ndarray, num_buckets: int) -> float:
    """In standard deviations of its distribution (normal for many buckets)."""
    counts = np.bincount((u * num_buckets).astype(np.int64).ravel(), minlength=num_buckets)
    expected = u.size / num_buckets
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - (num_buckets - 1)) / np.sqrt(2 * (num_buckets - 1)))


def test_the_mix_is_splitmix64() -> None:
    # The first outputs of splitmix64 from state 0, as its author publishes them.
    golden = 0x9E3779B97F4A7C15
    state = torch.tensor(
        [((i + 1) * golden & _MASK) - (((i + 1) * golden & _MASK) >> 63 << 64) for i in range(3)]
    )
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(word) & _MASK for word in mix64(state)] == expected
    words = torch.randint(-(2**63), 2**63 - 1, (500,), generator=torch.Generator().manual_seed(0))
    assert [int(w) & _MASK for w in mix64(words)] == [_plain_mix64(int(w) & _MASK) for w in words]


def test_noise_lies_in_the_half_open_unit_interval() -> None:
    u = _grid(300, 300, first_seed=-(2**63))
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert u.dtype == np.float64


@pytest.mark.parametrize("shape", [(1, 400_000), (400_000, 1), (640, 640)])
def test_noise_is_uniform_along_positions_seeds_and_both(shape: tuple[int, int]) -> None:
    u = _grid(*shape)
    assert abs(u.mean() - 0.5) < 5 * np.sqrt(1 / 12 / u.size)
    assert abs((u**2).mean() - 1 / 3) < 5 * np.sqrt(4 / 45 / u.size)
    for num_buckets in (16, 256, 4096):
        assert abs(_chi_square(u, num_buckets)) < 5
    # The low bits, too.
    assert abs(_chi_square((u * 2**32) % 1.0, 256)) < 5


@pytest.mark.parametrize("lag", [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0), (0, 16), (16, 0)])
def test_neighbours_do_not_correlate(lag: tuple[int, int]) -> None:
    u = _grid(700, 700) - 0.5
    seeds, positions = lag
    near = u[: 700 - seeds, max(0, -positions) : 700 - max(0, positions)]
    far = u[seeds:, max(0, positions) : 700 + min(0, positions)]
    assert near.shape == far.shape
    assert abs((near * far).mean() * 12) < 5 / np.sqrt(near.size)
    pairs = np.floor((near + 0.5) * 16) * 16 + np.floor((far + 0.5) * 16)
    assert abs(_chi_square((pairs + 0.5) / 256, 256)) < 5


def test_seed_and_position_are_not_interchangeable() -> None:
    u = _grid(64, 64)
    assert len(np.unique(u)) == u.size
    assert not np.isin(u[0, 1:], u[1:, 0]).any()
