"""Kernels of one instruction set after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_pi2.ops import load

load()


ISAS = torch.ops.pi2.kernel_tables().partition(":")[0].split(",")


@pytest.fixture(params=[ISAS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in ISAS[1:-1]), *ISAS[1:][-1:]])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each that this CPU has, in the place of the best; all but the first and the last are slow."""
    best = torch.ops.pi2.kernel_tables().partition(":")[2]
    assert torch.ops.pi2.select_kernels(request.param)
    yield request.param
    torch.ops.pi2.select_kernels(best)
