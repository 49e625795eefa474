"""Linear maps, packed once for noria-cpu."""

import torch

from noria._core import CpuBuilder


class CpuLinears:
    """Packs linear maps into a program's builder; what it gives is a number there.

    Attributes:
        reason: a clause that says how they are multiplied.
    """

    def __init__(self, builder: CpuBuilder, dtype: torch.dtype) -> None:
        self._builder = builder
        self._format = str(dtype).removeprefix("torch.")
        self.reason = f"noria-cpu with {self._format} weights packed at load"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
        """Packs a map.

        Args:
            weight: `[out_features, in_features]`.
            bias: `[out_features]`, or None.
        """
        numbers = None if bias is None else bias.float().numpy()
        return self._builder.matrix(weight.float().contiguous().numpy(), numbers, format=self._format)
