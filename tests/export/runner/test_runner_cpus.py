"""The C++ runner: which CPUs compute and which read, as the kernel says of its threads."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from runner_calls import BUILT, FOLDER, refused

ALLOWED = sorted(os.sched_getaffinity(0))
several = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs")


def text(cpus: list[int]) -> str:
    return ",".join(map(str, cpus))


def of_threads(pid: int) -> dict[str, set[tuple[int, ...]]]:
    """By name of the thread, the CPUs that it may use."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        found.setdefault(name, set()).add(tuple(sorted(os.sched_getaffinity(int(task.name)))))
        line = next(part for part in (task / "status").read_text().splitlines() if part.startswith("Cpus_allowed_list"))
        assert line.split("\t")[1] == listed(os.sched_getaffinity(int(task.name)))
    return found


def listed(cpus: set[int]) -> str:
    """As the kernel writes it."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in runs)


def bound(bundle: Path, *options: object) -> tuple[dict[str, set[tuple[int, ...]]], dict[str, Any]]:
    """CPUs of the threads of a runner that has answered, and what it says of them."""
    command = [FOLDER / "pi2_runner", bundle, "--requests", "-", "--engine", "pread", *options]
    with subprocess.Popen(
        [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={}
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write('{"ids": [5, 6], "max_new_tokens": 3}\n')
        process.stdin.flush()
        said = json.loads(process.stdout.readline())
        found = of_threads(process.pid)
        process.stdin.close()
        assert process.wait(timeout=30) == 0
    return found, said


@several
def test_those_that_compute_and_those_that_read(predicted: Path) -> None:
    one, other = ALLOWED[0], ALLOWED[1]
    found, said = bound(predicted, "--compute-cpus", one, "--read-cpus", other)
    assert said["cpus"] == {"compute": str(one), "read": str(other), "why": None}
    assert said["threads"] == 1
    assert found["pi2_runner"] == {(one,)}
    assert found["pi2-read"] == {(other,)}
    both, said = bound(predicted, "--compute-cpus", f"{one},{other}")
    assert said["threads"] == 2
    assert both["pi2-compute"] == both["pi2_runner"] == {(one, other)}
    assert both["pi2-read"] == {tuple(ALLOWED)}
    readers, said = bound(predicted, "--read-cpus", other)
    assert said["cpus"] == {"compute": None, "read": str(other), "why": None}
    assert readers["pi2-read"] == {(other,)}
    assert readers["pi2_runner"] == {tuple(ALLOWED)}
    all_of_it, _ = bound(predicted, "--cpus", other)
    assert {cpus for each in all_of_it.values() for cpus in each} == {(other,)}


def test_nothing_is_bound_unasked(predicted: Path) -> None:
    found, said = bound(predicted)
    assert said["cpus"] is None
    assert {cpus for each in found.values() for cpus in each} == {tuple(ALLOWED)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cpus", "x"], "--cpus: expected CPUs such as 4-7 or 0,2-3, found 'x'. "),
        (["--compute-cpus", "0-99999999999"], "--compute-cpus: expected CPUs such as 4-7 or 0,2-3, found "),
        (["--compute-cpus", "1000"], "--compute-cpus: expected CPUs of this machine, 0 to "),
        (
            ["--cpus", "auto", "--read-cpus", "0"],
            "--cpus: expected it without --compute-cpus and --read-cpus, found both",
        ),
        (
            ["--compute-cpus", ALLOWED[0], "--threads", 2],
            f"--threads: expected at most 1, one for each of the CPUs that compute ({ALLOWED[0]}), found 2. ",
        ),
    ],
    ids=range(5),
)
def test_what_cannot_be_done_is_refused(predicted: Path, options: list[object], message: str) -> None:
    assert refused(predicted, "--ids", "5", *options).startswith(message)


@several
def test_cpus_that_the_process_may_not_use_are_refused(predicted: Path) -> None:
    command = [FOLDER / "pi2_runner", predicted, "--ids", "5", "--read-cpus", ALLOWED[1]]
    result = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        env={},
        preexec_fn=lambda: os.sched_setaffinity(0, {ALLOWED[0]}),
    )
    assert result.returncode == 2
    assert result.stderr.startswith(
        f"pi2_runner: --read-cpus: expected CPUs that this process may use ({ALLOWED[0]}), found {ALLOWED[1]}. "
    )


EQUAL = "CPUs 0-3 are about equally fast"
UNKNOWN = "the system does not tell how fast the CPUs are"


@pytest.mark.parametrize(
    ("file", "numbers", "compute", "read", "why"),
    [
        ("cpu_capacity", [250] * 4 + [620] * 2 + [1024] * 2, "4-7", "0-3", None),
        ("cpu_capacity", [1024, 250, 1024, 250], "0,2", "1,3", None),
        ("cpu_capacity", [900, 1024, 1000, 1024], None, None, EQUAL),
        ("cpufreq/cpuinfo_max_freq", [1800000] * 4 + [2400000] * 3 + [2840000], "4-7", "0-3", None),
        ("cpu_capacity", [1024, 250, None, 250], None, None, UNKNOWN),
    ],
)
def test_big_and_little_cores_are_found(
    tmp_path: Path, file: str, numbers: list[int | None], compute: str | None, read: str | None, why: str | None
) -> None:
    for cpu, number in enumerate(numbers):
        path = tmp_path / f"cpu{cpu}" / file
        path.parent.mkdir(parents=True)
        if number is not None:
            path.write_text(f"{number}\n")
    command = [BUILT / "pi2_parts_test", "cpus", tmp_path, f"0-{len(numbers) - 1}"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert found == {"compute": compute, "read": read, "why": why}
