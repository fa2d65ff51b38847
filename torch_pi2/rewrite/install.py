"""Install sparse layers in a model and take them out. Modules stay where they are; their ``forward`` is replaced."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_pi2.base.lookups import Lookups
from torch_pi2.base.modules import allow_hooks, refuse_hooks
from torch_pi2.base.offloaded import GuardedModules, GuardedParameters, OffloadedParameter, offload, take_back
from torch_pi2.errors import ConfigError
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.lazy import LazyDown
from torch_pi2.layers.of_model import homes

#: Name of the sparse layer in the module that holds the down weight.
NAME = "sparse_ffn"
#: The ``forward`` as installed: accelerate and patches may put another around it.
_FORWARD = "_pi2_forward"


@dataclass(frozen=True)
class Override:
    """``module.forward`` becomes ``forward``, a method of the replacement."""

    module: nn.Module
    forward: Any


def install(model: nn.Module, ffn: SparseFFN | SparseExperts, overrides: Sequence[Override]) -> None:
    """Install ``ffn`` through ``overrides``, and free the memory of parameters that nothing else uses."""
    site = ffn.site
    site_name = {id(model.get_parameter(name)): name for name in site.parameter_names}
    replaced = [override.module for override in overrides]
    running = set(reachable(model, set(replaced)))
    inside = dict.fromkeys(module for root in replaced for module in root.modules())
    in_use = {id(parameter) for module in running for parameter in module._parameters.values()}
    ffn.lookups = Lookups(replaced)
    host = model.get_submodule(site.down.weight.rpartition(".")[0])
    for override in overrides:
        keyword = next(iter(inspect.signature(override.module.forward).parameters), "x")
        override.forward.__self__.keyword = keyword
        override.module.__dict__["forward"] = override.module.__dict__[_FORWARD] = override.forward
    host._modules[NAME] = ffn
    ffn.train(replaced[0].training)
    if isinstance(ffn, SparseFFN) and not isinstance(overrides[-1].forward.__self__, LazyDown):
        ffn.only_in_eval = site.drops == "inside" or (len(overrides) == 1 and bool(site.drops))
    for module in inside:
        names = {local: site_name[id(p)] for local, p in module._parameters.items() if id(p) in site_name}
        if names:
            freed = [local for local in names if id(module._parameters[local]) not in in_use]
            offload(module, names, ffn, freed, shared=module in running)
        if module in running:  # also part of another module
            continue
        if module not in replaced:
            refuse_hooks(module, site.key)
        if module._modules:
            module.__dict__["_modules"] = GuardedModules(module._modules, site.key)


def reachable(module: nn.Module, without: Set[nn.Module]) -> Iterator[nn.Module]:
    """Modules in ``module``, leaving out those in ``without`` and below."""
    seen = set(without)
    stack = [module]
    while stack:
        found = stack.pop()
        if found not in seen:
            seen.add(found)
            yield found
            stack.extend(child for child in found._modules.values() if child is not None)


def uninstall(model: nn.Module, lossy: bool = False) -> nn.Module:
    """Undo every :func:`install`; with ``lossy``, quantised layers become dequantised ones. Raises ConfigError: a layer
    is quantised (unless ``lossy``), or a ``forward`` was patched; nothing is changed then.
    """
    for name, module in model.named_modules():
        installed = vars(module).get(_FORWARD)
        if installed is not None and vars(module).get("forward", installed) != installed:
            what = f"restoring {name or type(model).__name__}"
            found = "another around it (accelerate's hooks, or a patch), which would call the sparse layer"
            fix = "Take it off first (accelerate: remove_hook_from_submodules)."
            raise ConfigError(what, expected="the forward that torch_pi2.optimize gave it", found=found, fix=fix)
    modules = list(model.modules())
    guarded: list[Any] = [module._parameters for module in modules if _is_guarded(module)]
    freed = {id(p.owner) for p in guarded if any(isinstance(v, OffloadedParameter) for v in dict.values(p))}
    for home in homes(model):
        if id(home) in freed and not lossy:
            home.check_float(f"the original weights of {home.site.key}")
    for module in modules:
        if module.__dict__.pop(_FORWARD, None) is not None:
            module.__dict__.pop("forward", None)
        if _is_guarded(module):
            take_back(module)
        if isinstance(module._modules, GuardedModules):
            module.__dict__["_modules"] = dict(module._modules)
        if isinstance(module._modules.get(NAME), SparseFFN | SparseExperts):
            del module._modules[NAME]
        allow_hooks(module)
    return model


def _is_guarded(module: nn.Module) -> bool:
    return isinstance(module._parameters, GuardedParameters) and module._parameters.owner is not None


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> Callable[[], None]:
    """Replace modules of ``model``, keys of ``new``, by its values; the function returned undoes it."""
    places = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    places = [(parent, name, child) for parent, name, child in places if child is not None and child in new]

    def register(module_for: Callable[[Any], Any]) -> None:
        for parent, name, child in places:
            dict.__setitem__(parent._modules, name, module_for(child))  # works for guarded modules, too

    register(new.__getitem__)
    return lambda: register(lambda child: child)
