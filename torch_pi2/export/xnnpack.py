"""XNNPACK's delegate for programs that repeat themselves: what is alike goes through its passes once. Needs executorch.

Nine tenths of its time are passes that trace a partition again, each with the same outcome for every layer of a
decoder: the layers' graphs differ in their constants alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from executorch.backends.xnnpack._passes import XNNPACKPassManager
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.utils.configs import get_xnnpack_edge_compile_config
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from torch_pi2.base.progress import bar

#: Tells XNNPACK's preprocessing to leave its passes out, but for one that finds nothing any more.
_PASSED = CompileSpec("dqlinear_partitioner", b"")
_PROGRESS = CompileSpec("progress", b"")
#: What nodes know of where they come from.
_PROVENANCE = {
    *("nn_module_stack", "stack_trace", "torch_fn", "original_aten", "from_node", "seq_nr", "desc", "eager_input_vals"),
    *("debug_handle", "delegation_tag"),
}


@dataclass(frozen=True)
class _Passed:
    """A partition behind XNNPACK's passes.

    Attributes:
        targets: names of constants, in the order of the placeholders of the partition before.
        handles: of nodes behind the passes, the first node before them with the same debug handle.
    """

    program: ExportedProgram
    targets: list[str | None]
    handles: dict[torch.fx.Node, int]


@final
class RepeatedXnnpack(BackendDetails):
    """As ``XnnpackBackend``, to the byte. :func:`named_xnnpack` gives its results that name, by which they are run."""

    @classmethod
    def copy_exported_program_for_preprocess(
        cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> ExportedProgram:
        """Itself: copying is for those that are new, and would copy weights."""
        return edge_program

    @classmethod
    def preprocess_multimethod(
        cls, edge_programs: dict[str, list[ExportedProgram]], compile_specs: dict[str, list[list[CompileSpec]]]
    ) -> dict[str, list[PreprocessResult]]:
        """Of all methods; they share the bytes of their constants."""
        shared: dict[str, Any] = {}
        progress = any(_PROGRESS in specs for of_method in compile_specs.values() for specs in of_method)
        total = sum(map(len, edge_programs.values()))
        results: dict[str, list[PreprocessResult]] = {}
        with bar(None, "lower", progress, total=total, unit=" parts", delay=2) as shown:
            for method, programs in edge_programs.items():
                known: dict[Any, _Passed] = {}  # sizes that are not fixed have a meaning within a method
                results[method] = []
                for program in programs:
                    results[method].append(_sharing(_preprocess(program, known), shared))
                    shown.update()
        return results

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Of one partition."""
        return _preprocess(edge_program, {})


def xnnpack_partitioner(progress: bool) -> XnnpackPartitioner:
    """XNNPACK's own, for :class:`RepeatedXnnpack`."""
    partitioner = XnnpackPartitioner()
    partitioner.delegation_spec = DelegationSpec(RepeatedXnnpack.__name__, [_PROGRESS] if progress else [])
    return partitioner


def named_xnnpack(module: torch.fx.GraphModule) -> None:
    """What :class:`RepeatedXnnpack` made in ``module`` becomes XNNPACK's, in place."""
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, LoweredBackendModule) and part.backend_id == RepeatedXnnpack.__name__:
                named = LoweredBackendModule(
                    part.original_module,
                    XnnpackBackend.__name__,
                    part.processed_bytes,
                    [],
                    part.named_data_store_output,
                )
                named.meta = part.meta
                setattr(parent, name, named)


def _preprocess(program: ExportedProgram, known: dict[Any, _Passed]) -> PreprocessResult:
    key = _structure(program)
    if key in known:
        passed = _bound(known[key], program)
    else:
        first = _through_passes(program)
        passed = first.program
        if _keeps_constants(program, passed):
            known[key] = first
    return XnnpackBackend.preprocess(passed, [_PASSED])


