"""``Pi2Partitioner``: feed-forward layers and mixtures of experts become calls of the ``Pi2Backend`` delegate.

Weights are in a store that is written first; the ``.pte`` only has a blob of 512 bytes per call
(:mod:`torch_pi2.export.store`), passed in the compile specs. Needs executorch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch import nn

from torch_pi2.base.fields import Field, argument
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.export.delegated import ROLES, exported_layers
from torch_pi2.export.program import named_failures, quiet
from torch_pi2.export.store import blob_of, event_of, write_store
from torch_pi2.layers.of_model import SparseLayer
from torch_pi2.ops.constants import constants
from torch_pi2.ops.experts import experts_ffn
from torch_pi2.ops.ffn import predicted_ffn, sparse_ffn
from torch_pi2.ops.operators import arguments_of
from torch_pi2.rewrite.state import get_state

BACKEND = "Pi2Backend"
_BLOB = "blob"
#: The blob of a node of a program; None for nodes that are not ours.
BlobOf = Callable[[torch.export.ExportedProgram, torch.fx.Node], "bytes | None"]
#: Whole layers in programs of :func:`torch_pi2.export_program`, and their references.
_WHOLE: Mapping[str, Callable] = {f"pi2.{fn.__name__}": fn for fn in (sparse_ffn, predicted_ffn, experts_ffn)}
#: Arguments that identify the model.
_WEIGHTS = ("neuron_rows", "bias_gate", "bias_up", "bias_down")
#: Argument of such an operator -> attribute of its layer.
_THRESHOLDS = {"threshold": "threshold", "cut": "predictor_threshold", "thresholds": "thresholds", "cuts": "cuts"}


def role_of(node: torch.fx.Node) -> int | None:
    """The blob's role of a delegate operator; None for other nodes."""
    return ROLES.get(_operator(node))


def _operator(node: torch.fx.Node) -> str:
    """Name of the ATen or edge operator that a node calls, such as "aten.relu"; or ""."""
    target = node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "_op", None)
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return ""
    return str(target._schema.name.replace("::", "."))


def _is_constant(program: torch.export.ExportedProgram, node: torch.fx.Node) -> bool:
    signature = program.graph_signature
    kinds = signature.inputs_to_parameters, signature.inputs_to_buffers, signature.inputs_to_lifted_tensor_constants
    return any(node.name in names for names in kinds)


def _mismatch(program: torch.export.ExportedProgram, node: torch.fx.Node, home: SparseLayer, known: dict) -> str:
    """The first weight or threshold of a call that differs from the layer ``home``; or "". Predictors are not compared,
    as their rows may have another order. ``known``: input of the program -> name of the parameter or buffer.
    """
    for data in node.all_input_nodes:
        name = known.get(data.name, "")
        theirs = program.state_dict.get(name, program.constants.get(name))
        ours = getattr(home, name.rpartition(".")[2], None) if name.endswith(_WEIGHTS) else None
        known_bytes = type(theirs) in (torch.Tensor, nn.Parameter)  # fake once part of the program is lowered
        if theirs is not None and ours is not None and known_bytes and not _is_same(theirs.detach(), ours.detach()):
            return name
    call = vars(arguments_of(_WHOLE[_operator(node)], node.args))
    different = [name for name in _THRESHOLDS if name in call and call[name] != getattr(home, _THRESHOLDS[name])]
    return different[0] if different else ""


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, so that NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.data_ptr() == b.data_ptr() or torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))


