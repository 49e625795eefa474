"""What noria knows of a family of models: how its files are read, and what it computes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from noria.backends.ops import Ops, Weights
from noria.models.config import ModelConfig

if TYPE_CHECKING:
    from noria.loading.fields import JsonFields
    from noria.loading.gguf_config import GgufFields


class Network(Protocol):
    """A model's parameters and its forward, as a file of `noria.models` gives them."""

    def forward(self, ops: Ops[Any, Any, Any]) -> Any:
        """One step's logits, `[num_logits, vocab_size]`."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family.

    Attributes:
        title: its name, for people.
        architectures: its names in `architectures` of a config.json.
        gguf_architecture: its name in `general.architecture` of a GGUF file.
        read_hf: its configuration, from a config.json.
        read_gguf: likewise, from a GGUF file's metadata.
        gguf_modules: a layer's modules in a Hugging Face checkpoint -> in a GGUF file.
        network: builds parameters and forward.
        gguf_permutes_qk: a GGUF file has the rows of each head of q and k interleaved.
        gguf_adds_one: a GGUF file has 1 added to the weights of norms.
        hf_prefixes: other beginnings of tensors' names in a checkpoint -> those that `network` asks for.
        hf_ignored: beginnings of names of tensors that a checkpoint may carry and no forward reads.
    """

    title: str
    architectures: tuple[str, ...]
    gguf_architecture: str
    read_hf: "Callable[[JsonFields], ModelConfig]"
    read_gguf: "Callable[[GgufFields], ModelConfig]"
    gguf_modules: Mapping[str, str]
    network: Callable[[ModelConfig, Weights[Any, Any]], Network]
    gguf_permutes_qk: bool = False
    gguf_adds_one: bool = False
    hf_prefixes: tuple[tuple[str, str], ...] = ()
    hf_ignored: tuple[str, ...] = ()
