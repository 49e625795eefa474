"""What this process may use: CPU and its instruction sets, cores, memory. Detected at run time."""

import functools
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# What matters to matrix code, by the names of Linux's /proc/cpuinfo; shown in this order.
_ISA_FLAGS = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx_vnni_int8",
    "avx_ne_convert",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx512vbmi",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "asimdhp",
    "asimddp",
    "asimdfhm",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
    "svei8mm",
    "svebf16",
    "sme",
    "sme2",
)

# macOS: `sysctl -a` names and the Linux name of the same thing.
_SYSCTL_FLAGS = {
    "hw.optional.AdvSIMD": "asimd",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_FHM": "asimdfhm",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.arm.FEAT_SME2": "sme2",
    "hw.optional.avx2_0": "avx2",
    "hw.optional.avx512f": "avx512f",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, as this process sees it.

    Attributes:
        cpu_model: as the system names it.
        isa_flags: instruction sets that matter to matrix code, by Linux's names.
        num_cpus: logical CPUs that are online.
        num_usable_cpus: of these, what affinity and the control group's quota leave.
        usable_cpus_reason: what `num_usable_cpus` comes from, in words.
        memory_bytes: installed memory.
        memory_limit_bytes: the control group's limit, or None where there is none.
        memory_available_bytes: free for new use without swapping, or None where the system does not tell.
        system: operating system and architecture.
        python_version: of this interpreter.
    """

    cpu_model: str
    isa_flags: tuple[str, ...]
    num_cpus: int
    num_usable_cpus: float
    usable_cpus_reason: str
    memory_bytes: int | None
    memory_limit_bytes: int | None
    memory_available_bytes: int | None
    system: str
    python_version: str

    @property
    def isa_summary(self) -> str:
        """The flags in one line."""
        return " ".join(self.isa_flags) if self.isa_flags else "none found"


def detect_machine(root: Path = Path("/")) -> Machine:
    """Looks at the machine.

    Args:
        root: where `proc` and `sys` lie; another folder in tests.
    """
    cpu_model, isa_flags = _cpu(root)
    num_cpus = os.cpu_count() or 1
    affinity = _affinity(num_cpus)
    quota = cpu_quota(root)
    usable: float = affinity
    reason = f"affinity to {affinity} of {num_cpus}" if affinity < num_cpus else "all online"
    if quota is not None and quota < usable:
        usable, reason = quota, f"control group quota of {quota:g}"
    memory_bytes, memory_available = _memory(root)
    limit = memory_limit(root)
    if limit is not None and memory_bytes is not None and limit >= memory_bytes:
        limit = None
    return Machine(
        cpu_model=cpu_model,
        isa_flags=isa_flags,
        num_cpus=num_cpus,
        num_usable_cpus=usable,
        usable_cpus_reason=reason,
        memory_bytes=memory_bytes,
        memory_limit_bytes=limit,
        memory_available_bytes=memory_available,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python_version=platform.python_version(),
    )


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """Model name and the flags that matter, of the first processor in /proc/cpuinfo's text."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    model = fields.get("model name", "")
    if not model and "CPU part" in fields:
        model = f"ARM implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}"
    return model or platform.machine(), tuple(flag for flag in _ISA_FLAGS if flag in flags)


def _cpu(root: Path) -> tuple[str, tuple[str, ...]]:
    cpuinfo = _read(root / "proc/cpuinfo")
    if cpuinfo is not None:
        return parse_cpuinfo(cpuinfo)
    if sys.platform == "darwin":
        names = _sysctl()
        found = {flag for name, flag in _SYSCTL_FLAGS.items() if names.get(name) == "1"}
        model = names.get("machdep.cpu.brand_string", platform.machine())
        return model, tuple(flag for flag in _ISA_FLAGS if flag in found)
    return platform.processor() or platform.machine(), ()


def _affinity(num_cpus: int) -> int:
    # Not on macOS and Windows, which have no such call.
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return num_cpus


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs that the control groups above this process allow, or None; version 2 and 1."""
    quotas: list[float] = []
    for folder in _cgroup_folders(root, "cpu"):
        words = (_read(folder / "cpu.max") or "").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the control groups above this process allow, or None; version 2 and 1."""
    limits: list[int] = []
    for folder in _cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read_int(folder / name)
            # Version 1 says "no limit" by the largest multiple of a page in 63 bits.
            if limit is not None and limit < 2**62:
                limits.append(limit)
    return min(limits, default=None)


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The process's control groups for a controller, from the innermost to the mount's root."""
    folders: list[Path] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, inner = rest.partition(":")
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = mount / inner.lstrip("/")
        while True:
            folders.append(folder)
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent
    return folders


def _memory(root: Path) -> tuple[int | None, int | None]:
    """Installed and available bytes."""
    text = _read(root / "proc/meminfo")
    if text is not None:
        kib: dict[str, int] = {}
        for line in text.splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if words and words[0].isdigit():
                kib[name] = int(words[0])
        total, available = kib.get("MemTotal"), kib.get("MemAvailable")
        return (
            None if total is None else total * 1024,
            None if available is None else available * 1024,
        )
    if sys.platform == "darwin":
        total_text = _sysctl().get("hw.memsize", "")
        return (int(total_text) if total_text.isdigit() else None), None
    return None, None


@functools.cache
def _sysctl() -> dict[str, str]:
    """macOS's table of system values."""
    try:
        done = subprocess.run(["sysctl", "-a"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {
        name.strip(): value.strip()
        for name, colon, value in (line.partition(":") for line in done.stdout.splitlines())
        if colon
    }


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The torch that is installed, and what it uses if it runs in this process.

    Attributes:
        version: None where it is not installed.
        num_threads: threads of one operation; None if torch was not imported.
        cpu_capability: the widest instruction set that its kernels use; None if torch was not imported.
    """

    version: str | None
    num_threads: int | None
    cpu_capability: str | None


def torch_facts() -> TorchFacts:
    """Looks at torch without importing it: that takes seconds."""
    if "torch" not in sys.modules:
        try:
            return TorchFacts(metadata.version("torch"), None, None)
        except metadata.PackageNotFoundError:
            return TorchFacts(None, None, None)
    import torch

    return TorchFacts(
        version=str(torch.__version__),
        num_threads=torch.get_num_threads(),
        cpu_capability=str(torch.backends.cpu.get_cpu_capability()),
    )
