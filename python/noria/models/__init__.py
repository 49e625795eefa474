"""Models: one short file each, over the ops of `noria.backends.ops`.

torch is imported when a model is loaded, not when a configuration is read.
"""

from typing import TYPE_CHECKING

from noria.models.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from noria.models.model import Model, load_model

__all__ = ["Model", "ModelConfig", "RopeConfig", "load_model"]


def __getattr__(name: str) -> object:
    if name in ("Model", "load_model"):
        from noria.models import model

        return getattr(model, name)
    raise AttributeError(f"module 'noria.models' has no attribute {name!r}")
