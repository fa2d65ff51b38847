"""``find_sites``: every FFN of a model, with the names of its parameters (design D4, first finder); :func:`search` also
reports those of unknown form, which stay dense.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import fx, nn

from torch_pi2.base.dtypes import stands_for_another
from torch_pi2.base.fields import argument, checked
from torch_pi2.base.modules import fresh_settings, has_sparse_layers
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.base.progress import log
from torch_pi2.errors import NoFFNFoundError, Pi2Error, UnsupportedModelError
from torch_pi2.graph.capture import CapturedGraph, capture, example_inputs
from torch_pi2.graph.experts import all_experts, expert_lists, expert_sites, without_experts
from torch_pi2.graph.match import Match, Projection, Seen, Tensors, match_ffns
from torch_pi2.graph.operations import op_name
from torch_pi2.graph.skipped import not_reached, skipped_layers
from torch_pi2.ops.activations import ACTIVATIONS, scaled
from torch_pi2.types.site import ExpertsForm, FFNSite, LinearRef

_FSDP = "FullyShardedDataParallel"

#: id of a parameter -> all its fully-qualified names, first registered first.
Names = Mapping[int, Sequence[str]]


@dataclass(frozen=True)
class Found:
    """The FFNs of a model, and those ``left`` dense: name -> reason. ``example``: args and kwargs of a forward; None if
    the model is on ``meta``. ``refused``: the error of :func:`search` if no layer (with ``strict``: not every layer)
    can be made sparse; else None.
    """

    sites: list[FFNSite]
    left: dict[str, str]
    refused: Pi2Error | None = None
    example: tuple[Sequence[Any], Mapping[str, Any]] | None = None


@checked
def find_sites(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    on_meta: bool = False,
) -> list[FFNSite]:
    """The model's feed-forward layers in order of execution, whatever its modules are called.

    The model runs once, in eval mode without gradients, on ``args`` and ``kwargs`` (a Hugging Face model needs none:
    see :func:`torch_pi2.graph.example_inputs`). Weights used several times give one site. Each expert of a mixture is a
    site (:mod:`torch_pi2.graph.experts`); with experts, the order is that of registration.

    Layers that look like an FFN and cannot be made sparse are named in a warning of the ``torch_pi2`` logger.

    Args:
        strict: refuse a model with an FFN whose activation the kernels do not know. Otherwise such layers are left out,
            as long as others can be made sparse.
        on_meta: the whole model is on ``meta`` (values of weights are not needed).

    Raises:
        NoFFNFoundError: nothing matched; the message lists what was seen.
        UnsupportedModelError: an FFN's activation is unknown, or Dynamo cannot capture the model.
        CalibrationError: inputs are missing or wrong. DeviceError: the model is on ``meta``.
        ConfigError: the model is already rewritten or quantised.
    """
    return search(model, args, kwargs, strict=strict, on_meta=on_meta).sites


@fresh_settings()
def search(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
    on_meta: bool = False,
    needed: bool = True,
    warn: bool = True,
) -> Found:
    """As :func:`find_sites`, with what stays dense (``warn``: logged). ``needed``: raise if there is no layer."""
    if has_sparse_layers(model):
        fix = "Call torch_pi2.restore(model) first; one that was quantised is loaded again."
        rewritten = "one that torch_pi2 has already rewritten"
        argument(model, type(model).__name__, fix).wrong("a dense model", rewritten)
    if count := sum(isinstance(parameter, OffloadedParameter) for parameter in model.parameters()):
        fix = "Take the float model; torch_pi2.load_dense(folder) makes one of a quantised folder."
        quantised = f"{count} matrices that torch_pi2 has quantised"
        argument(model, type(model).__name__, fix).wrong("float weights", quantised)
    if any(type(m).__name__ == _FSDP or (type(m) is nn.Linear and m.weight.dim() != 2) for m in model.modules()):
        fix = "Load what its state_dict gives, of all processes, into a model that is not wrapped, and take that."
        argument(model, type(model).__name__, fix).wrong("whole weights", f"those that {_FSDP} has divided")
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    buffer_names = {id(tensor): [name] for name, tensor in model.named_buffers()}
    sites: list[FFNSite] = []
    known: set[tuple[int, ...]] = set()
    all_seen: list[Seen] = []
    unknown: dict[str, str] = {}
    left: dict[str, str] = {}
    if not args and not kwargs:
        kwargs = example_inputs(model)
    experts, unknown_experts = all_experts(model)
    lists = expert_lists(model)
    with without_experts(model, [*experts, *lists]):
        graphs = capture(model, args, kwargs, on_meta=on_meta)
    for graph in graphs:
        buffers = {node: t for node, t in graph.tensors.items() if id(t) in buffer_names}
        graph.tensors = {node: t for node, t in graph.tensors.items() if id(t) in names}
        matches, seen = match_ffns(graph.gm, graph.tensors, buffers)
        all_seen.append(seen)
        for match in matches:
            weights = tuple(id(graph.tensors[p.weight]) for p in match.projections)
            if weights not in known:
                known.add(weights)
                sites.append(_site(model, match, graph, names, len(sites)))
        for projections, reason in (*seen.left, *skipped_layers(matches, seen)):
            left[_owner_of(graph.tensors | buffers, names | buffer_names, projections)] = reason
        for projections, computed in seen.unknown:
            unknown[_owner_of(graph.tensors, names, projections)] = f"another formula, of {computed}"
    reached = {id(tensor) for graph in graphs for tensor in graph.tensors.values()}
    left |= not_reached(model, reached, [*experts, *lists])
    for name, children in lists.items():
        listed, reason = _in_list(model.get_submodule(name), name, children, on_meta)
        sites += listed
        left |= {f"{name}.{child}": reason for child in children if reason}
    sites = _with_experts(model, sites, experts, lists)
    other = unknown_experts | _unusable(model, sites)
    sites = [site for site in sites if site.owner not in other]
    refused: Pi2Error | None = None
    if unknown and (strict or not sites):
        acts = ", ".join(name for name in ACTIVATIONS if name != "identity")
        what, found = f"feed-forward layers of {type(model).__name__}", named(unknown | other, 3)
        fix = "find_sites(..., strict=False) leaves such layers out, as torch_pi2.optimize leaves them dense."
        none = "This formula is not supported yet, and there is no other feed-forward layer: use the model as it is."
        expected = f"act(up), act(gate) * up or act(gate) * act(up) with act one of {acts}"
        refused = UnsupportedModelError(what, expected=expected, found=found, fix=fix if sites else none)
    elif not sites:
        refused = _nothing_found(model, all_seen, left | other)
    if refused is not None and needed:
        raise refused
    owners = {site.owner for site in sites}  # a layer may be left in one graph and found in another
    left = {name: reason for name, reason in (unknown | left | other).items() if name not in owners}
    if left and warn:
        log.warning("left dense: %s", named(left))
    return Found(_with_unique_keys(sites), left, refused, None if on_meta else (args, kwargs or {}))


def named(left: Mapping[str, str], most: int = 8) -> str:
    """Names by reason, for messages; at most ``most`` names per reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    parts = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - most} more" if len(names) > most else ""
        parts.append(f"{', '.join(names[:most])}{more} ({reason})")
    return "; ".join(parts)


