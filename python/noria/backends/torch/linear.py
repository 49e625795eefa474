"""Linear maps, in the layout that the hardware multiplies fastest.

On a CPU a weight is packed once, at load, for oneDNN's kernels: for 2 to 64 rows a packed product takes a
third to four fifths of the time of a plain one, which packs its weight anew at each call. The two ops are
private to torch, so they are used only after a trial product has come out right.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from noria.loading.dtype import cpu_computes_bfloat16

if TYPE_CHECKING:
    from noria.loading.weights import Blocks


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear map's parameters.

    Attributes:
        weight: `[out_features, in_features]`; opaque where packed.
        bias: `[out_features]`, or None.
        out_features: columns of what it gives.
        is_packed: whether the weight is in oneDNN's layout.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    is_packed: bool

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, out_features]` of `x` `[num_tokens, in_features]`."""
        if not self.is_packed:
            return functional.linear(x, self.weight, self.bias)
        if x.shape[0] == 0:  # which oneDNN refuses
            return x.new_empty(0, self.out_features)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            x, self.weight, self.bias, "none", [], ""
        )
        return product


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """How linear maps are laid out and multiplied.

    Attributes:
        packs: whether weights are packed.
        reason: a clause that says what is used and why.
    """

    packs: bool
    reason: str

    @property
    def block_kinds(self) -> frozenset[str]:
        """None: blocks are dequantised as they are read."""
        return frozenset()

    def linear_of_blocks(self, blocks: "Blocks", in_features: int, bias: torch.Tensor | None) -> Linear:
        """Never asked: there are no such kinds."""
        raise ValueError(f"torch multiplies with no blocks of {blocks.kind}: {in_features} inputs, {bias}")

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Lays a map out; a packed weight is a copy.

        Args:
            weight: `[out_features, in_features]`.
            bias: `[out_features]`, or None.
        """
        out_features = weight.shape[0]
        return Linear(_packed(weight) if self.packs else weight, bias, out_features, self.packs)


def chosen_kernel(dtype: torch.dtype, device: torch.device) -> LinearKernel:
    """The fastest way to multiply that this torch has for a dtype on a device."""
    if device.type != "cpu":
        return LinearKernel(False, f"torch's linear on {device.type}")
    if dtype == torch.bfloat16 and not cpu_computes_bfloat16():
        return LinearKernel(False, "torch's linear: this CPU has no bfloat16 units to pack for")
    if dtype not in (torch.float32, torch.bfloat16):
        return LinearKernel(False, f"torch's linear: oneDNN packs no {str(dtype).removeprefix('torch.')}")
    if not torch.backends.mkldnn.is_available():
        return LinearKernel(False, "torch's linear: this torch is built without oneDNN")
    failure = _trial(dtype)
    if failure is not None:
        return LinearKernel(False, f"torch's linear: packing for oneDNN failed ({failure})")
    return LinearKernel(True, "oneDNN with weights packed at load")


def _packed(weight: torch.Tensor) -> torch.Tensor:
    # Without a number of rows to expect, which serves every number nearly as well as its own packing.
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)  # noqa: SLF001
    return packed


def _trial(dtype: torch.dtype) -> str | None:
    """None if a packed product is right, for one row and for several; else what went wrong."""
    weight = torch.arange(48 * 32, dtype=torch.float32).view(48, 32).sin().to(dtype)
    bias = torch.arange(48, dtype=torch.float32).cos().to(dtype)
    try:
        linear = Linear(_packed(weight), bias, 48, True)
        for num_rows in (1, 5):
            x = torch.arange(num_rows * 32, dtype=torch.float32).view(num_rows, 32).cos().to(dtype)
            wanted = functional.linear(x.float(), weight.float(), bias.float())
            if not torch.allclose(
                linear.apply(x).float(), wanted, atol=1e-4 if dtype == torch.float32 else 0.2
            ):
                return "a trial product was wrong"
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        return str(error).partition("\n")[0]
    return None
