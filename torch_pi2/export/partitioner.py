"""``Pi2Partitioner``: feed-forward layers and mixtures of experts become calls of the ``Pi2Backend`` delegate.

The weights are in a store that is written first (D2), so the ``.pte`` only has a blob of 512 bytes per call
(:mod:`torch_pi2.export.blob`), which travels in the compile specs. Needs executorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch import nn

from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export.blob import event_of
from torch_pi2.export.delegated import ROLES, exported_layers
from torch_pi2.export.store import blob_of, write_store
from torch_pi2.layers.of_model import SparseLayer
from torch_pi2.ops.operators import arguments_of
from torch_pi2.ops.reference import experts_ffn, predicted_ffn, sparse_ffn
from torch_pi2.rewrite.state import get_state

BACKEND = "Pi2Backend"
_BLOB = "blob"
#: The blob of a node of a program; None: it is none of ours.
BlobOf = Callable[[torch.export.ExportedProgram, torch.fx.Node], "bytes | None"]
#: Whole layers in programs of :func:`torch_pi2.export_program`, and their references.
_WHOLE: Mapping[str, Callable[..., Any]] = {
    "pi2.sparse_ffn": sparse_ffn,
    "pi2.predicted_ffn": predicted_ffn,
    "pi2.experts_ffn": experts_ffn,
}
#: Arguments that tell one model from another: tensors; and numbers, with their names in a layer.
_WEIGHTS = ("neuron_rows", "bias_gate", "bias_up", "bias_down")
_THRESHOLDS = {"threshold": "threshold", "cut": "predictor_threshold", "thresholds": "thresholds", "cuts": "cuts"}


def role_of(node: torch.fx.Node) -> int | None:
    """The role in the blob of a delegate operator; None for other nodes."""
    return ROLES.get(_operator(node))


def _operator(node: torch.fx.Node) -> str:
    """Name of the operator that a node calls, such as "aten.relu", in ATen and in ExecuTorch's dialect; or ""."""
    target = node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "_op", None)
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return ""
    return str(target._schema.name.replace("::", "."))


def _is_constant(program: torch.export.ExportedProgram, node: torch.fx.Node) -> bool:
    signature = program.graph_signature
    kinds = signature.inputs_to_parameters, signature.inputs_to_buffers, signature.inputs_to_lifted_tensor_constants
    return any(node.name in names for names in kinds)


def _mismatch(
    program: torch.export.ExportedProgram, node: torch.fx.Node, home: SparseLayer, known: Mapping[str, str]
) -> str:
    """The first weight or threshold of a call that differs from those of ``home``, the layer of that name; or "".

    Predictors are not compared: their rows may be in another order in a program. known: name of a program's input ->
    name of the parameter or buffer.
    """
    for data in node.all_input_nodes:
        name = known.get(data.name, "")
        theirs = program.state_dict.get(name, program.constants.get(name))
        ours = getattr(home, name.rpartition(".")[2], None) if name.endswith(_WEIGHTS) else None
        known_bytes = type(theirs) in (torch.Tensor, nn.Parameter)  # not so once a part of the program is lowered
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


def _without_gradients(program: torch.export.ExportedProgram) -> None:
    """Lowering runs operators on fake parameters, and ours have no gradients. The model's parameters are unchanged."""
    parameters = {name: value for name, value in program.state_dict.items() if isinstance(value, nn.Parameter)}
    detached = {id(value): nn.Parameter(value.detach(), requires_grad=False) for value in parameters.values()}
    program.state_dict.update({name: detached[id(value)] for name, value in parameters.items()})
    for node in program.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["val"] = node.meta["val"].detach()


