"""Layers that look like an FFN but have no known form: they stay dense, and are named with a reason.

Looser than :mod:`.match`: weights may be computed (weight norm, tied by transposing) or stored ``[in, out]``, and
between the projections may stand parameters, buffers and whatever does not mix tokens. Attention never fits: products
of activations stop the walk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from torch_pi2.graph.match import turned
from torch_pi2.graph.operations import CASTS, ELEMENTWISE, RESHAPES, op_name

#: What mixes tokens or activations: no feed-forward layer has it inside.
_MIXES = re.compile(
    "conv|attention|matmul|mm$|bmm|einsum|dot|embedding|fft|scan|lstm|gru|rnn|interpolate|pool|roll|shift|index_add"
    "|transpose|permute|stack|solve|autograd_function|wrap"
)
#: What a norm is made of, and what may stand around it without making a layer feed-forward.
_NORMS = re.compile(r"\w*norm|normalize|mean|sum|(var|std)(_mean)?")
_IN_NORMS = (
    CASTS
    | RESHAPES
    | {"pow", "square", "sqrt", "rsqrt", "reciprocal", "add", "sub", "mul", "multiply", "div", "truediv", "true_divide"}
    | {"contiguous", "clone", "chunk", "split", "getitem", "narrow"}
)
#: Why an FFN with an adapter in it stays dense.
_MORE = "more matmuls than gate, up and down"
_LINEARS = frozenset(["linear", "matmul", "mm", "addmm"])
_MAX_NODES = 256


@dataclass(frozen=True)
class _Loose:
    """A matmul with weights of the model, ``[out, in]`` as it works; ``own`` are the parameters they are made of."""

    node: fx.Node
    x: fx.Node
    n_in: int
    n_out: int
    own: tuple[fx.Node, ...]
    plain: bool


def skipped_layers(
    gm: fx.GraphModule, tensors: Mapping[fx.Node, torch.Tensor], taken: Set[fx.Node]
) -> list[tuple[tuple[fx.Node, ...], str]]:
    """Layers of ``gm`` that look feed-forward, and none of whose matmuls is in ``taken``: parameters, and the reason.

    Args:
        tensors: placeholder -> the parameter or buffer that it stands for.
    """
    linears = {found.node: found for node in gm.graph.nodes if (found := _as_linear(node, tensors)) is not None}
    skipped: list[tuple[tuple[fx.Node, ...], str]] = []
    for down in linears.values():
        if down.node in taken:
            continue
        walk = _walk(down, linears, tensors)
        if walk is None or not walk[1]:
            continue
        sources, region, own = walk
        if len(sources) == 1 and _is_norm(region):  # a product of low rank with a norm in it, as DeepSeek's queries
            continue
        behind = _behind(sources, linears, tensors)
        firsts = next((list(dict.fromkeys(some)) for some in (sources, behind) if _begin(some, down)), [])
        between = [source for source in sources if source not in firsts]
        if firsts and taken.isdisjoint(s.node for s in (*firsts, *between)):
            parameters = tuple(dict.fromkeys(n for s in (*firsts, *between, down) for n in s.own))
            reason = _reason([*sources, down], region, own) or (_MORE if between or len(firsts) > 3 else "")
            if reason:
                skipped.append((parameters, reason))
    return skipped


def _behind(
    sources: list[_Loose], linears: Mapping[fx.Node, _Loose], tensors: Mapping[fx.Node, torch.Tensor]
) -> list[_Loose]:
    """What the latest of ``sources`` are made from: an adapter is two matmuls in a row, and a layer may have three."""
    order = {node: number for number, node in enumerate(sources[0].node.graph.nodes)}
    latest = max(order[source.x] for source in sources)
    found: list[_Loose] = []
    for source in sources:
        walk = _walk(source, linears, tensors) if order[source.x] == latest else None
        found += [source] if walk is None else walk[0]
    return found


def _begin(firsts: list[_Loose], down: _Loose) -> bool:
    """Whether these can be the matmuls that a layer begins with, which have one input."""
    fits = len({first.x for first in firsts}) == 1 and all(first.n_in == down.n_out for first in firsts)
    return fits and any(first.n_out >= down.n_in for first in firsts)


def not_reached(model: nn.Module, reached: Set[int], apart: Iterable[str]) -> dict[str, str]:
    """Name -> reason of modules that hold the linears of a feed-forward layer, none of which ran in any graph.

    Args:
        reached: ids of the parameters in graphs. apart: names of modules that were looked at in another way.
    """
    found: dict[str, str] = {}
    known = tuple(f"{name}." for name in apart)
    for name, module in model.named_modules():
        weights = [part.weight for part in module.children() if isinstance(part, nn.Linear)]
        shapes = {tuple(weight.shape) for weight in weights}
        is_ffn = len(weights) in (2, 3) and len(shapes) == 2 and {(h, i) for i, h in shapes} == shapes
        is_ffn = is_ffn and min(weights[0].shape) * 8 > max(weights[0].shape)  # an adapter is narrower
        own = [id(p) for part in module.children() if isinstance(part, nn.Linear) for p in part.parameters()]
        if is_ffn and reached.isdisjoint(own) and not f"{name}.".startswith(known):
            found[name] = "the example inputs do not reach it, or it is kept from torch.compile"
    return found


def _is_norm(region: list[fx.Node]) -> bool:
    names = {op_name(node.target) for node in region}
    norms = {name for name in names if _NORMS.fullmatch(name)}
    return bool(norms) and names - norms <= _IN_NORMS


def _reason(linears: list[_Loose], region: list[fx.Node], own: list[fx.Node]) -> str:
    made = [p for p in linears if not p.plain]
    if len({n for p in linears for n in p.own}) < sum(len(p.own) for p in linears):
        return "its matmuls share weights"
    if made:
        return "weights that are computed from parameters"
    names = list(dict.fromkeys(op_name(n.target) for n in region))
    other = [name for name in names if name not in ELEMENTWISE]
    if other and all(map(_NORMS.fullmatch, other)):
        return "a norm over all its neurons stands before the last matmul"
    if any(node.op == "placeholder" for node in own):
        return "an activation with parameters of its own between its matmuls"
    if other:
        return f"{', '.join(other)} between its matmuls"
    if own:
        return "numbers of its own between its matmuls"
    return ""


def _walk(
    down: _Loose, linears: Mapping[fx.Node, _Loose], tensors: Mapping[fx.Node, torch.Tensor]
) -> tuple[list[_Loose], list[fx.Node], list[fx.Node]] | None:
    """The matmuls that ``down``'s input is made from, what lies between, and weights within; None if there is more."""
    sources: dict[fx.Node, _Loose] = {}
    region: dict[fx.Node, None] = {}
    own: dict[fx.Node, None] = {}
    todo = [down.x]
    while todo:
        node = todo.pop()
        if node in region or node in sources:
            continue
        name = op_name(node.target) if node.op in ("call_function", "call_method") else ""
        if node in linears:
            sources[node] = linears[node]
        elif node in tensors or node.op == "get_attr":
            own[node] = None
        elif name and not _MIXES.search(name):
            region[node] = None
            todo.extend(node.all_input_nodes)
        else:
            return None
        if len(region) > _MAX_NODES:
            return None
    return (list(sources.values()), list(region), list(own)) if sources else None


