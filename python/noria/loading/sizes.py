"""How large a model is, from the headers of its files."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from noria.backends.ops import Rope
from noria.loading import is_gguf
from noria.loading.gguf import GgufWeights
from noria.loading.gguf_file import GgufFile
from noria.loading.hf import HfWeights
from noria.models.config import ModelConfig, RopeConfig
from noria.models.registry import ARCHITECTURES

if TYPE_CHECKING:
    from noria.loading.weights import WeightSource

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def num_parameters(path: Path, config: ModelConfig) -> int:
    """Parameters that a model holds once it is loaded; a tied head counts as none.

    Raises:
        ModelError: a file is missing or malformed.
    """
    with _opened(path, config) as source:
        return sum(math.prod(source.shape(name) or ()) for name in source.names())


@dataclass(frozen=True, slots=True)
class Storage:
    """In what a backend holds parameters.

    Attributes:
        plain: number format of tables and vectors.
        linear: number format of linear maps.
        block_kinds: GGUF's types that linear maps stay in.
        packs: linear maps are copies, so that a tied head is held beside its table.
    """

    plain: str
    linear: str
    block_kinds: frozenset[str] = frozenset()
    packs: bool = True


def stored_bytes(path: Path, config: ModelConfig, storage: Storage) -> dict[str, int]:
    """Bytes that a model of noria's own families takes once it is loaded, by number format or GGUF type.

    Not counted is what fills a packed map's last panel up: less than 48 rows of it.

    Args:
        path: of its files.
        config: read from them.
        storage: of the backend that will run it.

    Raises:
        ModelError: a file is missing or malformed.
    """
    with _opened(path, config) as source:
        counted = _CountedWeights(source, storage)
        ARCHITECTURES[config.architecture].network(config, counted)
    return counted.num_bytes


class _CountedWeights:
    """A `noria.backends.ops.Weights` that gives nothing and adds up what a model asks for."""

    def __init__(self, source: "WeightSource", storage: Storage) -> None:
        self._source = source
        self._storage = storage
        self.num_bytes: dict[str, int] = {}

    def table(self, _name: str, rows: int, columns: int) -> None:
        """An embedding table."""
        self._add(self._storage.plain, rows * columns)

    def vector(self, _name: str, size: int, *, plus_one: bool = False) -> None:
        """A vector; with 1 added it is float32 at least."""
        is_narrow = _ITEM_BYTES[self._storage.plain] < _ITEM_BYTES["float32"]
        self._add("float32" if plus_one and is_narrow else self._storage.plain, size)

    def rope(self, _rope: RopeConfig) -> Rope[None]:
        """Frequencies, which are not in the files."""
        return Rope(None, 1.0)

    def linear(self, parts: list[tuple[str, int]], in_features: int, has_bias: bool) -> None:
        """Linear maps as one."""
        self._add_map([f"{name}.weight" for name, _ in parts], sum(size for _, size in parts), in_features)
        if has_bias:
            self._add(self._storage.plain, sum(size for _, size in parts))

    def tied_linear(self, name: str, out_features: int, in_features: int) -> None:
        """A head; the table alone where it is not packed."""
        if self._storage.packs:
            self._add_map([name], out_features, in_features)

    def _add_map(self, names: list[str], out_features: int, in_features: int) -> None:
        # As TorchWeights decides it.
        kinds = {self._source.block_kind(name) for name in names}
        kind = kinds.pop() if len(kinds) == 1 else None
        stored = kind if kind is not None and kind in self._storage.block_kinds else self._storage.linear
        self._add(stored, out_features * in_features)

    def _add(self, stored: str, num_elements: int) -> None:
        self.num_bytes[stored] = self.num_bytes.get(stored, 0) + _num_bytes(stored, num_elements)


def _num_bytes(stored: str, num_elements: int) -> int:
    if stored in _ITEM_BYTES:
        return num_elements * _ITEM_BYTES[stored]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[stored]]
    return num_elements // block * block_bytes


@contextmanager
def _opened(path: Path, config: ModelConfig) -> "Iterator[WeightSource]":
    """A model's tensors, of which the headers are read."""
    if is_gguf(path):
        with GgufWeights(GgufFile(path), config) as tensors:
            yield tensors
        return
    family = ARCHITECTURES.get(config.architecture)
    prefixes, ignored = (family.hf_prefixes, family.hf_ignored) if family else ((), ())
    with HfWeights(path, prefixes, ignored) as files:
        yield files
