"""A loaded model, and loading it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from noria.backends.attention import Attention
from noria.backends.ops import StepInputs
from noria.backends.torch.attention import SdpaAttention
from noria.backends.torch.linear import LinearKernel, chosen_kernel
from noria.backends.torch.ops import TorchOps
from noria.errors import ConfigError
from noria.kv_cache import KvCache
from noria.loading import is_gguf
from noria.loading.dtype import chosen_dtype
from noria.loading.gguf import GgufWeights, read_gguf_config
from noria.loading.gguf_file import GgufFile
from noria.loading.hf import HfWeights, read_hf_config
from noria.loading.progress import LoadingBar
from noria.loading.weights import TorchWeights, WeightSource
from noria.models.config import ModelConfig
from noria.models.family import Network
from noria.models.foreign import load_foreign
from noria.models.registry import ARCHITECTURES, implementation


@dataclass(frozen=True, slots=True)
class Model:
    """A model on its device.

    Attributes:
        config: its shape.
        dtype: of parameters, activations and KV cache.
        dtype_reason: a clause that says which dtype was chosen and why.
        device: where it runs.
        linear_kernel: a clause that says how linear maps are multiplied, and why.
        max_model_len: the longest context it will be run with, in tokens.
        network: parameters and forward.
        attention: the kernel of the attention op.
    """

    config: ModelConfig
    dtype: torch.dtype
    dtype_reason: str
    device: torch.device
    linear_kernel: str
    max_model_len: int
    network: Network
    attention: Attention

    @property
    def implementation(self) -> str:
        """A clause that says what runs it: noria's own forward, or transformers' modules."""
        return implementation(self.config)

    def forward(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        """Computes one step; K and V of its tokens are in the cache when it returns.

        Returns:
            Logits `[num_logits, vocab_size]`: float32, or float64 where the model is float64.
        """
        with torch.inference_mode():
            logits: torch.Tensor = self.network.forward(TorchOps(inputs, kv, self.attention))
            return logits


def load_model(
    path: Path,
    *,
    dtype: "torch.dtype | Literal['auto', 'float64', 'float32', 'bfloat16', 'float16']" = "auto",
    device: torch.device,
    max_model_len: int | None = None,
) -> Model:
    """Loads a model.

    Args:
        path: a Hugging Face directory or a `.gguf` file.
        dtype: what it computes in; "auto": bfloat16 where the hardware computes it, else float32.
        device: where it runs.
        max_model_len: the longest context it will be run with; None: the model's own.

    Raises:
        ModelError: the files are not a whole, well-formed model that noria runs.
        ConfigError: `max_model_len` exceeds the model's context, or the dtype is none of noria's.
    """
    path = Path(path)
    torch_dtype, reason = chosen_dtype(dtype, device)
    kernel = chosen_kernel(torch_dtype, device)
    if is_gguf(path):
        file = GgufFile(path)
        config = read_gguf_config(file)
        length = _length(max_model_len, config)
        with GgufWeights(file, config) as source:
            network = _network(config, source, torch_dtype, device, kernel, length)
    else:
        config = read_hf_config(path)
        length = _length(max_model_len, config)
        if config.is_foreign:
            config, foreign = load_foreign(path, config, torch_dtype, device)
            kernel = LinearKernel(False, "transformers' modules as they are")
            return Model(config, torch_dtype, reason, device, kernel.reason, length, foreign, SdpaAttention())
        family = ARCHITECTURES[config.architecture]
        with HfWeights(path, family.hf_prefixes, family.hf_ignored) as tensors:
            network = _network(config, tensors, torch_dtype, device, kernel, length)
    return Model(config, torch_dtype, reason, device, kernel.reason, length, network, SdpaAttention())


def _length(max_model_len: int | None, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model's context is 1 to {limit} tokens",
            name="max_model_len",
            value=max_model_len,
        )
    return limit if max_model_len is None else max_model_len


def _network(
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    kernel: LinearKernel,
    max_model_len: int,
) -> Network:
    num_elements = sum(math.prod(source.shape(name) or ()) for name in source.names())
    with LoadingBar(num_elements) as bar:
        weights = TorchWeights(source, config, dtype, device, kernel, max_model_len, bar)
        network = ARCHITECTURES[config.architecture].network(config, weights)
    weights.check_all_used()
    return network
