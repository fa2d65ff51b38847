"""Oracle: the neurons that contribute most, known by computing all of them first. An upper bound, which saves nothing.

No paper; the bound that predictors are held against in PowerInfer (arXiv 2312.12456) and Deja Vu (arXiv 2310.17157).
For each token the neurons with the largest |h_i| * ||down_i||, where h_i is what column i of down is multiplied by: the
greedy choice for the norm of the output, exact where columns are orthogonal. It keeps copies of the float weights.
"""

import torch

import torch_pi2
from torch_pi2.types.site import FFNSite, FFNWeights


def smaller(weight: torch.Tensor) -> torch.Tensor:
    """In bfloat16 where that changes no value, as in most published models."""
    return weight.bfloat16() if torch.equal(weight.bfloat16().float(), weight) else weight


@torch_pi2.register_method
class Oracle(torch_pi2.SparseMethod):
    """``share``: of the FFN's rows that a method with the same choice would read."""

    name = "oracle"
    recordable = True

    def __init__(self, share: float = 0.5) -> None:
        self.share = share

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        weights = layer.weights
        self.site = layer.site.to_json()
        self.gate_IH, self.up_IH = None if weights.gate is None else smaller(weights.gate), smaller(weights.up)
        self.bias_gate_I, self.bias_up_I = weights.bias_gate, weights.bias_up
        self.norm_I = weights.down.norm(dim=0)

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        gate = None if self.gate_IH is None else self.gate_IH.float()
        weights = FFNWeights(gate, self.up_IH.float(), self.up_IH[:0], self.bias_gate_I, self.bias_up_I, None)
        layer = torch_pi2.LayerSamples(FFNSite.from_json(self.site), weights, x_TH.float(), x_TH)
        score_TI = layer.h_TI().abs() * self.norm_I
        count = max(1, round(self.share * len(self.norm_I)))
        return torch.zeros_like(score_TI, dtype=torch.bool).scatter_(1, score_TI.topk(count).indices, True)
