"""``export_program``: a ``torch.export`` program in which every sparse FFN is an operator: for other ways out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.export.failures import named_failures
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.lazy import LazyDown
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import homes, is_optimized


@checked
def export_program(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """Export an optimised model with ``torch.export``; the result needs ``torch_pi2.ops.load()`` to run.

    Args:
        model: rewritten by :func:`torch_pi2.optimize`.
        args, kwargs: example inputs.
        dynamic_shapes: as for ``torch.export.export``.

    Raises:
        UnsupportedModelError: the model is dense, some of its sparse FFNs would come out dense (their activation is
            code of a bigger block), or torch cannot export it; the message has torch's reason.
    """
    if not is_optimized(model):
        raise UnsupportedModelError(
            type(model).__name__,
            expected="a model that torch_pi2.optimize has rewritten",
            found="a dense model",
            fix="Call torch_pi2.optimize(model, ...) first, or torch.export.export for the dense model.",
        )
    layers = homes(model)
    lazy = [m.sparse.site.key for m in model.modules() if isinstance(m, LazyDown)]
    if lazy:
        raise _dense_in_program(model, len(layers), len(layers) - len(lazy), f" (not {', '.join(lazy[:3])})")
    model.eval()
    what = f"torch.export of {type(model).__name__}"
    with torch.no_grad(), _in_row_order(model), named_failures(what, "a model that torch.export can trace"):
        exported = torch.export.export(
            model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
        )
    # a layer that is called twice gives two operators, so more of them are fine
    operators = ("pi2.sparse_ffn", "pi2.experts_ffn")
    found = sum(str(node.target).startswith(operators) for node in exported.graph.nodes)
    if found < len(layers):
        raise _dense_in_program(model, len(layers), found, "")
    return exported


@contextmanager
def _in_row_order(model: nn.Module) -> Iterator[None]:
    """Within it no rows are in blocks, which are for kernels of this CPU: a program may run elsewhere."""
    ours = [m for m in model.modules() if isinstance(m, QuantLinear | SparseFFN)]
    before = [dict(vars(m), _buffers=dict(m._buffers)) for m in ours]
    try:
        for module in ours:
            module.leave_blocks()
        yield
    finally:
        for module, state in zip(ours, before, strict=True):
            vars(module).update(state)


def _dense_in_program(model: nn.Module, expected: int, found: int, which: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"torch.export of {type(model).__name__}",
        expected=f"all {expected} sparse FFNs as operators of the program",
        found=f"only {found}{which}",
        fix="Move each FFN with its activation into a module of its own, and optimise the model again.",
    )
