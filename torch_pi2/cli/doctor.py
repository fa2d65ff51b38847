"""Check this installation: versions, CPU features, threads, the C++ library and its kernels, optional extras."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

from torch_pi2.cli import common
from torch_pi2.errors import LibraryMissingError

EXAMPLE = "torch-pi2 doctor"

#: CPU flags that matter to the kernels.
_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "asimddp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing but ``--json`` and ``--threads``."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    library = _library()
    return {
        "ok": library["loaded"],
        "versions": {
            "torch_pi2": _version("torch-pi2"),
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "numpy", "safetensors", "transformers", "executorch")},
        },
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "library": library,
        "extras": _extras(),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    """Model name and the flags above, from Linux; elsewhere what Python knows."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    have = set(flags.group(1).split()) if flags else set()
    return {
        "name": name.group(1) if name else platform.processor() or platform.machine(),
        "features": [flag for flag in _FLAGS if flag in have],
    }


def _library() -> dict[str, Any]:
    import torch

    from torch_pi2.ops import library

    try:
        library.load()
        tables, _, used = torch.ops.pi2.kernel_tables().partition(":")
        path = str(library.library_path())
    except LibraryMissingError as error:
        return {"loaded": False, "problem": str(error)}
    return {"loaded": True, "path": path, "kernels": used, "kernels_built": tables.split(",")}


def _extras() -> dict[str, dict[str, Any]]:
    """Optional dependencies as the installed package declares them, and the command that gets what is missing."""
    try:
        metadata = importlib.metadata.metadata("torch-pi2")
    except importlib.metadata.PackageNotFoundError:
        return {}
    wanted: dict[str, list[str]] = {extra: [] for extra in metadata.get_all("Provides-Extra") or []}
    for line in metadata.get_all("Requires-Dist") or []:
        requirement, _, marker = line.partition(";")
        named = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        name = re.match(r"[\w.-]+", requirement.strip())
        if named and name and name.group() not in ("torch-pi2", "torch_pi2"):
            wanted.setdefault(named.group(1), []).append(name.group())
    result: dict[str, dict[str, Any]] = {}
    for extra, names in wanted.items():
        missing = [name for name in names if _version(name) is None]
        result[extra] = {"missing": missing, "install": f"pip install 'torch-pi2[{extra}]'" if missing else None}
    return result


def render(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version or '(none)'}" for name, version in result["versions"].items())
    library = result["library"]
    if library["loaded"]:
        loaded = f"{library['path']}\n           kernels {library['kernels']} of {', '.join(library['kernels_built'])}"
    else:
        loaded = f"NOT LOADED: {library['problem']}"
    rows = [
        (name, ", ".join(facts["missing"]) or "complete", facts["install"] or "")
        for name, facts in result["extras"].items()
    ]
    extras = common.table(("extra", "missing", "get it with"), rows) if rows else "extras unknown: not installed by pip"
    return (
        f"versions   {versions}\n"
        f"platform   {result['platform']}\n"
        f"CPU        {result['cpu']['name']}: {' '.join(result['cpu']['features']) or 'no known features'}\n"
        f"threads    {result['threads']} of {result['cores']} cores\n"
        f"library    {loaded}\n\n"
        f"{extras}\n\n"
        f"{'all is well' if result['ok'] else 'something is wrong: see above'}"
    )
