"""Tokens/s against the budget as a drawing: what is in it, and results that do not belong together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot
from torch_pi2.errors import ArtifactError, ConfigError, LibraryMissingError

GB = 10**9


def result(share: float, rates: dict[str, float], **others: Any) -> dict[str, Any]:
    """A model of 1 GB that must stay in memory and 4 GB of neurons, of which a token wants 0.5 GB."""
    budget = int((1 + 4 * share) * GB)
    modes = {
        name: {
            "budget_bytes": budget if name != "bundle" else GB,
            "tokens_per_s": rate,
            "spread": {"tokens_per_s": [rate - 1, rate + 2]},
        }
        for name, rate in rates.items()
    }
    return {
        "what": "offload",
        "shape": "mistral-7b",
        "weights": "int4",
        "activations": "int8",
        "synthetic": {"seed": 0},
        "threads": 2,
        "tokens": "drawn at random",
        "simulated": False,
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_bytes": 24 * 2**30, "kernels": "avx2"},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "ffn_in_memory": share,
        "ffn_bytes": 4 * GB,
        "token_bytes": GB // 2,
        "budget_bytes": budget,
        "modes": modes,
        "peers": {"llama.cpp": {"tokens_per_s": 0.5}} if share == 0.5 else {},
        **others,
    }


def write(folder: Path, *results: dict[str, Any]) -> list[Path]:
    paths = [folder / f"{i}.json" for i in range(len(results))]
    for path, each in zip(paths, results):
        path.write_text(json.dumps(each))
    return paths


SWEEP = [
    result(1.0, {"pipeline": 20.0}),
    result(0.5, {"bundle": 2.0, "cache": 8.0, "pipeline": 9.0}),
    result(0.0, {"pipeline": 2.5}),
]


def test_points_and_the_demand_of_a_token():
    found = plot.series(SWEEP)
    assert list(found) == ["bundle", "cache", "pipeline", "llama.cpp"]
    assert found["pipeline"] == [(0.2, 2.5, 1.5, 4.5), (0.6, 9.0, 8.0, 11.0), (1.0, 20.0, 19.0, 22.0)]
    assert found["bundle"] == [(0.2, 2.0, 1.0, 4.0)]
    assert found["llama.cpp"] == [(0.6, 0.5, 0.5, 0.5)]
    assert [plot.demand(r) for r in SWEEP] == pytest.approx([0.3] * 3)


def test_the_drawing_says_what_was_measured_where(tmp_path):
    paths = write(tmp_path, *SWEEP)
    plot.main([str(tmp_path / "out.svg"), *map(str, paths)])
    svg = (tmp_path / "out.svg").read_text()
    for text in (
        "synthetic mistral-7b, int4 weights, int8 activations, 2 threads",
        "memory budget, % of the 5.00 GB that the whole model takes",
        "tokens/s: median of rounds, slowest to fastest",
        "one token's demand: 30 %",
        "Some CPU, 2 cores, 24 GiB, avx2 kernels; python 3.11.7, torch 2.13.0",
        *("bundle", "cache", "pipeline", "llama.cpp"),
    ):
        assert f">{text}</text>" in svg, text
    assert "SIMULATED" not in svg
    assert plot.draw(paths, tmp_path / "again.svg").read_text() == svg
    plot.draw(write(tmp_path, result(0.5, {"pipeline": 9.0}, simulated="ufs-4.0")), tmp_path / "out.svg")
    assert "2 threads, SIMULATED ufs-4.0</text>" in (tmp_path / "out.svg").read_text()


def test_results_that_do_not_belong_together(tmp_path):
    paths = write(tmp_path, SWEEP[0], result(0.5, {"pipeline": 9.0}, threads=1, shape="tiny"))
    with pytest.raises(ConfigError, match=r"1\.json: expected the model, .* of .*0\.json, found shape tiny; threads 1"):
        plot.draw(paths, tmp_path / "out.svg")
    with pytest.raises(ConfigError, match="results to draw: expected one or more, found none"):
        plot.draw([], tmp_path / "out.svg")
    with pytest.raises(ArtifactError, match=r"benchmarks offload --json` printed, found a result of bench layer"):
        plot.draw(write(tmp_path, {"what": "layer"}), tmp_path / "out.svg")
    for key in ("simulated", "token_bytes", "budget_bytes", "machine"):
        old = {name: value for name, value in SWEEP[0].items() if name != key}
        with pytest.raises(ArtifactError, match=rf"0\.json: .* found one that cannot be drawn \(KeyError: '{key}'"):
            plot.draw(write(tmp_path, old), tmp_path / "out.svg")
    with pytest.raises(ArtifactError, match=r"none\.json: .*found FileNotFoundError"):
        plot.draw([tmp_path / "none.json"], tmp_path / "out.svg")
    assert not (tmp_path / "out.svg").exists()


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LibraryMissingError, match=r"expected an installed matplotlib, .*pip install .*'matplotlib>="):
        plot.draw(write(tmp_path, *SWEEP), tmp_path / "out.svg")
