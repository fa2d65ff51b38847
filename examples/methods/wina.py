"""WINA: weight-informed neuron activation (arXiv 2505.19427, the definition of its binary activation gate).

A linear layer uses the input channels with the largest |x_k| * ||W[:, k]||_2, the norm of the weights that channel k
is multiplied by.
Differs from the paper: a threshold on these products, their quantile over calibration tokens, takes the place of the
largest K of each token, so that kernels need no sorting; weights are not rotated to have orthogonal columns, which its
error bounds suppose; the share is the same everywhere.
"""

import torch_pi2


@torch_pi2.register_method
class Wina(torch_pi2.InputMethod):
    """``share``: of the weights of each linear layer that are read for a token."""

    name = "wina"
    recordable = True

    def __init__(self, share: float = 0.6) -> None:
        self.share = share

    def fit(self, linear: torch_pi2.LinearSamples) -> None:
        self.scale_K = linear.weight_NK.norm(dim=0)
        size = (linear.x_TK.abs() * self.scale_K).flatten()
        skipped = round((1 - self.share) * len(size))
        self.threshold = float(size.kthvalue(skipped).values) if skipped else 0.0
