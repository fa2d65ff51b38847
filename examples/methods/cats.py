"""CATS: Contextually-Aware Thresholding for Sparsity (arXiv 2404.08763, where its cutoff is defined: a percentile of
|SiLU(x W_gate)| over sampled tokens, one number for a layer).

The gate is computed in full, and up and down for the neurons whose |act(gate)| is above the cutoff. In a layer without
a gate, which the paper has not, up is the first matrix and down the only one that is skipped.
Differs from the paper: its sparsity is of neurons; here the cutoff follows from the share of all rows, gates included.
"""

import torch

import torch_pi2
from torch_pi2.errors import ConfigError


@torch_pi2.register_method
class Cats(torch_pi2.SparseMethod):
    """``share``: of the FFN's rows that are read; more than the first matrix's, 1/3 (1/2 without a gate)."""

    name = "cats"

    def __init__(self, share: float = 0.6) -> None:
        self.share = share

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        rows = layer.site.rows_per_neuron
        kept = (self.share * rows - 1) / (rows - 1)
        if not 0 < kept <= 1:
            fix, expected = "Choose another share, or a method that predicts gates.", f"more than 1/{rows}, at most 1"
            raise ConfigError(f"share of {self.name}", expected=expected, found=str(self.share), fix=fix)
        values = layer.gate_TI().abs().flatten()
        cut = values.kthvalue(max(1, round((1 - kept) * len(values)))).values if kept < 1 else torch.tensor(0.0)
        self.cut_I = cut.expand(layer.site.intermediate).clone()
