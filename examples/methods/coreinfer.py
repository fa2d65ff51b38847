"""CoreInfer: core neurons of a sentence (arXiv 2410.18311, definitions of token-wise and sentence-wise core neurons).

The core neurons of a token are the share ``alpha`` of its activated neurons with the largest activations; those of a
sentence are the neurons that are core neurons of most of its tokens. They are kept for all tokens that follow the
prompt, which is computed in full (the paper's prediction by stability; nothing is fitted).
Differs from the paper: products h = act(gate) * up have both signs, so activations are |h| and activated is not zero;
the paper's prediction by similarity, from clusters of sentences, is left out.
"""

import torch

import torch_pi2


@torch_pi2.register_method
class CoreInfer(torch_pi2.SparseMethod):
    """``share``: of the FFN's rows that are read for a generated token (the paper's beta). ``alpha``: see above."""

    name = "coreinfer"
    scope = "prompt"
    recordable = True

    def __init__(self, share: float = 0.5, alpha: float = 0.4) -> None:
        self.share, self.alpha = share, alpha

    def prompt_scores(self, x_TH: torch.Tensor, h_TI: torch.Tensor) -> torch.Tensor:
        size_TI = h_TI.abs()
        count_T1 = ((size_TI > 0).sum(1, keepdim=True) * self.alpha).round().long().clamp(min=1)
        least_T1 = size_TI.sort(dim=1, descending=True).values.gather(1, count_T1 - 1)
        return ((size_TI >= least_T1) & (size_TI > 0)).sum(0).float()

    def choose(self, score_I: torch.Tensor) -> torch.Tensor:
        kept = score_I.topk(max(1, round(self.share * len(score_I)))).indices
        return torch.zeros_like(score_I, dtype=torch.bool).index_fill_(0, kept, True)
