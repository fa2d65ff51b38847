"""Running a user's model for our own purposes, and leaving no trace of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def evaluating(*roots: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own training flag is restored afterwards.

    ``nn.TransformerEncoderLayer``'s fused fast path is off meanwhile: it hides the FFN's matmuls.
    """
    flags = [(module, module.training) for root in roots for module in root.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        for root in roots:
            root.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, training in flags:
            module.training = training


@contextmanager
def fresh_settings() -> Iterator[None]:
    """Settings of torch as in a new process, whatever the caller has set; his are back afterwards.

    Default dtype and device, gradients, inference mode, autocast, precision of matrix products, determinism.
    """
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    deterministic, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        _on_cpu(),
    ):
        try:
            torch.set_default_dtype(torch.float32)
            torch.set_float32_matmul_precision("highest")
            torch.use_deterministic_algorithms(False)
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warns)
            torch.set_float32_matmul_precision(precision)
            torch.set_default_dtype(dtype)


def _on_cpu() -> AbstractContextManager[object]:
    """The CPU as default device; nothing where it is one: with this mode, a capture takes twice as long.

    While ``torch.jit.trace`` runs it keeps trials of ours out of its graph.
    """
    needless = torch.get_default_device().type == "cpu" and not torch._C._is_tracing()
    return nullcontext() if needless else torch.device("cpu")
