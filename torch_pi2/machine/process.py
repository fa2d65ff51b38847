"""Description of this machine, and the memory that is free."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from torch_pi2.ops import load

_PROC, _CGROUPS = Path("/proc/self"), Path("/sys/fs/cgroup")
_PACKAGES = ("torch-pi2", "torch", "transformers", "llama-cpp-python")


def describe() -> dict[str, Any]:
    """``machine``: CPU, cores, memory and kernels; ``versions``: of packages."""
    load()
    name = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = {"cpu": name.group(1) if name else platform.machine(), "cores": os.cpu_count()}
    machine |= {"memory_bytes": memory_bytes(), "kernels": torch.ops.pi2.kernel_tables().partition(":")[2]}
    return {"machine": machine, "versions": versions}


def memory_bytes() -> int:
    """Memory of the machine, or of a control group that this process is in."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for _, limit in _memory_limits())])


def free_bytes() -> int | None:
    """Available memory, also within the limits of control groups; None if unknown."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    free = [int(found[1]) * 1024] if found else []
    for group, limit in _memory_limits():
        kept = re.findall(r"^(?:total_)?inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
        used = _numbers(group / "memory.current") or _numbers(group / "memory.usage_in_bytes") or [0]
        free.append(max(0, limit - used[0] + max(map(int, kept), default=0)))  # files are dropped when memory is short
    return min(free, default=None)


def cores() -> int:
    """CPU cores that this process may use, rounded up where a control group has a share of the time."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu"):
        quota = _numbers(group / "cpu.max")
        quota = quota or _numbers(group / "cpu.cfs_quota_us") + _numbers(group / "cpu.cfs_period_us")
        if len(quota) == 2 and min(quota) > 0:
            found = min(found, -(-quota[0] // quota[1]))
    return found


def _groups(controller: str) -> list[Path]:
    """The control groups of this process, of versions 1 and 2, with those that they are in."""
    folders: list[Path] = []
    for line in _text(_PROC / "cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):
            root = _CGROUPS / (controller if names else "")
            inside = Path(os.path.normpath(path.strip("/") or "."))
            folders += [root / part for part in (inside, *inside.parents)]
    return folders


def _memory_limits() -> list[tuple[Path, int]]:
    files = [(group, group / name) for group in _groups("memory") for name in ("memory.max", "memory.limit_in_bytes")]
    return [(group, numbers[0]) for group, file in files if (numbers := _numbers(file))]


def _numbers(path: Path) -> list[int]:
    """The whole numbers in a file; none if it is missing or says ``max``."""
    words = _text(path).split()
    return [int(word) for word in words] if all(re.fullmatch(r"-?\d+", word) for word in words) else []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
