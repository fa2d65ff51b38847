"""``find_sites``: every FFN of a model, with the names of its parameters (design D4, first finder)."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from torch import fx, nn

from torch_pi2.errors import ConfigError, NoFFNFoundError, UnsupportedModelError
from torch_pi2.graph.capture import CapturedGraph, capture
from torch_pi2.graph.experts import expert_sites, find_experts, unknown_experts, without_experts
from torch_pi2.graph.match import Match, Projection, Seen, Stream, match_ffns
from torch_pi2.graph.sites import FFNSite, LinearRef
from torch_pi2.ops.activations import ACTIVATIONS

_log = logging.getLogger("torch_pi2")

#: id of a parameter -> all its fully-qualified names, the first registered first.
Names = Mapping[int, Sequence[str]]


def find_sites(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    on_meta: bool = False,
) -> list[FFNSite]:
    """The model's feed-forward layers in order of execution, whatever its modules are called.

    The model runs once, in eval mode without gradients, on ``args`` and ``kwargs`` (a Hugging Face model needs
    none: see :func:`torch_pi2.graph.example_inputs`). Weights used several times give one site. Each expert of a
    mixture is a site of its own (:mod:`torch_pi2.graph.experts`); with experts, the order is that of registration.

    Args:
        strict: refuse a model in which a layer looks like an FFN but has an activation that the kernels do not
            know. With False such layers are named in a warning of the ``torch_pi2`` logger and left out, as
            long as others were found.
        on_meta: the model is on ``meta`` as a whole (weights of any size are not needed to find their layers).

    Raises:
        NoFFNFoundError: nothing matched; the message lists what was seen.
        UnsupportedModelError: an FFN's activation is unknown, or Dynamo cannot capture the model.
        CalibrationError: inputs are missing or wrong. DeviceError: the model is on ``meta``.
        ConfigError: the model is already in its sparse form.
    """
    from torch_pi2.graph.rewrite import is_optimized

    if is_optimized(model):
        raise ConfigError(
            type(model).__name__,
            expected="a dense model",
            found="one that torch_pi2 has already rewritten",
            fix="Call torch_pi2.restore(model) first.",
        )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    sites: list[FFNSite] = []
    known: set[tuple[int, ...]] = set()
    all_seen: list[Seen] = []
    unknown: list[str] = []
    with without_experts(model):
        graphs = capture(model, args, kwargs, on_meta=on_meta)
    for graph in graphs:
        graph.tensors = {node: t for node, t in graph.tensors.items() if id(t) in names}
        matches, seen = match_ffns(graph.gm, graph.tensors)
        all_seen.append(seen)
        for match in matches:
            weights = tuple(id(graph.tensors[p.weight]) for p in _projections(match))
            if weights not in known:
                known.add(weights)
                sites.append(_site(model, match, graph, names, len(sites)))
        for down, computed in seen.unknown:
            weight = names[id(graph.tensors[down.weight])][0]
            unknown.append(f"{weight.rpartition('.')[0]} (after {computed})")
    unknown = list(dict.fromkeys(unknown))
    if unknown and (strict or not sites):
        raise _unknown_activation(model, unknown)
    if unknown:
        _log.warning("left dense, activation not known: %s", "; ".join(unknown))
    sites = _with_experts(model, sites)
    if sites and (unknown_forms := unknown_experts(model)):
        _log.warning("left dense, experts of an unknown form: %s", "; ".join(unknown_forms))
    if not sites:
        raise _nothing_found(model, all_seen)
    return _with_unique_keys(sites)


def _with_experts(model: nn.Module, sites: list[FFNSite]) -> list[FFNSite]:
    """``sites`` and those of experts, in the order in which their parameters are registered."""
    from dataclasses import replace

    forms = find_experts(model)
    if not forms:
        return sites
    experts = [s for name, form in forms.items() for s in expert_sites(name, form, _class_name(model, name))]
    places = {name: i for i, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    in_order = sorted([*sites, *experts], key=lambda site: places[site.up.weight])  # stable: experts stay together
    return [replace(site, layer=layer) for layer, site in enumerate(in_order)]


def _class_name(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__


def _projections(match: Match) -> list[Projection]:
    gate = [match.gate.projection] if match.gate else []
    return [*gate, match.up.projection, match.down]


def _site(model: nn.Module, match: Match, graph: CapturedGraph, names: Names, layer: int) -> FFNSite:
    parameters = [graph.tensors[node] for p in _projections(match) for node in (p.weight, p.bias) if node is not None]
    chosen = _names_with_deepest_owner([names[id(p)] for p in parameters])
    name_of = {id(parameter): name for parameter, name in zip(parameters, chosen)}
    owner = _common_owner(chosen)

    def ref(stream: Stream) -> LinearRef:
        p = stream.projection
        bias = None if p.bias is None else name_of[id(graph.tensors[p.bias])]
        return LinearRef(name_of[id(graph.tensors[p.weight])], bias, stream.rows)

    down = ref(Stream(match.down))
    return FFNSite(
        key=owner,
        layer=layer,
        activation=match.activation,
        activation_on_up=match.activation_on_up,
        gate=None if match.gate is None else ref(match.gate),
        up=ref(match.up),
        down=down,
        hidden=match.hidden,
        intermediate=match.intermediate,
        owner=owner,
        owner_class=type(model.get_submodule(owner)).__name__,
        inner=_inner_modules(model, match, graph.gm.graph, down.weight.rpartition(".")[0], owner),
        owner_runs=_owner_runs(model, match, owner),
    )


def _common_owner(names: Sequence[str]) -> str:
    """Deepest module that contains all parameters of these names."""
    first, *others = (name.split(".")[:-1] for name in names)
    for other in others:
        first = _shared(first, other)
    return ".".join(first)


def _names_with_deepest_owner(aliases: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """One name per parameter so that they lie closest together (parameters shared by layers have several)."""

    def beside(anchor: str) -> tuple[str, ...]:
        return tuple(max(names, key=lambda name: len(_shared(anchor.split("."), name.split(".")))) for names in aliases)

    candidates = [beside(anchor) for anchor in min(aliases, key=len)]
    return max(candidates, key=lambda names: len([part for part in _common_owner(names).split(".") if part]))


def _shared(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """The parts with which both begin."""
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other))]


def _inner_modules(model: nn.Module, match: Match, graph: fx.Graph, down_module: str, owner: str) -> tuple[str, ...]:
    """Names of the modules in which the whole region is computed; empty if part of it is the owner's own code."""
    stack_of_down = _module_path(match.down.nodes[0])
    if stack_of_down is None or not down_module.endswith(stack_of_down):
        return ()
    # graphs of broken captures start at a submodule: what precedes the path in the parameter's name is missing
    prefix = down_module[: len(down_module) - len(stack_of_down)]
    found: dict[str, None] = {}
    for node in match.region:
        path = _module_path(node)
        name = None if path is None else prefix + path
        if (
            not name
            or name == owner
            or not name.startswith(f"{owner}." if owner else "")
            or down_module.startswith(name)
        ):
            return ()
        found[name] = None
    inside = set(match.region)
    outside = {prefix + path for n in graph.nodes if n not in inside and (path := _module_path(n)) is not None}
    if outside & found.keys():
        return ()
    modules = dict(model.named_modules(remove_duplicate=False))
    return tuple(found) if all(name in modules for name in found) else ()


