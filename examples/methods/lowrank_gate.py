"""Low-rank gate: the gate's truncated singular value decomposition, whitened by the inputs, as a score. No training.

The whitening is that of SVD-LLM (arXiv 2403.07378, truncation-aware data whitening): with inputs of covariance
C = S S^T, the best rank-r gate in the mean square of its outputs is the truncated decomposition of W S, times
S^-1. With V the first r right singular vectors of W S this is (W S V) (V^T S^-1), matrices [I, r] and [r, H].
Neurons are scored by |act(approximate gate)| * E|up| * ||down||; where that is zero (ReLU), by the gate.
Differs from SVD-LLM: it replaces weights there, and only chooses neurons here, which are then computed exactly.
"""

import torch
import torch.nn.functional as F

import torch_pi2
from torch_pi2.ops.activations import ACTIVATIONS


@torch_pi2.register_method
class LowRankGate(torch_pi2.SparseMethod):
    """``share``: of the FFN's rows that are read. ``rank``: None: a 16th of the hidden size."""

    name = "lowrank-gate"
    recordable = True

    def __init__(self, share: float = 0.5, rank: int | None = None) -> None:
        self.share, self.max_rank = share, rank

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        weights, hidden = layer.weights, layer.site.hidden
        gated = weights.gate is not None
        w_IH, bias_I = (weights.gate, weights.bias_gate) if gated else (weights.up, weights.bias_up)
        c_HH = layer.x_TH.T @ layer.x_TH / len(layer.x_TH)
        s_HH = torch.linalg.cholesky(c_HH + 1e-3 * c_HH.diagonal().mean() * torch.eye(hidden))
        ws_IH = w_IH @ s_HH
        rank = min(hidden, self.max_rank or max(1, hidden // 16))
        v_Hr = torch.linalg.eigh(ws_IH.T @ ws_IH).eigenvectors[:, -rank:]
        self.a_rH = torch.linalg.solve_triangular(s_HH.T, v_Hr, upper=True).T.bfloat16()
        self.b_Ir = (ws_IH @ v_Hr).bfloat16()
        self.bias_I = None if bias_I is None else bias_I.bfloat16()
        self.activation = layer.site.activation
        mean_up_I = layer.h_TI().abs().mean(0) / layer.gate_TI().abs().mean(0).clamp(min=1e-20)
        self.scale_I = (mean_up_I * weights.down.norm(dim=0)).clamp(min=1e-20)

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        gate_TI = F.linear(F.linear(x_TH.bfloat16(), self.a_rH), self.b_Ir, self.bias_I).float()
        score_TI = ACTIVATIONS[self.activation](gate_TI).abs() * self.scale_I
        score_TI = torch.where(score_TI > 0, score_TI, gate_TI.clamp(max=0))
        count = max(1, round(self.share * len(self.scale_I)))
        return torch.zeros_like(score_TI, dtype=torch.bool).scatter_(1, score_TI.topk(count).indices, True)
