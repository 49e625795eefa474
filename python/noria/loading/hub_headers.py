"""A hub's model without its weights: of each of their files the header alone is read.

What stands in for a file has its header and its size, and a hole for the rest, so that all that reads headers
reads it as it reads the file.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from noria.errors import ModelError
from noria.loading.fields import JsonFields
from noria.loading.gguf_file import GgufFile
from noria.loading.hub import DESCRIPTION, HubName, fetch_model, hub_errors, path_or_name

_FIRST_BYTES = 2**17
"""Of safetensors: the header of a model of some billions of parameters takes about so many."""
_FIRST_GGUF_BYTES = 2**22
"""Of GGUF, whose header has the vocabulary."""
_MAX_HEADER_BYTES = 2**28


@contextmanager
def described_model(text: str) -> Iterator[Path]:
    """A model's folder or file, of whose weights the headers are there.

    Args:
        text: a path, or a hub's name. What is in the cache already is taken from there.

    Raises:
        ModelError: as `local_model`.
    """
    found = path_or_name(text)
    if isinstance(found, Path):
        yield found
        return
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE:
        yield fetch_model(found)
        return
    with tempfile.TemporaryDirectory(prefix="noria-headers-") as temporary:
        folder = Path(temporary)
        if found.file is not None:
            cached = try_to_load_from_cache(found.repo, found.file, revision=found.revision)
            yield Path(cached) if isinstance(cached, str) else _gguf_header(found, found.file, folder)
            return
        described = fetch_model(found, DESCRIPTION)
        missing = [name for name in _weight_files(described) if not (described / name).exists()]
        if not missing:
            yield described
            return
        for file in described.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        for name in missing:
            _safetensors_header(found, name, folder / name)
        yield folder


def _weight_files(folder: Path) -> list[str]:
    """Files that a folder's weights are in."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        return ["model.safetensors"]
    fields = JsonFields.of_file(index)
    weight_map = fields.object("weight_map")
    if weight_map is None:
        raise fields.error("weight_map", "an object")
    names = {name for name in weight_map.values.values() if isinstance(name, str)}
    return sorted(name for name in names if Path(name).name == name)


class _RemoteFile:
    """A file on a hub, read in pieces.

    Args:
        name: of the model.
        file: of the repository.
    """

    def __init__(self, name: HubName, file: str) -> None:
        self._name = name
        with hub_errors(name):
            from huggingface_hub import HfFileSystem

            self._file = HfFileSystem().open(
                f"{name.repo}/{file}", "rb", revision=name.revision, cache_type="none"
            )
        self.size = int(self._file.size)

    def read(self, num_bytes: int) -> bytes:
        """The first bytes of it; fewer where it is shorter."""
        with hub_errors(self._name):
            self._file.seek(0)
            return bytes(self._file.read(min(num_bytes, self.size)))


def _safetensors_header(name: HubName, file: str, path: Path) -> None:
    """Writes what stands in for a safetensors file."""
    remote = _RemoteFile(name, file)
    header = remote.read(_FIRST_BYTES)
    num_bytes = 8 + int.from_bytes(header[:8], "little")
    if not 8 < num_bytes <= min(remote.size, _MAX_HEADER_BYTES):
        raise ModelError(f"{name.repo}/{file}: not a safetensors file (a header of {num_bytes} bytes)")
    if num_bytes > len(header):
        header = remote.read(num_bytes)
    _write(path, header[:num_bytes], remote.size)


def _gguf_header(name: HubName, file: str, folder: Path) -> Path:
    """Writes what stands in for a GGUF file, whose header says nowhere how long it is."""
    remote = _RemoteFile(name, file)
    path = folder / Path(file).name
    num_bytes = _FIRST_GGUF_BYTES
    while True:
        header = remote.read(num_bytes)
        _write(path, header, remote.size)
        is_whole = len(header) == remote.size or num_bytes >= _MAX_HEADER_BYTES
        try:
            if GgufFile(path).header_bytes <= len(header):
                return path
        except ModelError:
            # Perhaps only because it goes on behind what was read.
            if is_whole:
                raise
        if is_whole:
            raise ModelError(f"{name.repo}/{file}: its header does not end within {num_bytes} bytes")
        num_bytes *= 4


def _write(path: Path, header: bytes, size: int) -> None:
    with path.open("wb") as file:
        file.write(header)
        file.truncate(size)
