"""Progress: a bar in a terminal, a line of each phase elsewhere, and nothing unasked."""

from __future__ import annotations

import io
import sys

import pytest

from torch_pi2.base.progress import bar, lines, phase


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with lines("x"):
        assert list(bar([1, 2], "count", True)) == [1, 2]
        phase("measure")
    said = sys.stderr.getvalue()
    assert "count: 100%" in said
    assert "x: count" not in said
    assert "x: measure ...\n" in said


def test_elsewhere_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with lines("x"):
        assert list(bar([1, 2], "count", True)) == [1, 2]
        list(bar([1], "unasked", False))
    with lines("x", wanted=False):
        list(bar([1], "quiet", True))
    list(bar([1], "a library's", True))
    assert capsys.readouterr().err == "x: count ...\n"