def _unusable(model: nn.Module, sites: Sequence[FFNSite]) -> dict[str, str]:
    """Owner -> reason of sites that cannot be read or replaced."""
    found: dict[str, str] = {}
    users: dict[tuple[str, str], list[FFNSite]] = {}
    for site in sites:
        mine: set[tuple[str | None, tuple[int, ...] | None]] = set()
        for ref in site.refs.values():
            if reason := stands_for_another(model.get_parameter(ref.weight)):
                found[site.owner] = reason
            if ref.expert is None:
                for name in (ref.weight, ref.bias):
                    if name and (name, ref.rows) in mine:
                        found[site.owner] = f"{name} stands in two places of it"
                    mine.add((name, ref.rows))
                users.setdefault((site.owner, ref.weight), []).append(site)
    for (owner, weight), shared in users.items():
        if len({id(site) for site in shared}) > 1:
            found[owner] = f"{weight} is shared by {len(shared)} layers of one module"
    return found


def _owner_of(tensors: Tensors, names: Names, projections: Sequence[Projection]) -> str:
    """The module that holds their parameters; for parametrised ones, the module itself."""
    parameters = [node for p in projections for node in p.own if node in tensors]
    chosen = _names_with_deepest_owner([names[id(tensors[node])] for node in parameters])
    owner = _common_owner(chosen)
    return owner.partition(".parametrizations")[0] or ", ".join(chosen)


