"""An FX pass that replaces feed-forward layers of a Dynamo graph by ``pi2::sparse_ffn``, experts by ``experts_ffn``.

It runs before AOTAutograd, where an FFN is still a few linears and weights are the model's own parameters. The form
of experts is that of their module (:mod:`torch_pi2.graph.experts`): the nodes of its code run on random tokens, and
must give what the form says. Code that breaks graphs, such as a loop over the experts that have tokens, stays dense.
"""

import inspect
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.utils.weak import WeakTensorKeyDictionary

from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.progress import warn_once
from torch_pi2.errors import DeviceError, DtypeError, NonFiniteError, StaleArtifactError
from torch_pi2.graph.experts import expert_sites, experts_form, looks_like_experts
from torch_pi2.graph.match import Match, match_ffns, size_hint
from torch_pi2.graph.operations import same_tokens, token_magnitudes
from torch_pi2.graph.routed import Routed, masked_experts
from torch_pi2.graph.skipped import skipped_layers
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.gpu import on_gpu
from torch_pi2.ops import load
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.rewrite.rewrite import predictor_tensors
from torch_pi2.types.method import Method
from torch_pi2.types.plan import LayerPlan, Plan, weights_hash
from torch_pi2.types.site import FFNSite, FFNWeights


@dataclass(frozen=True)
class GraphLayer:
    """A feed-forward layer, or a module of experts, in a graph. ``sites``: the layer's, or one per expert, with the
    names of ``parameters``. ``inputs``: tokens; for experts also the router's choices and weights. ``nodes``: those
    that compute it, in order. ``result``: the one that others use.
    """

    name: str
    sites: list[FFNSite]
    parameters: dict[str, fx.Node]
    inputs: list[fx.Node]
    nodes: list[fx.Node]
    result: fx.Node

    @property
    def keeps_shape(self) -> bool:
        """Whether it returns its input's shape and dtype. Sizes are compared as symbols, which adds no guards."""
        x, y = (node.meta.get("example_value") for node in (self.inputs[0], self.result))
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.dtype != y.dtype:
            return False
        return [str(size) for size in x.shape] == [str(size) for size in y.shape]


def find_experts(gm: fx.GraphModule, tensors: Mapping[fx.Node, torch.Tensor]) -> tuple[list[GraphLayer], dict]:
    """Modules of experts that ``gm`` computes (``tensors``: placeholder -> its parameter); and name -> reason of those
    that it, or its frame, leaves dense.
    """
    try:
        output: Any = InstructionTranslator.current_tx().output
    except AttributeError:  # not called by Dynamo
        return [], {}
    frame, modules = output.root_tx.f_locals.get("self"), dict[nn.Module, None]()
    if isinstance(frame, nn.Module) and looks_like_experts(frame):
        modules[frame] = None
    for node in (node for node, tensor in tensors.items() if tensor.dim() == 3):
        source = node.meta["grapharg"].source
        while hasattr(source, "base"):
            source = source.base
            holder = output.resolve_source_value(source)
            if isinstance(holder, nn.Module):
                modules |= dict.fromkeys([holder] if looks_like_experts(holder) else [])
                break
    found: list[GraphLayer] = []
    left: dict[str, str] = {}
    tried: dict[Any, str] = {}
    for module in modules:
        name, form = _name_of(module), experts_form(module, tried)
        if isinstance(form, str):
            left[name] = f"experts of an unknown form; {form}"
            continue
        local_names = {id(p): local for local, p in module.named_parameters()}
        parameters = {local_names[id(t)]: node for node, t in tensors.items() if id(t) in local_names}
        sites = expert_sites("", form, type(module).__name__)
        for nodes in _calls(gm, module, parameters.values()) if len(parameters) == len(local_names) else [[]]:
            made = _found(name, sites, parameters, nodes)
            if made is None or not _runs_so(gm, made, tensors):
                stop = output.compile_subgraph_reason
                reason = stop.reason.partition("\n")[0]
                why = f"breaks graphs in all its layers ({reason})" if stop.graph_break else "has another form"
                left[name] = f"the code of {type(module).__name__} {why}; call torch_pi2.optimize before torch.compile"
            else:
                found.append(made)
    return found, left


def _name_of(module: nn.Module) -> str:
    """Its name in the outermost module whose forward is running."""
    name, frame = type(module).__name__, inspect.currentframe()
    while frame is not None:
        root = frame.f_locals.get("self")
        if isinstance(root, nn.Module):
            name = next((name for name, other in root.named_modules() if other is module and name), name)
        frame = frame.f_back
    return name.removeprefix("_orig_mod.")