def _through_passes(program: ExportedProgram) -> _Passed:
    module = copy.deepcopy(program.graph_module)
    passed = XNNPACKPassManager(
        _program(program, module, copy.deepcopy(program.graph_signature), program.state_dict, program.constants)
    ).transform()
    first = {handle: i for i, handle in reversed(list(enumerate(_handles(program)))) if handle is not None}
    handles = {n: first[n.meta["debug_handle"]] for n in passed.graph.nodes if n.meta.get("debug_handle") in first}
    return _Passed(passed, _targets(program), handles)


def _bound(first: _Passed, program: ExportedProgram) -> ExportedProgram:
    """What the passes would make of ``program``, which has the structure of the ``first`` one."""
    handles = _handles(program)
    for node, i in first.handles.items():
        node.meta["debug_handle"] = handles[i]
    names = dict(zip(first.targets, _targets(program), strict=True))
    signature = first.program.graph_signature
    inputs = [replace(spec, target=names[spec.target]) for spec in signature.input_specs]
    return _program(
        first.program,
        first.program.graph_module,
        ExportGraphSignature(inputs, list(signature.output_specs)),
        program.state_dict,
        program.constants,
    )


def _program(
    like: ExportedProgram,
    module: torch.fx.GraphModule,
    signature: ExportGraphSignature,
    state: Mapping[str, Any],
    constants: Mapping[str, Any],
) -> ExportedProgram:
    """``like`` with another graph and other constants, in the dialect that XNNPACK's passes give."""
    verifier = EXIREdgeDialectVerifier(edge_compile_config=get_xnnpack_edge_compile_config(), class_only=True)
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=signature,
        state_dict=dict(state),
        range_constraints=like.range_constraints,
        module_call_graph=like.module_call_graph,
        constants=dict(constants),
        verifiers=[verifier],
    )


def _sharing(result: PreprocessResult, shared: dict[str, Any]) -> PreprocessResult:
    """``result`` with the bytes of ``shared``, where they have been seen: by their names, which are their hashes."""
    data = result.data_store_output
    if data is not None:
        for name, entry in data.pte_data.items():
            data.buffers[entry.buffer_index] = shared.setdefault(name, data.buffers[entry.buffer_index])
    return result


def _keeps_constants(program: ExportedProgram, passed: ExportedProgram) -> bool:
    """Whether the constants behind the passes are some of those before, which others can stand for."""
    before = {**program.state_dict, **program.constants}
    after = {**passed.state_dict, **passed.constants}
    targets = {spec.target for spec in passed.graph_signature.input_specs}
    return targets <= {*_targets(program)} and all(after[name] is before.get(name) for name in after)


def _targets(program: ExportedProgram) -> list[str | None]:
    return [spec.target for spec in program.graph_signature.input_specs]


def _handles(program: ExportedProgram) -> list[int | None]:
    return [node.meta.get("debug_handle") for node in program.graph.nodes]


def _structure(program: ExportedProgram) -> Any:
    """The same for programs that differ in the values of constants and in names alone."""
    nodes = list(program.graph.nodes)
    places = {node: i for i, node in enumerate(nodes)}
    targets, handles, origins = _targets(program), _handles(program), [node.meta.get("torch_fn") for node in nodes]

    def placed(arguments: Any) -> Any:
        return torch.fx.node.map_arg(arguments, lambda node: f"%{places[node]}")

    signature = program.graph_signature
    parts = [
        [(spec.kind, spec.persistent, targets.index(spec.target)) for spec in signature.input_specs],
        [(spec.kind, spec.target) for spec in signature.output_specs],
    ]
    for node, handle, origin in zip(nodes, handles, origins, strict=True):
        called = () if node.op == "placeholder" else (node.target, placed(node.args), placed(node.kwargs))
        of_origin = (origins.index(origin), (origin or ("", ""))[1])
        meta = [(name, _described(value)) for name, value in node.meta.items() if name not in _PROVENANCE]
        parts.append([(node.op, *map(str, called), handles.index(handle), of_origin), *sorted(meta)])
    return repr(parts)


def _described(value: Any) -> str:
    if isinstance(value, list | tuple):
        return str([_described(item) for item in value])
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    return repr(value)
