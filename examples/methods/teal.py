"""TEAL: training-free activation sparsity in LLMs (arXiv 2408.14690, the sections on the sparsification function and on
block-wise greedy optimisation).

A linear layer skips the input channels with |x_k| <= t, and does not read their weights; t is the quantile of |x| over
calibration tokens that leaves its share, for layers of attention and FFN alike. With ``greedy``, shares differ within a
block: from all channels, step by step the layer uses fewer whose error grows least for the weights that it saves, until
the block reads the share. Differs from the paper: the error is that of each linear layer's own output, relative to its
norm, where the paper measures the block's; a prompt uses all channels, where the paper sparsifies its second half.
"""

import re
from collections.abc import Mapping

import torch_pi2

_LEVELS = 20
_TOKENS = 128


@torch_pi2.register_method
class Teal(torch_pi2.InputMethod):
    """``share``: of the weights that are read for a token, of each linear layer or (``greedy``) of each block."""

    name = "teal"
    recordable = True

    def __init__(self, share: float = 0.6, greedy: bool = True) -> None:
        self.share, self.greedy = share, greedy

    def allocate(self, linears: Mapping[str, torch_pi2.LinearSamples]) -> None:
        self._shares: dict[str, float] = {}
        blocks: dict[str, list[str]] = {}
        for name in linears if self.greedy else ():
            blocks.setdefault(re.sub(r"(\.\d+)\..*", r"\1", name), []).append(name)
        for names in blocks.values():
            errors, sizes = {}, {}
            for name in names:
                linear = linears[name]
                errors[name], sizes[name] = self.errors(linear), linear.weight_NK.numel()
            level = dict.fromkeys(names, _LEVELS)  # of channels that are used
            while sum(level[y] * sizes[y] for y in names) > self.share * _LEVELS * sum(sizes.values()):
                grows = {y: (errors[y][n - 1] - errors[y][n]) / sizes[y] for y, n in level.items() if n > 0}
                level[min(grows, key=grows.__getitem__)] -= 1
            self._shares |= {name: level[name] / _LEVELS for name in names}

    @staticmethod
    def errors(linear: torch_pi2.LinearSamples) -> list[float]:
        """Relative squared errors of the output with 0, 1/20, ... of the channels."""
        x_TK = linear.x_TK[:_TOKENS]
        size, whole = x_TK.abs(), (x_TK @ linear.weight_NK.T).square().sum().clamp(min=1e-20)
        found = []
        for level in range(_LEVELS + 1):
            skipped = round((1 - level / _LEVELS) * size.numel())
            cut = size.flatten().kthvalue(skipped).values if skipped else 0.0
            found.append(float(((x_TK * (size <= cut)) @ linear.weight_NK.T).square().sum() / whole))
        return [*found[:-1], 0.0]

    def fit(self, linear: torch_pi2.LinearSamples) -> None:
        share = getattr(self, "_shares", {}).get(linear.key, self.share)
        size = linear.x_TK.abs().flatten()
        skipped = round((1 - share) * len(size))
        self.threshold = float(size.kthvalue(skipped).values) if skipped else 0.0
