"""The loss of a model on token ids."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from torch_pi2.eval.loss import summed_nats


def nats_per_token(model: nn.Module, batches: Iterable[torch.Tensor]) -> float:
    """Mean over every token but the first of each row."""
    total, count = summed_nats(model, batches)
    return total / count
