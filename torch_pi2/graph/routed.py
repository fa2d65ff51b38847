"""Experts of a running dense model: the tokens of each, its result, and the router that chooses it.

The inside of a module of experts (a loop, grouped matrix products, a kernel) varies with the version and settings of
transformers, so only its arguments and results are used. Routers are found by their choices, not by names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.modules import other_forwards
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.graph.experts import ARGUMENTS
from torch_pi2.types.site import FFNSite, intermediate


class Routed(NamedTuple):
    """Arguments of a module of experts: ``x_TH``, and for each token its experts ``index_TK`` with their weights."""

    x_TH: torch.Tensor
    index_TK: torch.Tensor
    routing_TK: torch.Tensor

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any], experts: int) -> "Routed":
        """Arguments of a call; rows sorted by expert become tokens of one expert each."""
        if len(args) + len(kwargs) == 1:
            x_TH = args[0] if args else kwargs[ARGUMENTS[0][0]]
            expert_T = torch.arange(experts, dtype=torch.int64, device=x_TH.device)
            expert_T = expert_T.repeat_interleave(x_TH.shape[0] // experts)
            # rows of zeros belong to other experts, and stay zeros
            index_TK = torch.where((x_TH != 0).any(-1), expert_T, experts)[:, None]
            return Routed(x_TH, index_TK, torch.ones_like(x_TH[:, :1]))
        given = [next(kwargs[name] for name in names if name in kwargs) for names in ARGUMENTS[len(args) :]]
        return Routed(*args, *given)

    def tokens_of(self, site: FFNSite) -> torch.Tensor:
        """Tokens routed to ``site``, int64 ascending, each once."""
        return torch.nonzero(self.index_TK.eq(site.up.expert or 0).any(-1)).flatten()

    def weight_of(self, site: FFNSite, tokens: torch.Tensor) -> torch.Tensor:
        """``[N]`` float32: routing weight of ``site`` for each of ``tokens``."""
        return (self.routing_TK[tokens].float() * self.index_TK[tokens].eq(site.up.expert or 0)).sum(-1)


def modules_of(sites: Sequence[FFNSite]) -> dict[str, list[FFNSite]]:
    """Module of experts -> its sites; other sites are left out."""
    found: dict[str, list[FFNSite]] = {}
    for site in sites:
        if site.experts is not None:
            found.setdefault(site.experts, []).append(site)
    return found


def chosen_shares(model_config: Any, sites: Sequence[FFNSite]) -> dict[str | None, float]:
    """Module of experts -> share of its experts per token by the configuration (1 if it does not say)."""
    if hasattr(model_config, "get_text_config"):
        model_config = model_config.get_text_config()
    chosen = getattr(model_config, "num_experts_per_tok", None)
    counts = {name: 1 + max(site.up.expert or 0 for site in own) for name, own in modules_of(sites).items()}
    return {name: min(1.0, (chosen or count) / count) for name, count in counts.items()}


#: An expert, its input ``[N, H]`` and its gate ``[N, I]`` in float32 -> which neurons count, bool ``[N, I]``.
Keep = Callable[[FFNSite, torch.Tensor, torch.Tensor], torch.Tensor]


def masked_experts(model: nn.Module, sites: Sequence[FFNSite], keep: Keep, routed: Routed) -> torch.Tensor:
    """Output of the module of ``sites`` (all of its experts) for ``routed``, with unwanted neurons zeroed."""
    y_TH = routed.x_TH.new_zeros(routed.x_TH.shape, dtype=torch.float32)
    for site in sites:
        tokens = routed.tokens_of(site)
        if not len(tokens):
            continue
        weights, x_NH = site.weights(model), routed.x_TH[tokens]
        gate_NI, h_NI = intermediate(site, weights, x_NH)
        kept_NI = (h_NI * keep(site, x_NH, gate_NI)).to(x_NH.dtype)
        made_NH = F.linear(kept_NI, weights.down, weights.bias_down).float()
        y_TH.index_add_(0, tokens, made_NH * routed.weight_of(site, tokens)[:, None])
    return y_TH.to(routed.x_TH.dtype)


def masked(model: nn.Module, sites: Sequence[FFNSite], keep: Keep) -> AbstractContextManager[None]:
    """Context in which the modules of ``sites`` compute only the neurons that ``keep`` selects."""

    def forward(own: Sequence[FFNSite]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: masked_experts(model, own, keep, Routed.of(args, kwargs, len(own)))

    return other_forwards({model.get_submodule(name): forward(own) for name, own in modules_of(sites).items()})


#: Number of random tokens to route, and least share of choices that a router must reproduce (some are close).
_TOKENS, _LEAST_FOUND = 64, 0.9


@dataclass(frozen=True)
class LinearRouter:
    """Top-``chosen`` routing by scores ``weight x + bias``: ``weight [E, H]``, ``bias [E]`` or None. ``correction
    [E]``, or None: if given, scores are their sigmoid plus ``correction``.
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


class _Stop(Exception):
    """Ends a call early."""


def find_router(block: nn.Module, experts: nn.Module, count: int, beside: Sequence = ()) -> LinearRouter | None:
    """The router of ``experts`` (``count`` of them) in ``block``; None if it is not linear with a top k.

    The block routes random tokens, which ``experts`` do not compute. Each matrix ``[E, H]`` of the block, with and
    without vectors ``[E]``, is compared with its choices. Modules ``beside`` (perhaps in a store) return zeros.
    """
    with other_forwards(dict.fromkeys(beside, torch.zeros_like)):
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


def _try(block: nn.Module, experts: nn.Module, count: int) -> Routed | None:
    """How the block routes random tokens; None if it takes other arguments, or does not choose by token."""
    seen: list[Routed] = []

    def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) + len(kwargs) > 1:
            seen.append(Routed.of(args, kwargs, count))
        raise _Stop

    matrices = [t for t in _around(block, experts) if t.dim() == 2 and t.shape[0] == count]
    if not matrices:
        return None
    generator = torch.Generator().manual_seed(count)
    x_BTH = torch.randn((1, _TOKENS, matrices[0].shape[1]), generator=generator).to(matrices[0])
    hook = experts.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    with hook, torch.no_grad(), suppress(Exception):  # model code may raise anything when called with one tensor
        block(x_BTH)
    return seen[0] if seen and len(seen[0].index_TK) == _TOKENS else None


def _around(block: nn.Module, experts: nn.Module) -> list[torch.Tensor]:
    """The block's float tensors outside its experts, except neurons in a store."""
    inside = {id(t) for t in (*experts.parameters(), *experts.buffers())}
    every = (t for t in (*block.parameters(), *block.buffers()) if id(t) not in inside)
    return [t.detach() for t in every if not isinstance(t, OffloadedParameter) and t.is_floating_point()]


def _candidates(block: nn.Module, experts: nn.Module, shape: tuple[int, int], chosen: int) -> Iterator[LinearRouter]:
    around = _around(block, experts)
    vectors = [None, *(t for t in around if t.shape == shape[:1])]
    for weight in (t for t in around if t.shape == shape):
        for bias, correction in product(vectors, vectors):
            if bias is None or bias is not correction:
                yield LinearRouter(weight, bias, correction, chosen)
