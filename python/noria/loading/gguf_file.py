"""The header of a GGUF file: metadata, and where each tensor lies.

`gguf.GGUFReader` makes an array object per string and takes seconds on a vocabulary of 49k tokens; this
reader walks the same bytes with `struct` in a tenth of a second. It trusts nothing it reads: every count is
checked against the bytes that are left before anything of that size is made.

Source of the format: ggml/docs/gguf.md, and gguf/gguf_reader.py of the `gguf` package.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from noria.errors import ModelError

T = TypeVar("T")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_ARRAY_NESTING = 4
_MOST_RESIDENT_BYTES = 32 << 20

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]

_KIND_NAMES: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    list: "an array",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file.

    Attributes:
        name: as the file spells it.
        shape: slowest dimension first, as torch and numpy have it (the file itself lists them the other way).
        ggml_type: a `gguf.GGMLQuantizationType` value.
        offset: first byte, from the start of the file.
        nbytes: bytes it takes there.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


class GgufFile:
    """A GGUF file, mapped into memory, its header read.

    Attributes:
        path: the file.
        version: 2 or 3.
        metadata: by key: `str`, `int`, `float`, `bool`, or a `list` of one of them.
        tensors: by name, in the file's order.
        header_bytes: how long the header is.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            ModelError: no such file, or it is not a whole, well-formed GGUF file of version 2 or 3.
        """
        self.path = Path(path)
        self._num_resident_bytes = 0
        try:
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelError(f"{self.path}: the file is empty; a GGUF file was expected") from None
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read ({error.strerror})") from None
        header = _Header(self.path, self._data)
        self.version = header.version
        self.metadata = header.metadata
        self.tensors = header.tensors
        self.header_bytes = header.num_bytes

    def tensor_bytes(self, name: str) -> memoryview:
        """A tensor's bytes as they lie in the file: read-only, not copied.

        What was read before leaves this process's memory now and then: it can be read again at any time.

        Raises:
            ModelError: the file has no tensor of that name.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.path}: tensor {name!r} is missing ({len(self.tensors)} tensors found)")
        self._num_resident_bytes += info.nbytes
        if self._num_resident_bytes > _MOST_RESIDENT_BYTES:
            if hasattr(mmap, "MADV_DONTNEED"):
                self._data.madvise(mmap.MADV_DONTNEED)
            self._num_resident_bytes = info.nbytes
        return memoryview(self._data)[info.offset : info.offset + info.nbytes]

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """One metadata value, checked to be a `kind`; an integer passes for a float.

        Raises:
            ModelError: the key is missing and `default` is None, or its value is of another kind.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: metadata key {key!r} is missing")
        if kind is float and type(value) is int:
            return kind(value)  # type: ignore[call-arg]
        # bool is a subclass of int, and is not meant where a number is.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(
                f"{self.path}: metadata key {key!r} should be {_KIND_NAMES.get(kind, kind.__name__)}, "
                f"found {_KIND_NAMES.get(type(value), type(value).__name__)}"
            )
        return value


class _Header:
    """Walks the header once, from front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

        magic = bytes(self._take(4, "the magic number"))
        if magic != _MAGIC:
            raise self._error(f"not a GGUF file: it starts with {magic!r}, expected {_MAGIC!r}")
        self.version = self._scalar(_U32, "the version")
        if self.version not in _VERSIONS:
            if self.version & 0xFFFF == 0:
                raise self._error("big-endian GGUF is not supported; convert the file to little-endian")
            raise self._error(f"GGUF version {self.version} is not supported; versions 2 and 3 are")
        num_tensors = self._scalar(_U64, "the tensor count")
        num_keys = self._scalar(_U64, "the metadata count")
        # A key takes at least 8 + 4 + 1 bytes, a tensor 8 + 4 + 8 + 4 + 8.
        self._check_count(num_keys, 13, "metadata keys")
        self._check_count(num_tensors, 32, "tensors")

        self.metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key")
            if key in self.metadata:
                raise self._error(f"metadata key {key!r} occurs twice")
            self.metadata[key] = self._value(self._scalar(_U32, f"the type of {key!r}"), key, 0)
        raw = [self._tensor() for _ in range(num_tensors)]
        self.num_bytes = self._at
        self.tensors = self._placed(raw)

    def _error(self, text: str) -> ModelError:
        return ModelError(f"{self._path}: {text}")

    def _take(self, num_bytes: int, what: str) -> memoryview:
        start = self._at
        if num_bytes > self._size - start:
            raise self._error(
                f"the file is truncated or corrupt: {what} needs {num_bytes} bytes at byte {start} "
                f"of {self._size}"
            )
        self._at = start + num_bytes
        return memoryview(self._data)[start : self._at]

    def _scalar(self, kind: struct.Struct, what: str) -> int:
        value: int = kind.unpack(self._take(kind.size, what))[0]
        return value

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        left = self._size - self._at
        if count > left // min_bytes:
            raise self._error(
                f"the file is truncated or corrupt: {count} {what} announced, {left} bytes left"
            )

    def _string(self, what: str) -> str:
        length = self._scalar(_U64, f"the length of {what}")
        return self._decoded(self._take(length, what), what)

    def _decoded(self, raw: memoryview | bytes, what: str) -> str:
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{what} is not valid UTF-8 (before byte {self._at})") from None

    def _value(self, kind: int, key: str, nesting: int) -> object:
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key, nesting)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self._error(f"metadata key {key!r} has the unknown value type {kind}")
        return self._scalar(scalar, f"the value of {key!r}")

    def _array(self, key: str, nesting: int) -> list[object]:
        kind = self._scalar(_U32, f"the element type of {key!r}")
        count = self._scalar(_U64, f"the length of {key!r}")
        if kind == _STRING:
            return self._strings(count, key)
        if kind == _ARRAY:
            if nesting == _MAX_ARRAY_NESTING:
                raise self._error(f"metadata key {key!r} nests arrays deeper than {_MAX_ARRAY_NESTING}")
            self._check_count(count, 12, f"arrays in {key!r}")
            return [self._array(key, nesting + 1) for _ in range(count)]
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self._error(f"metadata key {key!r} has the unknown element type {kind}")
        raw = self._take(count * scalar.size, f"the array {key!r}")
        return list(struct.unpack(f"<{count}{scalar.format[-1]}", raw))

    def _strings(self, count: int, key: str) -> list[object]:
        """A vocabulary has 100k of them: the loop keeps to local names and slices."""
        self._check_count(count, 8, f"strings in {key!r}")
        data, size, at = self._data, self._size, self._at
        unpack_length = _U64.unpack_from
        strings: list[object] = []
        for index in range(count):
            self._at = at  # for messages
            if size - at < 8:
                self._take(8, f"the length of string {index} of {key!r}")
            end = at + 8 + unpack_length(data, at)[0]
            if end > size:
                self._take(end - at, f"string {index} of {key!r}")
            strings.append(self._decoded(data[at + 8 : end], f"string {index} of {key!r}"))
            at = end
        self._at = at
        return strings

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor name")
        num_dims = self._scalar(_U32, f"the rank of tensor {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed")
        raw = self._take(8 * num_dims, f"the shape of tensor {name!r}")
        shape = tuple(reversed(struct.unpack(f"<{num_dims}Q", raw)))
        ggml_type = self._scalar(_U32, f"the type of tensor {name!r}")
        return name, shape, ggml_type, self._scalar(_U64, f"the offset of tensor {name!r}")

    def _placed(self, raw: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, TensorInfo]:
        """Offsets from the start of the file, each tensor checked to lie whole inside it."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"'general.alignment' should be a power of two, found {alignment!r}")
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, ggml_type, relative in raw:
            if name in tensors:
                raise self._error(f"tensor {name!r} occurs twice")
            if ggml_type not in sizes:
                raise self._error(f"tensor {name!r} has the unknown type {ggml_type}")
            block, block_bytes = sizes[ggml_type]
            num_elements = math.prod(shape)
            if num_elements == 0:
                raise self._error(f"tensor {name!r} has an empty dimension: shape {list(shape)}")
            if shape[-1] % block:
                raise self._error(
                    f"tensor {name!r} has rows of {shape[-1]} elements; "
                    f"{GGMLQuantizationType(ggml_type).name} needs a multiple of {block}"
                )
            nbytes = num_elements // block * block_bytes
            offset = data_start + relative
            if relative % alignment:
                raise self._error(f"tensor {name!r} starts at {relative}, not a multiple of {alignment}")
            if offset + nbytes > self._size:
                raise self._error(
                    f"the file is truncated or corrupt: tensor {name!r} ends at byte {offset + nbytes} "
                    f"of {self._size}"
                )
            tensors[name] = TensorInfo(name, shape, ggml_type, offset, nbytes)
        return tensors
