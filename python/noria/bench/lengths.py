"""Seeded length distributions, and what a static batch loses on them.

A static batch runs until its longest sequence ends, so on a sample of output lengths it takes
`E[longest of n] / E[length]` times the steps of a batch whose seats are refilled at once.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Lengths in tokens: lognormal, rounded to the nearest integer, then clipped.

    Attributes:
        median: tokens; half of the unclipped lengths lie below it.
        sigma: standard deviation of the length's natural logarithm; 0 makes every length the median.
        low: shortest length, tokens.
        high: longest length, tokens.
    """

    median: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        if not (np.isfinite(self.median) and self.median >= 1):
            raise ConfigError(
                f"median length is {self.median}; it must be 1 or more", name="median", value=self.median
            )
        if not (np.isfinite(self.sigma) and 0 <= self.sigma <= 10):
            raise ConfigError(f"sigma is {self.sigma}; it must be 0 to 10", name="sigma", value=self.sigma)
        if self.low < 1:
            raise ConfigError(
                f"shortest length is {self.low}; it must be 1 or more", name="low", value=self.low
            )
        if self.high < self.low:
            raise ConfigError(
                f"longest length is {self.high}, below the shortest, {self.low}", name="high", value=self.high
            )

    def sample(self, rng: np.random.Generator, num: int) -> npt.NDArray[np.int64]:
        """`num` lengths, `[num]`; the first n of a longer sample are the same n."""
        lengths = np.rint(rng.lognormal(np.log(self.median), self.sigma, num))
        return np.clip(lengths, self.low, self.high).astype(np.int64)


def expected_longest(lengths: npt.NDArray[np.int64], num_drawn: int) -> float:
    """Mean of the longest of `num_drawn` lengths drawn from the sample without putting back; tokens.

    Exact: the i-th smallest of n is the longest of k in C(i - 1, k - 1) of the C(n, k) draws.

    Args:
        lengths: the sample, `[n]`.
        num_drawn: k; a k above n draws the whole sample.

    Raises:
        ConfigError: the sample is empty or `num_drawn` is below 1.
    """
    num_lengths = len(lengths)
    if num_lengths == 0:
        raise ConfigError("the sample of lengths is empty", name="lengths", value=0)
    if num_drawn < 1:
        raise ConfigError(
            f"num_drawn is {num_drawn}; it must be 1 or more", name="num_drawn", value=num_drawn
        )
    k = min(num_drawn, num_lengths)
    # Weights from the largest length down: w(n) = k / n, w(i - 1) = w(i) * (i - k) / (i - 1).
    ranks = np.arange(num_lengths, 1, -1, dtype=np.float64)
    weights = np.cumprod(np.concatenate(([k / num_lengths], np.maximum(ranks - k, 0) / (ranks - 1))))
    descending = np.sort(lengths)[::-1]
    return float(np.dot(weights, descending))


def longest_over_mean(lengths: npt.NDArray[np.int64], num_drawn: int) -> float:
    """`E[longest of num_drawn] / E[length]`: the steps that a static batch takes for each useful one."""
    return expected_longest(lengths, num_drawn) / float(np.mean(lengths))


def longest_over_mean_in_order(lengths: npt.NDArray[np.int64], num_drawn: int) -> float:
    """The same for the batches as they fall: the first `num_drawn` lengths, the next, and so on.

    The sum of their longest, over the steps that full seats would take.
    """
    if len(lengths) == 0 or num_drawn < 1:
        return longest_over_mean(lengths, num_drawn)
    starts = np.arange(0, len(lengths), num_drawn)
    longest = np.maximum.reduceat(lengths, starts)
    return float(longest.sum() * num_drawn / lengths.sum())