@final
class Pi2Backend(BackendDetails):  # the delegate's name is that of the class
    """Gives each call its blob; profiles show the operator that it was."""

    @staticmethod
    def preprocess(edge_program: torch.export.ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        blob = next(spec.value for spec in compile_specs if spec.key == _BLOB)
        handles = (node.meta.get("debug_handle") for node in edge_program.graph.nodes if node.op == "call_function")
        known = tuple(handle for handle in handles if handle is not None)
        return PreprocessResult(processed_bytes=blob, debug_handle_map={event_of(blob): known} if known else None)


class BlobPartitioner(Partitioner):
    """Delegates each node that has a blob, and leaves everything else to another partitioner.

    Args:
        blob: of a node.
        rest: of the rest. It is a part of this one because each partitioner in a list decomposes the whole program
            first: with the same operators to preserve that is done twice, with others what the next one knows
            (quantised linears) would be gone without an error. None: those of XNNPACK are preserved.
    """

    def __init__(self, blob: BlobOf, rest: Partitioner | None = None) -> None:
        super().__init__()
        self._blob, self._rest = blob, rest

    def ops_to_not_decompose(self, ep: torch.export.ExportedProgram) -> Any:
        if self._rest is not None:
            return self._rest.ops_to_not_decompose(ep)
        if any(isinstance(node.target, EdgeOpOverload) for node in ep.graph.nodes):
            return [], None  # lowered already: ExecuTorch asks which operators must be gone
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
                for data in node.all_input_nodes:  # weights are in the store, and go with the node
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

    Who runs the ``.pte`` has our library in the process, and says where the store is (docs/BUNDLE.md).
    :func:`torch_pi2.export` does more: a KV cache, a manifest, a tokenizer.

    Args:
        model: that :func:`torch_pi2.optimize` or :func:`torch_pi2.load` gave.
        store: the file to write, at once; ``.pte`` files know its name alone.
        rest: another partitioner, for all else; or list it behind this one, if it is XNNPACK's.

    Raises:
        ConfigError: a dense model; when lowering, a program without layers of this model. UnsupportedModelError: see
            :func:`torch_pi2.export`; a layer that is called twice. ArtifactError: the store cannot be written.
    """

    def __init__(self, model: nn.Module, store: str | Path, rest: Partitioner | None = None) -> None:
        layers = exported_layers(model)
        if not layers:
            raise UnsupportedModelError(
                "Pi2Partitioner",
                expected="a model with neurons",
                found=f"a {type(model).__name__} without any",
                fix="Import it with neurons='all', or lower it without this partitioner.",
            )
        names = {id(module): name for name, module in model.named_modules() if isinstance(module, SparseLayer)}
        facts = write_store(Path(store), layers, get_state(model).plan)
        self._layers = layers
        self._places = {f"{names[id(ffn)]}.neuron_rows": i for i, ffn in enumerate(layers)}

        def blob(program: torch.export.ExportedProgram, node: torch.fx.Node) -> bytes | None:
            layer = self._layer(program, node)
            return None if layer is None else blob_of(facts, layers, layer, 0).pack()

        super().__init__(blob, rest)

    def transform_for_pre_decomposition(
        self, exported_program: torch.export.ExportedProgram
    ) -> torch.export.ExportedProgram:
        self._check(exported_program)
        _without_gradients(exported_program)
        return exported_program

    def partition(self, exported_program: torch.export.ExportedProgram) -> PartitionResult:
        self._check(exported_program)
        return super().partition(exported_program)

    def _layer(self, program: torch.export.ExportedProgram, node: torch.fx.Node) -> int | None:
        """The layer that a node is; None if it is no layer of ours."""
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
            raise ConfigError(
                "Pi2Partitioner",
                expected="a program of the model that the partitioner was created with",
                found=f"a layer of another one ({other})",
                fix="Create it with the model that the program was exported from.",
            )
        return found[0]

    def _check(self, program: torch.export.ExportedProgram) -> None:
        """Raises ConfigError for a program of which nothing would be ours, UnsupportedModelError for a layer twice."""
        found = [layer for layer in (self._layer(program, node) for node in program.graph.nodes) if layer is not None]
        if not found:
            ours = next((name for name in map(_operator, program.graph.nodes) if name.startswith("pi2.")), None)
            raise ConfigError(
                "Pi2Partitioner",
                expected="a program with feed-forward layers of its model, from torch_pi2.export_program",
                found="one with " + (f"operators such as {ours} alone" if ours else "no operator of ours"),
                fix="Export the optimised model, not the dense one; leave the partitioner out for other methods.",
            )
        if len({*found}) < len(found):
            raise UnsupportedModelError(
                "Pi2Partitioner",
                expected="layers that are called once",
                found=f"layer {next(i for i in found if found.count(i) > 1)} called twice",
                fix="Leave the partitioner out: feed-forward layers are then lowered with weights in the .pte.",
            )
