"""An FX pass that replaces feed-forward layers of a Dynamo graph by ``pi2::sparse_ffn``.

It runs before AOTAutograd, where an FFN is still a few linears and weights are the model's own parameters. Stacked
experts stay dense: :func:`torch_pi2.optimize` makes them sparse before a model is compiled.
"""

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.progress import warn_once
from torch_pi2.errors import DeviceError, DtypeError, NonFiniteError, StaleArtifactError
from torch_pi2.graph.match import Match, match_ffns
from torch_pi2.graph.skipped import skipped_layers
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.gpu import on_gpu
from torch_pi2.ops import load
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.rewrite.rewrite import predictor_tensors
from torch_pi2.types.method import Method
from torch_pi2.types.plan import LayerPlan, Plan, weights_hash
from torch_pi2.types.site import FFNSite


@dataclass(frozen=True)
class GraphLayer:
    """A feed-forward layer in a graph. ``site``: with the names of ``parameters``. ``x``: its input. ``nodes``: those
    that compute it, in order. ``result``: the one that others use.
    """

    name: str
    site: FFNSite
    parameters: dict[str, fx.Node]
    x: fx.Node
    nodes: list[fx.Node]
    result: fx.Node

    @property
    def keeps_shape(self) -> bool:
        """Whether it returns its input's shape and dtype. Sizes are compared as symbols, which adds no guards."""
        x, y = (node.meta.get("example_value") for node in (self.x, self.result))
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.dtype != y.dtype:
            return False
        return [str(size) for size in x.shape] == [str(size) for size in y.shape]


_SAMPLE = 32
#: Version, address and sample of a parameter.
_Stamp = tuple[int, int, tuple[float, ...]]


