"""What can be checked of ``export/android`` without a device: the scripts with a stand-in for adb, and CMake's part.

Its library and its Kotlin run under a JVM in ``runner/test_jvm.py``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "export" / "android" / "run.sh"
#: Runs what is for the device on this machine, in the folder that stands for its disk, and writes down every call.
ADB = """#!/bin/sh
echo "$1" >>"$DISK/calls"
case $1 in
  get-state) echo "$STATE" ;;
  push) cp "$2" "$3" ;;
  shell) shift; exec sh -c "$*" ;;
esac
"""
RUNNER = """#!/bin/sh
echo "runner: $*"
exit 3
"""
TARGETS = (
    "executorch extension_module_static extension_tensor extension_data_loader extension_flat_tensor "
    "extension_named_data_map extension_threadpool optimized_native_cpu_ops_lib quantized_ops_lib xnnpack_backend"
)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    for folder in ("bin", "runner", "a bundle", "device"):
        (tmp_path / folder).mkdir()
    for name, text in (("bin/adb", ADB), ("runner/pi2_runner", RUNNER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "a bundle" / "manifest.json").write_text("{}")
    (tmp_path / "a bundle" / "model.pi2").write_bytes(b"neurons")
    return tmp_path


def run(disk: Path, *args: object, state: str = "device") -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{disk / 'bin'}:{os.environ['PATH']}",
        "DISK": str(disk),
        "STATE": state,
        "PI2_DEVICE_DIR": str(disk / "device" / "it's here"),
    }
    return subprocess.run(["bash", SCRIPT, *map(str, args)], env=environment, capture_output=True, text=True)


def test_script_copies_what_is_new_and_passes_options_on(disk: Path) -> None:
    there = disk / "device" / "it's here"
    result = run(disk, disk / "runner", disk / "a bundle", "--prompt", 'it\'s $HOME; "x"')
    assert result.stdout == f'runner: {there}/bundle --prompt it\'s $HOME; "x"\n', result.stderr
    assert result.returncode == 3  # the runner's own
    assert (there / "bundle" / "model.pi2").read_bytes() == b"neurons"
    pushes = (disk / "calls").read_text().split().count("push")
    assert pushes == 3
    (disk / "a bundle" / "model.pi2").write_bytes(b"changed")  # as long as before
    run(disk, disk / "runner", disk / "a bundle")
    assert (disk / "calls").read_text().split().count("push") == pushes + 1
    assert (there / "bundle" / "model.pi2").read_bytes() == b"changed"


def test_script_says_what_is_missing(disk: Path) -> None:
    for args, state, message in (
        ([], "device", "arguments: expected RUNNER BUNDLE [options], found 0 arguments. "),
        ([disk, disk / "a bundle"], "device", f"{disk}: expected a folder with pi2_runner, found none. "),
        ([disk / "runner", disk], "device", f"{disk}: expected a bundle, found no manifest.json. "),
        ([disk / "runner", disk / "a bundle"], "offline", "adb: expected one device, found none. "),
    ):
        result = run(disk, *args, state=state)
        assert result.returncode == 2
        assert result.stderr.startswith(f"run.sh: {message}")


def test_names_agree_with_what_uses_them() -> None:
    """R8 keeps what native code looks up, and the script's folders are those of the page."""
    folder = ROOT / "export" / "android"
    looked_up = re.findall(r'Get\w*MethodID\(.*, "(\w+)", ', (folder / "jni.cc").read_text())
    assert len(looked_up) == 3
    rules = (folder / "consumer-rules.pro").read_text()
    for name in looked_up:
        assert f" {name}(" in rules
    for text in ("org.torchpi2.Bundle$Listener", "native <methods>;"):
        assert text in rules
    head = SCRIPT.read_text().partition("set -euo")[0]
    page = (ROOT / "docs" / "ANDROID.md").read_text()
    assert set(re.findall(r"build/[\w/-]+", head)) == set(re.findall(r"run\.sh (build/\S+)", page))


def configure(source: Path, build: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", ROOT / "export" / "android", "-B", build, "-G", "Ninja", f"-DEXECUTORCH_SOURCE={source}"]
    dependencies = f"-DPI2_DEPENDENCIES={ROOT / 'build' / 'deps'}"
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    return subprocess.run(
        [*map(str, command), dependencies, *options], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )


@pytest.mark.slow
def test_cmake_takes_the_targets_of_executorchs_own_build(tmp_path: Path) -> None:
    source = tmp_path / "executorch"
    assert f"expected a checkout of ExecuTorch v1.5.1, found '{source}'" in _words(
        configure(source, tmp_path / "b").stderr
    )
    source.mkdir()
    (source / "version.txt").write_text("1.4.0\n")
    assert "expected version 1.5.1, found 1.4.0" in _words(configure(source, tmp_path / "b").stderr)
    (source / "version.txt").write_text("1.5.1a0\n")
    (source / "CMakeLists.txt").write_text(
        "if(NOT EXECUTORCH_BUILD_XNNPACK)\n  message(FATAL_ERROR off)\nendif()\n"
        f"foreach(name {TARGETS})\n  add_library(${{name}} INTERFACE)\nendforeach()\n"
        "if(EXECUTORCH_BUILD_QNN)\n  add_library(qnn_executorch_backend SHARED version.cc)\nendif()\n"
    )
    (source / "version.cc").touch()
    result = configure(source, tmp_path / "b")
    assert result.returncode == 0, result.stderr
    ninja = (tmp_path / "b" / "build.ninja").read_text()
    link = ninja[ninja.index("build libtorch_pi2.so:") :].partition("\n\n")[0]
    assert "--whole-archive" in link  # the backend registers itself
    assert "qnn" not in link
    result = configure(source, tmp_path / "b", f"-DQNN_SDK_ROOT={source}")
    assert result.returncode == 0, result.stderr
    ninja = (tmp_path / "b" / "build.ninja").read_text()
    for target in ("libtorch_pi2.so", "runner/pi2_runner"):
        assert "libqnn_executorch_backend.so" in ninja[ninja.index(f"build {target}:") :].partition("\n\n")[0]


def _words(text: str) -> str:
    return " ".join(text.split())
