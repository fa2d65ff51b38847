"""Learned thresholds: cutoffs of |act(gate)| for each neuron, by gradient descent through soft masks, as in learned
threshold pruning (arXiv 2003.00075, the section on differentiable soft thresholds), here of activations.

While a layer learns, neuron i of a token is multiplied by m = sigmoid((|act(gate)_i| - t_i) / tau_i), not by a step.
What is minimised is the squared error of the layer's output, beside that of the dense layer, and a penalty on the
share of neurons: |down (h - m h)|^2 / |down h|^2 + lambda (mean(m) - share)^2. The temperature tau falls to a tenth.
Then m becomes a step, and one factor on all t makes the share exact. It begins at CATS' cutoff (arXiv 2404.08763).
Differs from learned threshold pruning: each layer learns alone, against its own output and not the model's loss.
"""

import torch

import torch_pi2
from torch_pi2.errors import ConfigError


@torch_pi2.register_method
class Learned(torch_pi2.SparseMethod):
    """``share``: of the FFN's rows that are read; more than the first matrix's, 1/3 (1/2 without a gate)."""

    name = "learned"

    def __init__(self, share: float = 0.6, steps: int = 60, tokens: int = 256, penalty: float = 10.0) -> None:
        self.share, self.steps, self.tokens, self.penalty = share, steps, tokens, penalty

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        rows = layer.site.rows_per_neuron
        kept = (self.share * rows - 1) / (rows - 1)
        if not 0 < kept <= 1:
            expected, fix = f"more than 1/{rows}, at most 1", "Choose another share."
            raise ConfigError(f"share of {self.name}", expected=expected, found=str(self.share), fix=fix)
        size_TI, h_TI, down_HI = layer.gate_TI().abs(), layer.h_TI(), layer.weights.down
        skipped = max(1, round((1 - kept) * size_TI.numel()))
        start = size_TI.flatten().kthvalue(skipped).values.clamp(min=1e-6)
        log_t_I = start.log().repeat(layer.site.intermediate).requires_grad_()
        optimizer, drawn = torch.optim.Adam([log_t_I], lr=0.1), torch.Generator().manual_seed(0)
        for step in range(self.steps if kept < 1 else 0):
            some = torch.randint(len(h_TI), (self.tokens,), generator=drawn)
            tau = 0.5 * 0.1 ** (step / self.steps)  # of the threshold
            with torch.enable_grad():
                t_I = log_t_I.exp()
                m_TI = torch.sigmoid((size_TI[some] - t_I) / (tau * t_I))
                lost_TH = (h_TI[some] * (1 - m_TI)) @ down_HI.T
                error = lost_TH.square().sum() / (h_TI[some] @ down_HI.T).square().sum().clamp(min=1e-12)
                loss = error + self.penalty * (m_TI.mean() - kept) ** 2
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
        t_I = log_t_I.detach().exp()
        factor = (size_TI / t_I).flatten().kthvalue(skipped).values if kept < 1 else 0.0
        self.cut_I = factor * t_I
