"""From named tensors in files to a model's parameters on their device: checked, converted, fused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from noria.backends.ops import Rope
from noria.errors import ModelError
from noria.loading.progress import LoadingBar
from noria.models.config import ModelConfig, RopeConfig
from noria.models.rope import inverse_frequencies, rotation_scale

L = TypeVar("L")
Lco = TypeVar("Lco", covariant=True)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix in GGUF's quantised blocks.

    Attributes:
        kind: GGUF's name of the type.
        rows: `[out_features, bytes of a row]` uint8.
    """

    kind: str
    rows: npt.NDArray[np.uint8]


class LinearLayout(Protocol[Lco]):
    """How a backend lays linear maps out."""

    @property
    def packs(self) -> bool:
        """Whether it copies weights, so that their memory can be used again."""

    @property
    def block_kinds(self) -> frozenset[str]:
        """Kinds of GGUF blocks that it multiplies with as they are."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Lco:
        """Lays a map out: weight `[out_features, in_features]`, bias `[out_features]` or None."""

    def linear_of_blocks(self, blocks: Blocks, in_features: int, bias: torch.Tensor | None) -> Lco:
        """Likewise, of blocks of one of its kinds."""


class WeightSource(Protocol):
    """Named tensors, by the names of a Hugging Face checkpoint."""

    def names(self) -> set[str]:
        """Tensors that a model should use up."""

    def file_of(self, name: str, /) -> Path:
        """The file to name in an error about this tensor."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None where there is no such tensor."""

    def block_kind(self, name: str, /) -> str | None:
        """GGUF's name of a matrix's quantised type; None where it is not quantised, or not there."""

    def blocks(self, name: str) -> Blocks | None:
        """A matrix's quantised blocks as they are; None where it has none."""

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        """Converts a tensor into `out`, contiguous and of the same shape."""


class TorchWeights(Generic[L]):
    """Parameters as the torch backend takes them; see `noria.backends.ops.Weights`.

    Nothing is allocated before the file's shape is known to be the one that the configuration asks for.
    """

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernel: LinearLayout[L],
        max_model_len: int,
        bar: LoadingBar,
    ) -> None:
        self._source = source
        self._config = config
        self._dtype = dtype
        self._device = device
        self._kernel = kernel
        self._max_model_len = max_model_len
        self._bar = bar
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._tables: dict[str, torch.Tensor] = {}
        self._scratch = torch.empty(0, dtype=dtype, device=device)
        self._used: set[str] = set()

    def table(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """An embedding table, `[rows, columns]`."""
        self._tables[name] = self._stacked([(name, (rows, columns))])
        return self._tables[name]

    def vector(self, name: str, size: int, *, plus_one: bool = False) -> torch.Tensor:
        """A vector, `[size]`; with 1 added it is float32 at least, as it is applied before rounding."""
        if plus_one:
            return self._stacked([(name, (size,))], dtype=self._wide).add_(1)
        return self._stacked([(name, (size,))])

    def rope(self, rope: RopeConfig) -> Rope[torch.Tensor]:
        """Frequencies `[rotary_dim / 2]`, float64 in a float64 model, else float32."""
        frequencies = inverse_frequencies(rope, self._config.rotary_dim, self._wide, self._max_model_len)
        return Rope(frequencies.to(self._device), rotation_scale(rope))

    def linear(self, parts: list[tuple[str, int]], in_features: int, has_bias: bool) -> L:
        """Linear maps of one input as one, stacked in order."""
        weights = [(f"{name}.weight", (size, in_features)) for name, size in parts]
        bias = self._stacked([(f"{name}.bias", (size,)) for name, size in parts]) if has_bias else None
        blocks = self._stacked_blocks(weights)
        if blocks is not None:
            return self._kernel.linear_of_blocks(blocks, in_features, bias)
        return self._kernel.linear(self._stacked(weights, is_packed=self._kernel.packs), bias)

    def tied_linear(self, name: str, out_features: int, in_features: int) -> L:
        """A linear map that shares an embedding table.

        A head that the file carries all the same is dropped if it equals the table, and is the head if not.
        """
        table = self._tables[name]
        if self._source.shape("lm_head.weight") is not None:
            parts = [("lm_head.weight", (out_features, in_features))]
            head = self._stacked(parts, is_packed=self._kernel.packs)
            if not torch.equal(head, table):
                return self._kernel.linear(head, None)
        blocks = self._stacked_blocks([(name, (out_features, in_features))], is_counted=False)
        if blocks is not None:
            return self._kernel.linear_of_blocks(blocks, in_features, None)
        return self._kernel.linear(table, None)

    def check_all_used(self) -> None:
        """Refuses a file with tensors that the configuration has no place for: it is not of this model.

        Raises:
            ModelError: it names one.
        """
        unused = sorted(self._source.names() - self._used)
        if unused:
            name = unused[0]
            others = f" (nor have {len(unused) - 1} others)" if len(unused) > 1 else ""
            raise ModelError(
                f"{self._source.file_of(name)}: tensor {name!r} has no place in a "
                f"{self._config.architecture} of this configuration{others}"
            )

    def _stacked(
        self,
        parts: Sequence[tuple[str, tuple[int, ...]]],
        *,
        dtype: torch.dtype | None = None,
        is_packed: bool = False,
    ) -> torch.Tensor:
        """Tensors of these names and shapes, one below the other.

        What will be packed, and so copied, is stacked in memory that the next such call takes again: freed
        and allocated anew, it leaves holes of a tenth of the model.
        """
        self._check(parts)
        shape = (sum(shape[0] for _, shape in parts), *parts[0][1][1:])
        if is_packed:
            if self._scratch.numel() < math.prod(shape):
                self._scratch = self._scratch.new_empty(math.prod(shape))
            stacked = self._scratch[: math.prod(shape)].view(shape)
        else:
            stacked = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        first = 0
        for name, shape in parts:
            self._source.copy_into(name, stacked[first : first + shape[0]])
            self._used.add(name)
            self._bar.advance(math.prod(shape))
            first += shape[0]
        return stacked

    def _stacked_blocks(
        self, parts: Sequence[tuple[str, tuple[int, ...]]], *, is_counted: bool = True
    ) -> Blocks | None:
        """Blocks of these tensors, one below the other; None unless all are of one kind that is kept.

        Args:
            parts: names and shapes.
            is_counted: whether reading them is loading them; not where a table's tensor is read again.
        """
        if not self._kernel.block_kinds:
            return None
        self._check(parts)
        found = [blocks for name, _ in parts if (blocks := self._source.blocks(name)) is not None]
        kinds = {blocks.kind for blocks in found}
        if len(found) < len(parts) or len(kinds) > 1 or not kinds <= self._kernel.block_kinds:
            return None
        if is_counted:
            for name, shape in parts:
                self._used.add(name)
                self._bar.advance(math.prod(shape))
        rows = np.concatenate([blocks.rows for blocks in found])
        return Blocks(found[0].kind, rows)

    def _check(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Refuses what is missing, or of another shape."""
        for name, shape in parts:
            found = self._source.shape(name)
            if found is None:
                raise ModelError(f"{self._source.file_of(name)}: tensor {name!r} is missing")
            if found != shape:
                raise ModelError(
                    f"{self._source.file_of(name)}: tensor {name!r} should have shape {list(shape)}, "
                    f"found {list(found)}"
                )
