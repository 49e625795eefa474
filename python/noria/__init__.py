"""An LLM inference engine with continuous batching: a Rust decision core under a Python engine.

from noria import LLM, SamplingParams

llm = LLM("model.gguf")
print(llm.generate("The wheel turns", SamplingParams(max_tokens=32))[0].outputs[0].text)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from noria.errors import (
    CommitError,
    ConfigError,
    EmptyPromptError,
    MaxTokensError,
    ModelError,
    NeverFitsError,
    NoriaError,
    PromptTooLongError,
    QueueFullError,
    RejectedError,
    SamplingParamsError,
    TokenizerError,
    TokenOutOfRangeError,
)

if TYPE_CHECKING:
    from noria.async_engine import AsyncEngine, OutputStream
    from noria.config import EngineConfig
    from noria.engine import EngineDeadError
    from noria.hints import SchedulingHints
    from noria.llm import LLM
    from noria.outputs import CompletionOutput, Events, RequestMetrics, RequestOutput
    from noria.sampling.params import SamplingParams
    from noria.sampling.structured import StructuredOutputsParams
    from noria.scores import Logprob
    from noria.scoring import ScoreOutput
    from noria.stats import EngineStats

__all__ = [
    "LLM",
    "AsyncEngine",
    "CommitError",
    "CompletionOutput",
    "ConfigError",
    "EmptyPromptError",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "Events",
    "Logprob",
    "MaxTokensError",
    "ModelError",
    "NeverFitsError",
    "NoriaError",
    "OutputStream",
    "PromptTooLongError",
    "QueueFullError",
    "RejectedError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SamplingParamsError",
    "SchedulingHints",
    "ScoreOutput",
    "StructuredOutputsParams",
    "TokenOutOfRangeError",
    "TokenizerError",
    "__version__",
]

# Imported when first asked for: torch alone takes seconds, and `noria --help` needs none of it.
_LAZY = {
    "LLM": "noria.llm",
    "AsyncEngine": "noria.async_engine",
    "CompletionOutput": "noria.outputs",
    "EngineConfig": "noria.config",
    "EngineDeadError": "noria.engine",
    "EngineStats": "noria.stats",
    "Events": "noria.outputs",
    "OutputStream": "noria.async_engine",
    "RequestMetrics": "noria.outputs",
    "RequestOutput": "noria.outputs",
    "Logprob": "noria.scores",
    "SamplingParams": "noria.sampling.params",
    "SchedulingHints": "noria.hints",
    "ScoreOutput": "noria.scoring",
    "StructuredOutputsParams": "noria.sampling.structured",
    "__version__": "noria._core",
}


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
