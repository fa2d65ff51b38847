"""System calls that the kernel refuses, as it does in containers: by a filter in a process of its own."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys

#: The same number on every machine that Linux runs on today.
IO_URING_SETUP = 425


def refuse(number: int, error: int) -> None:
    """From now on, and for good, call ``number`` fails with ``error`` in every thread of this process."""
    code = (
        (0x20, 0, 0, 0),  # load the call's number
        (0x15, 0, 1, number),  # is it this one?
        (0x06, 0, 0, 0x00050000 | error),  # then fail
        (0x06, 0, 0, 0x7FFF0000),  # else allow
    )
    lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(lines)))
    libc = ctypes.CDLL(None, use_errno=True)
    seccomp = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.syscall(seccomp, 1, 1, program) != 0:
        raise OSError(ctypes.get_errno(), "no filter of system calls")


def run_without_uring(script: str, *args: object, error: int) -> str:
    """What a Python script prints whose process may not use io_uring."""
    begin = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import sandbox\n"
    begin += f"sandbox.refuse(sandbox.IO_URING_SETUP, {error})\n"
    command = [sys.executable, "-c", begin + script, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
