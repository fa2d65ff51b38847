"""What a feed-forward layer computes, and a readable reference of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from torch_pi2.ops.activations import ACTIVATIONS, on_up
from torch_pi2.types.site import FFNSite, FFNWeights


@dataclass(frozen=True)
class Formula:
    """The function between the projections of an FFN, of one or two streams.

    Attributes:
        activation: a name in ``ops.ACTIVATIONS``.
        on_up: activation on both streams (dReLU).
        gate: index of the gate stream, None for a plain FFN; up: index of the other.
    """

    activation: str
    on_up: bool
    gate: int | None
    up: int


def apply_formula(formula: Formula, streams: Sequence[torch.Tensor]) -> torch.Tensor:
    """``h`` from the streams, each ``[T, I]``."""
    act = ACTIVATIONS[formula.activation]
    up = streams[formula.up]
    if formula.gate is None:
        return act(up)
    return act(streams[formula.gate]) * on_up(formula.activation, formula.on_up)(up)


def dense_reference(site: FFNSite, weights: FFNWeights, x: torch.Tensor) -> torch.Tensor:
    """What the original layer computes on ``x [..., H]``, in the dtype of its weights."""

    up = F.linear(x, weights.up, weights.bias_up)
    streams = [up] if weights.gate is None else [F.linear(x, weights.gate, weights.bias_gate), up]
    formula = Formula(site.activation, site.activation_on_up, 0 if site.gated else None, len(streams) - 1)
    return F.linear(apply_formula(formula, streams), weights.down, weights.bias_down)
