"""Description of this machine, and the memory of this process."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from torch_pi2.ops import load

_PACKAGES = ("torch-pi2", "torch", "transformers", "llama-cpp-python")


def describe() -> dict[str, Any]:
    """``machine``: CPU, cores, memory and kernels; ``versions``: of packages."""
    load()
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = {
        "cpu": name.group(1) if name else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "kernels": torch.ops.pi2.kernel_tables().partition(":")[2],
    }
    return {"machine": machine, "versions": versions}


def memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """Reset :func:`peak_rss_bytes` (Linux only)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_rss_bytes() -> int:
    """Peak resident memory since :func:`reset_peak`."""
    status = Path("/proc/self/status")
    peak = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE) if status.is_file() else None
    if peak:
        return int(peak.group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_bytes() -> int | None:
    """Available memory; None if unknown."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