@dataclass
class _Packed:
    """A sparse layer with the state of the parameters it was made from.

    ``made_from`` keeps plan and predictor alive, because the cache is keyed by their ids. Parameters are weak
    references: they tell whether an id belongs to another parameter now.
    """

    ffn: SparseFFN
    names: tuple[str, ...]
    stamps: list[_Stamp]
    made_from: tuple[Any, ...]
    parameters: list[weakref.ref[torch.Tensor]]

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        return all(ref() is parameter for ref, parameter in zip(self.parameters, parameters, strict=True))

    def refresh(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copy changed parameters into the neurons, which stay the same tensors: compiled code holds them."""
        stamps = [_stamp(parameter) for parameter in parameters]
        if stamps != self.stamps:
            for name, parameter in zip(self.names, parameters):
                self.ffn.assign(name, parameter.detach())
            self.stamps = stamps


def _stamp(parameter: torch.Tensor) -> _Stamp:
    version = 0 if parameter.is_inference() else parameter._version
    seen = () if on_gpu(parameter) else tuple(_sample(parameter.detach()).tolist())  # no synchronisation on a GPU
    return version, parameter.data_ptr(), seen


def _sample(values: torch.Tensor) -> torch.Tensor:
    """Numbers of a parameter from rows and columns far apart."""
    count = min(_SAMPLE, values.numel())
    if not values.is_contiguous():
        return values[torch.unravel_index(torch.linspace(0, values.numel() - 1, count).long(), values.shape)]
    return values.as_strided((count,), (max(1, values.numel() // max(1, count) - 1),), values.storage_offset())


#: down weight -> (ids of parameters, plan and predictor) -> neurons; entries go with the model.
_packed: Any = WeakTensorKeyDictionary()


@dataclass
class SparseCall:
    """A sparse layer in one graph: positions of its dense parameters among the inputs, and the inputs it adds."""

    packed: _Packed
    positions: list[int]
    extra: list[torch.Tensor]


def weights_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, torch.Tensor]:
    """Placeholders that are parameters or buffers of the model, with their tensors."""
    found = {}
    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), example_inputs):
        source = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
        name = source() if callable(source) else str(source)
        if isinstance(tensor, torch.Tensor) and ("_parameters" in name or "_buffers" in name):
            found[node] = tensor
    return found


def our_ops(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and "pi2." in str(node.target)]


@fresh_settings()
def make_sparse(
    gm: fx.GraphModule, example_inputs: Sequence[Any], plan: Plan | None, predictors: Mapping[str, Any]
) -> list[SparseCall]:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    tensors = {n: t for n, t in zip(placeholders, example_inputs) if isinstance(t, torch.nn.Parameter)}
    matches, seen = match_ffns(gm, tensors, weights_of(gm, example_inputs))
    stacked = list(dict.fromkeys(_name(n).rpartition(".")[0] for n, t in tensors.items() if t.dim() == 3))
    for name in stacked:
        warn_once(f"{name} stays dense: stacked experts need torch_pi2.optimize before torch.compile")
    if not matches and not seen.unknown and not our_ops(gm) and not stacked:
        warn_once("a graph without feed-forward layers is left to Inductor (torch_pi2.optimize sees whole models)")
    for projections, computed in seen.unknown:
        warn_once(f"{_name(projections[-1].weight)} stays dense: another formula, of {computed}")
    # optimize() has reported the layers left in a model that it rewrote
    for projections, reason in (*seen.left, *([] if our_ops(gm) else skipped_layers(matches, seen))):
        warn_once(f"{_name(projections[-1].own[-1])} stays dense: {reason}")
    position = {node: index for index, node in enumerate(placeholders)}
    chosen = [_planned(layer, plan) for layer in map(_of_match, matches)]
    if plan is not None:
        _check_plan(plan, chosen, tensors)
    sparse = []
    no_zeros: dict[str, list[str]] = {}
    replaced: dict[fx.Node, fx.Node] = {}  # an FFN may be the input of the next one
    for layer, planned in chosen:
        if planned is None and not exact_zeros(activation := layer.site.activation):
            no_zeros.setdefault(activation, []).append(layer.name)
            continue
        if not layer.keeps_shape:
            warn_once(f"{layer.name} stays dense: its output has another shape or dtype than its input")
            continue
        try:
            packed = _pack(layer, planned, tensors, predictors)
        except (DeviceError, DtypeError, NonFiniteError) as error:
            warn_once(str(error))
            continue
        extra = _replace(gm, layer, packed.ffn, replaced)
        sparse.append(SparseCall(packed, [position[node] for node in layer.parameters.values()], extra))
    for activation, names in no_zeros.items():
        why = "layers with {} stay dense without a plan: no output of theirs is exactly zero ({})"
        warn_once(why.format(activation, ", ".join(names) if len(names) < 9 else f"{names[0]} to {names[-1]}"))
    if sparse:
        # no eliminate_dead_code(): it would remove y.mul_(2) where the result is unused; AOTAutograd handles this
        gm.graph.lint()
        gm.recompile()
    return sparse


def _of_match(match: Match) -> GraphLayer:
    parameters: dict[str, fx.Node] = {}  # under names independent of the graph; a fused one has the first role's
    for role, projection in zip(("gate", "up", "down") if match.gate else ("up", "down"), match.projections):
        if projection.weight not in parameters.values():
            parameters[f"{role}.weight"] = projection.weight
        if projection.bias is not None and projection.bias not in parameters.values():
            parameters[f"{role}.bias"] = projection.bias
    name, name_of = _name(match.down.weight), {node: name for name, node in parameters.items()}
    site = match.site(name_of.__getitem__, key=name.rpartition(".")[0], layer=0, owner="")
    return GraphLayer(name, site, parameters, match.x, [*match.inside, *match.down.nodes], match.down.node)


def _pack(
    layer: GraphLayer, planned: LayerPlan | None, tensors: Mapping[fx.Node, torch.Tensor], predictors: Mapping
) -> _Packed:
    load()
    parameters, site = [tensors[node] for node in layer.parameters.values()], layer.site
    predictor = None if planned is None else predictors.get(planned.site.key)
    key: tuple[Any, ...] = (*map(id, parameters), *((ref.rows, ref.expert) for ref in site.refs.values()))
    key += (site.activation, site.activation_on_up, id(planned), id(predictor))
    shared = _packed.setdefault(tensors[layer.parameters[site.down.weight]], {})
    if key not in shared or not shared[key].is_of(parameters):
        model = _holder(dict(zip(layer.parameters, (p.detach().cpu() if on_gpu(p) else p for p in parameters))))
        order = torch.arange(site.intermediate, dtype=torch.int32)
        plan = LayerPlan(site, Method.EXACT, 0, order) if planned is None else replace(planned, site=site)
        ffn = SparseFFN(site, site.weights(model), plan, *predictor_tensors(predictor))
        ffn.eval().to(parameters[0].device)
        stamps, references = [_stamp(p) for p in parameters], [weakref.ref(p) for p in parameters]
        shared[key] = _Packed(ffn, tuple(layer.parameters), stamps, (planned, predictor), references)
    packed: _Packed = shared[key]
    packed.refresh(parameters)
    return packed


def _holder(parameters: Mapping[str, torch.Tensor]) -> Any:
    """A stand-in for a model, sufficient for :meth:`FFNSite.weights`."""
    return SimpleNamespace(get_parameter=parameters.__getitem__)


def further_input(gm: fx.GraphModule, tensor: torch.Tensor, fake_mode: Any) -> fx.Node:
    """A new placeholder for ``tensor``, after all others."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(placeholders[-1]):
        node = gm.graph.placeholder(f"pi2_tensor_{len(placeholders)}")
    node._dynamo_source = None  # what AOTAutograd expects of non-user inputs
    node.meta["example_value"] = fake_mode.from_tensor(tensor, static_shapes=True)
    return node


def _replace(gm: fx.GraphModule, layer: GraphLayer, ffn: Any, replaced: dict[fx.Node, fx.Node]) -> list[torch.Tensor]:
    """Replace a layer by an operator; returns further inputs of the graph. ``replaced``: results of earlier layers."""
    extra: list[torch.Tensor] = []
    fake_mode = layer.x.meta["example_value"].fake_mode

    def given(tensor: torch.Tensor | None) -> fx.Node | None:
        if tensor is None:
            return None
        extra.append(tensor)
        return further_input(gm, tensor, fake_mode)

    arguments: list[Any] = [replaced.get(layer.x, layer.x), *map(given, ffn.tensors())]
    operator: Any = torch.ops.pi2.sparse_ffn.default
    if ffn.has_predictor:
        tensors, *how = ffn.asked()
        operator = torch.ops.pi2.predicted_ffn.default
        arguments += [[given(t) for t in tensors], *how]
    else:
        arguments.append(None)  # no mask
    *settings, own = ffn.settings(ffn.n_hot, ffn.threshold)
    arguments += [*settings, given(own)]
    with gm.graph.inserting_before(layer.result):
        node = gm.graph.call_function(operator, tuple(arguments))
    node.meta = dict(layer.result.meta)
    replaced[layer.result] = node
    layer.result.replace_all_uses_with(node)
    for old in reversed(layer.nodes):
        gm.graph.erase_node(old)
    return extra


def _name(parameter: fx.Node) -> str:
    """Name of a parameter relative to the compiled frame, e.g. ``model.layers.0.mlp.up.weight``."""
    source = getattr(parameter.meta.get("grapharg"), "source", None)
    text = str(getattr(source, "name", parameter.name)) if source is not None else parameter.name
    parts = [p for pair in re.findall(r"\['?(\w+)'?\]|\.(\w+)", text) for p in pair if p]
    if not parts:
        return parameter.name
    return ".".join(p for p in parts[1:] if p not in ("_modules", "_parameters", "_orig_mod"))


def _planned(layer: GraphLayer, plan: Plan | None) -> tuple[GraphLayer, LayerPlan | None]:
    """The layer of the plan with this down weight, with the same matrix first; inner frames know a name's end."""
    if plan is None:
        return layer, None
    name = _name(layer.parameters[layer.site.down.weight])
    names = [f".{planned.site.down.weight}" for planned in plan.layers]
    found = [y for y, own in zip(plan.layers, names) if own.endswith(f".{name}") or f".{name}".endswith(own)]
    exact = [planned for planned in found if planned.site.down.weight == name] or found
    if len(exact) != 1:
        warn_once(
            f"{name} fits {len(exact)} layers of the plan, so it runs without it"
            + ("; the graph is broken inside the model, use torch_pi2.optimize before torch.compile" if exact else "")
        )
        return layer, None
    planned = exact[0]
    site = layer.site.swapped() if planned.site.up_first and layer.site.gated else layer.site
    if _form(site) != _form(planned.site):
        raise _stale(name, "{} -> {} {}".format(*_form(site)))
    return replace(layer, site=site), planned


def _form(site: FFNSite) -> tuple[Any, ...]:
    return site.hidden, site.intermediate, site.activation, site.activation_on_up, site.gated


def _check_plan(
    plan: Plan, chosen: Sequence[tuple[GraphLayer, LayerPlan | None]], tensors: Mapping[fx.Node, torch.Tensor]
) -> None:
    """Compare the hash of the weights if the graph has the whole model; shapes were compared before."""
    by_name: dict[str, torch.Tensor] = {}
    for found, planned in chosen:
        for role, ref in planned.site.refs.items() if planned is not None else ():
            own = found.site.refs[role]
            by_name[ref.weight] = tensors[found.parameters[own.weight]]
            if ref.bias is not None and own.bias is not None:
                by_name[ref.bias] = tensors[found.parameters[own.bias]]
    model = _holder(by_name)
    try:
        found_hash = weights_hash(model, [layer.site for layer in plan.layers])
    except KeyError:
        return
    if found_hash != plan.model_hash:
        raise _stale("the model's FFN weights", found_hash[:12], plan.model_hash[:12])


def _stale(what: str, found: str, expected: str = "what the plan was made from") -> StaleArtifactError:
    fix = "Make a new plan for this model (torch_pi2.optimize)."
    return StaleArtifactError(f"plan for {what}", expected=expected, found=found, fix=fix)
