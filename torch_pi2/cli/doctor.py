"""Check this installation: versions, CPU features, threads, the C++ library and its kernels, optional extras.

With --target: whether bundles can be exported for it here, and if not, what is missing and how to get it.
With --measure: what computing and reading cost on this machine, for plans (`torch-pi2 plan --hardware measured`).
"""

import argparse
import importlib.metadata
import json
import platform
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.base.package import how_to_install
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError, LibraryMissingError, Pi2Error

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

EXAMPLE = "torch-pi2 doctor --target qnn:SM8650"

_PACKAGES = ("torch", "numpy", "safetensors", "transformers", "executorch", "torchao", "onnxruntime-qnn")
#: Largest error of the fitted lines that is not reported; an idle machine has less than half of it.
_STEADY = 0.12
#: Sizes in bytes of the random reads whose rates are shown, and their queue depth.
_BLOCKS, _DEPTH = (4096, 65536), 64
#: CPU flags that matter to the kernels.
_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "asimddp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", metavar="xnnpack|qnn:SOC", help="also check the requirements of export for it")
    add("--compile", action="store_true", help="with --target qnn:SOC: also compile a small layer (some 10 seconds)")
    add = parser.add_argument_group("hardware profile").add_argument
    add("--measure", action="store_true", help="measure this machine, two to three minutes; let nothing else run")
    folder = "on the drive that models are read from (default: the cache's)"
    add("--measure-folder", type=Path, metavar="DIR", help=folder)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from torch_pi2.machine.process import cores

    if args.measure_folder is not None and not args.measure:
        raise common.needs("--measure-folder", "--measure")
    target = None if args.target is None else _target(args.target, args.compile)
    library = _library()
    profile = _hardware(args) if args.measure or library["loaded"] else None
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    have = set(flags.group(1).split()) if flags else set()
    cpu_name = name.group(1) if name else platform.processor() or platform.machine()
    cpu = {"name": cpu_name, "features": [flag for flag in _FLAGS if flag in have]}
    versions = {"torch_pi2": _version("torch-pi2"), "python": platform.python_version()}
    versions |= {name: _version(name) for name in _PACKAGES}
    here = {"platform": platform.platform(), "cpu": cpu, "cores": cores(), "threads": torch.get_num_threads()}
    found = {"library": library, "extras": _extras(), "target": target, "hardware": profile}
    good = library["loaded"] and not (target and target["problems"])
    return {"ok": good, "versions": versions, **here, **found}


