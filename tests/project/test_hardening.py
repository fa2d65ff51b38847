"""The compiler's help is in what was built (cmake/hardening.cmake), of this package and of the runner."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from torch_pi2.base.library import library_path

LIBRARIES = library_path().parent
RUNNER = Path(__file__).parents[2] / "build" / "runner" / "pi2"
BUILT = {path.name: path for path in (*sorted(LIBRARIES.glob("*.so")), RUNNER / "pi2_runner")}


@dataclass(frozen=True)
class Elf:
    position_independent: bool
    relro: bool
    bind_now: bool
    executable_stack: bool
    needed: tuple[str, ...]
    #: Names of functions and data that others have.
    undefined: frozenset[str]


def read_elf(path: Path) -> Elf:
    """What ``readelf`` (of binutils) says."""
    text = subprocess.run(["readelf", "-hldW", "--dyn-syms", path], capture_output=True, text=True, check=True).stdout
    return Elf(
        position_independent="DYN (" in text,
        relro="GNU_RELRO" in text,
        bind_now=re.search(r"\((?:FLAGS|FLAGS_1|BIND_NOW)\).*\bNOW\b|BIND_NOW", text) is not None,
        executable_stack=re.search(r"GNU_STACK.*\bRWE\b", text) is not None,
        needed=tuple(re.findall(r"\(NEEDED\).*\[(.+)\]", text)),
        undefined=frozenset(re.findall(r"\bUND ([^\s@]+)", text)),
    )


def test_all_that_is_built_is_looked_at() -> None:
    assert {"libpi2.so", "libpi2_torch.so", "pi2_runner"} <= set(BUILT)
    assert (RUNNER / "pi2_runner").exists(), "the runner was not built: make runner"


@pytest.mark.parametrize("name", BUILT)
def test_hardened(name: str) -> None:
    elf = read_elf(BUILT[name])
    assert elf.position_independent
    assert elf.relro, "tables of functions can be written over"
    assert elf.bind_now, "tables of functions can be written over: bound late"
    assert not elf.executable_stack
    assert "__stack_chk_fail" in elf.undefined, "no stack protector"
    assert any(n.startswith("_ZSt21__glibcxx_assert_fail") for n in elf.undefined), "no assertions of the C++ library"


@pytest.mark.parametrize("name", ["libpi2.so", "libpi2_executorch.so", "pi2_runner"])
def test_fortified(name: str) -> None:
    """Calls of the C library whose room is known go through its checks."""
    if name not in BUILT:
        pytest.skip("built without ExecuTorch")
    checked = {n for n in read_elf(BUILT[name]).undefined if n.endswith("_chk")}
    assert checked, "no call is checked"


@pytest.mark.parametrize("name", BUILT)
def test_nothing_is_needed_that_the_wheel_does_not_name(name: str) -> None:
    """Beside the C and C++ libraries, PyTorch and ExecuTorch: nothing that a machine may or may not have."""
    system = {f"lib{name}" for name in ("c", "m", "stdc++", "gcc_s", "pthread", "dl", "rt")}
    ours = {"libpi2", "libpi2_executorch", "libtorch_cpu", "libtorch", "libc10"}
    needed = {n.partition(".so")[0] for n in read_elf(BUILT[name]).needed}
    assert {n for n in needed if not n.startswith(("libexecutorch", "ld-linux"))} <= system | ours, needed
