"""Model files: Hugging Face directories and GGUF files."""

from pathlib import Path
from typing import TYPE_CHECKING

from noria.errors import ModelError

if TYPE_CHECKING:
    from noria.models.config import ModelConfig


_MAX_SHOWN = 100


def is_gguf(path: Path) -> bool:
    """Whether a model path is a GGUF file; it is a Hugging Face directory otherwise.

    Raises:
        ModelError: neither.
    """
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:  # a name too long, a folder that may not be read
        raise ModelError(f"{str(path)[:_MAX_SHOWN]}: {error.strerror}") from None
    if is_folder:
        return False
    if not is_there:
        raise ModelError(f"{path}: no such file or directory")
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path}: a model is a Hugging Face directory or a .gguf file")
    return True


def read_model_config(path: Path) -> "ModelConfig":
    """A model's configuration, without its weights.

    Args:
        path: a Hugging Face directory or a `.gguf` file.

    Raises:
        ModelError: it cannot be read, or is of an architecture that noria does not run.
    """
    path = Path(path)
    if is_gguf(path):
        from noria.loading.gguf import read_gguf_config
        from noria.loading.gguf_file import GgufFile

        return read_gguf_config(GgufFile(path))
    from noria.loading.hf import read_hf_config

    return read_hf_config(path)
