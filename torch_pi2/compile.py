"""``torch.compile(model, backend="torch_pi2")``: sparse FFNs in the Dynamo graph, Inductor for the rest.

PyTorch finds it through the entry point group ``torch_dynamo_backends``, without an import of this package. Errors are
those of eager calls. Quantised linears that read the same input (q, k, v) are merged into one call over all their rows.
"""

import operator
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from torch_pi2.base.fields import argument
from torch_pi2.base.memory import new_tensor
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.progress import warn_once
from torch_pi2.distributed.group import groups
from torch_pi2.layers.gpu import on_gpu
from torch_pi2.layers.offloaded import open_stores, unreadable
from torch_pi2.ops import load
from torch_pi2.predict.file import PREDICTORS_FILE
from torch_pi2.rewrite.fx_pass import SparseCall, further_input, make_sparse, our_ops, weights_of
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import STORE_FILE
from torch_pi2.types.plan import Plan

_OPTIONS = ("plan", "predictors", "before", "after")


def backend(
    gm: fx.GraphModule, example_inputs: Sequence, *, options: Mapping | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a Dynamo graph: sparse operators for FFNs, Inductor for everything else.

    Without a plan, layers of the ReLU family get the exact gate (lossless); others stay dense, named in warnings. A
    graph without FFNs, or one that needs gradients, is given to Inductor as it is, with one warning.

    Neurons are made once per set of weights and shared by all graphs that use it; the dense weights stay in memory, as
    they belong to the model (``torch_pi2.optimize`` frees them). After a parameter is changed in place or loaded,
    neurons are refreshed at the next call. Changes that PyTorch does not count (``p.data.mul_(2)``, or any in place
    under ``torch.inference_mode()``) are noticed by a sample of each parameter, on the CPU only: changes of all numbers
    (PEFT merging an adapter) are seen, changes of a few rows are not. After such a change, call
    ``torch._dynamo.reset()`` and compile again with new parameters (``model.load_state_dict(..., assign=True)``).

    Args:
        options: ``plan``: a :class:`Plan` or its folder (``my-sparse-model/pi2``: predictors in it are used);
            ``predictors``: site key -> low-rank predictor; ``before``, ``after``: lists of functions that change a
            ``torch.fx.GraphModule`` in place (None is returned), called with the Dynamo graph before ours, and with
            the graph that has our operators. Graphs that need gradients pass through neither.
        mode: one of Inductor's modes, e.g. ``"max-autotune"``.

    Raises:
        ConfigError: an option that does not exist, or a predictor is missing. StaleArtifactError: the plan was made
            from other weights. ArtifactError: from what was compiled, if neurons in a store cannot be read.
    """
    plan, predictors = _read_options(options)
    before, after = (_passes(options or {}, name) for name in ("before", "after"))
    sparse: list[SparseCall] = []
    merged: list[torch.Tensor] = []
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs):
        warn_once("a graph that needs gradients is compiled densely; call the model under torch.no_grad()")
    else:
        changed = _copy(gm)
        _run_passes(before, "before", changed)
        sparse = make_sparse(changed, example_inputs, plan, predictors)
        merged = merge_linears(changed, weights_of(changed, example_inputs))
        _run_passes(after, "after", changed)
        gm = changed if sparse or merged or before or after else gm
    placeholders = gm.graph.find_nodes(op="placeholder")
    ours = [node.meta["example_value"] for node in placeholders[len(example_inputs) :]]
    compiled = _explaining(_inductor(gm, [*example_inputs, *ours], mode), gm)
    # call compiled code with further inputs: refreshed neurons, and merged linears
    compiled = _together(compiled, gm)
    if not sparse and not merged:
        return compiled
    extra = [tensor for layer in sparse for tensor in layer.extra] + [*merged]

    def run(*args: Any) -> Any:
        for layer in sparse:
            layer.packed.refresh([args[i] for i in layer.positions])
        return compiled(*args, *extra)

    return run


def _passes(options: Mapping[str, Any], name: str) -> list[Callable[[fx.GraphModule], None]]:
    given = options.get(name) or []
    if not isinstance(given, list | tuple) or not all(map(callable, given)):
        argument(given, f"{name} of the torch_pi2 backend").wrong("a list of functions")
    return [*given]


def _run_passes(passes: list[Callable[[fx.GraphModule], None]], name: str, gm: fx.GraphModule) -> None:
    """Raises ConfigError: one of the user's returns another graph."""
    for change in passes:
        if (made := change(gm)) is not None:
            what = argument(
                made, f"{name} of the torch_pi2 backend: result of {change!r}", "Change the graph in place."
            )
            what.wrong("None")
        gm.graph.lint()
        gm.recompile()


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None) -> Callable[..., Any]:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = list_mode_options(mode) if mode else {}
    if shutil.which("openssl") is None:  # a command with which torch would name the headers that it keeps compiled
        patches = {**patches, "cpp_cache_precompile_headers": False}
    # Code in Inductor's disk cache calls operators by their schemas, which another version may have changed.
    operators: list[Any] = [node.target for node in our_ops(gm)]
    schemas = sorted({str(getattr(operator, "default", operator)._schema) for operator in operators})
    caching: Any = torch.compiler.config
    with caching.patch(cache_key_tag="".join([caching.cache_key_tag, *schemas])):
        return cast(Callable[..., Any], compile_fx(gm, example_inputs, config_patches=patches))