@final
class Pi2Backend(BackendDetails):  # the delegate's name is that of the class
    """Gives each call its blob, and its operator's debug handle for profiles."""

    @staticmethod
    def preprocess(edge_program: torch.export.ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        blob = next(spec.value for spec in compile_specs if spec.key == _BLOB)
        handles = (node.meta.get("debug_handle") for node in edge_program.graph.nodes if node.op == "call_function")
        known = tuple(handle for handle in handles if handle is not None)
        return PreprocessResult(processed_bytes=blob, debug_handle_map={event_of(blob): known} if known else None)


class BlobPartitioner(Partitioner):
    """Delegates each node that has a blob, and leaves everything else to another partitioner.

    Args:
        blob: gives the blob of a node.
        rest: takes the other nodes. It is nested because each partitioner in a list decomposes the whole program first:
            twice the work, or, with other operators to preserve, silently without the next one's patterns (quantised
            linears). None: operators of XNNPACK are preserved.
    """

    def __init__(self, blob: BlobOf, rest: Partitioner | None = None) -> None:
        super().__init__()
        self._blob, self._rest = blob, rest

    def ops_to_not_decompose(self, ep: torch.export.ExportedProgram) -> Any:
        if self._rest is not None:
            return self._rest.ops_to_not_decompose(ep)
        if any(isinstance(node.target, EdgeOpOverload) for node in ep.graph.nodes):
            return [], None  # after lowering ExecuTorch asks which operators must be gone
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        return XnnpackPartitioner().ops_to_not_decompose(ep)

    def partition(self, exported_program: torch.export.ExportedProgram) -> PartitionResult:
        tags: dict[str, DelegationSpec] = {}
        if self._rest is not None:
            found = self._rest.partition(exported_program)
            exported_program, tags = found.tagged_exported_program, dict(found.partition_tags)
        for i, node in enumerate(exported_program.graph.nodes):
            blob = self._blob(exported_program, node)
            if blob is not None:
                node.meta["delegation_tag"] = f"pi2_{i}"
                tags[f"pi2_{i}"] = DelegationSpec(BACKEND, [CompileSpec(_BLOB, blob)])
                for data in node.all_input_nodes:  # weights are in the store: remove them with the node
                    if data.op == "placeholder" and [*data.users] == [node] and _is_constant(exported_program, data):
                        data.meta["delegation_tag"] = f"pi2_{i}"
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)


@final
class Pi2Partitioner(BlobPartitioner):
    """Feed-forward layers of an optimised model to ``Pi2Backend``, their weights to a neuron store.

    For programs of the model or of a module around it, exported by :func:`torch_pi2.export_program` or
    ``torch.export.export``::

        model.config.use_cache = False
        program = torch_pi2.export_program(model, (ids,))
        partitioner = [Pi2Partitioner(model, "out/model.pi2"), XnnpackPartitioner()]
        edge = to_edge_transform_and_lower(program, partitioner=partitioner)
        edge.to_executorch().save("out/model.pte")

    To run the ``.pte``, load our library and pass the store's path (docs/BUNDLE.md). :func:`torch_pi2.export` adds a KV
    cache, a manifest and a tokenizer.

    Args:
        model: from :func:`torch_pi2.optimize` or :func:`torch_pi2.load`.
        store: the file to write, immediately; ``.pte`` files only have its name.
        rest: a partitioner for everything else; XNNPACK's may instead follow this one in a list.

    Raises:
        ConfigError: a dense model; when lowering, a program without layers of this model. UnsupportedModelError: see
            :func:`torch_pi2.export`; or a layer is called twice. ArtifactError: the store cannot be written.
    """

    def __init__(self, model: nn.Module, store: str | Path, rest: Partitioner | None = None) -> None:
        layers = exported_layers(model)
        if not layers:
            fix = "Import it with neurons='all', or lower it without this partitioner."
            found = f"a {type(model).__name__} without any"
            Field(model, "Pi2Partitioner", fix, UnsupportedModelError).wrong("a model with neurons", found)
        names = {id(module): name for name, module in model.named_modules() if isinstance(module, SparseLayer)}
        facts = write_store(Path(store), layers, get_state(model).plan)
        self._layers = layers
        self._places = {f"{names[id(ffn)]}.neuron_rows": i for i, ffn in enumerate(layers)}

        def blob(program: torch.export.ExportedProgram, node: torch.fx.Node) -> bytes | None:
            layer = self._layer(program, node)
            return None if layer is None else blob_of(facts, layers, layer, 0).pack()

        super().__init__(blob, rest)

    def transform_for_pre_decomposition(self, exported_program: torch.export.ExportedProgram) -> Any:
        self._check(exported_program)
        # lowering runs our operators, which have no gradients, on fakes of the parameters
        parameters = {k: v for k, v in exported_program.state_dict.items() if isinstance(v, nn.Parameter)}
        detached = {id(value): nn.Parameter(value.detach(), requires_grad=False) for value in parameters.values()}
        exported_program.state_dict.update({name: detached[id(value)] for name, value in parameters.items()})
        for node in exported_program.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta.get("val"), torch.Tensor):
                node.meta["val"] = node.meta["val"].detach()
        return exported_program

    def partition(self, exported_program: torch.export.ExportedProgram) -> PartitionResult:
        self._check(exported_program)
        return super().partition(exported_program)

    def _layer(self, program: torch.export.ExportedProgram, node: torch.fx.Node) -> int | None:
        if _operator(node) not in _WHOLE:
            return None
        rows = arguments_of(_WHOLE[_operator(node)], node.args).neuron_rows
        signature = program.graph_signature
        known = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        name = known.get(getattr(rows, "name", ""), "")
        found = [layer for place, layer in self._places.items() if name == place or name.endswith(f".{place}")]
        other = name or node.name
        if len(found) == 1:
            other = _mismatch(program, node, self._layers[found[0]], known)
        if other:
            argument(program, "Pi2Partitioner", "Create it with the model that the program was exported from.").wrong(
                "a program of the model that the partitioner was created with", f"a layer of another one ({other})"
            )
        return found[0]

    def _check(self, program: torch.export.ExportedProgram) -> None:
        """Raises ConfigError: no layer of this model; UnsupportedModelError: a layer is called twice."""
        found = [layer for layer in (self._layer(program, node) for node in program.graph.nodes) if layer is not None]
        if not found:
            fix = "Export the optimised model, not the dense one; leave the partitioner out for other methods."
            expected = "a program with feed-forward layers of its model, from torch_pi2.export_program"
            argument(program, "Pi2Partitioner", fix).wrong(expected, "one without")
        if len({*found}) < len(found):
            fix = "Leave the partitioner out: feed-forward layers are then lowered with weights in the .pte."
            twice = f"layer {next(i for i in found if found.count(i) > 1)} called twice"
            Field(program, "Pi2Partitioner", fix, UnsupportedModelError).wrong("layers that are called once", twice)


