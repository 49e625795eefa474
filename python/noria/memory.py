"""How much memory there is for the KV cache."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Of what is free once the weights are loaded. On a CPU other programs, and this one's activations, live in
# the same memory; a GPU is taken to be ours but for the activations.
CPU_SHARE = 0.5
GPU_SHARE = 0.8


def kv_memory_budget(device: "torch.device") -> int | None:
    """Bytes for a KV cache whose size was not given; None where the system does not say what is free."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    available = available_host_bytes()
    return None if available is None else int(available * CPU_SHARE)


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can still be used without swapping, control groups considered; None if unknown.

    Args:
        root: where `/proc` and `/sys` lie.
    """
    if sys.platform != "linux" and root == Path("/"):
        return _half_of_physical_bytes()
    limits = [_meminfo_bytes(root), _cgroup_v2_bytes(root), _cgroup_v1_bytes(root)]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _half_of_physical_bytes() -> int | None:
    """Where nothing says what can be had without swapping (macOS), half of all is a careful guess."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return None


def _meminfo_bytes(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _cgroup_v2_bytes(root: Path) -> int | None:
    """The tightest of the group's and its ancestors' limits, less what they use and cannot drop."""
    mount = root / "sys/fs/cgroup"
    group = mount / (_cgroup_path(root, "") or "").lstrip("/")
    tightest: int | None = None
    while True:
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:
            free = max(limit - used + _inactive_file_bytes(group / "memory.stat", "inactive_file"), 0)
            tightest = free if tightest is None else min(tightest, free)
        if group == mount or mount not in group.parents:
            return tightest
        group = group.parent


def _cgroup_v1_bytes(root: Path) -> int | None:
    mount = root / "sys/fs/cgroup/memory"
    group = mount / (_cgroup_path(root, "memory") or "").lstrip("/")
    if not (group / "memory.limit_in_bytes").exists():
        group = mount  # inside a container the path is the host's, and the mount is already the group
    limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return max(limit - used + _inactive_file_bytes(group / "memory.stat", "total_inactive_file"), 0)


def _cgroup_path(root: Path, controller: str) -> str | None:
    """This process's group for a controller; `""` is the unified hierarchy."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return None


def _number(path: Path) -> int | None:
    """A file's number; None if there is no such file or it says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file_bytes(path: Path, name: str) -> int:
    """Page cache that the kernel drops first: it counts as used, but can be had."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