def _explaining(compiled: Callable[..., Any], gm: fx.GraphModule) -> Callable[..., Any]:
    """Raise ArtifactError if the graph cannot read a neuron store, as eager modules do."""
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
    """Raise GroupError if another process of the graph's group is lost, as eager modules do."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and "_c10d_functional." in str(n.target)]
    found = {groups[arg] for node in calls for arg in node.args if isinstance(arg, str) and arg in groups}
    if len(found) != 1:
        return compiled
    (group,) = found

    def run(*args: Any) -> Any:
        with group.together():
            return compiled(*args)

    return run


def _read_options(options: Mapping[str, Any] | None) -> tuple[Plan | None, Mapping[str, Any]]:
    options = options or {}
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        fix = "Remove it; Inductor's own settings go through torch._inductor.config or mode=."
        what = argument(options, "options of the torch_pi2 backend", fix)
        what.wrong(f"only {', '.join(_OPTIONS)}", ", ".join(unknown))
    plan, predictors = options.get("plan"), options.get("predictors")
    if isinstance(plan, str | Path):
        # the same objects until the folder changes, as their ids key the neurons
        folder = Path(plan)
        files = [path for name in ("plan.json", PREDICTORS_FILE, STORE_FILE) if (path := folder / name).is_file()]
        stamp = sum(path.stat().st_mtime_ns for path in files)
        if folder not in _plans or _plans[folder][0] != stamp:
            with Parts(folder) as parts:
                plan = parts.plan()
                _plans[folder] = (stamp, plan, parts.predictors(plan.model_hash))
        plan, beside = _plans[folder][1:]
        predictors = beside if predictors is None else predictors
    if not isinstance(plan, Plan | None):
        argument(plan, "plan of the torch_pi2 backend").wrong("a Plan, or a folder that has one")
    if not isinstance(predictors, Mapping | None):
        argument(predictors, "predictors of the torch_pi2 backend").wrong("what torch_pi2.fit gives")
    return plan, predictors or {}


_plans: dict[Path, tuple[int, Plan, Mapping[str, Any]]] = {}


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy to change, with the attributes that AOTAutograd reads; Dynamo reads its own graph again afterwards."""
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


#
# The rows move once into one block of memory, of which the modules' own tensors become views: nothing is held twice.


class _Linear(NamedTuple):
    """A ``pi2::linear`` or ``pi2::linear_blocks`` node and its arguments."""

    node: fx.Node
    op: Any
    x: fx.Node
    rows: fx.Node
    bias: fx.Node | None
    settings: tuple[Any, ...]  # from weights on


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
    """Merge in place, before AOTAutograd; returns the tensors that the graph takes as further inputs, in this order."""
    load()
    groups: dict[tuple[Any, ...], list[_Linear]] = {}
    rows_used: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        found = _linear(node)
        if found is None or not {found.rows, *([] if found.bias is None else [found.bias])} <= set(tensors):
            continue
        if on_gpu(tensors[found.rows]):  # views there have a storage offset, which the graph has as 0
            continue
        rows_used[found.rows] = rows_used.get(found.rows, 0) + 1
        width = tensors[found.rows].shape[1]
        key = (found.op, found.x, found.settings, found.bias is None, width)
        groups.setdefault(key, []).append(found)
    extra: list[torch.Tensor] = []
    for group in groups.values():
        # rows of tied weights, used by two linears, can be in one place only
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
    fake_mode = group[0].x.meta["example_value"].fake_mode
    nodes = [further_input(gm, tensor, fake_mode) for tensor in extra]
    first = group[0]
    bias = nodes[1] if biases else None
    sizes = [len(part) for part in parts]
    with gm.graph.inserting_before(first.node):
        merged = gm.graph.call_function(first.op, (first.x, nodes[0], bias, *first.settings))
        shape = (*first.node.meta["example_value"].shape[:-1], sum(sizes))
        merged.meta["example_value"] = first.node.meta["example_value"].new_empty(shape)
        pieces = gm.graph.call_function(torch.split, (merged, sizes, -1))
        pieces.meta["example_value"] = torch.split(merged.meta["example_value"], sizes, -1)
        for i, linear in enumerate(group):
            result = gm.graph.call_function(operator.getitem, (pieces, i))
            result.meta = dict(linear.node.meta)
            linear.node.replace_all_uses_with(result)
    for linear in group:
        gm.graph.erase_node(linear.node)
    return extra


#: Rows that were moved -> their block of memory.
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
        # through numpy, so that storage offsets stay 0 as in the graph being compiled
        with torch.inference_mode(part.is_inference()), torch.no_grad():
            part.set_(torch.from_numpy(piece.numpy()).untyped_storage(), 0, part.shape, (width, 1))
        _piece_of[part] = whole
    return whole
