"""A forward of the whole model with its feed-forward layers replaced, compared with one without, before the rewrite.

The replacements compute with the model's own weights, which everything else finds hidden, as in an optimised model. So
what differs is code: what a layer's module does besides, or code outside that reads its parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_pi2.base.lookups import Lookups
from torch_pi2.base.modules import evaluating, other_forwards
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.base.progress import log
from torch_pi2.graph.experts import dense_experts
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.rewrite.install import Override, reachable
from torch_pi2.rewrite.strategies import as_it_was, find_strategy
from torch_pi2.types.plan import LayerPlan
from torch_pi2.types.site import FFNWeights, dense_reference

#: Most numbers of a result that are compared; more are thinned out.
_MOST = 1 << 24
#: Largest difference of results, relative to the largest, that is rounding.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}

Group = Sequence[LayerPlan]


class _Dense(SparseFFN):
    """A layer that computes with the model's own ``weights_now``."""

    in_memory = False
    weights_now: FFNWeights

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return dense_reference(self.site, self.weights_now, x)

    def projection(self, role: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return getattr(self.weights_now, role), getattr(self.weights_now, f"bias_{role}")


class _DenseExperts(SparseExperts):
    in_memory = False
    weights_now: list[FFNWeights]

    def compute(self, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        return dense_experts(self.sites, self.weights_now, x, index, routing)


def changed_by(model: nn.Module, groups: Sequence[Group], strategies: Mapping, example: Any) -> dict[str, str]:
    """Key of the first layer of a group -> how the model's results on ``example``, args and kwargs, change with it."""
    if not groups:
        return {}
    with as_it_was(model), evaluating(model):
        wanted = _results(model, example)
        counted: dict[str, str] = {}

        def problem(some: Sequence[Group]) -> str:
            with _replaced(model, some, strategies) as looked_up:
                try:
                    return _difference(_results(model, example), wanted)
                except Exception as error:
                    return f"raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                finally:
                    changed = {key: lookups.changed() for key, lookups in looked_up.items()}
                    how = "{}, which its code looks up, changes in each call"
                    counted.update({key: how.format(name) for key, name in changed.items() if name})

        known, together = -1, ""
        while len(counted) > known:  # what stays dense may change what others look up
            known, groups = len(counted), [group for group in groups if group[0].site.key not in counted]
            together = problem(groups)
        if not together:
            return counted
        if _difference(_results(model, example), wanted):
            log.warning("%s gives other results each time: not compared with the sparse model", type(model).__name__)
            return counted
        alone = {group[0].site.key: why for group in groups if (why := problem([group]))}
        raised = together.startswith("raises")
        return counted | (alone if alone or not raised else {group[0].site.key: together for group in groups})


@contextmanager
def _replaced(model: nn.Module, groups: Sequence[Group], strategies: Mapping[str, str]) -> Iterator[dict[str, Lookups]]:
    """Yields what the replaced code of each group looks up."""
    found = {group[0].site.key: _overrides(model, group, strategies) for group in groups}
    overrides = [override for some in found.values() for override in some]
    modules = {override.module for override in overrides}
    looked_up = {key: Lookups(override.module for override in some) for key, some in found.items()}
    in_use = {id(p) for module in reachable(model, modules) for p in module._parameters.values()}
    own = {id(model.get_parameter(name)) for group in groups for y in group for name in y.site.parameter_names}
    parts = [part for root in modules for part in root.modules()]
    held = [(part, name, p) for part in parts for name, p in part._parameters.items() if p is not None]
    hidden = [(part, name, parameter) for part, name, parameter in held if id(parameter) in own - in_use]
    with other_forwards({override.module: override.forward for override in overrides}):
        try:
            for part, name, parameter in hidden:
                part._parameters[name] = OffloadedParameter.make(name, tuple(parameter.shape), parameter.dtype)
            yield looked_up
        finally:
            for part, name, parameter in hidden:
                part._parameters[name] = parameter


def _overrides(model: nn.Module, group: Group, strategies: Mapping[str, str]) -> list[Override]:
    site = group[0].site
    weights = [layer.site.weights(model) for layer in group]
    parts = [_Dense.empty(layer.site, layer, "float", dtype=own.up.dtype) for layer, own in zip(group, weights)]
    sparse: Any = parts[0] if site.experts is None else _DenseExperts(parts, len(parts)).eval()
    sparse.weights_now = weights[0] if site.experts is None else weights
    return find_strategy(model, group, sparse, [strategies[site.key]], tried=0)[1]


def _results(model: nn.Module, example: tuple[Any, Any]) -> list[torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, tuple(example))
        found = [t for t in tree_leaves(model(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    thin = [t.flatten()[:: -(-t.numel() // _MOST) or 1] for t in found if t.is_floating_point()]
    return [torch.where(t.isfinite(), t, 0.0) for t in thin]


def _difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str:
    """Empty if they are the same but for rounding."""
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return "results of other shapes"
    for one, other in zip(found, wanted):
        scale = float(other.abs().max()) if other.numel() else 0.0
        off = float((one - other).abs().max()) if other.numel() else 0.0
        if not (off <= _ROUNDING.get(other.dtype, 1e-3) * scale or torch.equal(one, other)):
            return f"results change by {off / scale:.1e}" if scale else "results change"
    return ""
