"""Drafts whatever they take: what tests of texts need, where steps are too short for drafts to pay."""

from __future__ import annotations

import pytest

from torch_pi2.decode import speculate
from torch_pi2.decode.speculate import Pace


class Always(Pace):
    """Drafts as many tokens as there is room for."""

    off = False

    def count(self, most: int) -> int:
        return max((n for n in self.counts if n <= most), default=0)

    def passed(self, ms: float, guesses: int, right: int) -> None:
        assert ms > 0
        assert 0 <= right <= guesses


def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate, "Pace", Always)
