"""Which families noria runs, by the names that model files use.

A new family is a file beside llama.py and a line here.
"""

import importlib.util
from pathlib import Path

from noria.errors import ModelError
from noria.models import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3
from noria.models.config import ModelConfig
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

GGUF_ARCHITECTURES = {family.gguf_architecture: family for family in reversed(FAMILIES)}
"""`general.architecture` of a GGUF file -> its family; the first that names it, where two do."""


def known_family(names: list[str]) -> Family | None:
    """The family of the first of a config.json's architectures that noria runs itself; None: of none."""
    return next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)


def unknown_architecture(path: Path, names: list[str]) -> ModelError:
    """That noria runs none of a config.json's architectures."""
    found = ", ".join(repr(name) for name in names) or "none named"
    others = "" if importlib.util.find_spec("transformers") else "; the extra noria[hf] runs many others"
    return ModelError(
        f"{path}: architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}{others}"
    )


def implementation(config: ModelConfig) -> str:
    """A clause that says what runs a model."""
    if config.is_foreign:
        return f"transformers' own {config.architecture}, over noria's paged attention"
    return f"noria's own forward of {ARCHITECTURES[config.architecture].title}"


def known_gguf_family(path: Path, name: str) -> Family:
    """The family that a GGUF file names.

    Raises:
        ModelError: noria runs no such family.
    """
    if name not in GGUF_ARCHITECTURES:
        supported = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise ModelError(f"{path}: GGUF architecture {name!r} is not supported; supported: {supported}")
    return GGUF_ARCHITECTURES[name]
