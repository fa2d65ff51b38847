"""Check this installation: versions, CPU features, threads, the C++ library and its kernels, optional extras.

With --target: whether bundles can be exported for it here, and if not, what is missing and how to get it.
With --measure: what computing and reading cost on this machine, for plans (`torch-pi2 plan --hardware measured`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
from pathlib import Path
from typing import Any

from torch_pi2.base.package import how_to_install
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError, LibraryMissingError, Pi2Error, VersionError

EXAMPLE = "torch-pi2 doctor --target qnn:SM8650"

_PACKAGES = ("torch", "numpy", "safetensors", "transformers", "executorch", "torchao", "onnxruntime-qnn")
#: What the exporter needs besides torch: package, from which version on, and below which.
_EXPORT = (
    ("executorch", (1, 5, 1), (1, 5, 2)),
    ("torchao", (0, 18), (0, 19)),
    ("transformers", (5, 5), (6, 0)),
)

#: CPU flags that matter to the kernels.
_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "asimddp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="xnnpack|qnn:SOC", help="also check what exporting for it needs")
    parser.add_argument(
        "--compile", action="store_true", help="with --target qnn:SOC: compile a small layer to see (some 10 seconds)"
    )
    group = parser.add_argument_group("hardware profile")
    group.add_argument(
        "--measure", action="store_true", help="measure this machine, two to three minutes; let nothing else run"
    )
    group.add_argument(
        "--measure-folder",
        type=Path,
        metavar="DIR",
        help="on the drive that models are read from (default: the cache's)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from torch_pi2.machine.process import cores

    if getattr(args, "measure_folder", None) is not None and not args.measure:
        raise ConfigError(
            "--measure-folder", expected="--measure beside it", found="nothing to measure", fix="Pass --measure."
        )
    library = _library()
    asked = getattr(args, "target", None)  # examples/demo.py asks without a command line of ours
    target = None if asked is None else _target(asked, args.compile)
    profile = _measured(args) if getattr(args, "measure", False) else _cached() if library["loaded"] else None
    return {
        "ok": library["loaded"] and not (target and target["problems"]),
        "versions": {
            "torch_pi2": _version("torch-pi2"),
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "library": library,
        "extras": _extras(),
        "target": target,
        "hardware": profile,
    }


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    """Measure this machine, and keep the profile."""
    from torch_pi2.machine.find import cached_path
    from torch_pi2.measure.measure import measure

    folder = args.measure_folder
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            "--measure-folder", expected="a folder", found=str(folder), fix="Name one on the drive to be measured."
        )
    path = cached_path()
    common.check_out(path.parent)
    hardware = measure(folder=folder, progress=not args.quiet)
    hardware.save(path)
    return {"path": str(path), "hash": hardware.hash, "profile": json.loads(hardware.to_json())}


def _cached() -> dict[str, Any]:
    """Whether there is a profile of this machine."""
    from torch_pi2.machine.find import cached_path
    from torch_pi2.machine.hardware import Hardware

    path = cached_path()
    if not path.is_file():
        return {"path": None}
    try:
        hardware = Hardware.load(path)
        about = {} if hardware.accelerator is None else {"accelerator": hardware.accelerator.name}
        return {"path": str(path), "hash": hardware.hash, **about}
    except Pi2Error as error:
        return {"path": None, "problem": str(error)}


def _target(target: str, compile: bool) -> dict[str, Any]:
    """What is in the way of exporting for ``target``: ``problems`` with what, expected, found and fix each."""
    kind, _, soc = target.partition(":")
    if (kind, bool(soc)) not in (("xnnpack", False), ("qnn", True)):
        raise ConfigError(
            "--target", expected="xnnpack, or qnn: and an SoC such as qnn:SM8650", found=repr(target), fix="Correct it."
        )
    problems: list[Pi2Error] = [*_packages(), *_backend()]
    if kind == "qnn":
        from torch_pi2.export.qnn import problems as problems_of

        known = {problem.what for problem in problems}
        problems += [p for p in problems_of(soc, compile=compile) if p.what not in known]
    parts = ("what", "expected", "found", "fix")
    return {"name": target, "problems": [{name: getattr(p, name) for name in parts} for p in problems]}


def _packages() -> list[Pi2Error]:
    """Python packages that the exporter needs, and are not here or of another version."""
    found: list[Pi2Error] = []
    for name, least, below in _EXPORT:
        version = _version(name)
        fits = version is not None and least <= _numbers(version) < below
        if not fits:
            expected = f"{'.'.join(map(str, least))} or later, below {'.'.join(map(str, below))}"
            fix = how_to_install("export", "hf")
            kind = LibraryMissingError if version is None else VersionError
            found.append(kind(f"package {name}", expected=expected, found=version or "none", fix=fix))
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """Of the release: 1.5.1+cpu is (1, 5, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _backend() -> list[Pi2Error]:
    """Whether our library for ExecuTorch can be loaded."""
    from torch_pi2.decode.executorch import load_library

    try:
        load_library()
    except Pi2Error as error:
        return [error]
    return []


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
        result[extra] = {"missing": missing, "install": how_to_install(extra) if missing else None}
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
    target = "" if result["target"] is None else f"{_render_target(result['target'])}\n\n"
    return (
        f"versions   {versions}\n"
        f"platform   {result['platform']}\n"
        f"CPU        {result['cpu']['name']}: {' '.join(result['cpu']['features']) or 'no known features'}\n"
        f"threads    {result['threads']} of {result['cores']} cores\n"
        f"library    {loaded}\n"
        f"{_render_hardware(result['hardware'])}\n"
        f"{extras}\n\n{target}"
        f"{'all is well' if result['ok'] else 'something is wrong: see above'}"
    )


def _render_hardware(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if "profile" in found:
        from torch_pi2.cli.hardware_text import describe
        from torch_pi2.machine.hardware import Hardware

        return f"hardware   measured: {found['path']}\n\n{describe(Hardware.from_json(json.dumps(found['profile'])))}\n"
    if found["path"] is None:
        problem = f" ({found['problem']})" if "problem" in found else ""
        return f"hardware   not measured yet: torch-pi2 doctor --measure, about a minute{problem}\n"
    beside = f", with {found['accelerator']}" if "accelerator" in found else ""
    return f"hardware   measured: {found['path']}{beside}\n"


def _render_target(target: dict[str, Any]) -> str:
    lines = [f"  {p['what']}: expected {p['expected']}, found {p['found']}\n    {p['fix']}" for p in target["problems"]]
    head = "can be exported for" if not lines else "cannot be exported for yet:"
    return "\n".join([f"target     {target['name']}: {head}" + ("" if lines else " here"), *lines])
