"""Deja Vu: a trained predictor for each FFN (arXiv 2310.17157, the sections on the sparsity predictor of MLP blocks).

Two linear layers score the neurons of a token, and the highest are computed. They are trained with binary cross-entropy
on which neurons fire; those that do not are weighted by the mean rate of firing, as in the authors' code.
Differs from the paper: the input is that of the FFN itself, not of an earlier layer (which hides the predictor's time);
a few hundred steps in place of 20 epochs; the share decides how many neurons are computed.
"""

import torch
import torch.nn.functional as F

import torch_pi2


@torch_pi2.register_method
class DejaVu(torch_pi2.SparseMethod):
    """``share``: of the FFN's rows that are read. ``rank``: between the two layers (the paper: 1,000); None: a 16th of
    the hidden size. ``steps`` of ``batch`` tokens.
    """

    name = "dejavu"
    recordable = True

    def __init__(self, share: float = 0.5, rank: int | None = None, steps: int = 300, batch: int = 256) -> None:
        self.share, self.max_rank, self.steps, self.batch = share, rank, steps, batch

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        x_TH, fired_TI = layer.x_TH, layer.fired_TI
        hidden, intermediate = layer.site.hidden, layer.site.intermediate
        rank = min(hidden, self.max_rank or max(1, hidden // 16))
        drawn = torch.Generator().manual_seed(layer.site.layer)
        scale = float(x_TH.square().mean().sqrt().clamp(min=1e-12))  # inputs of unit size train alike in all layers
        a_rH = torch.randn(rank, hidden, generator=drawn) / (scale * hidden**0.5)
        b_Ir = torch.randn(intermediate, rank, generator=drawn) * 0.1 / rank**0.5
        c_I = torch.logit(fired_TI.float().mean(0).clamp(1e-4, 1 - 1e-4))
        rate = float(fired_TI.float().mean()) + 0.005
        with torch.enable_grad():
            learned = [tensor.requires_grad_() for tensor in (a_rH, b_Ir, c_I)]
            first = {"params": [a_rH], "lr": 1e-2 / (scale * hidden**0.5)}
            optimizer = torch.optim.AdamW([first, {"params": [b_Ir, c_I]}], lr=1e-2, weight_decay=0.01)
            for _ in range(self.steps):
                some = torch.randint(len(x_TH), (min(self.batch, len(x_TH)),), generator=drawn)
                wanted = fired_TI[some].float()
                score = x_TH[some] @ a_rH.T @ b_Ir.T + c_I
                loss = F.binary_cross_entropy_with_logits(score, wanted, wanted * (1 - rate) + rate)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.a_rH, self.b_Ir, self.c_I = (tensor.detach().bfloat16() for tensor in learned)

    def score(self, x_TH: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x_TH.bfloat16(), self.a_rH), self.b_Ir, self.c_I)

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        score_TI = self.score(x_TH)
        count = max(1, round(self.share * len(self.c_I)))
        return torch.zeros_like(score_TI, dtype=torch.bool).scatter_(1, score_TI.topk(count).indices, True)
