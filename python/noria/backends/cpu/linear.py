"""Linear maps, packed once for noria-cpu."""

import torch

from noria._core import CpuBuilder
from noria.loading.weights import Blocks

BLOCK_KINDS = frozenset({"Q8_0", "Q4_0", "Q4_1"})
"""GGUF's types that are multiplied with as they are."""


class CpuLinears:
    """Packs linear maps into a program's builder; what it gives is a number there.

    Args:
        builder: of the program.
        dtype: of the model.
        quantization: "int8": each map in 8 bits, whatever the file has; None: as the file has it.
    """

    def __init__(self, builder: CpuBuilder, dtype: torch.dtype, quantization: str | None) -> None:
        self._builder = builder
        self._format = quantization or str(dtype).removeprefix("torch.")
        self._quantization = quantization
        self._kinds: set[str] = set()

    @property
    def packs(self) -> bool:
        """A packed weight is a copy."""
        return True

    @property
    def reason(self) -> str:
        """A clause that says how they are multiplied."""
        return f"noria-cpu with {' and '.join(sorted(self._kinds))} weights packed at load"

    @property
    def block_kinds(self) -> frozenset[str]:
        """Kinds of GGUF blocks that are kept."""
        return frozenset() if self._quantization else BLOCK_KINDS

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
        """Packs a map.

        Args:
            weight: `[out_features, in_features]`.
            bias: `[out_features]`, or None.
        """
        self._kinds.add(self._format)
        numbers = None if bias is None else bias.float().numpy()
        return self._builder.matrix(weight.float().contiguous().numpy(), numbers, storage=self._format)

    def linear_of_blocks(self, blocks: Blocks, in_features: int, bias: torch.Tensor | None) -> int:
        """Packs a map of GGUF blocks: the same bits, in another order."""
        self._kinds.add(blocks.kind)
        numbers = None if bias is None else bias.float().numpy()
        return self._builder.matrix_of_blocks(blocks.rows, in_features, numbers, storage=blocks.kind)
