"""What ``readelf`` (of binutils) says of an ELF file: how it is to be loaded, and the names that it needs."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


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
    text = subprocess.run(["readelf", "-hldW", "--dyn-syms", path], capture_output=True, text=True, check=True).stdout
    return Elf(
        position_independent="DYN (" in text,
        relro="GNU_RELRO" in text,
        bind_now=re.search(r"\((?:FLAGS|FLAGS_1|BIND_NOW)\).*\bNOW\b|BIND_NOW", text) is not None,
        executable_stack=re.search(r"GNU_STACK.*\bRWE\b", text) is not None,
        needed=tuple(re.findall(r"\(NEEDED\).*\[(.+)\]", text)),
        undefined=frozenset(re.findall(r"\bUND ([^\s@]+)", text)),
    )
