"""``torch.compile(model, backend="torch_pi2")``: Inductor, for a model that has sparse layers.

Found by PyTorch through the entry point group ``torch_dynamo_backends``; nobody has to import us. Errors are those of
eager calls, and quantised linears that read the same input (q, k, v) become one call over all their rows.
"""

from __future__ import annotations

import operator
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from torch_pi2.base.memory import new_tensor
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.progress import warn_once
from torch_pi2.distributed.group import groups
from torch_pi2.errors import ConfigError
from torch_pi2.layers.gpu import on_gpu
from torch_pi2.layers.offloaded import open_stores, unreadable
from torch_pi2.ops import load


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, to which sparse layers are single operators.

    It makes no layer sparse: :func:`torch_pi2.optimize` or :func:`torch_pi2.load` the model first. A graph without
    sparse layers is compiled as it is, with one warning.

    Args:
        options: none is known; Inductor's own go through ``torch._inductor.config``.
        mode: one of Inductor's modes, e.g. ``"max-autotune"``.

    Raises:
        ConfigError: there are options.
        ArtifactError: from what was compiled, if neurons in a store cannot be read.
    """
    if options:
        raise ConfigError(
            "options of the torch_pi2 backend",
            expected="none",
            found=", ".join(sorted(options)),
            fix="For a plan, call torch_pi2.optimize or torch_pi2.load before torch.compile. Inductor's settings go "
            "through torch._inductor.config or mode=.",
        )
    if not _our_ops(gm):
        warn_once("a graph without sparse layers is left to Inductor: call torch_pi2.optimize before torch.compile")
    changed = _copy(gm)
    merged = merge_linears(changed, _weights(changed, example_inputs))
    gm = changed if merged else gm
    placeholders = gm.graph.find_nodes(op="placeholder")
    ours = [node.meta["example_value"] for node in placeholders[len(example_inputs) :]]
    compiled = _together(_explaining(_inductor(gm, [*example_inputs, *ours], mode), gm), gm)
    return (lambda *args: compiled(*args, *merged)) if merged else compiled


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None) -> Callable[..., Any]:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = list_mode_options(mode) if mode else {}
    if shutil.which("openssl") is None:  # a command with which torch would name the headers that it keeps compiled
        patches = {**patches, "cpp_cache_precompile_headers": False}
    # Code that Inductor kept on disk calls operators as their schemas were; another version's may be others.
    operators: list[Any] = [node.target for node in _our_ops(gm)]
    schemas = sorted({str(getattr(operator, "default", operator)._schema) for operator in operators})
    caching: Any = torch.compiler.config
    with caching.patch(cache_key_tag="".join([caching.cache_key_tag, *schemas])):
        return cast(Callable[..., Any], compile_fx(gm, example_inputs, config_patches=patches))


def _explaining(compiled: Callable[..., Any], gm: fx.GraphModule) -> Callable[..., Any]:
    """Raise ArtifactError where a graph cannot read a neuron store, as the modules do without a graph."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and "pi2.stored_" in str(node.target)]
    if not calls:
        return compiled
    numbers = {node.args[1] for node in calls}

    def run(*args: Any) -> Any:
        try:
            return compiled(*args)
        except (RuntimeError, MemoryError) as error:
            paths = {str(open_stores[n].path) for n in numbers if n in open_stores}
            explained = unreadable(error, " or ".join(sorted(paths)) or "the neuron store")
            if explained is None:
                raise
            raise explained from error

    return run


def _together(compiled: Callable[..., Any], gm: fx.GraphModule) -> Callable[..., Any]:
    """Raise GroupError where another process is lost with which a graph computes, as the modules do without a graph."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and "_c10d_functional." in str(n.target)]
    found = {groups[arg] for node in calls for arg in node.args if isinstance(arg, str) and arg in groups}
    if len(found) != 1:
        return compiled
    (group,) = found

    def run(*args: Any) -> Any:
        with group.together():
            return compiled(*args)

    return run


# --- graphs ---


def _weights(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, torch.Tensor]:
    """Placeholders that are parameters or buffers of the model, with their tensors."""
    found = {}
    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), example_inputs):
        source = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
        name = source() if callable(source) else str(source)
        if isinstance(tensor, torch.Tensor) and ("_parameters" in name or "_buffers" in name):
            found[node] = tensor
    return found


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy to change, with what AOTAutograd reads of it: Dynamo looks at its own graph again afterwards."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, nodes)
    graph.output(output)
    for old, new in nodes.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source
    return copy


def _our_ops(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and "pi2." in str(node.target)]


# --- linears that read the same input, as one. Lossless ---
#
# The rows move once into one piece of memory, of which the modules' own tensors become views: nothing is held twice.


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
