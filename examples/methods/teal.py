"""TEAL: training-free activation sparsity in LLMs (arXiv 2408.14690, the section on the sparsification function).

A linear layer skips the input channels with |x_k| <= t, and does not read their weights; t is the quantile of |x| over
calibration tokens that leaves the share, for each layer of attention and FFN alike.
Differs from the paper: the share is the same everywhere (the paper's uniform allocation, not its greedy one by blocks);
a prompt uses all channels, where the paper sparsifies the second half of it.
"""

import torch_pi2


@torch_pi2.register_method
class Teal(torch_pi2.InputMethod):
    """``share``: of the weights of each linear layer that are read for a token."""

    name = "teal"
    recordable = True

    def __init__(self, share: float = 0.6) -> None:
        self.share = share

    def fit(self, linear: torch_pi2.LinearSamples) -> None:
        size = linear.x_TK.abs().flatten()
        skipped = round((1 - self.share) * len(size))
        self.threshold = float(size.kthvalue(skipped).values) if skipped else 0.0
