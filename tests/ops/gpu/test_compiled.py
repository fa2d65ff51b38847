"""Kernels compiled for real GPUs, none of which is needed for that: what the interpreter takes may not compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HELPER = Path(__file__).parents[2] / "helpers" / "compiled_kernels.py"


@pytest.mark.slow
@pytest.mark.long
def test_kernels_compile_read_16_bytes_at_a_time_and_are_one_call_to_a_compiler(tmp_path: Path) -> None:
    """Turing, Hopper and Blackwell."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(HELPER), "75", "90", "120"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["loads"]) == 3 * (11 + 11)
    for name, loads in found["loads"].items():
        if name.split()[0] in ("listed_ffn", "list_fired", "project", "list_predicted"):
            assert loads.get("ld.global.v4.b32", 0) >= 1, (name, loads)
        assert sum(count for kind, count in loads.items() if kind.endswith(".b8")) <= 1, (name, loads)
    for name, calls in found["traced"].items():  # one call, and no copies of weights before it
        made = [call for call in calls if not call.startswith("aten.empty")]
        assert made == [f"pi2.{name.split()[0]}.default"], calls
