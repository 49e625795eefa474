"""A loaded model, and loading it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from noria._core import CpuBuilder
from noria.backends.attention import Attention
from noria.backends.choice import chosen_backend
from noria.backends.cpu.linear import CpuLinears
from noria.backends.cpu.ops import RecordingOps
from noria.backends.cpu.program import RecordedForward
from noria.backends.cpu.threads import chosen_threads
from noria.backends.ops import StepInputs
from noria.backends.torch.attention import SdpaAttention
from noria.backends.torch.linear import chosen_kernel
from noria.backends.torch.ops import TorchOps
from noria.errors import ConfigError
from noria.kv_cache import KvCache
from noria.loading import is_gguf
from noria.loading.dtype import chosen_dtype
from noria.loading.gguf import GgufWeights, read_gguf_config
from noria.loading.gguf_file import GgufFile
from noria.loading.hf import HfWeights, read_hf_config
from noria.loading.progress import LoadingBar
from noria.loading.weights import LinearLayout, TorchWeights
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
        backend: which ops run: "torch" or "cpu".
        backend_reason: a clause that says why.
        network: parameters and forward.
        attention: the kernel of the torch backend's attention op.
        program: the recorded forward; None where the backend is torch.
    """

    config: ModelConfig
    dtype: torch.dtype
    dtype_reason: str
    device: torch.device
    linear_kernel: str
    max_model_len: int
    backend: Literal["torch", "cpu"]
    backend_reason: str
    network: Network
    attention: Attention
    program: RecordedForward | None

    @property
    def implementation(self) -> str:
        """A clause that says what runs it: noria's own forward, or transformers' modules."""
        return implementation(self.config)

    @property
    def has_open_head(self) -> bool:
        """Whether its head's input can be had: not of a recorded program, nor of transformers' modules."""
        return self.program is None and not self.config.is_foreign

    def forward(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        """Computes one step; K and V of its tokens are in the cache when it returns.

        Returns:
            Logits `[num_logits, vocab_size]`: float32, or float64 where the model is float64.
        """
        if self.program is not None:
            return self.program.run(inputs, kv)
        with torch.inference_mode():
            logits: torch.Tensor = self.network.forward(TorchOps(inputs, kv, self.attention))
            return logits


def load_model(
    path: Path,
    *,
    dtype: "torch.dtype | Literal['auto', 'float64', 'float32', 'bfloat16', 'float16']" = "auto",
    device: torch.device,
    max_model_len: int | None = None,
    backend: str = "torch",
    quantization: str | None = None,
    file: GgufFile | None = None,
) -> Model:
    """Loads a model.

    Args:
        path: a Hugging Face directory or a `.gguf` file.
        dtype: what it computes in; "auto": bfloat16 where the hardware computes it, else float32.
        device: where it runs.
        max_model_len: the longest context it will be run with; None: the model's own.
        quantization: "int8": linear maps in 8 bits, on the cpu backend; None: as the file has them.
        file: the one at `path`, where it is a GGUF file and its header is read already.
        backend: which ops run; "auto": cpu where it computes this dtype on this device, else torch.

    Raises:
        ModelError: the files are not a whole, well-formed model that noria runs.
        ConfigError: `max_model_len` exceeds the model's context, the dtype is none of noria's, or the backend
            does not compute it there.
    """
    path = Path(path)
    torch_dtype, reason = chosen_dtype(dtype, device)
    if file is None and is_gguf(path):
        file = GgufFile(path)
    config = read_hf_config(path) if file is None else read_gguf_config(file)
    length = _length(max_model_len, config)
    name, backend_reason = chosen_backend(backend, torch_dtype, device, is_foreign=config.is_foreign)
    _check_quantization(quantization, name, backend_reason)
    network: Network
    program: RecordedForward | None = None
    if config.is_foreign:
        config, network = load_foreign(path, config, torch_dtype, device)
        linear_kernel = "transformers' modules as they are"
    elif name == "cpu":
        builder = CpuBuilder()
        linears = CpuLinears(builder, torch_dtype, quantization)
        network = _network(path, file, config, torch_dtype, device, linears, length)
        result = network.forward(RecordingOps(builder))
        program = RecordedForward(builder.build(result, num_threads=chosen_threads()[0]))
        linear_kernel = linears.reason
    else:
        kernel = chosen_kernel(torch_dtype, device)
        network = _network(path, file, config, torch_dtype, device, kernel, length)
        linear_kernel = kernel.reason
    return Model(
        config=config,
        dtype=torch_dtype,
        dtype_reason=reason,
        device=device,
        linear_kernel=linear_kernel,
        max_model_len=length,
        backend=name,
        backend_reason=backend_reason,
        network=network,
        attention=SdpaAttention(),
        program=program,
    )


def _check_quantization(quantization: str | None, backend: str, reason: str) -> None:
    if quantization not in (None, "int8"):
        raise ConfigError(
            f"quantization is {quantization!r}; it must be int8, or not given",
            name="quantization",
            value=quantization,
        )
    if quantization is not None and backend != "cpu":
        raise ConfigError(
            f"quantization is {quantization!r}; the cpu backend computes it, and this is {reason}",
            name="quantization",
            value=quantization,
        )


def _length(max_model_len: int | None, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model's context is {limit} tokens",
            name="max_model_len",
            value=max_model_len,
        )
    return limit if max_model_len is None else max_model_len


def _network(
    path: Path,
    file: GgufFile | None,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    layout: LinearLayout[Any],
    max_model_len: int,
) -> Network:
    family = ARCHITECTURES[config.architecture]
    opened = (
        HfWeights(path, family.hf_prefixes, family.hf_ignored) if file is None else GgufWeights(file, config)
    )
    with opened as source:
        num_elements = sum(math.prod(source.shape(name) or ()) for name in source.names())
        with LoadingBar(num_elements) as bar:
            weights = TorchWeights(source, config, dtype, device, layout, max_model_len, bar)
            network = family.network(config, weights)
        weights.check_all_used()
    return network
