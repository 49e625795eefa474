"""Which architectures noria runs, by the names that model files use.

A new model is a file beside llama.py and a line here.
"""

from pathlib import Path

from noria.errors import ModelError

ARCHITECTURES = {"LlamaForCausalLM": "noria.models.llama"}
"""`architectures` of a config.json -> the module whose `NETWORK` builds it; imported when it is needed."""

GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
"""`general.architecture` of a GGUF file -> the name above."""


def known_architecture(path: Path, names: list[str]) -> str:
    """The first of a config.json's architectures that noria runs.

    Raises:
        ModelError: it runs none of them.
    """
    for name in names:
        if name in ARCHITECTURES:
            return name
    found = ", ".join(repr(name) for name in names) or "none named"
    raise ModelError(f"{path}: architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")


def known_gguf_architecture(path: Path, name: str) -> str:
    """As `known_architecture`, for a GGUF file's name of it."""
    if name not in GGUF_ARCHITECTURES:
        supported = ", ".join(GGUF_ARCHITECTURES)
        raise ModelError(f"{path}: GGUF architecture {name!r} is not supported; supported: {supported}")
    return GGUF_ARCHITECTURES[name]
