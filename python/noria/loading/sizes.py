"""How large a model is, from the headers of its files."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from noria.loading import is_gguf
from noria.loading.gguf import GgufWeights
from noria.loading.gguf_file import GgufFile
from noria.loading.hf import HfWeights
from noria.models.config import ModelConfig
from noria.models.registry import ARCHITECTURES

if TYPE_CHECKING:
    from noria.loading.weights import WeightSource


def num_parameters(path: Path, config: ModelConfig) -> int:
    """Parameters that a model holds once it is loaded; a tied head counts as none.

    Raises:
        ModelError: a file is missing or malformed.
    """
    if is_gguf(path):
        with GgufWeights(GgufFile(path), config) as tensors:
            return _counted(tensors)
    family = ARCHITECTURES.get(config.architecture)
    prefixes, ignored = (family.hf_prefixes, family.hf_ignored) if family else ((), ())
    with HfWeights(path, prefixes, ignored) as tensors:
        return _counted(tensors)


def _counted(source: "WeightSource") -> int:
    return sum(math.prod(source.shape(name) or ()) for name in source.names())
