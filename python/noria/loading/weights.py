"""From named tensors in files to a model's parameters on their device: checked, converted, fused."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from noria.backends.ops import Rope
from noria.backends.torch.linear import Linear, LinearKernel
from noria.errors import ModelError
from noria.loading.progress import LoadingBar
from noria.models.config import ModelConfig, RopeConfig
from noria.models.rope import inverse_frequencies, rotation_scale


class WeightSource(Protocol):
    """Named tensors, by the names of a Hugging Face checkpoint."""

    def names(self) -> set[str]:
        """Tensors that a model should use up."""

    def file_of(self, name: str, /) -> Path:
        """The file to name in an error about this tensor."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None where there is no such tensor."""

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        """Converts a tensor into `out`, contiguous and of the same shape."""


class TorchWeights:
    """Parameters as the torch backend takes them; see `noria.backends.ops.Weights`.

    Nothing is allocated before the file's shape is known to be the one that the configuration asks for.
    """

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernel: LinearKernel,
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

    def linear(self, parts: list[tuple[str, int]], in_features: int, has_bias: bool) -> Linear:
        """Linear maps of one input as one, stacked in order."""
        weights = [(f"{name}.weight", (size, in_features)) for name, size in parts]
        weight = self._stacked(weights, is_packed=self._kernel.packs)
        bias = self._stacked([(f"{name}.bias", (size,)) for name, size in parts]) if has_bias else None
        return self._kernel.linear(weight, bias)

    def tied_linear(self, name: str, out_features: int, in_features: int) -> Linear:
        """A linear map that shares an embedding table.

        A head that the file carries all the same is dropped if it equals the table, and is the head if not.
        """
        table = self._tables[name]
        if self._source.shape("lm_head.weight") is not None:
            parts = [("lm_head.weight", (out_features, in_features))]
            head = self._stacked(parts, is_packed=self._kernel.packs)
            if not torch.equal(head, table):
                return self._kernel.linear(head, None)
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
        for name, shape in parts:
            found = self._source.shape(name)
            if found is None:
                raise ModelError(f"{self._source.file_of(name)}: tensor {name!r} is missing")
            if found != shape:
                raise ModelError(
                    f"{self._source.file_of(name)}: tensor {name!r} should have shape {list(shape)}, "
                    f"found {list(found)}"
                )
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
