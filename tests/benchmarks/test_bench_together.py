"""`python -m benchmarks together`: real processes on a small model, and its table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from shared import small_store

import torch_pi2
from benchmarks import together
from benchmarks.network import Network, NetworkError
from torch_pi2.errors import ConfigError

_RESULT = Path(together.__file__).parent / "results" / "together-mistral-7b.json"


@pytest.mark.slow
def test_two_processes_beside_one(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    base = small_store(tmp_path_factory)
    torch_pi2.pack(base / "store", tmp_path / "2", ranks=2)
    links = ["none"]
    if os.geteuid() == 0:
        try:
            with Network(1):
                links.append("1000")
        except NetworkError:
            links = ["none"]
    found = together.run(base / "store", tmp_path / "2", links=links, tokens=3, rounds=2, compiled=False)
    assert found["ranks"] == 2
    assert [*found["links"]] == links
    for case in (found["alone"], *(case for cases in found["links"].values() for case in cases.values())):
        assert case["tokens_per_s"] > 0
    for cases in found["links"].values():
        assert [*cases] == ["chunks", "ranks"]
        assert cases["chunks"]["sent_bytes"] == 8 * cases["ranks"]["sent_bytes"]
        assert cases["chunks"]["hit_rate"] >= found["alone"]["hit_rate"]  # each has a larger share in memory
    text = together.render(found)
    assert f"2 processes, {'no limit' if links[-1] == 'none' else '1000 Mbit/s'}, ranks" in text


def test_what_makes_no_sense_is_refused(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    base = small_store(tmp_path_factory)
    with pytest.raises(ConfigError, match="expected shards, found none"):
        together.run(base / "store", tmp_path)
    other = tmp_path / "other"
    torch_pi2.synthetic(other / "plain", "tiny", active=0.2, weights="int4", seed=5)
    torch_pi2.pack(other / "plain", other / "2", ranks=2)
    with pytest.raises(ConfigError, match="found those of another model"):
        together.run(base / "store", other / "2")
    with pytest.raises(ConfigError, match="reduction"):
        together.run(base / "store", other / "2", reductions=["rings"])


def test_the_table_of_the_committed_result() -> None:
    result = json.loads(_RESULT.read_text())
    rows = together.rows_of(result)
    assert rows[0][0] == "one process"
    assert len(rows) == 1 + sum(map(len, result["links"].values()))
    assert all(len(row) == len(together.HEADER) for row in rows)
