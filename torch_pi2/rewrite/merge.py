"""Quantised linears that read the same input (q, k, v) become one over all their rows. Lossless.

One operator call instead of three, and one run of memory. The rows move once into one piece of memory; the modules'
own tensors become views of it, so that nothing is held twice.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.base.memory import new_tensor
from torch_pi2.layers.gpu import on_gpu
from torch_pi2.ops import load


class _Linear(NamedTuple):
    """The arguments of a ``pi2::linear`` or ``pi2::linear_blocks`` node; ``bias`` is None or a node."""

    node: fx.Node
    op: Any
    x: fx.Node
    rows: fx.Node
    bias: fx.Node | None
    settings: tuple[Any, ...]  # weights, and whatever follows


def _linear(node: fx.Node) -> _Linear | None:
    for op in (torch.ops.pi2.linear, torch.ops.pi2.linear_blocks):
        if node.op == "call_function" and node.target in (op, op.default):
            names = [argument.name for argument in op.default._schema.arguments]
            given: dict[str, Any] = {"int8_activations": False} | dict(zip(names, node.args)) | dict(node.kwargs)
            x, rows, bias, *settings = (given[name] for name in names)
            return _Linear(node, op.default, x, rows, bias, tuple(settings))
    return None


@fresh_settings()
def merge_linears(gm: fx.GraphModule, tensors: Mapping[fx.Node, torch.Tensor]) -> list[torch.Tensor]:
    """Merge in place; returns the tensors that the graph now wants as further inputs, at the end, in this order.

    Args:
        gm: a Dynamo graph, before AOTAutograd; weights are placeholders.
        tensors: placeholder -> the real tensor behind it.
    """
    load()
    groups: dict[tuple[Any, ...], list[_Linear]] = {}
    rows_used: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        found = _linear(node)
        if found is None or not {found.rows, *([] if found.bias is None else [found.bias])} <= set(tensors):
            continue
        if on_gpu(tensors[found.rows]):  # where pieces of one memory are tensors with an offset, which graphs have as 0
            continue
        rows_used[found.rows] = rows_used.get(found.rows, 0) + 1
        width = tensors[found.rows].shape[1]
        key = (found.op, found.x, found.settings, found.bias is None, width)
        groups.setdefault(key, []).append(found)
    extra: list[torch.Tensor] = []
    for group in groups.values():
        # Rows used by two linears (tied weights) can be in one place only.
        if len(group) > 1 and all(rows_used[linear.rows] == 1 for linear in group):
            extra += _merge(gm, group, tensors)
    if extra:
        gm.graph.lint()
        gm.recompile()
    return extra


def _merge(gm: fx.GraphModule, group: Sequence[_Linear], tensors: Mapping[fx.Node, torch.Tensor]) -> list[torch.Tensor]:
    parts = [tensors[linear.rows] for linear in group]
    extra = [_in_one_piece(parts)]
    biases = [tensors[linear.bias] for linear in group if linear.bias is not None]
    if biases:
        extra.append(torch.cat(biases))
    placeholders = gm.graph.find_nodes(op="placeholder")
    fake_mode = group[0].x.meta["example_value"].fake_mode
    nodes: list[fx.Node | None] = []
    last = placeholders[-1]
    for tensor in extra:
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"pi2_merged_{len(placeholders) + len(nodes)}")
        last._dynamo_source = None  # what AOTAutograd expects of non-user inputs
        last.meta["example_value"] = fake_mode.from_tensor(tensor, static_shapes=True)
        nodes.append(last)
    first = group[0]
    bias = nodes[1] if biases else None
    sizes = [len(part) for part in parts]
    with gm.graph.inserting_before(first.node):
        merged = gm.graph.call_function(first.op, (first.x, nodes[0], bias, *first.settings))
        shape = (*first.node.meta["example_value"].shape[:-1], sum(sizes))
        merged.meta["example_value"] = first.node.meta["example_value"].new_empty(shape)
        pieces = gm.graph.call_function(torch.split, (merged, sizes, -1))
        pieces.meta["example_value"] = torch.split(merged.meta["example_value"], sizes, -1)
        results = []
        for i, linear in enumerate(group):
            result = gm.graph.call_function(operator.getitem, (pieces, i))
            result.meta = dict(linear.node.meta)
            results.append(result)
    for linear, result in zip(group, results):
        linear.node.replace_all_uses_with(result)
        gm.graph.erase_node(linear.node)
    return extra


#: Rows that were moved -> the piece they are in now.
_piece_of: Any = WeakTensorKeyDictionary()


def _in_one_piece(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All rows of ``parts`` as one tensor, whose memory they share from then on."""
    first, width = parts[0], parts[0].shape[1]
    total, sizes = sum(map(len, parts)), [part.nbytes for part in parts]
    where = [part.data_ptr() for part in parts]
    if where == [where[0] + before for before in accumulate(sizes[:-1], initial=0)]:
        if all(p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for p in parts):
            return first.as_strided((total, width), (width, 1))
        piece: torch.Tensor | None = _piece_of.get(first)
        if piece is not None and piece.data_ptr() == where[0] and len(piece) == total:
            return piece
    whole = new_tensor((total, width), first.dtype)
    for part, piece in zip(parts, whole.split([len(part) for part in parts])):
        piece.copy_(part)
        # through numpy: storage offsets stay 0, as the graph that is being compiled has them
        with torch.inference_mode(part.is_inference()), torch.no_grad():
            part.set_(torch.from_numpy(piece.numpy()).untyped_storage(), 0, part.shape, (width, 1))
        _piece_of[part] = whole
    return whole