def _calls(gm: fx.GraphModule, module: nn.Module, parameters: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """The nodes of each call of ``module``, without sizes computed from sizes, which may be of use elsewhere."""

    def stack(node: fx.Node) -> dict[str, tuple[str, type]]:
        return node.meta.get("nn_module_stack") or {}

    code = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    sizes = {n for n in gm.graph.nodes if isinstance(n.meta.get("example_value"), torch.SymInt)}
    code = [n for n in code if not sizes.issuperset((n, *n.all_input_nodes))]
    own: dict[str, None] = {}
    for user in (user for node in parameters for user in node.users):
        own |= dict.fromkeys([key for key, (_, kind) in stack(user).items() if kind is type(module)][-1:])
    return [[node for node in code if key in stack(node)] for key in own] or [code]  # the graph may be the module's own


def _found(name: str, sites: list[FFNSite], parameters: dict[str, fx.Node], nodes: list[fx.Node]) -> GraphLayer | None:
    """What ``nodes`` compute, if they take tokens and their experts, and give tokens."""
    inside = {*nodes, *parameters.values()}
    given = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    examples = {n: value for n in given if isinstance(value := n.meta.get("example_value"), torch.Tensor)}
    results = [node for node in nodes if not inside.issuperset(node.users)]
    index = [n for n, value in examples.items() if value.dtype is torch.int64 and value.dim() == 2]
    if len(examples) != 3 or len(index) != 1 or len(results) != 1:
        return None
    x, routing = sorted(examples.keys() - index, key=lambda n: str(examples[n].shape) == str(examples[index[0]].shape))
    if examples[x].shape[-1] != sites[0].hidden:
        return None
    return GraphLayer(name, sites, parameters, [x, *index, routing], nodes, results[0])


def _runs_so(gm: fx.GraphModule, found: GraphLayer, tensors: Mapping[fx.Node, torch.Tensor]) -> bool:
    """Whether the nodes compute the experts of their sites, and change none of their inputs."""
    x, index, routing = (node.meta["example_value"] for node in found.inputs)
    experts, (tokens, chosen) = len(found.sites), map(size_hint, index.shape)
    generator = torch.Generator().manual_seed(experts)
    x_TH = torch.randn((tokens, found.sites[0].hidden), generator=generator)
    mixed = torch.rand((tokens, experts), generator=generator).topk(chosen).indices
    weights_TK = torch.rand((tokens, chosen), generator=generator).to(routing.dtype)
    given = Routed((x_TH * token_magnitudes(x.dtype, (tokens,))).to(x.dtype), mixed, weights_TK)
    interpreter = fx.Interpreter(gm)
    interpreter.env.update({n: tensors[n] for n in found.parameters.values()})
    for node in (n for inner in found.nodes for n in inner.all_input_nodes if n.op != "get_attr"):
        if not isinstance(value := node.meta.get("example_value"), torch.Tensor) and value is not None:
            interpreter.env.setdefault(node, value if isinstance(value, tuple) else size_hint(value))
    interpreter.env.update({node: tensor.clone() for node, tensor in zip(found.inputs, given)})
    with torch.no_grad():
        try:
            for node in found.nodes:
                interpreter.env[node] = interpreter.run_node(node)
        except Exception:  # model code may raise anything for numbers that are made up
            return False
        holder: Any = SimpleNamespace(get_parameter=lambda name: tensors[found.parameters[name]])
        wanted = masked_experts(holder, found.sites, lambda *_: torch.ones(()), given)
    same = all(torch.equal(interpreter.env[node], tensor) for node, tensor in zip(found.inputs, given))
    return same and same_tokens(interpreter.env[found.result], wanted)


#: Numbers of a parameter compared before each call, to notice changes: a few microseconds.
_SAMPLE = 32
#: Version, address and sample of a parameter.
_Stamp = tuple[int, int, tuple[float, ...]]


@dataclass
class _Packed:
    """A sparse layer with the state of the parameters it was made from.

    ``made_from`` keeps plan and predictor alive, because the cache is keyed by their ids. Parameters are weak
    references: they tell whether an id belongs to another parameter now.
    """

    ffn: SparseFFN | SparseExperts
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
    experts, left = find_experts(gm, tensors)
    for name, reason in left.items():
        warn_once(f"{name} stays dense: {reason}")
    if not matches and not seen.unknown and not our_ops(gm) and not experts and not left:
        warn_once("a graph without feed-forward layers is left to Inductor")
    for projections, computed in seen.unknown:
        warn_once(f"{_name(projections[-1].weight)} stays dense: another formula, of {computed}")
    # optimize() has reported the layers left in a model that it rewrote
    for projections, reason in (*seen.left, *([] if our_ops(gm) else skipped_layers(matches, seen))):
        warn_once(f"{_name(projections[-1].own[-1])} stays dense: {reason}")
    position = {node: index for index, node in enumerate(placeholders)}
    chosen = [_planned(layer, plan) for layer in (*experts, *map(_of_match, matches))]
    if plan is not None:
        _check_plan(plan, chosen, tensors)
    sparse = []
    no_zeros: dict[str, list[str]] = {}
    replaced: dict[fx.Node, fx.Node] = {}  # an FFN may be the input of the next one
    for layer, planned in chosen:
        if planned is None and not exact_zeros(activation := layer.sites[0].activation):
            no_zeros.setdefault(activation, []).append(layer.name)
            continue
        if not layer.keeps_shape:
            warn_once(f"{layer.name} stays dense: its output has another shape or dtype than its input")
            continue
        if len(layer.inputs) > 1 and on_gpu(next(iter(tensors.values()))):
            warn_once(f"{layer.name} stays dense: experts on a GPU need torch_pi2.optimize")
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
    return GraphLayer(name, [site], parameters, [match.x], [*match.inside, *match.down.nodes], match.down.node)


def _pack(
    layer: GraphLayer, planned: Sequence[LayerPlan] | None, tensors: Mapping[fx.Node, torch.Tensor], predictors: Mapping
) -> _Packed:
    load()
    parameters, sites = [tensors[node] for node in layer.parameters.values()], layer.sites
    made_from = [None] * len(sites) if planned is None else [(y, predictors.get(y.site.key)) for y in planned]
    key: tuple[Any, ...] = (*map(id, parameters), *((ref.rows, ref.expert) for ref in sites[0].refs.values()))
    key += (sites[0].activation, sites[0].activation_on_up, *(id(part) for pair in made_from for part in pair or ()))
    shared = _packed.setdefault(tensors[layer.parameters[sites[0].down.weight]], {})
    if key not in shared or not shared[key].is_of(parameters):
        model = _holder(dict(zip(layer.parameters, (p.detach().cpu() if on_gpu(p) else p for p in parameters))))
        parts = (_part(site, site.weights(model), *(pair or (None, None))) for site, pair in zip(sites, made_from))
        ffn = SparseExperts(parts, len(sites)) if len(layer.inputs) > 1 else next(parts)
        ffn.eval().to(parameters[0].device)
        stamps, references = [_stamp(p) for p in parameters], [weakref.ref(p) for p in parameters]
        shared[key] = _Packed(ffn, tuple(layer.parameters), stamps, tuple(made_from), references)
    packed: _Packed = shared[key]
    packed.refresh(parameters)
    return packed


def _part(site: FFNSite, weights: FFNWeights, planned: LayerPlan | None, predictor: Any) -> SparseFFN:
    order = torch.arange(site.intermediate, dtype=torch.int32)
    plan = LayerPlan(site, Method.EXACT, 0, order) if planned is None else replace(planned, site=site)
    return SparseFFN(site, weights, plan, *predictor_tensors(predictor))


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
    """Replace a layer by operators; returns further inputs of the graph. ``replaced``: results of earlier layers."""
    extra: list[torch.Tensor] = []
    fake_mode = layer.inputs[0].meta["example_value"].fake_mode

    def given(tensor: torch.Tensor | None) -> fx.Node | None:
        if tensor is None:
            return None
        extra.append(tensor)
        return further_input(gm, tensor, fake_mode)

    arguments: list[Any] = [replaced.get(x, x) for x in layer.inputs]
    operator: Any = torch.ops.pi2.sparse_ffn.default
    if isinstance(ffn, SparseExperts):
        operator = torch.ops.pi2.experts_ffn.default
        predictor, *how = ffn.asked(ffn.cuts, ffn.thresholds)
        arguments += [given(ffn.neuron_rows), [given(tensor) for tensor in predictor], *how]
        arguments += [ffn.weights, ffn.int8_activations, *map(given, ffn.biases())]
    else:
        arguments += map(given, ffn.tensors())
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


def _planned(layer: GraphLayer, plan: Plan | None) -> tuple[GraphLayer, list[LayerPlan] | None]:
    """Layers of the plan with this down weight, the one with the same matrix first; inner frames know a name's end."""
    if plan is None:
        return layer, None
    name = _name(layer.parameters[layer.sites[0].down.weight])
    names = [f".{planned.site.down.weight}" for planned in plan.layers]
    found = [y for y, own in zip(plan.layers, names) if own.endswith(f".{name}") or f".{name}".endswith(own)]
    exact = [planned for planned in found if planned.site.down.weight == name] or found
    if len({planned.site.experts or planned.site.key for planned in exact}) != 1:
        warn_once(
            f"{name} fits {len(exact)} layers of the plan, so it runs without it"
            + ("; the graph is broken inside the model, use torch_pi2.optimize before torch.compile" if exact else "")
        )
        return layer, None
    turned = exact[0].site.up_first and layer.sites[0].gated
    sites = [site.swapped() for site in layer.sites] if turned else layer.sites
    here, there = ([_form(site) for site in some] for some in (sites, [planned.site for planned in exact]))
    if here != there:
        raise _stale(name, "{} -> {} {}".format(*here[0]))
    return replace(layer, sites=sites), exact


def _form(site: FFNSite) -> tuple[Any, ...]:
    return site.hidden, site.intermediate, site.activation, site.activation_on_up, site.gated


def _check_plan(
    plan: Plan, chosen: Sequence[tuple[GraphLayer, list[LayerPlan] | None]], tensors: Mapping[fx.Node, torch.Tensor]
) -> None:
    """Compare the hash of the weights if the graph has the whole model; shapes were compared before."""
    by_name: dict[str, torch.Tensor] = {}
    for found, planned in chosen:
        for site, layer in zip(found.sites, planned or ()):
            for role, ref in layer.site.refs.items():
                own = site.refs[role]
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