#: Most threads of ExecuTorch's pool with partial sums in our attention; and, in a row of sums, padding, maximum and
#: total.
_THREADS, _PADDING = 8, 18


@dataclass(frozen=True)
class Program:
    """A ``.pte`` in pieces, bytes of ExecuTorch's arena, which methods share, and of XNNPACK's workspace."""

    pieces: list[bytes]
    arena_bytes: int
    workspace_bytes: int


def lower(
    programs: Mapping[str, torch.export.ExportedProgram],
    name: str,
    *,
    blob: Callable[[int, int, int, int], bytes] | None = None,
    constant_methods: Mapping[str, Any] | None = None,
) -> Program:
    """The ``.pte`` of ``programs``. ``blob``: (layer, role, first neuron, queue) of a delegate operator -> its blob.
    ``constant_methods``: methods that return a number, a bool or a list of these. Raises UnsupportedModelError:
    ExecuTorch cannot lower it, or missed a delegate operator.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    def blob_of_node(_: Any, node: torch.fx.Node) -> bytes | None:
        role = role_of(node)
        if role is None or blob is None:
            return None
        layer, *settings = node.args[2:]  # behind x and the name of the layers
        first, queue = settings if role else (0, 0)
        return blob(layer, role, first, queue)  # type: ignore[arg-type]

    calls = {key: sum(role_of(n) is not None for n in p.graph.nodes) for key, p in programs.items()}
    with quiet(), named_failures(f"lowering {name}", "operators that ExecuTorch has"):
        partitioners = dict.fromkeys(programs, BlobPartitioner(blob_of_node, XnnpackPartitioner()))
        edge = _delegated(programs, partitioners, constant_methods or {})
        for key, wanted in calls.items():
            module = edge.exported_program(key).graph_module
            missed = [str(node.target) for node in module.graph.nodes if role_of(node) is not None]
            found = sum(lowered.backend_id == BACKEND for lowered in _lowered(module))
            if missed or found != wanted:
                what, expected = f"lowering {name}, method {key}", f"{wanted} delegate calls of feed-forward layers"
                more = f", and {len(missed)} operators not delegated ({missed[0]})" if missed else ""
                fix = "Report it: the partitioner has missed a layer."
                raise UnsupportedModelError(what, expected=expected, found=f"{found}{more}", fix=fix)
        workspace = workspace_bytes(edge)
        planning = MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True)
        how = ExecutorchBackendConfig(memory_planning_pass=planning, run_reinplace_pass=True)
        program = edge.to_executorch(how)
    arenas = zip_longest(*(p.non_const_buffer_sizes for p in program.executorch_program.execution_plan), fillvalue=0)
    pieces: Any = []
    program.write_to_file(SimpleNamespace(write=pieces.append))  # joining them would copy everything
    return Program(pieces, sum(map(max, arenas)), workspace)


def _delegated(programs: Mapping[str, torch.export.ExportedProgram], partitioners: Mapping, constants: Mapping) -> Any:
    """``to_edge_transform_and_lower`` in three quarters of the time (export of 8 layers: 39 instead of 51 CPU seconds).

    ExecuTorch decomposes programs three times, for operators that a partitioner preserves and then rejects. If it takes
    all of them, once gives the same bytes (tests/export/test_lower.py).
    """
    from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower

    settings: dict[str, Any] = {"_check_ir_validity": False, "_skip_dim_order": True}
    whole = {op for key, p in programs.items() for op in partitioners[key].ops_to_not_decompose(p)[0]}
    config = EdgeCompileConfig(preserve_ops=list(whole), **settings)
    edge = to_edge(dict(programs), constant_methods=dict(constants), compile_config=config)
    for key in programs:
        for node in edge.exported_program(key).graph.nodes:
            node.meta.pop("from_node", None)  # an unused tree that passes copy for each node
    edge = edge.to_backend(dict(partitioners))
    nodes = (node for key in programs for node in edge.exported_program(key).graph.nodes)
    if not any(getattr(node.target, "_op", None) in whole for node in nodes):
        return edge
    by_method = {key: [partitioner] for key, partitioner in partitioners.items()}
    how: Any = {"constant_methods": dict(constants), "compile_config": EdgeCompileConfig(**settings)}
    return to_edge_transform_and_lower(dict(programs), partitioner=by_method, **how)


def workspace_bytes(edge: Any) -> int:
    """Bytes of XNNPACK's shared workspace (most live tensors of a delegate), and of sums in attention and experts."""
    found, attention, experts = [0], [0], [0]
    for key in edge.methods:
        module = edge.exported_program(key).graph_module
        for lowered in _lowered(module):
            if lowered.backend_id == "XnnpackBackend":
                found.append(_most_alive(lowered.original_module.graph))
            graph = lowered.original_module.graph
            experts += [_experts_bytes(node) for node in graph.nodes if "pi2.delegate_experts" in str(node.target)]
        calls = (node for node in module.graph.nodes if "pi2.cached_attention" in str(node.args[:1]))
        attention += (_attention_bytes(call) for call in calls)
    return max(found) + max(attention) + max(experts)


