"""Hugging Face directories: config.json, and safetensors in one file or in shards."""

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from noria.errors import ModelError
from noria.loading.fields import JsonFields
from noria.loading.hf_config import with_generation_defaults
from noria.models.config import ModelConfig
from noria.models.registry import known_family, unknown_architecture

if TYPE_CHECKING:
    import torch

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_LEFTOVERS = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints carry and that no forward reads."""
_MOST_RESIDENT_BYTES = 32 << 20


def read_hf_config(directory: Path) -> ModelConfig:
    """The configuration in a directory's config.json, with the defaults of its generation_config.json.

    Raises:
        ModelError: a file or a key is missing, of the wrong kind, or asks for what noria does not run.
    """
    fields = JsonFields.of_file(directory / "config.json")
    names = fields.names("architectures")
    family = known_family(names)
    if fields.has("quantization_config"):
        raise ModelError(
            f"{fields.path}: quantised checkpoints are not supported (it has 'quantization_config')"
        )
    if family is not None:
        return with_generation_defaults(family.read_hf(fields), directory)
    from noria.models.foreign import read_foreign_config

    for name in names:
        config = read_foreign_config(directory, name)
        if config is not None:
            return with_generation_defaults(config, directory)
    raise unknown_architecture(fields.path, names)


class HfWeights:
    """The tensors of a directory's safetensors files, by the names that a network asks for.

    Args:
        directory: where the files are.
        prefixes: other beginnings of names -> those that the network asks for.
        ignored: beginnings of names of tensors that no forward reads.
    """

    def __init__(
        self, directory: Path, prefixes: tuple[tuple[str, str], ...] = (), ignored: tuple[str, ...] = ()
    ) -> None:
        """Opens every file and reads its header.

        Raises:
            ModelError: no safetensors; or a file is missing, truncated or malformed.
        """
        self.path = directory
        index = directory / "model.safetensors.index.json"
        single = directory / "model.safetensors"
        self._files: dict[str, Any] = {}  # file name -> safetensors' handle
        self._where: dict[str, str] = {}  # tensor -> file name
        self._num_resident_bytes = 0
        if single.exists():
            self._open(single.name)
            self._where = dict.fromkeys(self._files[single.name].keys(), single.name)
        elif index.exists():
            self._open_shards(JsonFields.of_file(index))
        else:
            raise ModelError(
                f"{directory}: it has neither model.safetensors nor model.safetensors.index.json"
            )
        self._there: dict[str, str] = {}  # the network's name -> the file's
        for name in self._where:
            if not name.endswith(_LEFTOVERS) and not name.startswith(ignored):
                found = next(((old, new) for old, new in prefixes if name.startswith(old)), None)
                self._there[found[1] + name.removeprefix(found[0]) if found else name] = name

    def _open(self, name: str) -> None:
        from safetensors import SafetensorError, safe_open

        path = self.path / name
        if path.is_dir():  # of which safetensors says "No such device"
            raise ModelError(f"{path}: it is a folder, where a safetensors file should be")
        try:
            self._files[name] = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise ModelError(f"{path}: the file is missing") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: truncated or not a safetensors file ({error})") from None

    def _open_shards(self, index: JsonFields) -> None:
        weight_map = index.object("weight_map")
        if weight_map is None:
            raise index.error("weight_map", "an object")
        for tensor, name in weight_map.values.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise weight_map.error(tensor, "a file name in this directory")
            self._where[tensor] = name
        for name in sorted(set(self._where.values())):
            self._open(name)
            held = set(self._files[name].keys())
            for tensor in (tensor for tensor, where in self._where.items() if where == name):
                if tensor not in held:
                    raise ModelError(
                        f"{self.path / name}: tensor {tensor!r} is missing, which the index places there"
                    )

    def names(self) -> set[str]:
        """Tensors that a model should use up."""
        return set(self._there)

    def file_of(self, name: str, /) -> Path:
        """The file to name in an error about this tensor."""
        return self.path / self._where.get(self._there.get(name, ""), "")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None where there is no such tensor."""
        there = self._there.get(name)
        if there is None:
            return None
        return tuple(self._files[self._where[there]].get_slice(there).get_shape())

    def block_kind(self, _name: str, /) -> None:
        """Checkpoints have none."""

    def blocks(self, _name: str, /) -> None:
        """Checkpoints have none."""

    def copy_into(self, name: str, out: "torch.Tensor") -> None:
        """Converts a tensor into `out`, of the same shape.

        Raises:
            ModelError: it is not of a floating-point type that noria reads.
        """
        there = self._there[name]
        handle = self._files[self._where[there]]
        dtype = handle.get_slice(there).get_dtype()
        if dtype not in _FLOAT_DTYPES:
            allowed = ", ".join(_FLOAT_DTYPES)
            raise ModelError(f"{self.file_of(name)}: tensor {name!r} should be of {allowed}, found {dtype}")
        tensor = handle.get_tensor(there)
        out.copy_(tensor)
        self._num_resident_bytes += tensor.nbytes
        if self._num_resident_bytes > _MOST_RESIDENT_BYTES:
            # The file is mapped, and its pages leave this process's memory with the mapping alone.
            del tensor, handle
            self._open(self._where[there])
            self._num_resident_bytes = 0

    def close(self) -> None:
        """Lets go of the files."""
        self._files.clear()

    def __enter__(self) -> "HfWeights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
