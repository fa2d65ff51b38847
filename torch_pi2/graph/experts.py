"""Mixtures of experts: modules that hold all experts of a block in two 3-D parameters, and the sites in them.

Structure says which modules these are, not names: parameters ``gate_up_proj [E, 2I, H]`` (gate rows first) and
``down_proj [E, H, I]`` and no others, an activation that :mod:`torch_pi2.graph.activation` recognises, and
``forward(hidden_states, top_k_index, top_k_weights)``, as the experts of transformers have. That their forward computes
what these say is seen on random input before one is replaced (:mod:`torch_pi2.graph.rewrite`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.graph.activation import Formula, identify
from torch_pi2.graph.sites import FFNSite, LinearRef

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
#: Tokens to probe with, and experts per token.
_PROBE_TOKENS, _PROBE_CHOICES = 24, 2


@dataclass(frozen=True)
class ExpertsForm:
    """A module of experts: their number E, I neurons each, H; ``activation`` and ``on_up`` as in an ``FFNSite``."""

    experts: int
    intermediate: int
    hidden: int
    activation: str
    on_up: bool


def looks_like_experts(module: nn.Module) -> bool:
    """Whether ``module`` has two parameters of as many matrices, and is no convolution."""
    own = dict(module.named_parameters(recurse=False))
    counts = Counter(p.shape[0] for p in own.values() if p.dim() == 3)
    many = any(n > 1 and times > 1 for n, times in counts.items())
    return (many or set(own) == {_GATE_UP, _DOWN}) and "conv" not in type(module).__name__.lower()


def experts_form(module: nn.Module) -> ExpertsForm | str:
    """The form of ``module``, for which :func:`looks_like_experts` holds; or why it has none that is known."""
    own = dict(module.named_parameters(recurse=False))
    if set(own) != {_GATE_UP, _DOWN}:
        return f"parameters {', '.join(sorted(own))}"
    more = [n for n, _ in (*module.named_parameters(), *module.named_buffers()) if n not in own]
    if more:
        return f"{more[0]} besides the experts"
    first, last = own[_GATE_UP].shape, own[_DOWN].shape
    fits = len(first) == len(last) == 3 and first == (last[0], 2 * last[2], last[1])
    if not fits or getattr(module, "is_transposed", False):
        return f"{_GATE_UP} {list(first)} and {_DOWN} {list(last)}, transposed or of other sizes"
    arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if arguments != ARGUMENTS:
        return f"forward({', '.join(arguments)})"
    experts, hidden, intermediate = last
    formula = _formula(module)
    if formula is None:
        return f"activation {getattr(module, 'act_fn', None)!r}"
    return ExpertsForm(experts, intermediate, hidden, formula.activation, formula.on_up)


def _formula(module: nn.Module) -> Formula | None:
    """What happens between gate, up and down; None if it is not known."""
    act_fn = getattr(module, "act_fn", None)
    if not callable(act_fn):
        return None
    found = identify(lambda probes: act_fn(probes[0]) * probes[1], [(8, 64), (8, 64)], 64)
    return found if isinstance(found, Formula) and found.gate == 0 else None


def find_experts(model: nn.Module) -> dict[str, ExpertsForm]:
    """Name -> form of the modules of experts whose form is known, in the order of registration."""
    found: dict[str, ExpertsForm] = {}
    for name, module in model.named_modules():
        form = experts_form(module) if name and looks_like_experts(module) else ""
        if isinstance(form, ExpertsForm):
            found[name] = form
    return found


def unknown_experts(model: nn.Module) -> list[str]:
    """The classes of modules that look like experts and whose form is not known, with the reason."""
    found: dict[str, None] = {}
    for module in model.modules():
        form = experts_form(module) if looks_like_experts(module) else ""
        if form and isinstance(form, str):
            found[f"{type(module).__name__} (experts stacked in one 3-D tensor; {form})"] = None
    return list(found)


def check_known_experts(what: str, model: nn.Module) -> None:
    """Raises UnsupportedModelError, by name, if a module of experts in ``model`` has no form that is known."""
    unknown = unknown_experts(model)
    if unknown:
        raise UnsupportedModelError(
            what,
            expected=f"experts with {_GATE_UP} [experts, 2 I, H], {_DOWN} [experts, H, I] and a known activation",
            found="; ".join(unknown),
            fix="Such experts are not supported yet; keep the float weights.",
        )


def expert_sites(name: str, form: ExpertsForm, owner_class: str, layer: int = 0) -> list[FFNSite]:
    """The sites of the module of experts ``name``, numbered from ``layer`` on."""
    n = form.intermediate
    return [
        FFNSite(
            key=f"{name}.{expert}",
            layer=layer + expert,
            activation=form.activation,
            activation_on_up=form.on_up,
            gate=LinearRef(f"{name}.{_GATE_UP}", rows=(0, n), expert=expert),
            up=LinearRef(f"{name}.{_GATE_UP}", rows=(n, 2 * n), expert=expert),
            down=LinearRef(f"{name}.{_DOWN}", expert=expert),
            hidden=form.hidden,
            intermediate=n,
            owner=f"{name}.{expert}",
            owner_class=owner_class,
        )
        for expert in range(form.experts)
    ]


class _Passed(nn.Module):
    """In the place of experts while a model is only looked at: which layers it calls does not depend on values."""

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return hidden_states.clone()


@contextmanager
def without_experts(model: nn.Module) -> Iterator[None]:
    """The modules of experts whose form is known pass their input on: their own code is no graph, and needs values."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    known = {id(model.get_submodule(name)) for name in find_experts(model)}
    for parent in list(model.modules()):
        for local, child in parent._modules.items():
            if child is not None and id(child) in known:
                replaced.append((parent, local, child))
    try:
        for parent, local, _ in replaced:
            parent._modules[local] = _Passed()
        yield
    finally:
        for parent, local, child in replaced:
            parent._modules[local] = child


#: Arguments of a module of experts, and what it makes of them.
ExpertsProbe = tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def probe_experts(model: Any, sites: Sequence[FFNSite]) -> ExpertsProbe:
    """Random tokens over all experts of one module, by random weights, and what the sites say comes out."""
    from torch_pi2.runtime.ffn import dense_reference

    first = sites[0]
    count, dtype = len(sites), first.weights(model).up.dtype
    choices = min(_PROBE_CHOICES, count)
    generator = torch.Generator().manual_seed(first.layer)
    tokens = max(_PROBE_TOKENS, -(-count // choices))
    x_TH = torch.randn((tokens, first.hidden), generator=generator).to(dtype)
    # every expert has a turn, and no token one of them twice
    mixed = torch.randperm(count, generator=generator)
    index_TK = mixed[torch.arange(tokens * choices).reshape(tokens, choices) % count]
    routing_TK = (torch.rand((tokens, choices), generator=generator) + 0.1).to(dtype)
    y_TH = torch.zeros((tokens, first.hidden))
    for expert, site in enumerate(sites):
        where_T, which_T = torch.where(index_TK == expert)
        if len(where_T):
            made = dense_reference(site, site.weights(model), x_TH[where_T]).float()
            y_TH.index_add_(0, where_T, made * routing_TK[where_T, which_T, None].float())
    return (x_TH, index_TK, routing_TK), y_TH.to(dtype)
