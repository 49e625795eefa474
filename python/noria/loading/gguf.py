"""GGUF files: their configuration, and their tensors under the names of a Hugging Face checkpoint.

Quantised tensors are dequantised as they are read, a slab at a time, straight into the model's own dtype.
What the converter did to a checkpoint is undone: permuted rows of q and k, and the 1 added to Gemma's norms.

Source of names and of the permuted q and k rows: llama.cpp's convert_hf_to_gguf.py, gguf's tensor_mapping.py.
"""

import math
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from noria.errors import ModelError
from noria.loading.gguf_config import ROPE_DIVISORS, ROPE_LONG_DIVISORS, ROPE_SHORT_DIVISORS, GgufFields
from noria.loading.gguf_file import GgufFile
from noria.models.config import ModelConfig
from noria.models.family import Family
from noria.models.registry import known_gguf_family

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from noria.loading.weights import Blocks

OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_THE_CONFIGURATION = {ROPE_DIVISORS, ROPE_SHORT_DIVISORS, ROPE_LONG_DIVISORS}
_SLAB_ELEMENTS = 1 << 20
"""Dequantised at once: 4 MiB of float32, which stays near the cores."""


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration in a GGUF file's metadata.

    Raises:
        ModelError: a key or a tensor is missing, of the wrong kind, or asks for what noria does not run.
    """
    fields = GgufFields(file)
    return known_gguf_family(file.path, fields.architecture).read_gguf(fields)


def gguf_name(name: str, family: Family) -> str:
    """What a GGUF file of a family calls a tensor of a Hugging Face checkpoint."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{family.gguf_modules[module]}.{kind}"


class GgufWeights:
    """A GGUF file's tensors, by the names of a Hugging Face checkpoint."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.path = file.path
        self._file = file
        family = known_gguf_family(file.path, GgufFields(file).architecture)
        self._adds_one = family.gguf_adds_one
        heads = {".self_attn.q_proj.": config.num_heads, ".self_attn.k_proj.": config.num_kv_heads}
        self._permuted = heads if family.gguf_permutes_qk else {}
        outer = {name: there for name, there in OUTER_NAMES.items() if there in file.tensors}
        inner = {there: here for here, there in family.gguf_modules.items()}
        self._names: dict[str, str] = dict(outer)  # Hugging Face's -> the file's
        self._foreign: set[str] = set()  # names that the family has no use for
        for there in file.tensors.keys() - set(outer.values()) - _OF_THE_CONFIGURATION:
            block, _, rest = there.removeprefix("blk.").partition(".")
            module, _, kind = rest.rpartition(".")
            if there.startswith("blk.") and module in inner:
                self._names[f"model.layers.{block}.{inner[module]}.{kind}"] = there
            else:
                self._foreign.add(there)

    def names(self) -> set[str]:
        """Tensors that a model should use up."""
        return set(self._names) | self._foreign

    def file_of(self, _name: str, /) -> Path:
        """The file to name in an error about this tensor."""
        return self.path

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None where there is no such tensor."""
        there = self._names.get(name)
        return None if there is None else self._file.tensors[there].shape

    def block_kind(self, name: str, /) -> str | None:
        """GGUF's name of a matrix's quantised type; None where it is not quantised, or not there."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        there = self._names.get(name)
        if there is None:
            return None
        info = self._file.tensors[there]
        kind = GGMLQuantizationType(info.ggml_type)
        return None if len(info.shape) != 2 or GGML_QUANT_SIZES[kind][0] == 1 else kind.name

    def blocks(self, name: str) -> "Blocks | None":
        """A matrix's quantised blocks, rows as the checkpoint had them; None where it is not quantised."""
        import numpy as np

        from noria.loading.weights import Blocks

        kind = self.block_kind(name)
        if kind is None:
            return None
        there = self._names[name]
        info = self._file.tensors[there]
        rows = np.frombuffer(self._file.tensor_bytes(there), dtype=np.uint8).reshape(info.shape[0], -1)
        heads = next((heads for part, heads in self._permuted.items() if part in name), None)
        if heads is not None:  # as in copy_into: blocks run along a row, so whole rows change places
            rows = rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        return Blocks(kind, rows)

    def copy_into(self, name: str, out: "torch.Tensor") -> None:
        """Dequantises a tensor into `out`, of the same shape, as the checkpoint had it.

        Raises:
            ModelError: it is of a type that cannot be dequantised.
        """
        there = self._names[name]
        heads = next((heads for part, heads in self._permuted.items() if part in name), None)
        if heads is not None:
            # The converter interleaves the halves of each head's rotary pairs: [2, dim / 2] -> [dim / 2, 2].
            interleaved = out.new_empty(out.shape)
            self._dequantise(there, interleaved)
            pairs = interleaved.view(heads, -1, 2, *out.shape[1:])
            out.copy_(pairs.transpose(1, 2).reshape(out.shape))
            return
        self._dequantise(there, out)
        if self._adds_one and name.endswith("norm.weight"):
            out.sub_(1)

    def _dequantise(self, there: str, out: "torch.Tensor") -> None:
        import numpy as np
        import torch
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self._file.tensors[there]
        kind = GGMLQuantizationType(info.ggml_type)
        rows = math.prod(info.shape[:-1])
        data = np.frombuffer(self._file.tensor_bytes(there), dtype=np.uint8).reshape(rows, -1)
        if not out.is_contiguous():
            raise ValueError("out must be contiguous")
        flat = out.view(rows, info.shape[-1])
        slab = max(1, _SLAB_ELEMENTS // info.shape[-1])
        try:
            for first in range(0, rows, slab):
                part = data[first : first + slab]
                values: npt.NDArray[np.float32 | np.float64]
                if kind == GGMLQuantizationType.F64:
                    values = part.view(np.float64)
                elif kind == GGMLQuantizationType.Q8_0:
                    values = _dequantised_q8_0(part)
                else:
                    values = dequantize(part, kind)
                # Copied where it is a view of the file, which torch takes for memory that it may write.
                owned = values if values.flags.writeable else values.copy()
                flat[first : first + slab] = torch.from_numpy(owned)
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {there!r} is of type {kind.name}, which cannot be dequantised"
            ) from None

    def __enter__(self) -> "GgufWeights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The mapping goes with the last view of it."""


def _dequantised_q8_0(rows: "npt.NDArray[np.uint8]") -> "npt.NDArray[np.float32]":
    """`[rows, columns]`: as gguf's own, which takes it 16 rows at a time and so three times as long."""
    import numpy as np

    blocks = rows.reshape(len(rows), -1, 34)  # a float16 scale, then 32 int8
    values = blocks[..., 2:].view(np.int8).astype(np.float32)
    values *= blocks[..., :2].view(np.float16).astype(np.float32)
    return values.reshape(len(rows), -1)
