"""Random: a control, which any method must beat at the same share.

No paper. Each layer keeps a share of its neurons that is drawn once, the same for all tokens.
"""

import torch

import torch_pi2


@torch_pi2.register_method
class Random(torch_pi2.SparseMethod):
    """``share``: of the FFN's rows that are read. ``seed``: of the draw; each layer has its own."""

    name = "random"
    recordable = True

    def __init__(self, share: float = 0.5, seed: int = 0) -> None:
        self.share, self.seed = share, seed

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        intermediate = layer.site.intermediate
        drawn = torch.Generator().manual_seed(1_000_003 * self.seed + layer.site.layer)
        self.kept_I = torch.zeros(intermediate, dtype=torch.bool)
        self.kept_I[torch.randperm(intermediate, generator=drawn)[: max(1, round(self.share * intermediate))]] = True

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.kept_I.expand(len(x_TH), -1)

    def read_bytes(self) -> int:
        return 0  # a pruned model needs no list
