"""An FX pass that replaces feed-forward layers of a Dynamo graph by ``pi2::sparse_ffn``.

It runs before AOTAutograd, where an FFN is still a few linears and weights are the model's own parameters.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.progress import warn_once
from torch_pi2.errors import DeviceError, DtypeError, NonFiniteError, StaleArtifactError
from torch_pi2.graph.match import Match, Projection, match_ffns
from torch_pi2.graph.skipped import skipped_layers
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.gpu import on_gpu
from torch_pi2.ops import load
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.rewrite.rewrite import predictor_tensors
from torch_pi2.types.method import Method
from torch_pi2.types.plan import LayerPlan, Plan, weights_hash

#: Numbers of a parameter compared before each call, to notice changes: a few microseconds.
_SAMPLE = 32
#: Version, address and sample of a parameter.
_Stamp = tuple[int, int, tuple[float, ...]]


# --- neurons, shared by all graphs over the same weights ---


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


# --- the graph ---


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
    if not matches and not seen.unknown and not our_ops(gm):
        warn_once("a graph without feed-forward layers is left to Inductor")
    for projections, computed in seen.unknown:
        warn_once(f"{_name(projections[-1].weight)} stays dense: another formula, of {computed}")
    # optimize() has reported the layers left in a model that it rewrote
    for projections, reason in (*seen.left, *([] if our_ops(gm) else skipped_layers(matches, seen))):
        warn_once(f"{_name(projections[-1].own[-1])} stays dense: {reason}")
    position = {node: index for index, node in enumerate(placeholders)}
    chosen = [_planned(match, plan) for match in matches]
    if plan is not None:
        _check_plan(plan, chosen, tensors)
    sparse = []
    replaced: dict[fx.Node, fx.Node] = {}  # an FFN may be the input of the next one
    for match, layer in chosen:
        if layer is None and not exact_zeros(match.activation):
            warn_once(f"layers with {match.activation} stay dense without a plan: no output of theirs is exactly zero")
            continue
        if not _keeps_shape(match):
            warn_once(f"{_name(match.down.weight)} stays dense: its output has another shape or dtype than its input")
            continue
        nodes = _parameter_nodes(match)
        try:
            packed = _pack(match, nodes, tensors, layer, predictors)
        except (DeviceError, DtypeError, NonFiniteError) as error:
            warn_once(str(error))
            continue
        extra = _replace(gm, match, packed.ffn, replaced)
        sparse.append(SparseCall(packed, [position[node] for node in nodes.values()], extra))
    if sparse:
        # no eliminate_dead_code(): it would remove y.mul_(2) where the result is unused; AOTAutograd handles this
        gm.graph.lint()
        gm.recompile()
    return sparse


def _keeps_shape(match: Match) -> bool:
    """Whether the FFN returns its input's shape and dtype. Sizes are compared as symbols, which adds no guards."""
    x, y = match.x.meta.get("example_value"), match.down.node.meta.get("example_value")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.dtype != y.dtype:
        return False
    return [str(size) for size in x.shape] == [str(size) for size in y.shape]


def _parameter_nodes(match: Match) -> dict[str, fx.Node]:
    """Parameters of a match under names independent of the graph; a fused one has the first role's name."""
    found: dict[str, fx.Node] = {}
    for role, projection in _roles(match):
        if projection.weight not in found.values():
            found[f"{role}.weight"] = projection.weight
        if projection.bias is not None and projection.bias not in found.values():
            found[f"{role}.bias"] = projection.bias
    return found


def _roles(match: Match) -> list[tuple[str, Projection]]:
    gate = [("gate", match.gate.projection)] if match.gate else []
    return [*gate, ("up", match.up.projection), ("down", match.down)]


def _pack(
    match: Match,
    nodes: Mapping[str, fx.Node],
    tensors: Mapping[fx.Node, torch.Tensor],
    layer: LayerPlan | None,
    predictors: Mapping[str, Any],
) -> _Packed:
    load()
    parameters = [tensors[node] for node in nodes.values()]
    rows = None if match.gate is None else match.gate.rows
    predictor = None if layer is None else predictors.get(layer.site.key)
    key = (*map(id, parameters), rows, match.activation, match.activation_on_up, id(layer), id(predictor))
    shared = _packed.setdefault(tensors[match.down.weight], {})
    if key not in shared or not shared[key].is_of(parameters):
        name_of = {node: name for name, node in nodes.items()}
        where = _name(match.down.weight).rpartition(".")[0]
        site = match.site(name_of.__getitem__, key=where, layer=0, owner="")
        order = torch.arange(site.intermediate, dtype=torch.int32) if layer is None else layer.order
        layer_plan = (
            LayerPlan(site, Method.EXACT, 0, order)
            if layer is None
            else LayerPlan(site, layer.method, layer.n_hot, order, layer.threshold, thresholds=layer.thresholds)
        )
        model = _holder(dict(zip(nodes, (p.detach().cpu() if on_gpu(p) else p for p in parameters))))
        ffn = SparseFFN(site, site.weights(model), layer_plan, *predictor_tensors(predictor)).eval()
        ffn.to(parameters[0].device)
        stamps, references = [_stamp(p) for p in parameters], [weakref.ref(p) for p in parameters]
        shared[key] = _Packed(ffn, tuple(nodes), stamps, (layer, predictor), references)
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


