"""Kernels of one instruction set after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_pi2.ops import load

load()


@pytest.fixture(params=torch.ops.pi2.kernel_tables().partition(":")[0].split(","))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each that this CPU has, in the place of the best."""
    best = torch.ops.pi2.kernel_tables().partition(":")[2]
    assert torch.ops.pi2.select_kernels(request.param)
    yield request.param
    torch.ops.pi2.select_kernels(best)
