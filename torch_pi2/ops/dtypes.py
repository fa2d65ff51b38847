"""Formats of floats (:mod:`torch_pi2.formats`) and torch's dtypes."""

from __future__ import annotations

import torch

from torch_pi2.formats import FLOAT, FLOATS

#: The dtypes that kernels have, by the name of the format.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FLOATS}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``: what files and messages call it."""
    return str(dtype).removeprefix("torch.")


def format_name(weights: str, dtype: torch.dtype) -> str:
    """The format that an operator's ``weights`` over a tensor of ``dtype`` mean."""
    return dtype_name(dtype) if weights == FLOAT else weights