def _hardware(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.machine.find import cached_path
    from torch_pi2.machine.hardware import Hardware

    folder = args.measure_folder
    try:
        path = cached_path()
    except Pi2Error as error:
        if args.measure:
            raise
        return {"path": None, "problem": str(error)}
    if args.measure:
        from torch_pi2.measure.measure import measure

        if folder is not None and not folder.is_dir():
            fix = "Name one on the drive to be measured."
            raise ConfigError("--measure-folder", expected="a folder", found=str(folder), fix=fix)
        common.check_out(path.parent)
        measure(folder=folder, progress=not args.quiet).save(path)
    if not path.is_file():
        return {"path": None}
    try:
        hardware = Hardware.load(path)
    except Pi2Error as error:
        return {"path": None, "problem": str(error)}
    return {"path": str(path), "hash": hardware.hash, "profile": json.loads(hardware.to_json())}


def _target(target: str, compile: bool) -> dict[str, Any]:
    """Why ``target`` cannot be exported for: ``problems``, each with what, expected, found and fix."""
    from torch_pi2.export.executorch import load_library

    kind, _, soc = target.partition(":")
    check_target(target)
    problems = []
    try:
        load_library()
    except Pi2Error as error:
        problems.append(error)
    if kind == "qnn":
        from torch_pi2.export.qnn import problems as problems_of

        known = {problem.what for problem in problems}
        problems += [p for p in problems_of(soc, compile=compile) if p.what not in known]
    parts = ("what", "expected", "found", "fix")
    return {"name": target, "problems": [{name: getattr(p, name) for name in parts} for p in problems]}


def check_target(target: str) -> None:
    """Raise ConfigError unless ``target`` is one."""
    kind, _, soc = target.partition(":")
    if (kind, bool(soc)) not in (("xnnpack", False), ("qnn", True)):
        expected = "xnnpack, or qnn: and an SoC such as qnn:SM8650"
        raise ConfigError("--target", expected=expected, found=repr(target), fix="Correct it.")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _library() -> dict[str, Any]:
    import torch

    from torch_pi2.base.library import library_path
    from torch_pi2.ops import library

    try:
        library.load()
        tables, _, used = torch.ops.pi2.kernel_tables().partition(":")
        path = str(library_path())
    except LibraryMissingError as error:
        return {"loaded": False, "problem": str(error)}
    return {"loaded": True, "path": path, "kernels": used, "kernels_built": tables.split(",")}


def _extras() -> dict[str, dict[str, Any]]:
    """By extra: missing packages, and the command that installs them."""
    try:
        extras = importlib.metadata.metadata("torch-pi2").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = {}
    for extra in extras:
        wanted = shlex.split(how_to_install(extra))[2:]  # a checkout that pip has not installed declares none: -e
        names = [] if "-e" in wanted else [re.split(r"[^\w.-]", text)[0] for text in wanted]
        missing = [name for name in names if _version(name) is None]
        found[extra] = {"missing": missing, "install": how_to_install(extra) if missing else None}
    return found


def render(result: dict[str, Any]) -> str:
    library, target = result["library"], result["target"]
    loaded = f"NOT LOADED: {library.get('problem')}"
    if library["loaded"]:
        loaded = f"{library['path']}, kernels {library['kernels']} of {', '.join(library['kernels_built'])}"
    extras = [{"extra": n, **of, "missing": " ".join(of["missing"]) or "-"} for n, of in result["extras"].items()]
    lines = {
        "versions": ", ".join(f"{name} {version or '(none)'}" for name, version in result["versions"].items()),
        "platform": result["platform"],
        "CPU": f"{result['cpu']['name']}: {' '.join(result['cpu']['features']) or 'no known features'}",
        "threads": f"{result['threads']} of {result['cores']} cores",
        "library": loaded,
        "hardware": _render_hardware(result["hardware"]),
    }
    found = target["problems"] if target else []
    problems = [f"  {p['what']}: expected {p['expected']}, found {p['found']}\n    {p['fix']}" for p in found]
    head = "cannot be exported for yet:" if problems else "can be exported for here"
    shown = [f"{name:10} {text}" for name, text in lines.items() if text]
    table = common.records(extras, ("extra", "missing", "install")) if extras else "extras: unknown without pip"
    shown += ["", table, *([] if target is None else ["", f"target     {target['name']}: {head}", *problems])]
    return "\n".join([*shown, "", "all is well" if result["ok"] else "something is wrong: see above"])


def _render_hardware(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if found["path"] is None:
        problem = f" ({found['problem']})" if "problem" in found else ""
        return f"not measured yet: torch-pi2 doctor --measure, about a minute{problem}"
    from torch_pi2.machine.hardware import Hardware

    shown = describe_hardware(Hardware.from_json(json.dumps(found["profile"])))
    return f"{found['path']}: {shown}".replace("\n", f"\n{' ' * 11}")


def describe_hardware(hardware: "Hardware") -> str:
    """The most important figures of a profile; ``--json`` has all."""
    reads = hardware.reads
    found = ((block, block / reads.us(1000, block, reads.file_bytes, _DEPTH) * 1e3) for block in _BLOCKS)
    rates = (f"{rate:.0f} MB/s of {block >> 10} KiB" for block, rate in found)
    lines = [
        f"{hardware.name}, {hardware.source}: {hardware.threads} threads of {hardware.cores} cores, "
        f"memory {hardware.memory_gb_per_s:.1f} GB/s",
        f"reads: {reads.engine}, {'direct' if reads.direct else 'through the page cache'}, {_DEPTH} at a time: "
        f"{', '.join(rates)}",
    ]
    if hardware.accelerator is not None:
        lines.append(f"accelerator: {hardware.accelerator.name}, {common.size(hardware.accelerator.memory_bytes)}")
    if not reads.warm:
        lines.append("NOT WARMED UP: passes over the file differed, figures of reads may be too low")
    if hardware.error > _STEADY:
        lines.append(f"NOT STEADY: calls differ by {hardware.error:.0%} from their lines; measure on an idle machine")
    return "\n".join(lines)