def _owner_runs(model: nn.Module, match: Match, owner: str) -> bool:
    """Whether every operation of the FFN takes place within a call of the owner's forward."""
    module = model.get_submodule(owner)
    names = [name for name, other in model.named_modules(remove_duplicate=False) if other is module]

    def within(node: fx.Node) -> bool:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            # graphs of broken captures start at a submodule: their paths are the ends of the names
            end = _plain_path(path)
            fits = any(not end or f".{name}".endswith(f".{end}") for name in names)
            if fits and (kind is type(module) or str(kind).endswith(type(module).__qualname__)):
                return True
        return False

    return all(within(node) for node in (*match.inside, *match.down.nodes))


def _module_path(node: fx.Node) -> str | None:
    """Path of the innermost module that a node comes from, without Dynamo's name for the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack or node.op not in ("call_function", "call_method"):
        return None
    return _plain_path(list(stack.values())[-1][0])


def _plain_path(path: Any) -> str:
    path = re.sub(r"\['?(\w+)'?\]", r".\1", re.sub(r"^[LG]\['?\w+'?\]", "", str(path)))
    return str(path).lstrip(".")


def _with_unique_keys(sites: Sequence[FFNSite]) -> list[FFNSite]:
    from dataclasses import replace

    count = Counter(site.owner for site in sites)
    given: Counter[str] = Counter()
    result = []
    for site in sites:
        key = site.owner
        if count[site.owner] > 1 or not key:
            key = f"{key}:{given[site.owner]}"
            given[site.owner] += 1
        result.append(replace(site, key=key))
    return result


def _unknown_activation(model: nn.Module, unknown: Sequence[str]) -> UnsupportedModelError:
    acts = ", ".join(name for name in ACTIVATIONS if name != "identity")
    shown = "; ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
    return UnsupportedModelError(
        f"feed-forward layers of {type(model).__name__}",
        expected=f"act(up), act(gate) * up or act(gate) * act(up) with act one of {acts}",
        found=f"another formula before {shown}",
        fix="This activation is not supported yet; find_sites(..., strict=False) leaves such layers dense.",
    )


def _nothing_found(model: nn.Module, all_seen: Sequence[Seen]) -> NoFFNFoundError:
    leaves = Counter(type(m).__name__ for m in model.modules() if not list(m.children()))
    reached = Counter(name for seen in all_seen for name in seen.blocked_by)
    classes = ", ".join(f"{n} {name}" for name, n in leaves.most_common(8))
    parts = [f"{sum(seen.linears for seen in all_seen)} linear layers", f"modules: {classes or 'none'}"]
    if reached:
        parts.append("going back from the linears one meets " + ", ".join(name for name, _ in reached.most_common(6)))
    refused = _known_unsupported(model)
    if refused:
        parts.append("not supported yet: " + ", ".join(refused))
    return NoFFNFoundError(
        f"feed-forward layers of {type(model).__name__}",
        expected="linear -> activation (* linear) -> linear",
        found="; ".join(parts),
        fix="If it has one, its form is not known yet; see the list of supported forms in the README.",
    )


def _known_unsupported(model: nn.Module) -> list[str]:
    found: dict[str, None] = {}
    for module in model.modules():
        name = type(module).__name__
        if name == "Conv1D":
            found["Conv1D (addmm with weights stored [in, out], as in GPT-2)"] = None
    return [*found, *unknown_experts(model)]