def _attention_bytes(call: Any) -> int:
    """Upper bound for a call of ``cached_attention``: sums of each split of the positions, for all tiles."""
    core = constants()
    heads, width = (call.kwargs["query"].meta["val"].shape[i] for i in (1, 3))
    _, key_heads, length, _ = call.kwargs["_all_bases"][0].meta["val"].shape
    rows, splits = max(core.attention_rows, heads // key_heads), -(-length // core.attention_split)
    tile = 4 * splits * rows * (width + _PADDING) + length * rows // 8
    return int(2 * _THREADS * tile)


def _experts_bytes(call: Any) -> int:
    """A mixture (csrc/ffn/experts.cc): results, gathered inputs and token lists of a slice."""
    (tokens, hidden), (_, slots) = (_sizes(call.args[i].meta["val"]) for i in (0, 3))
    slice_tokens = min(tokens, max(64, constants().expert_bytes // ((slots + 2) * hidden * 4)))
    return int(slice_tokens * ((slots + 2) * hidden * 4 + slots * 16))


def _lowered(module: Any) -> Iterator[Any]:
    for node in module.graph.nodes:
        if "executorch_call_delegate" in str(node.target):
            yield getattr(module, node.args[0].target)


def _most_alive(graph: Any) -> int:
    """Most live bytes, without inputs and outputs (in the arena); matrix products pack their second operand."""
    nodes = list(graph.nodes)
    outputs = set(nodes[-1].all_input_nodes)
    last = {used: i for i, node in enumerate(nodes) for used in node.all_input_nodes}
    alive = most = 0
    ends: dict[int, int] = {}
    for i, node in enumerate(nodes):
        inside = node.op == "call_function" and node not in outputs
        size = _bytes(node.meta.get("val")) if inside else 0
        alive += size
        packed = _bytes(node.args[1].meta.get("val")) if "bmm" in str(node.target) else 0
        most = max(most, alive + packed)
        end = last.get(node, i)
        ends[end] = ends.get(end, 0) + size
        alive -= ends.pop(i, 0)
    return most


def _sizes(tensor: torch.Tensor) -> list[int]:
    """Upper bounds of the traced shape."""
    from executorch.exir.sym_util import eval_shape_upper_bound

    return list(eval_shape_upper_bound(tensor.shape))


def _bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    size: int = value.element_size()
    for count in _sizes(value):
        size *= count
    return size
