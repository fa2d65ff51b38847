"""From methods (modules and example inputs) to the bytes of a ``.pte``. Needs executorch.

Feed-forward layers go to ``Pi2Backend``, everything else that it knows to XNNPACK, and what is left runs on
ExecuTorch's CPU operators. One call of ``to_edge_transform_and_lower`` for all methods, which share their constants and
their mutable buffers.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torch_pi2.base.progress import bar
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.export.failures import named_failures
from torch_pi2.export.memory import workspace_bytes
from torch_pi2.export.partitioner import BACKEND, BlobPartitioner, role_of


@dataclass(frozen=True)
class Method:
    """What is traced under one name.

    Attributes:
        module, args, dynamic_shapes: as for ``torch.export.export``.
        prepare: called before it is traced (a method may want other parts of the model than the one before).
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None = None
    dynamic_shapes: Any = None
    prepare: Callable[[], None] | None = None


def trace(
    methods: Mapping[str, Method], name: str, *, progress: bool = False
) -> dict[str, torch.export.ExportedProgram]:
    """``torch.export`` of every method. Raises UnsupportedModelError, with torch's reason."""
    programs = {}
    for key, method in bar(methods.items(), "trace", progress, delay=2):
        if method.prepare is not None:
            method.prepare()
        what = f"torch.export of {name}, method {key}"
        with torch.no_grad(), _quiet(), named_failures(what, "a model that torch.export can trace"):
            programs[key] = torch.export.export(
                method.module,
                method.args,
                dict(method.kwargs or {}),
                dynamic_shapes=method.dynamic_shapes,
                strict=False,
            )
    return programs


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
    constants: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Program:
    """The ``.pte`` of ``programs``.

    Args:
        blob: what a delegate operator becomes, of its layer, role, first neuron and queue.
        constants: methods that return a number, a bool or a list of these.

    Raises:
        UnsupportedModelError: ExecuTorch cannot lower it; or a delegate operator was left over.
    """
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    from torch_pi2.export.xnnpack import named_xnnpack, xnnpack_partitioner

    def blob_of_node(_: Any, node: torch.fx.Node) -> bytes | None:
        role = role_of(node)
        if role is None or blob is None:
            return None
        layer, *settings = node.args[2:]  # behind x and the name of the layers
        first, queue = settings if role else (0, 0)
        return blob(layer, role, first, queue)  # type: ignore[arg-type]

    rest = xnnpack_partitioner(progress)
    calls = {key: sum(role_of(n) is not None for n in p.graph.nodes) for key, p in programs.items()}
    with _quiet(), named_failures(f"lowering {name}", "operators that ExecuTorch has"):
        partitioners = dict.fromkeys(programs, _Parts(blob_of_node, rest))
        edge = _delegated(programs, partitioners, constants or {})
        for key in programs:
            named_xnnpack(edge.exported_program(key).graph_module)
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
    """As ``to_edge_transform_and_lower``, which decomposes programs three times: twice for nodes that a partitioner
    does not want although it wants their operator whole. Where there are none, once is the same.
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
        left = [str(node.target) for node in nodes if role_of(node) is not None]
        called = [n.args[0].target for n in nodes if "executorch_call_delegate" in str(n.target)]
        found = sum(getattr(edge.exported_program(key).graph_module, c).backend_id == BACKEND for c in called)
        if left or found != wanted:
            raise UnsupportedModelError(
                f"lowering {name}, method {key}",
                expected=f"{wanted} delegate calls of feed-forward layers",
                found=f"{found}" + (f", and {len(left)} operators that were left ({left[0]})" if left else ""),
                fix="Report it: the partitioner has missed a layer.",
            )


class _Uncompiled(torch.fx.GraphModule):
    """A graph without code. ExecuTorch sorts the whole program, and prints it to a log, for each part that it takes out
    of it, and the code that it would have each time is what that takes.
    """

    def recompile(self) -> Any:
        """Nothing: nobody runs it before it is a program again."""

    def __str__(self) -> str:
        return type(self).__name__


class _Parts(BlobPartitioner):
    """Its programs are cut into parts without code."""

    def partition(self, exported_program: torch.export.ExportedProgram) -> Any:
        found = super().partition(exported_program)
        tagged = found.tagged_exported_program
        tagged._graph_module = _Uncompiled(tagged.graph_module, tagged.graph)
        return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and ExecuTorch say for those who develop them."""
    loggers = [logging.getLogger(name) for name in ("executorch", "torch.fx", "torch._export", "root")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)
