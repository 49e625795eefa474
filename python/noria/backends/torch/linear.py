"""Linear maps."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear map's parameters.

    Attributes:
        weight: `[out_features, in_features]`.
        bias: `[out_features]`, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