def _in_list(container: nn.Module, name: str, children: list[str], on_meta: bool) -> tuple[list[FFNSite], str]:
    """The site of each of ``children``, as in the first, which runs alone; or why there is none."""
    first = container.get_submodule(children[0])
    weight = next(part.weight for part in first.modules() if isinstance(part, nn.Linear))
    x_BTH = torch.zeros((2, 8, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    try:
        found = search(first, (x_BTH,), {}, on_meta=on_meta, warn=False)
    except Pi2Error as error:
        return [], f"{type(container).__name__}: experts of an unknown form; {error.found}"
    if [site.owner for site in found.sites] != [""]:
        return [], f"{type(container).__name__}: experts that compute something else as well"

    def within(child: str, ref: LinearRef | None) -> Any:
        bias = None if ref is None or ref.bias is None else f"{child}.{ref.bias}"
        return None if ref is None else replace(ref, weight=f"{child}.{ref.weight}", bias=bias)

    (site,), made = found.sites, []
    for child in (f"{name}.{child}" for child in children):
        refs = {role: within(child, getattr(site, role)) for role in ("gate", "up", "down")}
        inner = tuple(f"{child}.{part}" for part in site.inner)
        made.append(replace(site, key=child, owner=child, inner=inner, **refs))
    return made, ""


def _with_experts(
    model: nn.Module, sites: list[FFNSite], forms: Mapping[str, ExpertsForm], lists: Mapping[str, Any]
) -> list[FFNSite]:
    """``sites`` and those of experts, in order of registration of their parameters."""
    if not forms and not lists:
        return sites
    classes = {name: type(model.get_submodule(name)).__name__ for name in forms}
    experts = [site for name, form in forms.items() for site in expert_sites(name, form, classes[name])]
    places = {name: i for i, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    in_order = sorted([*sites, *experts], key=lambda site: places[site.up.weight])  # stable: experts stay together
    return [replace(site, layer=layer) for layer, site in enumerate(in_order)]


def _site(model: nn.Module, match: Match, graph: CapturedGraph, names: Names, layer: int) -> FFNSite:
    parameters = [graph.tensors[node] for p in match.projections for node in (p.weight, p.bias) if node is not None]
    chosen = _names_with_deepest_owner([names[id(p)] for p in parameters])
    name_of = {id(parameter): name for parameter, name in zip(parameters, chosen)}
    owner = _common_owner(chosen)
    within = _within(model, owner)
    runs = all(map(within, (*match.inside, *match.down.nodes)))
    drops = [node for node in graph.gm.graph.nodes if _is_dropout(node)]

    def named(node: fx.Node) -> str:
        return name_of[id(graph.tensors[node])]

    site = match.site(
        named,
        key=owner,
        layer=layer,
        owner=owner,
        owner_class=type(model.get_submodule(owner)).__name__,
        inner=_inner_modules(model, match, graph.gm.graph, named(match.down.weight).rpartition(".")[0], owner),
        owner_runs=runs,
        # dropout does nothing in the evaluation mode of the capture
        drops="inside" if any(node in match.region for node in drops) else "owner" if any(map(within, drops)) else "",
    )
    if runs and match.scaled is not None:
        last, factor = match.scaled
        if within(last) and not within(last.next):  # the last operation in the owner's forward
            return replace(site, activation=scaled(site.activation, factor))
    return site


def _common_owner(names: Sequence[str]) -> str:
    first, *others = (name.split(".")[:-1] for name in names)
    for other in others:
        first = _shared(first, other)
    return ".".join(first)


def _names_with_deepest_owner(aliases: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """One name per parameter, closest together (parameters shared by layers have several)."""

    def beside(anchor: str) -> tuple[str, ...]:
        return tuple(max(names, key=lambda name: len(_shared(anchor.split("."), name.split(".")))) for names in aliases)

    candidates = [beside(anchor) for anchor in min(aliases, key=len)]
    return max(candidates, key=lambda names: len([part for part in _common_owner(names).split(".") if part]))


def _shared(one: Sequence[str], other: Sequence[str]) -> list[str]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other))]


def _inner_modules(model: nn.Module, match: Match, graph: fx.Graph, down_module: str, owner: str) -> tuple[str, ...]:
    """Names of the modules that compute the whole region; empty if part of it is the owner's own code."""
    stack_of_down = _module_path(match.down.nodes[0])
    if stack_of_down is None or not down_module.endswith(stack_of_down):
        return ()
    # after graph breaks, paths start at a submodule: restore the missing prefix
    prefix = down_module[: len(down_module) - len(stack_of_down)]
    found: dict[str, None] = {}
    for node in match.region:
        path = _module_path(node)
        name = None if path is None else prefix + path
        if not name or name == owner or not name.startswith(f"{owner}." if owner else ""):
            return ()
        if down_module.startswith(name):
            return ()
        found[name] = None
    inside = set(match.region)
    outside = {prefix + path for n in graph.nodes if n not in inside and (path := _module_path(n)) is not None}
    if outside & found.keys():
        return ()
    modules = dict(model.named_modules(remove_duplicate=False))
    return tuple(found) if all(name in modules for name in found) else ()


def _within(model: nn.Module, owner: str) -> Callable[[fx.Node], bool]:
    """Function that tells whether a node is computed within the owner's forward."""
    module = model.get_submodule(owner)
    names = [name for name, other in model.named_modules(remove_duplicate=False) if other is module]
    whole = owner != "" and type(module) is type(model)  # then a frame of this class may be the model's

    def within(node: fx.Node) -> bool:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            # after graph breaks, paths start at a submodule and are the ends of names; none is that of the whole model
            end = _plain_path(path)
            fits = any(f".{name}".endswith(f".{end}") if end else not whole for name in names)
            if fits and (kind is type(module) or str(kind).endswith(type(module).__qualname__)):
                return True
        return False

    return within


def _is_dropout(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    p = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
    return "dropout" in op_name(node.target) and bool(p != 0)


def _module_path(node: fx.Node) -> str | None:
    """Path of the node's innermost module, without Dynamo's name for the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack or node.op not in ("call_function", "call_method"):
        return None
    return _plain_path(list(stack.values())[-1][0])


def _plain_path(path: Any) -> str:
    path = re.sub(r"\['?(\w+)'?\]", r".\1", re.sub(r"^[LG]\['?\w+'?\]", "", str(path)))
    return str(path).lstrip(".")


def _with_unique_keys(sites: Sequence[FFNSite]) -> list[FFNSite]:
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


def _nothing_found(model: nn.Module, all_seen: Sequence[Seen], experts: Mapping[str, str]) -> NoFFNFoundError:
    leaves = Counter(type(m).__name__ for m in model.modules() if not list(m.children()))
    reached = Counter(name for seen in all_seen for name in seen.blocked_by)
    classes = ", ".join(f"{n} {name}" for name, n in leaves.most_common(8))
    parts = [f"{sum(seen.linears for seen in all_seen)} linear layers", f"modules: {classes or 'none'}"]
    if reached:
        parts.append("going back from the linears one meets " + ", ".join(name for name, _ in reached.most_common(6)))
    if experts:
        parts.append(f"not supported yet: {named(experts)}")
    what = f"feed-forward layers of {type(model).__name__}"
    fix = "If it has one, its form is not known yet; docs/MODELS.md lists the supported ones."
    return NoFFNFoundError(what, expected="linear -> activation (* linear) -> linear", found="; ".join(parts), fix=fix)
