"""``bench ffn``: the figures are there, hang together, and come from the run."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.ffn import run
from torch_pi2.errors import ConfigError


def test_figures_hang_together() -> None:
    r = run(256, 1024, 0.1, "bf16", rounds=3)
    assert r["threads"] == torch.get_num_threads()
    assert r["active"] == pytest.approx(0.1, abs=1e-3)
    neuron_bytes = 3 * 256 * 2
    touched = round(1024 * 0.1) * neuron_bytes
    assert r["touched_gb_per_s"] == pytest.approx(touched / r["sparse_ms"] / 1e6, rel=0.05)
    assert r["read_gb_per_s"] == pytest.approx(1024 * neuron_bytes / r["read_ms"] / 1e6, rel=0.05)
    assert r["sparse_over_dense"] == pytest.approx(r["sparse_ms"] / r["dense_ms"], rel=0.05)
    for name in ("dense_ms", "torch_ms", "sparse_ms", "predict_ms", "gather_ms", "read_ms"):
        low, high = r["spread"][name]
        assert 0 < low <= r[name] <= high


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"active": 0}, "active: expected more than 0 and at most 1, found 0"),
        ({"active": 1.5}, "at most 1, found 1.5"),
        ({"hidden": 0}, "hidden"),
        ({"dtype": "int3"}, "dtype: expected .*bf16.*found int3"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**({"hidden": 8, "intermediate": 16} | settings))


def test_a_result_can_be_shown_by_whoever_has_it() -> None:
    """The demo renders what ``run`` returned, without the command line between them."""
    from benchmarks.ffn import render

    assert "ms" in render(run(64, 128, 0.25, "fp32", rounds=1))


def test_the_command_prints_the_promised_figures(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["ffn", "--hidden", "64", "--intermediate", "512", "--active", "0.1", "--dtype", "fp32"]
    threads = torch.get_num_threads()
    try:
        assert main([*argv, "--rounds", "3", "--threads", "1", "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out)
    assert found["threads"] == 1
    assert found["command"].startswith("python -m benchmarks ffn --hidden 64")
    times = ("dense_ms", "torch_ms", "sparse_ms", "predict_ms")
    rates = ("touched_gb_per_s", "gather_gb_per_s", "read_gb_per_s")
    assert all(found[name] > 0 for name in (*times, *rates))
    assert main([*argv, "--rounds", "1"]) == 0
    assert "GB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "found"), [("x", "invalid positive value: 'x'"), ("0", "expected 1 or more, found 0")]
)
def test_wrong_command_lines(given: str, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ffn", "--hidden", given, "--json"]) == 2
    assert found in json.loads(capsys.readouterr().out)["error"]["found"]


def test_every_benchmark_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in BENCHMARKS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert "--json" in capsys.readouterr().out
