"""Torch dtypes of float formats (:mod:`torch_pi2.formats`); checks of device, dtype and finiteness."""

import math

import torch

from torch_pi2.errors import DeviceError, DtypeError, NonFiniteError
from torch_pi2.formats import FLOAT, FLOATS

#: Dtypes that kernels support, by format name.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FLOATS}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``, as in files and messages."""
    return str(dtype).removeprefix("torch.")


def format_name(weights: str, dtype: torch.dtype) -> str:
    """The format that an operator's ``weights`` stand for, over a tensor of ``dtype``."""
    return dtype_name(dtype) if weights == FLOAT else weights


def check_computed(what: str, dtype: torch.dtype) -> None:
    """Raises DtypeError: no kernel computes in ``dtype``."""
    if dtype not in DTYPES.values():
        raise DtypeError(what, expected=" or ".join(DTYPES), found=dtype_name(dtype), fix="Choose one of these.")


def stands_for_another(tensor: torch.Tensor) -> str:
    """Why a parameter's numbers cannot be read directly (it is of a class of torchao or similar); empty if they can."""
    kind = type(tensor.detach())
    if kind is torch.Tensor:
        return ""
    how = "give the float model, which weights='int4' or 'int8' quantises, or import what torchao saved"
    what = f"weights of class {kind.__name__}, quantised or spread by another library"
    return f"{what}: {how}: torch_pi2.import_quantized(folder, other)"


def check_on_cpu(what: str, device: torch.device) -> None:
    """Raises DeviceError: not on the CPU."""
    if device.type != "cpu":
        expected, fix = "cpu", "Load the weights (a model on 'meta' has none) or move it with model.to('cpu')."
        raise DeviceError(what, expected=expected, found=str(device), fix=fix)


def check_finite(what: str, tensor: torch.Tensor, most: float = math.inf, reason: str = "") -> None:
    """Raises NonFiniteError: NaN, infinity, or a magnitude above ``most``, for which ``reason`` is given."""
    if not tensor.numel():
        return
    low, high = (float(v) for v in tensor.detach().aminmax())  # isfinite needs more memory than the matrix
    largest = max(-low, high)
    if not largest <= most or largest == math.inf:  # a NaN compares false
        broken = int((~torch.isfinite(tensor)).sum())
        expected = f"finite numbers of at most {most:.6g}, {reason}" if reason else "finite numbers"
        found = f"{broken} NaN or infinite of {tensor.numel()}" if broken else f"{largest:.6g}"
        fix = "Check the checkpoint; a sparse or quantised form of broken weights would hide the fault."
        raise NonFiniteError(f"values of {what}", expected=expected, found=found, fix=fix)
