"""``benchmarks attention``: figures that hang together, and settings that make no sense."""

from __future__ import annotations

import pytest

from benchmarks import table
from benchmarks.__main__ import main
from benchmarks.attention import render, run
from torch_pi2.errors import ConfigError

SMALL = {"heads": 4, "key_heads": 2, "width": 16, "used": [100, 130], "room": [128, 192], "memory_size": 1 << 16}


@pytest.mark.parametrize("tokens", [1, 3])
def test_figures_hang_together(tokens: int) -> None:
    result = run(**SMALL, tokens=tokens, rounds=3, dtype="float32")
    assert [length["used"] for length in result["lengths"]] == [100, 130]
    for length in result["lengths"]:
        kv_bytes = 2 * 2 * 16 * 4 * length["used"]
        assert length["gb_per_s"] == pytest.approx(kv_bytes / length["us"] / 1e3, rel=0.05, abs=0.01)
        assert length["of_read"] == pytest.approx(length["read_us"] / length["us"], rel=0.05, abs=0.01)
        assert length["spread_us"][0] <= length["us"] <= length["spread_us"][1]
    assert "times torch's speed" in render(result)
    page, first = table.page({"x": result}), result["lengths"][0]
    about = f"| x: 4 heads of 16 over 2, float32, {tokens} token(s) of 1 sequence(s), {result['threads']} threads "
    assert f"{about}| 100 | 128 | {first['us']:.1f} |" in page
    assert f"| {100 * first['of_read']:.0f} % | {first['over_torch']:.2f} |" in page


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype: expected .*bfloat16.*found int8"),
        ({"width": 0}, "width: expected 1 or more, found 0"),
        ({"heads": 3}, "heads: expected a multiple of 2, found 3"),
        ({"used": [100]}, r"used, room: expected lengths of 1 and more.*found \[100\], \[128, 192\]"),
        ({"used": [129, 130]}, "a room that holds it"),
        ({"room": [128, 191]}, "a multiple of 64"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**(SMALL | settings))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--heads", "2", "--key-heads", "1", "--width", "8", "--used", "9", "--room", "64", "--rounds", "1"]
    assert main(["attention", *small]) == 0
    assert "attention 2 heads of 8 over 1, bfloat16, 1 token(s)" in capsys.readouterr().out
