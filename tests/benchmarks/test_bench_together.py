"""`python -m benchmarks together`: real processes on a small model, and its table."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from shared import small_store

import torch_pi2
from benchmarks import together
from benchmarks.network import Network, NetworkError
from torch_pi2.errors import ConfigError

_RESULT = Path(together.__file__).parent / "results" / "together-mistral-7b.json"


@pytest.mark.long
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
    torch_pi2.pack(base / "store", tmp_path / "stages", ranks=2, by="layers")
    how: dict[str, Any] = {
        "links": links,
        "tokens": 3,
        "rounds": 2,
        "prompt": 40,
        "chunk_tokens": 16,
        "compiled": False,
    }
    found = together.run(base / "store", tmp_path / "2", tmp_path / "stages", **how)
    assert found["ranks"] == 2
    assert [*found["links"]] == links
    for case in (found["alone"], *(case for cases in found["links"].values() for case in cases.values())):
        assert case["tokens_per_s"] > 0
        assert case["prompt_tokens_per_s"] > 0
    for cases in found["links"].values():
        assert [*cases] == ["chunks", "ranks", "layers"]
        assert cases["layers"]["sent_bytes"] < cases["ranks"]["sent_bytes"]
        assert all(0 < case["link"]["mbit_per_s"] < math.inf for case in cases.values())
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


def test_other_stages_are_refused(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    base = small_store(tmp_path_factory)
    torch_pi2.pack(base / "store", tmp_path / "2", ranks=2)
    for stages, found in ((tmp_path / "2", "others"), (tmp_path, "0 shards")):
        with pytest.raises(ConfigError, match=f"expected 2 stages of .*, found {found}"):
            together.run(base / "store", tmp_path / "2", stages)


def test_the_table_of_the_committed_result() -> None:
    result = json.loads(_RESULT.read_text())
    rows = together.rows_of(result)
    assert rows[0][0] == "one process"
    assert len(rows) == 1 + sum(map(len, result["links"].values()))
    assert all(len(row) == len(together.HEADER) for row in rows)
