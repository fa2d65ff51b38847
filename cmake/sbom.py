"""Write what a wheel has of compiled code as CycloneDX 1.6 (PEP 770): ``sbom.py LIBRARIES OUT NAME VERSION COMPILER``.

The wheel's own libraries with their hashes; the packages whose headers, and so whose inline functions, are compiled
into them; and, as excluded, what export/runner/dependencies.py fetches and compiles if the runner is built from the
wheel's sources. Nothing in it depends on when or where it is made: the time is SOURCE_DATE_EPOCH, or none.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: library -> packages whose headers are compiled into it. tests/project/test_sbom.py compares with what is compiled.
HEADERS = {"libpi2.so": (), "libpi2_torch.so": ("torch",), "libpi2_executorch.so": ("executorch",)}
LICENCES = {
    "torch": "BSD-3-Clause",
    "executorch": "BSD-3-Clause",
    "oniguruma": "BSD-2-Clause",
    "json": "MIT",
    "llhttp": "MIT",
}


def package(name: str, version: str, **more: Any) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **more}


def licence(name: str) -> list[dict[str, Any]]:
    return [{"license": {"id": LICENCES[name]}}]


def headers_of(name: str) -> dict[str, Any]:
    # Without what follows '+', the kind of build: an index knows none.
    version = metadata.version(name).partition("+")[0]
    return package(name, version, licenses=licence(name), description="headers; the library itself is a dependency")


def fetched_by_the_runner() -> list[dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("dependencies", ROOT / "export" / "runner" / "dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = []
    for part, (requirement, arguments, sha256) in module.SOURCES.items():
        name, _, version = requirement.partition("==")
        platform = next((a.partition("=")[2] for a in arguments if a.startswith("--platform=")), "")
        made = package(name, version, scope="excluded", hashes=[{"alg": "SHA-256", "content": sha256}])
        made["bom-ref"] = f"runner:{part}"
        made["licenses"] = licence(part.partition("-")[0])
        made["description"] = (
            f"{part}, of this package{f' for {platform}' if platform else ''}: part of the C++ runner, "
        )
        made["description"] += "fetched when that is built; not in this wheel"
        found.append(made)
    return found


def bill(libraries: Path, name: str, version: str, compiler: str) -> dict[str, Any]:
    there = sorted(libraries.glob("*.so"))
    headers = sorted({header for path in there for header in HEADERS[path.name]})
    parts: list[dict[str, Any]] = [
        {
            "type": "file",
            "bom-ref": f"torch_pi2/_lib/{path.name}",
            "name": f"torch_pi2/_lib/{path.name}",
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
            "licenses": [{"license": {"id": "MIT"}}],
        }
        for path in there
    ]
    known = {h: headers_of(h) for h in headers}
    runner = fetched_by_the_runner()
    itself = package(name, version, licenses=[{"license": {"id": "MIT"}}])
    uses = {p.name: [known[h]["bom-ref"] for h in HEADERS[p.name]] for p in there}
    for path in there:
        if path.name != "libpi2.so":
            uses[path.name].append("torch_pi2/_lib/libpi2.so")
    made: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "tools": {"components": [{"type": "application", "name": "compiler", "version": compiler}]},
            "component": itself,
        },
        "components": [*parts, *known.values(), *runner],
        "dependencies": [
            {"ref": itself["bom-ref"], "dependsOn": [p["bom-ref"] for p in parts]},
            *({"ref": p["bom-ref"], "dependsOn": sorted(uses[path.name])} for p, path in zip(parts, there)),
        ],
    }
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch:
        made["metadata"]["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(epoch)))
    made["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(made, sort_keys=True))}"
    return made


def main() -> None:
    libraries, out, name, version, compiler = sys.argv[1:]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(bill(Path(libraries), name, version, compiler), indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
