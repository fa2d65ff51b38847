"""CHESS: channel-wise thresholding (arXiv 2409.01366, where thresholds of channels are defined).

The importance of neuron i for a token is E[|up_i|] * |act(gate)_i|, up replaced by its mean magnitude over sampled
tokens, since up is not computed yet. One threshold t on importances gives the share, and so neuron i has the threshold
t / E[|up_i|] on |act(gate)_i|. The gate is computed in full, up and down above the thresholds.
Differs from the paper: attention stays dense (the paper's other half). Without a gate it is CATS.
"""

import torch
import torch.nn.functional as F

import torch_pi2
from torch_pi2.errors import ConfigError
from torch_pi2.ops.activations import on_up


@torch_pi2.register_method
class Chess(torch_pi2.SparseMethod):
    """``share``: of the FFN's rows that are read; more than the first matrix's, 1/3 (1/2 without a gate)."""

    name = "chess"

    def __init__(self, share: float = 0.6) -> None:
        self.share = share

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        site, weights = layer.site, layer.weights
        kept = (self.share * site.rows_per_neuron - 1) / (site.rows_per_neuron - 1)
        if not 0 < kept <= 1:
            fix, expected = "Choose another share.", f"more than 1/{site.rows_per_neuron}, at most 1"
            raise ConfigError(f"share of {self.name}", expected=expected, found=str(self.share), fix=fix)
        mean_up_I = torch.ones(site.intermediate)
        if site.gated:
            up_TI = F.linear(layer.x_TH, weights.up, weights.bias_up)
            mean_up_I = on_up(site.activation, site.activation_on_up)(up_TI).abs().mean(0).clamp(min=1e-20)
        values = (layer.gate_TI().abs() * mean_up_I).flatten()
        threshold = values.kthvalue(max(1, round((1 - kept) * len(values)))).values if kept < 1 else 0.0
        self.cut_I = threshold / mean_up_I
