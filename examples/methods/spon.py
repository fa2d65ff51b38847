"""SPON: spontaneous neurons (arXiv 2512.12744, the section on their injection and absorption into biases).

A layer that skips small products h adds a fixed vector a to what is left of them, W (kept(h) + a): W a is a bias of
down, and costs nothing. Here products are skipped as in CATS (arXiv 2404.08763), by a cutoff of |act(gate)|.
Differs from the paper: it learns the vectors of all layers by distillation from the dense model, and this takes the
mean of the products that are skipped, which is the best vector for the mean square of the layer's own output; the paper
skips inputs of all linear layers (TEAL). The biases are made part of the model before ``optimize``::

    methods = torch_pi2.fit(model, text, stats=torch_pi2.profile(model, text), method=Spon(0.6))
    fold(model, methods)
    torch_pi2.optimize(model, text, method="spon", predictors=methods)
"""

import torch
from torch import nn

import torch_pi2
from torch_pi2.errors import ConfigError
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.types.plan import weights_hash


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

    def read_bytes(self) -> int:
        return self.cut_I.nbytes + self.bias_H.nbytes


def fold(model: nn.Module, methods: FittedPredictors) -> None:
    """Add ``bias_H`` of each method to the bias of its layer's ``down`` in the dense ``model``, in place; a layer
    without one gets one. ``methods`` then belong to these weights. Raises ConfigError: ``down`` is no ``nn.Linear`` of
    its own (experts, GPT-2).
    """
    for site in torch_pi2.find_sites(model):
        if site.key not in methods:
            continue
        linear = model.get_submodule(site.down.weight.rpartition(".")[0])
        if not isinstance(linear, nn.Linear) or site.down.rows is not None:
            fix = "Fold into models whose FFNs are made of nn.Linear."
            raise ConfigError(f"down of {site.key}", expected="an nn.Linear", found=type(linear).__name__, fix=fix)
        bias_H = methods[site.key].bias_H.to(linear.weight.dtype)
        linear.bias = nn.Parameter(
            bias_H if linear.bias is None else linear.bias.detach() + bias_H, requires_grad=False
        )
    methods.model_hash = weights_hash(model, torch_pi2.find_sites(model))
