"""GRIFFIN: neurons chosen by the prompt (arXiv 2404.01365, where neurons are selected by the statistic s).

With Z the products of a prompt, each token's row divided by its norm, neuron j has s_j = ||Z[:, j]||_2, and the largest
are kept for all tokens that are generated. The prompt itself is computed in full; nothing is fitted. (s_j^2 is summed
here, piece by piece of a long prompt, and has the same order.)
As in the paper, whose batches share one choice; here each sequence has its own.
"""

import torch

import torch_pi2


@torch_pi2.register_method
class Griffin(torch_pi2.SparseMethod):
    """``share``: of the FFN's rows that are read for a generated token."""

    name = "griffin"
    scope = "prompt"
    recordable = True

    def __init__(self, share: float = 0.5) -> None:
        self.share = share

    def prompt_scores(self, x_TH: torch.Tensor, h_TI: torch.Tensor) -> torch.Tensor:
        return (h_TI / h_TI.norm(dim=1, keepdim=True).clamp(min=1e-20)).square().sum(0)

    def choose(self, score_I: torch.Tensor) -> torch.Tensor:
        kept = score_I.topk(max(1, round(self.share * len(score_I)))).indices
        return torch.zeros_like(score_I, dtype=torch.bool).index_fill_(0, kept, True)
