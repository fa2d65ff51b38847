"""R-Sparse: rank-aware activation sparsity (arXiv 2504.19449, the section on rank-aware sparse inference).

A linear layer multiplies the channels with |x_k| > t by its weights, and the others by a low-rank approximation of
them, y = W s(x) + B A (x - s(x)), where B A is the truncated singular value decomposition of W. That is
(W - B A) s(x) + B A x: a layer with other weights whose inputs are sparse, and two small ones beside it that are not.
``prepare`` makes the dense model so, without changing what it computes, and ``optimize`` then skips channels. Layers
that the rank would not make smaller are not split, which leaves TEAL (arXiv 2408.14690) of them.
Differs from the paper: the rank and the share are the same everywhere and given, where the paper searches for the best
of both for each layer; a prompt uses all channels.
"""

import torch
from torch import nn

import torch_pi2


@torch_pi2.register_method
class RSparse(torch_pi2.InputMethod):
    """``share``: of the weights of each linear layer that are read for a token, those of ``rank`` among them."""

    name = "r-sparse"
    recordable = True

    def __init__(self, share: float = 0.5, rank: int = 16) -> None:
        self.share, self.rank = share, rank

    def prepare(self, model: nn.Module) -> None:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        for name, linear in list(model.named_modules()):
            if isinstance(linear, nn.Linear) and linear is not head and 0 < 2 * self.rank < min(linear.weight.shape):
                model.set_submodule(name, Split(linear, self.rank).train(linear.training))

    def fit(self, linear: torch_pi2.LinearSamples) -> None:
        part, (outputs, inputs) = linear.key.rpartition(".")[2], linear.weight_NK.shape
        if part in ("lowrank_a", "lowrank_b"):
            return  # all of their inputs
        own = self.rank * (1 / outputs + 1 / inputs) if part == "rest" else 0.0
        size = linear.x_TK.abs().flatten()
        skipped = min(len(size), round((1 - self.share + own) * len(size)))
        self.threshold = float(size.kthvalue(skipped).values) if skipped else 0.0


class Split(nn.Module):
    """A linear layer as its best approximation of rank ``rank``, and the rest of its weights."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        w_NK = linear.weight.detach().float()
        if linear.in_features <= linear.out_features:
            v_Kr = torch.linalg.eigh(w_NK.T @ w_NK).eigenvectors[:, -rank:]
            a_rK, b_Nr = v_Kr.T, w_NK @ v_Kr
        else:
            b_Nr = torch.linalg.eigh(w_NK @ w_NK.T).eigenvectors[:, -rank:]
            a_rK = b_Nr.T @ w_NK
        self.rest = self._linear(w_NK - b_Nr @ a_rK, linear)
        self.lowrank_a, self.lowrank_b = self._linear(a_rK, linear), self._linear(b_Nr, linear)
        self.rest.bias = linear.bias

    @staticmethod
    def _linear(weight: torch.Tensor, like: nn.Linear) -> nn.Linear:
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        made.weight = nn.Parameter(weight.to(like.weight.dtype).contiguous(), requires_grad=False)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(x) + self.lowrank_b(self.lowrank_a(x))
