"""Running a user's model for our own purposes, and leaving no trace of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(*roots: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own training flag is restored afterwards.

    ``nn.TransformerEncoderLayer``'s fused fast path is off meanwhile: it hides the FFN's matmuls.
    """
    flags = [(module, module.training) for root in roots for module in root.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        for root in roots:
            root.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, training in flags:
            module.training = training
