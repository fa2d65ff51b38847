"""Modules that give way to others, and come back: whatever is put into a model goes through here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from torch_pi2.base.hooks import share_hooks
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import stand_ins
from torch_pi2.layers.standin import StandIn

#: A module that has another, the name under which it does, and what is to be there.
Target = tuple[nn.Module, str, nn.Module]


@dataclass(frozen=True)
class Swap:
    """``original`` gives way to ``stand_in`` wherever it is registered, or only at ``at`` if given."""

    original: nn.Module
    stand_in: StandIn
    at: str | None = None


def everywhere(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> list[Target]:
    """Each key of ``new`` is to give way to its value wherever in ``model`` it is registered."""
    places = ((parent, name, child) for parent in model.modules() for name, child in parent._modules.items())
    return [(parent, name, new[child]) for parent, name, child in places if child is not None and child in new]


def exchange(targets: Sequence[Target]) -> Callable[[], None]:
    """Register the modules of ``targets``; what is returned takes all of it back, as does an exception here."""
    before = [(parent, name, parent._modules[name]) for parent, name, _ in targets]

    def undo() -> None:
        for parent, name, child in before:
            parent._modules[name] = child

    try:
        for parent, name, module in targets:
            parent._modules[name] = module
    except BaseException:  # an interruption
        undo()
        raise
    return undo


def install(model: nn.Module, ffn: SparseFFN | SparseExperts, swaps: Sequence[Swap]) -> None:
    """Register the stand-ins of ``ffn``, then give back the memory of parameters that nothing else uses."""
    site = ffn.site
    wanted = {name for ref in (site.gate, site.up, site.down) if ref for name in (ref.weight, ref.bias) if name}
    site_name = {id(model.get_parameter(name)): name for name in wanted}
    # a layer rewritten before may share a weight with this one: what it stands for counts as in use, too
    earlier = {id(p) for _, _, s in stand_ins(model) for p in s.original.parameters()}
    targets = everywhere(model, {swap.original: swap.stand_in for swap in swaps if swap.at is None})
    for swap in swaps:
        if swap.at is not None:
            parent_name, _, name = swap.at.rpartition(".")
            targets.append((model.get_submodule(parent_name), name, swap.stand_in))
    for swap in swaps:
        parameters = dict(swap.original.named_parameters(remove_duplicate=False))
        names = {local: site_name[id(p)] for local, p in parameters.items() if id(p) in site_name}
        swap.stand_in.stand_for(swap.original, ffn, names)
    for swap in swaps:
        share_hooks(swap.original, swap.stand_in)
    ffn.training = swaps[0].original.training
    if isinstance(ffn, SparseFFN):
        ffn.passes_on = swaps[0].stand_in is ffn and len(swaps) > 1
    if isinstance(ffn, SparseFFN) and swaps[0].stand_in is ffn:
        ffn.only_in_eval = ffn.site.drops == "inside" or (len(swaps) == 1 and bool(ffn.site.drops))
    exchange(targets)
    in_use = earlier | {id(p) for p in model.parameters()}
    running = {id(module) for module in model.modules()}
    for swap in swaps:
        swap.stand_in.silence(module for module in swap.original.modules() if id(module) not in running)
        held = {local: swap.original.get_parameter(local) for local in swap.stand_in._names}
        swap.stand_in.release(tuple(local for local, p in held.items() if id(p) not in in_use))


def put_back(model: nn.Module, lossy: bool = False) -> nn.Module:
    """Undo every :func:`install`; if ``lossy``, quantised layers get the numbers that their rows stand for.

    It needs no record: every stand-in keeps what it stands for.

    Raises:
        ConfigError: a layer is quantised, unless ``lossy``; nothing is changed then.
    """
    places = list(stand_ins(model))
    ours = dict.fromkeys(s for _, _, s in places)
    for stand_in in () if lossy else ours:
        stand_in.check_refill()
    for stand_in in ours:
        stand_in.refill(lossy=lossy)
    exchange([(parent, name, stand_in.original) for parent, name, stand_in in places])
    for stand_in in ours:
        stand_in.unsilence()
    return model
