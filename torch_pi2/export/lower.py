"""From methods (modules and example inputs) to the bytes of a ``.pte``. Needs executorch.

Feed-forward layers go to ``Pi2Backend``, everything else that it knows to XNNPACK, and what is left runs on
ExecuTorch's CPU operators. One call of ``to_edge_transform_and_lower`` for all methods, which share their constants and
their mutable buffers.
"""

from __future__ import annotations

import copy
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
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
    """A ``.pte``; bytes of the memory that ExecuTorch plans for its methods, which share it, and of XNNPACK's."""

    data: bytes
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
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass

    def blob_of_node(_: Any, node: torch.fx.Node) -> bytes | None:
        role = role_of(node)
        if role is None or blob is None:
            return None
        layer, *settings = node.args[2:]  # behind x and the name of the layers
        first, queue = settings if role else (0, 0)
        return blob(layer, role, first, queue)  # type: ignore[arg-type]

    rest = XnnpackPartitioner()
    calls = {key: sum(role_of(n) is not None for n in p.graph.nodes) for key, p in programs.items()}
    with _quiet(), _counted(progress), named_failures(f"lowering {name}", "operators that ExecuTorch has"):
        edge = to_edge_transform_and_lower(
            dict(programs),
            partitioner={key: [BlobPartitioner(blob_of_node, rest) if count else rest] for key, count in calls.items()},
            constant_methods=dict(constants or {}),
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
        _check_delegated(edge, calls, name)
        workspace = workspace_bytes(edge)
        program = edge.to_executorch(
            ExecutorchBackendConfig(
                memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True),
                run_reinplace_pass=True,
            )
        )
    arenas = zip_longest(*(p.non_const_buffer_sizes for p in program.executorch_program.execution_plan), fillvalue=0)
    return Program(program.buffer, sum(map(max, arenas)), workspace)


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


@contextmanager
def _counted(progress: bool) -> Iterator[None]:
    """A bar that counts the parts that XNNPACK takes, which is most of the time; how many there are is not known."""
    if not progress:
        yield
        return
    from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend

    before = XnnpackBackend.preprocess
    with bar(None, "lower", progress, unit=" parts", delay=2) as shown:

        def preprocess(*args: Any) -> Any:
            shown.update()
            return before(*args)

        XnnpackBackend.preprocess = staticmethod(preprocess)
        try:
            yield
        finally:
            XnnpackBackend.preprocess = staticmethod(before)


class _SharingCopies:
    """``copy`` for ``torch.fx.traceback``: where a node comes from is not copied with every node made of it."""

    copy = staticmethod(copy.copy)

    @staticmethod
    def deepcopy(value: Any) -> Any:
        return value


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and ExecuTorch say, and keep, for those who develop them.

    The provenance of nodes, which nothing here reads, is a tree that grows with every pass and is copied for each node:
    a fifth of the time of lowering.
    """
    provenance: Any = importlib.import_module("torch.fx.traceback")

    loggers = [logging.getLogger(name) for name in ("executorch", "torch.fx", "torch._export", "root")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        before = provenance.copy
        provenance.copy = _SharingCopies
        try:
            yield
        finally:
            provenance.copy = before
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)
