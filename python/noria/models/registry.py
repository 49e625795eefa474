"""Which families noria runs, by the names that model files use.

A new family is a file beside llama.py and a line here.
"""

from pathlib import Path

from noria.errors import ModelError
from noria.models import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3
from noria.models.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    phi3.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
)

ARCHITECTURES = {name: family for family in FAMILIES for name in family.architectures}
"""`architectures` of a config.json -> its family."""

GGUF_ARCHITECTURES = {
    family.gguf_architecture: family for family in reversed(FAMILIES) if family.gguf_architecture
}
"""`general.architecture` of a GGUF file -> its family; the first that names it, where two do."""


def known_family(path: Path, names: list[str]) -> Family:
    """The family of the first of a config.json's architectures that noria runs.

    Raises:
        ModelError: it runs none of them.
    """
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(repr(name) for name in names) or "none named"
    raise ModelError(f"{path}: architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")


def known_gguf_family(path: Path, name: str) -> Family:
    """As `known_family`, for a GGUF file's name of it."""
    if name not in GGUF_ARCHITECTURES:
        supported = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise ModelError(f"{path}: GGUF architecture {name!r} is not supported; supported: {supported}")
    return GGUF_ARCHITECTURES[name]
