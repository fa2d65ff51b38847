"""A layer's part of a predictor: rows of the cold neurons, in plan order."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torch_pi2.errors import ConfigError, DtypeError, ShapeError
from torch_pi2.types.site import FFNSite


class Cold(NamedTuple):
    """A layer's part of a predictor. ``kind``: its name in operators. ``weights``: format of quantised rows, else "".
    ``cut``: replaces the threshold. ``in_blocks``: rows are in blocks of 16; with a bias; b may begin with padding.
    ``method``: a ``SparseMethod``, which is asked in Python.
    """

    kind: str
    tensors: dict[str, torch.Tensor]
    weights: str = ""
    cut: float | None = None
    in_blocks: bool = False
    method: Any = None


def layer_tensors(
    site: FFNSite,
    method: str,
    found: Mapping[str, torch.Tensor] | None,
    wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[str, torch.Tensor]:
    """The ``wanted`` tensors of ``found``, and ``bias``. Raises ConfigError: none; ShapeError, DtypeError: others."""
    missing = [name for name in wanted if name != "bias" and name not in (found or {})]
    if found is None or missing:
        what, none = f"predictor of {site.key}", "none" if found is None else f"no {', '.join(missing)}"
        expected = f"tensors {', '.join(wanted)}, as its plan says {method!r}"
        fix = f"Fit predictors (torch_pi2.fit with method={method!r}) and pass them, or plan without them."
        raise ConfigError(what, expected=expected, found=none, fix=fix)
    for name, (shape, dtype) in wanted.items():
        tensor = found.get(name)
        if tensor is not None and tuple(tensor.shape) != shape:
            found_shape, fix = str(tuple(tensor.shape)), "It was made for another layer."
            raise ShapeError(f"predictor {name} of {site.key}", expected=str(shape), found=found_shape, fix=fix)
        if tensor is not None and tensor.dtype != dtype:
            fix = "Use a predictor made by torch_pi2.fit."
            raise DtypeError(f"predictor {name} of {site.key}", expected=str(dtype), found=str(tensor.dtype), fix=fix)
    return {name: found[name] for name in wanted if found.get(name) is not None}
