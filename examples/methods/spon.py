"""SPON: spontaneous neurons (arXiv 2512.12744, the section on their injection and absorption into biases).

A layer that skips small products h adds a fixed vector a to what is left of them, W (kept(h) + a): W a is a bias of
down, and costs nothing. Here products are skipped as in CATS (arXiv 2404.08763), by a cutoff of |act(gate)|.
Differs from the paper: it learns the vectors of all layers by distillation from the dense model, and this takes the
mean of the products that are skipped, which is the best vector for the mean square of the layer's own output; the paper
skips inputs of all linear layers (TEAL).
"""

import torch

import torch_pi2
from torch_pi2.errors import ConfigError


@torch_pi2.register_method
class Spon(torch_pi2.SparseMethod):
    """``share``: of the FFN's rows that are read; more than the first matrix's, 1/3 (1/2 without a gate)."""

    name = "spon"

    def __init__(self, share: float = 0.6) -> None:
        self.share = share

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        rows = layer.site.rows_per_neuron
        kept = (self.share * rows - 1) / (rows - 1)
        if not 0 < kept <= 1:
            expected, fix = f"more than 1/{rows}, at most 1", "Choose another share."
            raise ConfigError(f"share of {self.name}", expected=expected, found=str(self.share), fix=fix)
        gate_TI = layer.gate_TI().abs()
        values = gate_TI.flatten()
        cut = values.kthvalue(max(1, round((1 - kept) * len(values)))).values if kept < 1 else torch.tensor(0.0)
        self.cut_I = cut.expand(layer.site.intermediate).clone()
        vector_I = (layer.h_TI() * (gate_TI <= cut)).mean(0)
        self.bias_H = layer.weights.down @ vector_I
