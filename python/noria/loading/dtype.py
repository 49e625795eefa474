"""Which dtype a model computes in."""

import functools
import platform
import subprocess
from pathlib import Path

import torch

from noria.errors import ConfigError

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def chosen_dtype(dtype: "torch.dtype | str", device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype, and a clause that says why.

    Args:
        dtype: one of `DTYPES`, by name or itself; or "auto", which is bfloat16 only where the hardware
            computes it: without such units a CPU is 2 to 3 times slower in it than in float32.
        device: where the model will run.

    Raises:
        ConfigError: another dtype.
    """
    if dtype == "auto":
        return _auto(device)
    if isinstance(dtype, str) and dtype in DTYPES:
        dtype = DTYPES[dtype]
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise ConfigError(
            f"dtype is {dtype}; it must be auto or one of {', '.join(DTYPES)}", name="dtype", value=dtype
        )
    return dtype, f"{_name(dtype)}, as asked for"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _auto(device: torch.device) -> tuple[torch.dtype, str]:
    if device.type == "cuda":
        # Before compute capability 8 bfloat16 is emulated.
        has_units = torch.cuda.get_device_capability(device) >= (8, 0) or torch.version.hip is not None
        what = torch.cuda.get_device_name(device)
    else:
        has_units = device.type == "cpu" and cpu_computes_bfloat16()
        what = "this CPU" if device.type == "cpu" else f"device type {device.type!r}"
    if has_units:
        return torch.bfloat16, f"bfloat16, which {what} computes natively"
    return torch.float32, f"float32: {what} has no bfloat16 units that noria knows of"


@functools.cache
def cpu_computes_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself: AVX512-BF16 or AMX on x86, the BF16 extension on Arm."""
    if platform.system() == "Darwin":
        return _sysctl_says_bf16()
    return has_bfloat16_flag(Path("/proc/cpuinfo"))


def has_bfloat16_flag(cpuinfo: Path) -> bool:
    """Whether a Linux cpuinfo file lists such a unit; false where there is no file."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = {
        flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()
    }
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def _sysctl_says_bf16() -> bool:
    command = ["/usr/sbin/sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "1"
    except OSError:
        return False
