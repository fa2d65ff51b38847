"""``torch.export`` of models, and of methods of a bundle; ``export_program`` is public."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_pi2.base.fields import Field, checked
from torch_pi2.base.package import quiet_loggers
from torch_pi2.base.progress import bar
from torch_pi2.errors import Pi2Error, UnsupportedModelError
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import homes


@dataclass(frozen=True)
class MethodSpec:
    """A method to be traced: arguments of ``torch.export.export``."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None = None
    dynamic_shapes: Any = None


#: Errors of this machine, not of the model.
_OTHER_ERRORS = (Pi2Error, OSError, MemoryError)


@contextmanager
def named_failures(what: str, expected: str) -> Iterator[None]:
    """Convert errors of torch, transformers and ExecuTorch into UnsupportedModelError with their reason."""
    try:
        yield
    except _OTHER_ERRORS:
        raise
    except Exception as error:  # they raise many types
        lines = str(error).strip().splitlines()
        found = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        fix = "Export its dense form with torch.export and ExecuTorch to see whether torch_pi2 is the cause."
        raise UnsupportedModelError(what, expected=expected, found=found, fix=fix) from error


def trace(methods: Mapping[str, MethodSpec], name: str, *, progress: bool = False) -> dict[str, Any]:
    """``torch.export`` of every method of the model ``name``. Raises UnsupportedModelError."""
    programs = {}
    for key, method in bar(methods.items(), "trace", progress, delay=2):
        what = f"torch.export of {name}, method {key}"
        with torch.no_grad(), quiet(), named_failures(what, "a model that torch.export can trace"):
            call, shapes = (method.module, method.args, dict(method.kwargs or {})), method.dynamic_shapes
            programs[key] = torch.export.export(*call, dynamic_shapes=shapes, strict=False)
    return programs


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress developer warnings and logs of torch and ExecuTorch."""
    with warnings.catch_warnings(), quiet_loggers("executorch", "torch.fx", "torch._export", "root"):
        warnings.simplefilter("ignore")
        yield


@checked
def export_program(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, dynamic_shapes: Any = None
) -> torch.export.ExportedProgram:
    """Export an optimised model with ``torch.export``; the result needs ``torch_pi2.ops.load()`` to run.

    Args:
        model: rewritten by :func:`torch_pi2.optimize`.
        args, kwargs, dynamic_shapes: as for ``torch.export.export``.

    Raises:
        UnsupportedModelError: the model is dense, a sparse FFN would be exported dense (its activation is inline code
            of a bigger block), or torch cannot export it.
    """
    layers = homes(model)
    if not layers:
        fix = "Call torch_pi2.optimize(model, ...) first, or torch.export.export for the dense model."
        expected = "a model that torch_pi2.optimize has rewritten"
        Field(model, type(model).__name__, fix, UnsupportedModelError).wrong(expected, "a dense model")
    model.eval()
    what = f"torch.export of {type(model).__name__}"
    with torch.no_grad(), _in_row_order(model), named_failures(what, "a model that torch.export can trace"):
        call = (model, tuple(args), dict(kwargs or {}))
        exported = torch.export.export(*call, dynamic_shapes=dynamic_shapes, strict=False)
    operators = ("pi2.sparse_ffn", "pi2.experts_ffn")
    count = sum(str(node.target).startswith(operators) for node in exported.graph.nodes)
    if count < len(layers):  # more: a layer is called twice
        expected, found = f"all {len(layers)} sparse FFNs as operators of the program", f"only {count}"
        Field(model, what, "Export inputs that call all of them.", UnsupportedModelError).wrong(expected, found)
    return exported


@contextmanager
def _in_row_order(model: nn.Module) -> Iterator[None]:
    """Within the block, rows are not interleaved for this CPU's kernels: the program may run elsewhere."""
    layers = [m for m in model.modules() if isinstance(m, QuantLinear | SparseFFN)]
    before = [dict(vars(m), _buffers=dict(m._buffers)) for m in layers]
    try:
        for module in layers:
            module.leave_blocks()
        yield
    finally:
        for module, state in zip(layers, before, strict=True):
            vars(module).update(state)
