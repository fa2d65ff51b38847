"""Packing that records each of its steps, so that any can be the last."""

from __future__ import annotations

import pytest

from torch_pi2.checkpoint import pack as packing


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_RECORD", 1)
