"""SparseInfer: training-free prediction of signs (arXiv 2411.12692, the section on sign-bit-based prediction).

The sign bit of each product of an input and a gate weight is the XOR of their sign bits. A neuron whose products are
positive N_pos times and negative N_neg times is predicted to be zero if alpha * N_pos < N_neg. It reads a bit for each
gate weight, and is meant for ReLU, where negative gates are exact zeros.
Differs from the paper: alpha follows from the share, layer by layer (the paper sets it by hand, 1.00 to 1.03); signs
are multiplied as numbers after they were unpacked. The built-in method "signbit" has kernels, and other thresholds.
"""

import torch

import torch_pi2


@torch_pi2.register_method
class SparseInfer(torch_pi2.SparseMethod):
    """``share``: of the FFN's rows that are read."""

    name = "sparseinfer"
    recordable = True

    def __init__(self, share: float = 0.5) -> None:
        self.share = share

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        self.hidden = layer.site.hidden
        negative_IH = torch.signbit(layer.weights.up if layer.weights.gate is None else layer.weights.gate)
        negative_IBb = torch.nn.functional.pad(negative_IH, (0, -self.hidden % 8)).unflatten(1, (-1, 8))
        self.bits_IB = (negative_IBb << torch.arange(8)).sum(2).to(torch.uint8)
        # share of neurons kept with at most 0, 1, 2 ... negative products; alpha between two of them
        pairs = torch.zeros(self.hidden + 1, dtype=torch.int64)
        for x_TH in layer.x_TH.split(1024):
            pairs += torch.bincount(self.negative(x_TH).long().flatten(), minlength=self.hidden + 1)
        most = int((pairs.cumsum(0) / pairs.sum() - self.share).abs()[: self.hidden].argmin())
        self.alpha = (most + 0.5) / (self.hidden - most - 0.5)

    def negative(self, x_TH: torch.Tensor) -> torch.Tensor:
        """N_neg of each token and neuron, whole numbers in float32 ``[T, I]``."""
        bits_IH = (self.bits_IB[:, :, None] >> torch.arange(8, dtype=torch.uint8)).flatten(1)[:, : self.hidden] & 1
        sign_TH = 1.0 - 2.0 * torch.signbit(x_TH).float()
        return (self.hidden - sign_TH @ (1.0 - 2.0 * bits_IH.float()).T) / 2

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        negative_TI = self.negative(x_TH)
        return self.alpha * (self.hidden - negative_TI) >= negative_TI
