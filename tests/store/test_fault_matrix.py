"""Every call that can fail, in turn: reads, allocations, writes, fsync, names. ``faults/sweep.py`` says what must be.

Here a few of each; ``make faults`` runs all of them and prints how many there were.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from faults.sweep import ALL, ERRORS, moments
from tiny_bundle import shared_bundle

HELPERS = Path(__file__).parents[1] / "helpers"
RUNNER = Path(__file__).parents[2] / "build" / "runner" / "pi2" / "pi2_runner"

#: What is swept: kinds of calls that an operation makes at all.
READING = ("open", "read", "memory")
WRITING = ("open", "read", "write", "fsync", "name", "size", "map", "memory")
MATRIX = {
    "load": READING,
    "load-preloaded": (*READING, "thread"),
    "load-in-memory": READING,
    "generate": ("read", "memory"),
    "prompt": ("read", "memory"),
    "pack": (*WRITING, "kill"),
    "save": ("open", "write", "fsync", "name", "size", "kill"),
}


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``faults/shim.cc``, for ``LD_PRELOAD``."""
    made = tmp_path_factory.mktemp("shim") / "pi2-fault-shim.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fno-builtin"]
    subprocess.run(
        [os.environ.get("CXX", "c++"), *flags, "-o", made, HELPERS / "faults" / "shim.cc", "-ldl"], check=True
    )
    return made


def swept(shim: Path, how_many: str, folder: Path, pairs: Sequence[str]) -> list[dict[str, Any]]:
    """What ``helpers/faults/sweep.py`` prints; its findings fail."""
    environment = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": str(HELPERS), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, HELPERS / "faults" / "sweep.py", how_many, folder, *pairs],
        capture_output=True, text=True, env=environment, timeout=600 if how_many == "FEW" else None,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f"{each['operation']}:{each['kind']}" for each in found] == list(pairs)
    return found


@pytest.mark.parametrize(
    "pairs",
    [
        ["load:open", "load:read", "load-preloaded:thread", "generate:read", "generate:memory"],
        ["pack:write", "pack:name", "pack:memory", "pack:kill", "save:write"],
    ],
    ids=["reading", "writing"],
)
@pytest.mark.slow
def test_a_few_calls_that_fail(shim: Path, tmp_path: Path, pairs: list[str]) -> None:
    for found in swept(shim, "FEW", tmp_path, pairs):
        what = f"{found['operation']}:{found['kind']}"
        assert found["tried"] > 0, what  # the shim sees them
        assert not found["findings"], (what, found["findings"])


@pytest.mark.faults
@pytest.mark.parametrize("operation", MATRIX)
def test_every_call_that_fails(shim: Path, tmp_path: Path, operation: str, capsys: pytest.CaptureFixture[str]) -> None:
    findings = []
    for found in swept(shim, "ALL", tmp_path, [f"{operation}:{kind}" for kind in MATRIX[operation]]):
        findings += found["findings"]
        with capsys.disabled():
            counts = " ".join(f"{found[name]:>7}" for name in ("calls", "tried", "refused", "made_good"))
            print(f"{operation:>15} {found['kind']:>7} {counts} {len(found['findings']):>4} found", flush=True)
    assert not findings


def runner_swept(shim: Path, bundle: Path, kind: str, few: bool) -> tuple[dict[str, int], list[str]]:
    """The C++ runner, started once for every k: its answer, or a last line of its own and exit code 2."""
    seen = shim.with_name(f"seen-{os.getpid()}")

    def run(k: int, count: int) -> subprocess.CompletedProcess[str]:
        fault = f"{kind} {k} {count} {ERRORS[kind][count > 1]} {bundle} program"
        return subprocess.run(
            [RUNNER, bundle, "--ids", "5,6,7", "--max-new-tokens", "3"],
            capture_output=True, text=True, timeout=60,
            env={"LD_PRELOAD": str(shim), "PI2_FAULT": fault, "PI2_FAULT_SEEN": str(seen)},
        )  # fmt: skip

    wanted = run(ALL, 1)
    assert wanted.returncode == 0, wanted.stderr
    counts = {"calls": int(seen.read_text().split()[0]), "tried": 0, "refused": 0, "made_good": 0}
    findings = []
    for count in (1, ALL):
        for k in moments(counts["calls"], few):
            done = run(k, count)
            last = done.stderr.splitlines()[-1:]
            refused = done.returncode == 2 and last and last[0].startswith("pi2_runner: ") and ": expected " in last[0]
            counts["tried"] += 1
            counts["refused" if refused else "made_good"] += 1
            if not refused and (done.returncode, done.stdout) != (0, wanted.stdout):
                findings.append(f"{kind} {k} of {counts['calls']}, {count}: {done.returncode}, {last}")
    return counts, findings


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["open", "read", "map", "memory"])
def test_a_few_calls_of_the_runner_that_fail(shim: Path, tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    counts, findings = runner_swept(shim, shared_bundle(tmp_path_factory), kind, True)
    assert counts["refused"] > 0
    assert not findings


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["open", "read", "map", "memory"])
def test_every_call_of_the_runner_that_fails(
    shim: Path, tmp_path_factory: pytest.TempPathFactory, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    counts, findings = runner_swept(shim, shared_bundle(tmp_path_factory), kind, False)
    with capsys.disabled():
        print(f"{'runner':>15} {kind:>7} {' '.join(f'{n:>7}' for n in counts.values())} {len(findings):>4} found")
    assert not findings
