"""Which backend runs a model's ops."""

from typing import Literal

import torch

from noria import _core
from noria.backends.cpu.threads import chosen_threads
from noria.errors import ConfigError

_CPU_DTYPES = (torch.float32, torch.bfloat16)


def chosen_backend(
    backend: str, dtype: torch.dtype, device: torch.device, *, is_foreign: bool = False
) -> tuple[Literal["torch", "cpu"], str]:
    """The backend, and a clause that says why.

    Args:
        backend: "torch", "cpu", or "auto": cpu where it can be.
        dtype: of the model.
        device: where it runs.
        is_foreign: transformers' modules run it, not a forward of noria's.

    Raises:
        ConfigError: none of that name, or the cpu backend does not compute this dtype on this device.
    """
    if backend == "torch":
        return "torch", f"torch on {device}, as asked for"
    if backend not in ("auto", "cpu"):
        message = f"backend is {backend!r}; it must be auto, torch or cpu"
        raise ConfigError(message, name="backend", value=backend)
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        failure = f"it runs on CPUs, and the device is {device}"
    elif is_foreign:
        failure = "it runs noria's own models, and transformers' modules run this one"
    elif dtype not in _CPU_DTYPES:
        failure = f"it computes float32 and bfloat16, and the dtype is {name}"
    else:
        num_threads, reason = chosen_threads()
        threads = f"{num_threads} thread{'s' if num_threads > 1 else ''} ({reason})"
        if _core.cpu_is_bound(num_threads):
            threads += ", each on a CPU of its own"
        return "cpu", f"noria-cpu, {_core.cpu_isa()} kernels on {threads}"
    if backend == "cpu":
        raise ConfigError(f"backend is 'cpu': {failure}", name="backend", value=backend)
    return "torch", f"torch on {device}, as noria-cpu is not for it: {failure}"
