"""The exact gate as a predictor: compute the gate, and what fires is what is active. No training."""

from __future__ import annotations

import torch

from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.types.predictor import PredictorCard
from torch_pi2.types.site import FFNSite, FFNWeights


class ExactGate:
    """Scores are the layer's own ``|act(gate)|`` (``|act(up)|`` for a plain FFN): what the kernel computes.

    Predicted active are scores above the cut; recall is 1 by construction for gate-only and plain FFNs with
    the same threshold, and for dReLU too, where a neuron that fires has a positive gate (precision is then
    the share of those whose up is positive as well). Lossless with cut 0 on ReLU-family models.

    Args:
        site, weights: the FFN.
        threshold: cut on the magnitude; 0 is lossless.
    """

    def __init__(self, site: FFNSite, weights: FFNWeights, threshold: float = 0.0) -> None:
        self.site = site
        self._weights = weights
        # Predictors answer score >= threshold, the gate fires on score > cut: the next float above it.
        self.threshold = float(
            torch.nextafter(*torch.tensor([threshold, float("inf")], dtype=torch.float32, device="cpu"))
        )
        self.card: PredictorCard | None = None

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, I]`` float32."""
        w = self._weights
        matrix, bias = (w.up, w.bias_up) if w.gate is None else (w.gate, w.bias_gate)
        return ACTIVATIONS[self.site.activation](torch.nn.functional.linear(x_TH, matrix, bias).float()).abs()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Nothing: the gate is part of the layer."""
        return {}

    @property
    def macs(self) -> int:
        """Multiply-adds per token: the gate matmul, all of which the layer needs anyway where it fires."""
        return self.site.hidden * self.site.intermediate

    @property
    def rank(self) -> int:
        return 0
