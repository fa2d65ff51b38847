"""Whether a plan is of the model that a folder's configuration gives: names, sizes and activations of its layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from torch_pi2.errors import StaleArtifactError
from torch_pi2.graph.activation import identify
from torch_pi2.layers.experts import expert_groups
from torch_pi2.ops.activations import shaped
from torch_pi2.types.plan import Plan
from torch_pi2.types.site import FFNSite, Formula

#: Where the classes come from that a configuration's words for activations mean.
_OF_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_PROBES = 64


def check_names(model: nn.Module, plan: Plan) -> None:
    """Raises StaleArtifactError if ``plan`` names parameters that ``model`` does not have."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for layer in plan.layers:
        for ref in (layer.site.gate, layer.site.up, layer.site.down):
            for name in (ref.weight, ref.bias) if ref else ():
                if name is not None and name not in names:
                    raise StaleArtifactError(
                        "plan",
                        expected=f"a model with a parameter {name}",
                        found=f"{type(model).__name__} without one",
                        fix="Make a new plan for this model.",
                    )


def check_fits(model: nn.Module, plan: Plan) -> None:
    """As :func:`check_names`, and sizes and activations, of a ``model`` without weights: nothing else would tell.

    An activation is told by the modules of activations in a layer's owner, which configurations choose; code of the
    owner's own is not looked at, nor are numbers of activations.

    Raises:
        StaleArtifactError: the configuration was changed since the folder was made.
    """
    check_names(model, plan)
    known: dict[str, str] = {}
    for group in expert_groups(plan.layers):
        site = group[0].site
        weights = site.weights(model)
        wide, high = (site.intermediate, site.hidden), (site.hidden, site.intermediate)
        for role, weight, wanted in (("up", weights.up, wide), ("down", weights.down, high)):
            if tuple(weight.shape) != wanted:
                raise _changed(site, f"{role} of {list(wanted)}", str(list(weight.shape)))
        base, found = shaped(site.activation), set[str]()
        for module in _activations(model, site):
            if repr(module) not in known:
                known[repr(module)] = _activation_of(module)
            found |= {known[repr(module)]} - {""}
        if base is not None and found and base.base not in found:
            raise _changed(site, base.base, " and ".join(sorted(found)))


def _activations(model: nn.Module, site: FFNSite) -> Iterator[nn.Module]:
    owner = model.get_submodule(site.experts or site.owner)
    for module in owner.modules():
        if type(module).__module__ in _OF_ACTIVATIONS and not [*module.parameters(), *module.buffers()]:
            yield module


def _activation_of(module: nn.Module) -> str:
    """Its name among ours, or of its class; empty: it changes nothing, or looks at several numbers at a time."""
    x = torch.linspace(-6, 6, _PROBES)
    with torch.no_grad():
        y, apart = module(x), torch.cat([module(one) for one in x.split(1)])
    if not torch.allclose(y, apart, atol=1e-5) or torch.equal(x, y):
        return ""
    found = identify(lambda streams: module(streams[0]), [(2, _PROBES)], _PROBES)
    known = shaped(found.activation) if isinstance(found, Formula) else None
    return type(module).__name__ if known is None else known.base


def _changed(site: FFNSite, expected: str, found: str) -> StaleArtifactError:
    return StaleArtifactError(
        f"config.json, {site.key}",
        expected=f"{expected}, which its neurons were made for",
        found=found,
        fix="Undo the change of config.json, or make the folder anew from the checkpoint with it.",
    )
