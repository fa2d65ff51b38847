"""Installing sparse layers in a model without weights, by the strategy that was tried when the folder was written."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from torch_pi2.errors import StaleArtifactError, UnsupportedModelError
from torch_pi2.formats import FLOAT
from torch_pi2.layers.experts import SparseExperts, expert_groups
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import replacements
from torch_pi2.layers.sequence import FusedIdentity
from torch_pi2.rewrite.install import install
from torch_pi2.rewrite.skeleton import put
from torch_pi2.rewrite.strategies import find_strategy
from torch_pi2.types.method import Method
from torch_pi2.types.plan import LayerPlan, Plan

#: Number of experts per module whose weights are read to try the strategy.
TRIED_EXPERTS = 2
#: Names of strategies in files.
_IN_FILES = {"module": "owner", "sequential": "chain", "lazy": "lazy"}
_OF_FILES = {name: strategy for strategy, name in _IN_FILES.items()}


def check_names(model: nn.Module, plan: Plan) -> None:
    """Raises StaleArtifactError: ``plan`` names what ``model`` lacks, or an owner without the layer's parameters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for site in (layer.site for layer in plan.layers):
        owner = site.owner if site.experts is None else site.experts
        named = [(f"parameter {name}", name in parameters) for name in site.parameter_names]
        named += [(f"module {name}", name in modules) for name in (owner, *site.inner)]
        within = all(name.startswith(f"{owner}." if owner else "") for name in site.parameter_names)
        named.append((f"module {owner} that holds all parameters of {site.key}", within))
        for what, good in named:
            if not good:
                fix = "Make a new plan for this model."
                found = f"{type(model).__name__} without one"
                raise StaleArtifactError("plan", expected=f"a model with a {what}", found=found, fix=fix)


def check_sizes(model: nn.Module, plan: Plan) -> None:
    """As :func:`check_names`, also for sizes: the configuration may have changed since the folder was made."""
    check_names(model, plan)
    for group in expert_groups(plan.layers):
        site = group[0].site
        weights = site.weights(model)
        wide, high = (site.intermediate, site.hidden), (site.hidden, site.intermediate)
        for role, weight, wanted in (("up", weights.up, wide), ("down", weights.down, high)):
            if tuple(weight.shape) != wanted:
                expected, found = f"{role} of {list(wanted)}, which its neurons were made for", str(list(weight.shape))
                fix = "Undo the change of config.json, or make the folder anew from the checkpoint with it."
                raise StaleArtifactError(f"config.json, {site.key}", expected=expected, found=found, fix=fix)


def tried_strategy(model: nn.Module, group: Sequence[LayerPlan], lazy: bool) -> str:
    """The strategy that works for a layer, or all experts of one module, by its name in files.

    The layer's parameters must have values; of experts, those of the first ``TRIED_EXPERTS``. ``lazy``: lazy tensors
    are one, slower than the others. Raises UnsupportedModelError: no strategy works.
    """
    site = group[0].site
    ways = [*_IN_FILES] if lazy else [*_IN_FILES][:-1]
    plan = replace(group[0], method=Method.EXACT, n_hot=0)  # which has no predictor
    empty = SparseFFN.empty(site, plan, FLOAT, dtype=model.get_parameter(site.up.weight).dtype) if lazy else None
    try:
        with torch.no_grad():
            return _IN_FILES[find_strategy(model, group, empty, ways, tried=TRIED_EXPERTS)[0]]
    except UnsupportedModelError as error:
        what = f"weights of {site.key or 'the FFN'} ({site.owner_class}) in a folder"
        expected = "a module that computes the feed-forward layer, or a sequence of modules"
        fix = "Move the FFN into a module of its own; in memory, optimize(model, weights=...) runs it as it is."
        raise UnsupportedModelError(what, expected=expected, found=error.found, fix=fix) from None


def strategies_used(model: nn.Module) -> dict[str, str]:
    """Key of each layer (of experts: of their module) -> its strategy by its name in files; lazy ones are left out."""
    replaced = [replacement for _, replacement in replacements(model)]
    sequences = {part.site.key for part in replaced if isinstance(part, FusedIdentity)}
    found = {}
    for part in replaced:
        if isinstance(part, SparseFFN | SparseExperts):
            found[part.site.key] = _IN_FILES["sequential" if part.site.key in sequences else "module"]
    return found


def place(
    model: nn.Module, group: Sequence[LayerPlan], sparse: SparseFFN | SparseExperts, strategy: str = _IN_FILES["module"]
) -> None:
    """Install ``sparse`` for a layer or all experts of a module, which need no values; ``strategy``: known to work."""
    site = group[0].site
    with torch.no_grad():
        _, overrides = find_strategy(model, group, sparse, [_OF_FILES[strategy]], tried=0)
    for name in site.parameter_names:
        if model.get_parameter(name).numel():
            put(model, [name], torch.empty(0, dtype=model.get_parameter(name).dtype))
    install(model, sparse, overrides)
