"""Modules of experts in a Dynamo graph: the nodes that compute each of them.

The form is that of the module (:mod:`torch_pi2.graph.experts`). The nodes of its code then run on random tokens, and
must give what the form says. Code that breaks graphs, such as a loop over the experts that have tokens, stays dense.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslator

from torch_pi2.graph.experts import expert_sites, experts_form, looks_like_experts
from torch_pi2.graph.match import size_hint
from torch_pi2.graph.operations import same_tokens, token_magnitudes
from torch_pi2.graph.routed import Routed, masked_experts
from torch_pi2.types.site import FFNSite


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
