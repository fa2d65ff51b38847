"""Routers of mixtures of experts that are one linear layer, found by what a block chooses and not by names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.absent import AbsentParameter
from torch_pi2.graph.routed import Routed

#: Random tokens that a block routes, and the share of its choices that a router must find (some are close).
_TOKENS, _LEAST_FOUND = 64, 0.9


@dataclass(frozen=True)
class LinearRouter:
    """A token's experts are the ``chosen`` (K) with the highest scores.

    Attributes:
        weight: ``[E, H]``. bias: ``[E]``, or None. Scores are ``weight x + bias``;
        correction: ``[E]``, or None: else the sigmoid of that, plus ``correction``.
        chosen: experts of a token.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    correction: torch.Tensor | None
    chosen: int

    def choose(self, x_TH: torch.Tensor) -> torch.Tensor:
        """int64 ``[T, K]``."""
        scores_TE = F.linear(x_TH.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        if self.correction is not None:
            scores_TE = scores_TE.sigmoid() + self.correction.float()
        return scores_TE.topk(self.chosen, -1).indices


class _Routed(Exception):
    """Ends a call that has done what it was for."""


def find_router(
    block: nn.Module, experts: nn.Module, count: int, beside: Sequence[nn.Module] = ()
) -> LinearRouter | None:
    """The router in ``block``, which holds ``experts`` (``count`` of them); None: it is no linear layer and a top k.

    The block routes random tokens, and nothing of them is computed by ``experts``. Which of the parameters around them
    make the same choices is tried: all matrices ``[E, H]``, with and without vectors ``[E]``. Modules ``beside`` give
    zeros meanwhile: what they compute would be read from storage.
    """
    with _giving_zeros(beside):
        routed = _try(block, experts, count)
    if routed is None:
        return None
    x_TH, index_TK, _ = routed
    best, most = None, _LEAST_FOUND
    for router in _candidates(block, experts, (count, x_TH.shape[-1]), index_TK.shape[-1]):
        found = float((router.choose(x_TH)[:, :, None] == index_TK[:, None, :]).any(1).float().mean())
        if found >= most and (best is None or found > most):
            best, most = router, found
    return best


@contextmanager
def _giving_zeros(modules: Sequence[nn.Module]) -> Iterator[None]:
    for module in modules:
        module.forward = torch.zeros_like
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _try(block: nn.Module, experts: nn.Module, count: int) -> Routed | None:
    """What the experts get of random tokens; None: the block wants other arguments, or does not choose by token."""
    seen: list[Routed] = []

    def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) + len(kwargs) > 1:
            seen.append(Routed.of(args, kwargs, count))
        raise _Routed

    matrices = [t for t in _around(block, experts) if t.dim() == 2 and t.shape[0] == count]
    if not matrices:
        return None
    generator = torch.Generator().manual_seed(count)
    x_BTH = torch.randn((1, _TOKENS, matrices[0].shape[1]), generator=generator).to(matrices[0])
    hook = experts.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        with torch.no_grad():
            block(x_BTH)
    except Exception:  # whatever code of a model raises that is called with one tensor
        pass
    finally:
        hook.remove()
    return seen[0] if seen and len(seen[0].index_TK) == _TOKENS else None


def _around(block: nn.Module, experts: nn.Module) -> list[torch.Tensor]:
    """What the block has beside its experts, but for layers whose neurons are elsewhere."""
    inside = {id(t) for t in (*experts.parameters(), *experts.buffers())}
    every = (t for t in (*block.parameters(), *block.buffers()) if id(t) not in inside)
    return [t.detach() for t in every if not isinstance(t, AbsentParameter) and t.is_floating_point()]


def _candidates(block: nn.Module, experts: nn.Module, shape: tuple[int, int], chosen: int) -> Iterator[LinearRouter]:
    around = _around(block, experts)
    vectors = [None, *(t for t in around if t.shape == shape[:1])]
    for weight in (t for t in around if t.shape == shape):
        for bias, correction in product(vectors, vectors):
            if bias is None or bias is not correction:
                yield LinearRouter(weight, bias, correction, chosen)
