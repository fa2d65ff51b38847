"""``Pi2Partitioner``: the delegate operators of a program become calls of the ``Pi2Backend`` delegate.

The weights are in a store that has been written before (D2), so that what is left in the ``.pte`` is a blob of 512
bytes per call (:mod:`torch_pi2.export.blob`). Needs executorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult

from torch_pi2.errors import ConfigError
from torch_pi2.export.markers import ROLES

BACKEND = "Pi2Backend"

#: Name of registered layers -> (layer, role, first neuron, queue) -> the blob.
_blobs: dict[str, Callable[[int, int, int, int], bytes]] = {}


@contextmanager
def blobs(name: str, make: Callable[[int, int, int, int], bytes]) -> Iterator[None]:
    """While this is entered, operators of the registered layers ``name`` are lowered to what ``make`` gives."""
    _blobs[name] = make
    try:
        yield
    finally:
        del _blobs[name]


def role_of(node: torch.fx.Node) -> int | None:
    """Role in the blob of a node that is a delegate operator; None of any other."""
    return ROLES.get(_operator(node))


def _operator(node: torch.fx.Node) -> str:
    """Name of the operator that a node calls, such as "aten.relu", in ATen and in ExecuTorch's dialect; or ""."""
    target = node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "_op", None)
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return ""
    return str(target._schema.name.replace("::", "."))


@final
class Pi2Backend(BackendDetails):  # the delegate's name is that of the class
    """Gives each delegate operator its blob."""

    @staticmethod
    def preprocess(edge_program: torch.export.ExportedProgram, compile_specs: list[Any]) -> PreprocessResult:
        found = [(node, role_of(node)) for node in edge_program.graph.nodes]
        calls = [(node, role) for node, role in found if role is not None]
        assert len(calls) == 1, calls
        node, role = calls[0]
        assert role is not None
        name, layer, *rest = node.args[1:]
        first, queue = rest if role else (0, 0)
        if name not in _blobs:
            raise ConfigError(
                f"lowering of {node.target}",
                expected="a program made by torch_pi2.export",
                found=f"layers {name}, whose store is not known",
                fix="Lower it inside torch_pi2.export(...), which writes the store first.",
            )
        return PreprocessResult(processed_bytes=_blobs[name](int(layer), role, int(first), int(queue)))


@final
class Pi2Partitioner(Partitioner):
    """Takes delegate operators, each by itself, and leaves everything else to another partitioner.

    It is for :func:`torch_pi2.export` alone, which writes the store first; elsewhere it would take nothing.

    Args:
        rest: of the rest. It is a part of this one because each partitioner in a list decomposes the whole program
            first: with another list of operators to preserve, what the other one knows (quantised linears) would be
            gone without an error; with the same list, it would be done twice.
    """

    def __init__(self, rest: Partitioner | None = None) -> None:
        super().__init__()
        self._rest = rest
        self._spec = DelegationSpec(BACKEND, [])

    def transform_for_pre_decomposition(
        self, exported_program: torch.export.ExportedProgram
    ) -> torch.export.ExportedProgram:
        _refuse_others(exported_program)
        return exported_program

    def ops_to_not_decompose(self, ep: torch.export.ExportedProgram) -> Any:
        return ([], None) if self._rest is None else self._rest.ops_to_not_decompose(ep)

    def partition(self, exported_program: torch.export.ExportedProgram) -> PartitionResult:
        _refuse_others(exported_program)
        tags: dict[str, DelegationSpec] = {}
        if self._rest is not None:
            found = self._rest.partition(exported_program)
            exported_program, tags = found.tagged_exported_program, dict(found.partition_tags)
        for i, node in enumerate(exported_program.graph.nodes):
            if role_of(node) is not None:
                node.meta["delegation_tag"] = f"pi2_{i}"
                tags[f"pi2_{i}"] = self._spec
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)


def _refuse_others(program: torch.export.ExportedProgram) -> None:
    """Raises ConfigError for a program of which nothing would be ours."""
    if any(role_of(node) is not None for node in program.graph.nodes):
        return
    ours = next((name for name in map(_operator, program.graph.nodes) if name.startswith("pi2.")), None)
    raise ConfigError(
        "Pi2Partitioner",
        expected="a program that torch_pi2.export(model, folder) lowers, whose feed-forward layers are in a store",
        found="another program, with " + (f"operators such as {ours}" if ours else "no operator of ours"),
        fix="Call torch_pi2.export(model, folder): it lowers the rest with XNNPACK, too. Or leave Pi2Partitioner out: "
        "all feed-forward layers are then lowered as any other part of the model, with weights in the .pte.",
    )
