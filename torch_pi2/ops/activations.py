"""Activations the kernels know, by name. ``relu``-like ones give exact zeros (lossless sparsity)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]

#: name -> function, in the order of the C++ enum ``pi2::Activation``.
ACTIVATIONS: dict[str, Activation] = {
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "identity": lambda x: x,
}

#: Activations that are exactly zero on half of the line: skipping their zeros is lossless.
SPARSE_ACTIVATIONS = frozenset({"relu", "relu2"})
