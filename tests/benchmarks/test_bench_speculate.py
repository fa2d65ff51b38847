"""``python -m benchmarks speculate``: figures that hang together, of guesses that are right as often as stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import speculate, table
from benchmarks.__main__ import main, render
from torch_pi2.errors import ConfigError


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculate")


def measured(monkeypatch: pytest.MonkeyPatch, work: Path, **settings: Any) -> dict[str, Any]:
    monkeypatch.chdir(work)
    return speculate.run(**{"prompt": 20, "tokens": 40, "rounds": 2, "compiled": False} | settings)


def test_guesses_that_are_right_as_often_as_stated(monkeypatch: pytest.MonkeyPatch, work: Path) -> None:
    result = measured(monkeypatch, work, shape="tiny", right=[1.0, 0.0])
    assert result["synthetic"]
    known, wrong = result["cases"]
    assert known["accepted"] == known["drafted"] > 0
    assert wrong["accepted"] == 0 < wrong["drafted"]
    for case in result["cases"]:
        least, most = case["ratio_spread"]
        assert least <= case["ratio"] <= most
        assert case["passes"] <= case["drafted"] <= 4 * case["passes"]
        assert case["same_text"] is None
    page = render(result)
    assert "100.0% right, given text" in page or "100% right, given text" in page
    assert result["machine"]["cpu"] in page
    plain = f"{known['tokens_per_s']['plain']:.2f}"
    row = f"float activations, prompt 20 | {known['guesses']}, up to {known['at_a_time']} | {plain} |"
    assert row.replace("float", result["activations"]) in table.page({"x": result})


def test_the_trained_model_says_the_same(monkeypatch: pytest.MonkeyPatch, work: Path) -> None:
    result = measured(monkeypatch, work, prompt=64)
    assert (result["synthetic"], result["weights"]) == (False, "int4")
    given, own = result["cases"]
    assert given["same_text"] is None
    assert own["same_text"] is True
    assert own["passes"] > 0
    assert "standard library" in render(result)


def test_over_a_store(monkeypatch: pytest.MonkeyPatch, work: Path) -> None:
    how: dict[str, Any] = {"shape": "tiny", "right": [1.0, 0.0], "guesses": [1, 3], "always": True}
    result = measured(monkeypatch, work, **how, ffn_in_memory=0.5)
    assert [case["at_a_time"] for case in result["cases"]] == [1, 3, 1, 3]
    for case, right in zip(result["cases"], (True, True, False, False), strict=True):
        assert case["accepted"] == (case["drafted"] if right else 0)
        assert case["pass_steps"] > 0
        assert case["switched_off"] == 0
        plain, speculative = case["store"]["plain"], case["store"]["speculative"]
        for figures in (plain, speculative):
            assert figures["bytes_read_per_token"] > figures["reads_per_token"] > 0
            assert 0 < figures["hit_rate"] < 1
        if not right:  # each wrong guess brings neurons of its own
            assert speculative["bytes_read_per_token"] > plain["bytes_read_per_token"]
    page = render(result)
    assert "MB/token, plain" in page
    assert "50.0 % of the neurons in memory" in page
    phone = measured(monkeypatch, work, **how | {"right": [1.0], "guesses": [3]}, ffn_in_memory=0.5, device="ufs-4.0")
    assert "simulated device ufs-4.0; at most" in render(phone)


def test_in_memory_nothing_is_read(monkeypatch: pytest.MonkeyPatch, work: Path) -> None:
    result = measured(monkeypatch, work, shape="tiny", right=[0.5], rounds=1)
    assert (result["budget_bytes"], result["cases"][0]["store"]) == (None, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"right": [1.5]}, r"right: expected 0 to 1, found 1\.5\."),
        ({"guesses": [4, 8]}, r"guesses: expected 1 to 7, found 4,8\."),
        ({"tokens": 1}, r"tokens: expected 2 or more, found 1\."),
        ({"folder": "x", "shape": "tiny"}, r"expected one of them, found both"),
        ({"ffn_in_memory": 1.5}, r"ffn_in_memory: expected 0 to 1, found 1\.5\."),
        ({"device": "ufs-4.0"}, r"--device ufs-4.0: expected --ffn-in-memory below 1 .*, found everything in memory"),
        (
            {"shape": "tiny", "weights": "int8", "ffn_in_memory": 0.5},
            r"--weights int8 with --ffn-in-memory: expected int4, .* found int8\.",
        ),
    ],
)
def test_settings_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, work: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        measured(monkeypatch, work, **settings)


def test_from_the_shell(monkeypatch: pytest.MonkeyPatch, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(work)
    sizes = ["--prompt", "8", "--tokens", "12", "--rounds", "1", "--eager"]
    assert main(["speculate", "--shape", "tiny", "--right", "0.5", *sizes]) == 0
    assert "50% right, given text" in capsys.readouterr().out