def _as_linear(node: fx.Node, tensors: Mapping[fx.Node, torch.Tensor]) -> _Loose | None:
    name = op_name(node.target) if node.op in ("call_function", "call_method") else ""
    if name not in _LINEARS:
        return None
    given = dict(zip(("input", "weight"), node.args[1:] if name == "addmm" else node.args)) | node.kwargs
    x, weight = given.get("input"), given.get("weight", given.get("other"))
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    shape: Any = getattr(weight.meta.get("example_value"), "shape", ())
    own = tuple(_made_of(weight, tensors))
    if len(shape) != 2 or not own:
        return None
    n_out, n_in = shape if name == "linear" else reversed(shape)
    return _Loose(node, x, int(n_in), int(n_out), own, weight in tensors or turned(weight) in tensors)


def _made_of(weight: fx.Node, tensors: Mapping[fx.Node, torch.Tensor]) -> Iterator[fx.Node]:
    """The parameters that a weight is made of; none if anything else goes into it."""
    found: dict[fx.Node, None] = {}
    todo, seen = [weight], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in tensors or node.op == "get_attr":
            found[node] = None
        elif node.op in ("call_function", "call_method") and len(seen) < 64:
            todo.extend(node.all_input_nodes)
        else:
            return
    yield from (node for node in found if node in tensors)
