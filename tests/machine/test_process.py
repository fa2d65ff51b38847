"""What a process may use: less than the machine has, where a control group says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_pi2.machine import process

MIB = 1 << 20
_V2 = {
    "app/memory.max": "max",
    "memory.max": str(64 * MIB),
    "memory.current": str(50 * MIB),
    "memory.stat": f"anon 5\ninactive_file {6 * MIB}\n",
    "app/cpu.max": "max 100000",
    "cpu.max": "50000 100000",
}
_V1 = {
    "memory/app/memory.limit_in_bytes": str(64 * MIB),
    "memory/app/memory.usage_in_bytes": str(50 * MIB),
    "memory/app/memory.stat": f"inactive_file 7\ntotal_inactive_file {6 * MIB}\n",
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "memory/memory.usage_in_bytes": str(80 * MIB),
    "cpu/app/cpu.cfs_quota_us": "50000",
    "cpu/app/cpu.cfs_period_us": "100000",
    "cpu/cpu.cfs_quota_us": "-1",
    "cpu/cpu.cfs_period_us": "100000",
}


def _groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    (tmp_path / "cgroup").write_text(mine)
    monkeypatch.setattr(process, "_PROC", tmp_path)
    monkeypatch.setattr(process, "_CGROUPS", tmp_path / "groups")


@pytest.mark.parametrize(
    ("mine", "files"),
    [("0::/app\n", _V2), ("5:cpu,cpuacct:/app\n4:memory:/app\n1:name=systemd:/\n0::/\n", _V1)],
)
def test_limits_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str, files: dict[str, str]
) -> None:
    """Of the group itself, or of one that it is in; cached files are free memory."""
    _groups(tmp_path, monkeypatch, mine, files)
    assert process.memory_bytes() == 64 * MIB
    assert process.free_bytes() == 20 * MIB
    assert process.cores() == 1


@pytest.mark.parametrize("mine", ["", "0::/\n", "0::/../elsewhere\n", "4:memory:/gone\n"])
def test_no_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str) -> None:
    free, memory, cores = process.free_bytes(), process.memory_bytes(), process.cores()
    _groups(tmp_path, monkeypatch, mine, {"memory.max": "max", "cpu.max": "max 100000", "memory.stat": ""})
    assert (process.memory_bytes() >= memory, process.cores() >= cores) == (True, True)
    assert (process.free_bytes() or 0) > (free or 0) / 4