def _replace(gm: fx.GraphModule, match: Match, ffn: SparseFFN, replaced: dict[fx.Node, fx.Node]) -> list[torch.Tensor]:
    """Replace a match by its operators; returns the tensors that the graph needs as further inputs.

    ``replaced``: results of earlier matches -> the nodes that replaced them; the new one is added.
    """
    extra: list[torch.Tensor] = []
    x = replaced.get(match.x, match.x)
    fake_mode = match.x.meta["example_value"].fake_mode

    def given(tensor: torch.Tensor | None) -> fx.Node | None:
        if tensor is None:
            return None
        extra.append(tensor)
        return further_input(gm, tensor, fake_mode)

    result = match.down.node
    arguments: list[Any] = [x, *(given(t) for t in ffn.tensors())]
    operator: Any = torch.ops.pi2.sparse_ffn.default
    if ffn.has_predictor:
        tensors, *how = ffn.asked()
        operator = torch.ops.pi2.predicted_ffn.default
        arguments += [[given(t) for t in tensors], *how]
    else:
        arguments.append(None)  # no mask
    *settings, own = ffn.settings(ffn.n_hot, ffn.threshold)
    arguments += [*settings, given(own)]
    with gm.graph.inserting_before(match.down.nodes[0]):
        node = gm.graph.call_function(operator, tuple(arguments))
    node.meta = dict(result.meta)
    replaced[result] = node
    result.replace_all_uses_with(node)
    for old in (*reversed(match.down.nodes), *reversed(match.inside)):
        gm.graph.erase_node(old)
    return extra


# --- plans: finding the planned layer of a match ---


def _name(parameter: fx.Node) -> str:
    """Name of a parameter relative to the compiled frame, e.g. ``model.layers.0.mlp.up.weight``."""
    source = getattr(parameter.meta.get("grapharg"), "source", None)
    text = str(getattr(source, "name", parameter.name)) if source is not None else parameter.name
    parts = [p for pair in re.findall(r"\['?(\w+)'?\]|\.(\w+)", text) for p in pair if p]
    if not parts:
        return parameter.name
    return ".".join(p for p in parts[1:] if p not in ("_modules", "_parameters", "_orig_mod"))


def _planned(match: Match, plan: Plan | None) -> tuple[Match, LayerPlan | None]:
    """The plan's layer for this FFN, and the match with the same matrix first."""
    layer = _planned_layer(match, plan)
    return match.swapped() if layer is not None and layer.site.up_first else match, layer


def _planned_layer(match: Match, plan: Plan | None) -> LayerPlan | None:
    """The plan's layer with this down weight. Frames below the root know only the end of its name."""
    if plan is None:
        return None
    name = _name(match.down.weight)
    found = [
        layer
        for layer in plan.layers
        if f".{layer.site.down.weight}".endswith(f".{name}") or f".{name}".endswith(f".{layer.site.down.weight}")
    ]
    exact = [layer for layer in found if layer.site.down.weight == name] or found
    if len(exact) != 1:
        warn_once(
            f"{name} fits {len(exact)} layers of the plan, so it runs without it"
            + ("; the graph is broken inside the model, use torch_pi2.optimize before torch.compile" if exact else "")
        )
        return None
    site = exact[0].site.swapped() if exact[0].site.up_first else exact[0].site  # gate first, as found
    same = (site.hidden, site.intermediate, site.activation, site.activation_on_up) == (
        match.hidden,
        match.intermediate,
        match.activation,
        match.activation_on_up,
    )
    if not same:
        raise _stale(name, f"{match.hidden} -> {match.intermediate} {match.activation}")
    return exact[0]


def _check_plan(
    plan: Plan, chosen: Sequence[tuple[Match, LayerPlan | None]], tensors: Mapping[fx.Node, torch.Tensor]
) -> None:
    """Compare the hash of the weights if the graph has the whole model; shapes were compared before."""
    by_name: dict[str, torch.Tensor] = {}
    for match, layer in chosen:
        if layer is None:
            continue
        refs = {"gate": layer.site.gate, "up": layer.site.up, "down": layer.site.down}
        for role, projection in _roles(match):
            ref = refs[role]
            if ref is None:
                raise _stale(layer.site.key, "a gated layer")
            by_name[ref.weight] = tensors[projection.weight]
            if ref.bias is not None and projection.bias is not None:
                by_name[ref.bias] = tensors[projection.bias]
    model = _holder(by_name)
    try:
        found = weights_hash(model, [layer.site for layer in plan.layers])
    except KeyError:
        return
    if found != plan.model_hash:
        raise _stale("the model's FFN weights", found[:12], plan.model_hash[:12])


def _stale(what: str, found: str, expected: str = "what the plan was made from") -> StaleArtifactError:
    return StaleArtifactError(
        f"plan for {what}", expected=expected, found=found, fix="Make a new plan for this model (torch_pi2.optimize)."
    )
