"""From traced methods to the bytes of a ``.pte``. Needs executorch.

Feed-forward layers go to ``Pi2Backend``, what XNNPACK supports to XNNPACK, and the rest runs on ExecuTorch's CPU
operators. All methods are lowered at once, so that they share constants and mutable buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import torch

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.export.partitioner import BACKEND, BlobPartitioner, role_of
from torch_pi2.export.program import named_failures, quiet
from torch_pi2.ops.constants import constants

#: Threads of ExecuTorch's pool at most, for which our attention has sums; and, in a row of sums, padding, largest score
#: and total.
_THREADS, _PADDING = 8, 18


@dataclass(frozen=True)
class Program:
    """A ``.pte`` in pieces; bytes of the memory that ExecuTorch plans for its methods, which share it; of XNNPACK's."""

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
    """The ``.pte`` of ``programs``.

    Args:
        blob: what a delegate operator becomes, of its layer, role, first neuron and queue.
        constant_methods: methods that return a number, a bool or a list of these.

    Raises:
        UnsupportedModelError: ExecuTorch cannot lower it; or it missed a delegate operator.
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
        partitioners = dict.fromkeys(programs, _Parts(blob_of_node, XnnpackPartitioner()))
        edge = _delegated(programs, partitioners, constant_methods or {})
        _check_delegated(edge, calls, name)
        workspace = workspace_bytes(edge)
        program = edge.to_executorch(
            ExecutorchBackendConfig(
                memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True),
                run_reinplace_pass=True,
            )
        )
    arenas = zip_longest(*(p.non_const_buffer_sizes for p in program.executorch_program.execution_plan), fillvalue=0)
    pieces: Any = []
    program.write_to_file(SimpleNamespace(write=pieces.append))  # as they are: in one they would be there twice
    return Program(pieces, sum(map(max, arenas)), workspace)


def _delegated(
    programs: Mapping[str, torch.export.ExportedProgram], partitioners: Mapping[str, Any], constants: Mapping[str, Any]
) -> Any:
    """As ``to_edge_transform_and_lower``, in half of the time (8 layers, 4 methods: 31 instead of 56 s of a CPU).

    ExecuTorch decomposes programs three times, twice of them for nodes that a partitioner wants decomposed although it
    wants their operator whole. Without such nodes once gives the same bytes (tests/export/test_lower.py).
    """
    from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower

    settings: dict[str, Any] = {"_check_ir_validity": False, "_skip_dim_order": True}
    whole = {op for key, p in programs.items() for op in partitioners[key].ops_to_not_decompose(p)[0]}
    config = EdgeCompileConfig(preserve_ops=list(whole), **settings)
    edge = to_edge(dict(programs), constant_methods=dict(constants), compile_config=config)
    for key in programs:
        for node in edge.exported_program(key).graph.nodes:
            node.meta.pop("from_node", None)  # a tree, copied for each node that a pass makes, and read by nothing here
    found = {key: _calls(edge.exported_program(key), whole) for key in programs}
    wants = {key: partitioners[key].ops_to_not_decompose(edge.exported_program(key))[1] for key in programs}
    if all(wants[key](node) for key, nodes in found.items() for node in nodes):
        edge = edge.to_backend(dict(partitioners))
        if not any(_calls(edge.exported_program(key), whole) for key in programs):
            return edge
    return to_edge_transform_and_lower(
        dict(programs),
        partitioner={key: [partitioner] for key, partitioner in partitioners.items()},
        constant_methods=dict(constants),
        compile_config=EdgeCompileConfig(**settings),
    )


def _calls(program: torch.export.ExportedProgram, operators: Set[Any]) -> list[torch.fx.Node]:
    """Nodes that call one of ``operators``, in ExecuTorch's dialect."""
    return [node for node in program.graph.nodes if getattr(node.target, "_op", None) in operators]


def _check_delegated(edge: Any, calls: Mapping[str, int], name: str) -> None:
    for key, wanted in calls.items():
        nodes = edge.exported_program(key).graph_module.graph.nodes
        missed = [str(node.target) for node in nodes if role_of(node) is not None]
        called = [n.args[0].target for n in nodes if "executorch_call_delegate" in str(n.target)]
        found = sum(getattr(edge.exported_program(key).graph_module, c).backend_id == BACKEND for c in called)
        if missed or found != wanted:
            raise UnsupportedModelError(
                f"lowering {name}, method {key}",
                expected=f"{wanted} delegate calls of feed-forward layers",
                found=f"{found}" + (f", and {len(missed)} operators not delegated ({missed[0]})" if missed else ""),
                fix="Report it: the partitioner has missed a layer.",
            )


class _Uncompiled(torch.fx.GraphModule):
    """A graph for which no Python code is generated: ExecuTorch would do so for each partition, and nobody runs it."""

    def recompile(self) -> Any:
        """Do nothing."""

    def __str__(self) -> str:
        return type(self).__name__


class _Parts(BlobPartitioner):
    """Partitions graphs for which no code is generated."""

    def partition(self, exported_program: torch.export.ExportedProgram) -> Any:
        found = super().partition(exported_program)
        tagged = found.tagged_exported_program
        tagged._graph_module = _Uncompiled(tagged.graph_module, tagged.graph)
        return found


# --- memory of what was lowered ---------------------------------------------------------------------------------------


def workspace_bytes(edge: Any) -> int:
    """What XNNPACK needs for tensors within its delegates, which all share it, the most that live at once in any; and
    our attention for its sums, and experts for theirs.
    """
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
    """Of a call of ``cached_attention``, at most: sums of each split of the positions, of the tiles in work at once."""
    core = constants()
    heads, width = (call.kwargs["query"].meta["val"].shape[i] for i in (1, 3))
    _, key_heads, length, _ = call.kwargs["_all_bases"][0].meta["val"].shape
    rows, splits = max(core.attention_rows, heads // key_heads), -(-length // core.attention_split)
    tile = 4 * splits * rows * (width + _PADDING) + length * rows // 8
    return int(2 * _THREADS * tile)


def _experts_bytes(call: Any) -> int:
    """Of a mixture (csrc/ffn/experts.cc): a slice's results, gathered inputs and lists of its tokens."""
    (tokens, hidden), (_, slots) = (_sizes(call.args[i].meta["val"]) for i in (0, 3))
    slice_tokens = min(tokens, max(64, constants().expert_bytes // ((slots + 2) * hidden * 4)))
    return int(slice_tokens * ((slots + 2) * hidden * 4 + slots * 16))


def _lowered(module: Any) -> Iterator[Any]:
    for node in module.graph.nodes:
        if "executorch_call_delegate" in str(node.target):
            yield getattr(module, node.args[0].target)


def _most_alive(graph: Any) -> int:
    """Inputs and outputs are in ExecuTorch's memory. A product of matrices has its second one once more, packed."""
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
    """The largest that were allowed when it was traced."""
    from executorch.exir.sym_util import eval_shape_upper_bound

    return list(eval_shape_upper_bound(tensor.shape))


def _bytes(value: Any) -> int:
    """Of a tensor, or of several, at their largest sizes."""
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    size: int = value.element_size()
    for count in _sizes(value):
        size *= count
    return size
