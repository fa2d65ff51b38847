"""The installed package's bill of materials (PEP 770) against what is installed, and against what the compiler read."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from torch_pi2.base.library import library_path

ROOT = Path(__file__).parents[2]
LIBRARIES = library_path().parent


@pytest.fixture(scope="module")
def sbom() -> dict[str, Any]:
    (file,) = (f for f in metadata.files("torch-pi2") or [] if ".dist-info/sboms/" in str(f))
    assert file.name == "torch_pi2.cdx.json"
    found: dict[str, Any] = json.loads(Path(str(file.locate())).read_text())
    return found


def named(sbom: dict[str, Any], kind: str, scope: str = "required") -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in sbom["components"] if c["type"] == kind and c.get("scope", "required") == scope}


def test_its_form(sbom: dict[str, Any]) -> None:
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    itself = sbom["metadata"]["component"]
    assert (itself["name"], itself["version"]) == ("torch-pi2", metadata.version("torch-pi2"))
    refs = [c["bom-ref"] for c in sbom["components"]] + [itself["bom-ref"]]
    assert len(refs) == len(set(refs))
    assert {r for d in sbom["dependencies"] for r in [d["ref"], *d["dependsOn"]]} <= set(refs)
    assert all(c["licenses"] for c in sbom["components"])


def test_every_library_of_the_wheel_with_its_hash(sbom: dict[str, Any]) -> None:
    there = {f"torch_pi2/_lib/{p.name}": hashlib.sha256(p.read_bytes()).hexdigest() for p in LIBRARIES.glob("*.so")}
    assert len(there) >= 2
    assert {n: c["hashes"][0]["content"] for n, c in named(sbom, "file").items()} == there


def test_every_package_whose_headers_were_compiled_in(sbom: dict[str, Any]) -> None:
    """As ninja wrote down what the compiler read for the libraries that are installed."""
    builds = sorted((ROOT / "build").glob("py3-*/.ninja_deps"))
    assert builds, "no build of this checkout: make install"
    site = Path(str(metadata.distribution("torch").locate_file(""))).resolve()
    read: set[Path] = set()
    for build in builds:
        command = [sys.executable, "-m", "ninja", "-C", str(build.parent), "-t", "deps"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()  # relative to the build where ccache made them so
        read |= {(build.parent / line.strip()).resolve() for line in lines if line.startswith("    ")}
    others = {p for p in read if ROOT not in p.parents or site in p.parents}
    assert others, "ninja remembers nothing"
    # The C and C++ libraries, the compiler's and the kernel's headers: of the system.
    foreign = {p for p in others if p.parts[1] not in ("usr", "lib")}
    unknown = {p for p in foreign if site.resolve() not in p.parents}
    assert not unknown
    packages = {p.relative_to(site.resolve()).parts[0] for p in foreign}
    assert packages == set(named(sbom, "library"))
    for name, component in named(sbom, "library").items():
        assert component["version"] == metadata.version(name).partition("+")[0]


def test_what_the_runner_is_built_with_is_named_and_excluded(sbom: dict[str, Any]) -> None:
    sys.path.insert(0, str(ROOT / "export" / "runner"))
    try:
        from dependencies import SOURCES
    finally:
        sys.path.pop(0)
    wanted = {(*requirement.split("=="), sha256) for requirement, _, sha256 in SOURCES.values()}
    found = [c for c in sbom["components"] if c.get("scope") == "excluded"]
    assert {(c["name"], c["version"], c["hashes"][0]["content"]) for c in found} == wanted
