"""Quantising weights with checks whose errors name the weight."""

import math

import torch

from torch_pi2.base.dtypes import DTYPES, check_finite, check_on_cpu, dtype_name
from torch_pi2.base.fields import Field
from torch_pi2.errors import DtypeError, ShapeError, check_choice
from torch_pi2.formats import FORMATS, GGML, QUANTIZED
from torch_pi2.ops import load

_LARGEST_SCALE = 65504.0  # of float16


def check_kind(weights: str) -> None:
    """Raises ConfigError unless weights can be quantised to the format ``weights``."""
    others = "Blocks of GGUF files are for linear layers, as a file brings them; nothing is quantised to them."
    fix = others if weights in GGML else "See torch_pi2.Config(weights=...)."
    check_choice("weights", weights, QUANTIZED, fix)


def check_quantizable(what: str, w: torch.Tensor, weights: str) -> None:
    """Check that a weight can be quantised; ``what``: its name. Raises DtypeError: not float32, bfloat16 or float16.
    ShapeError: not a matrix with columns. DeviceError: not on the CPU. NonFiniteError: NaN or infinity, or so large
    that float16 cannot hold a scale.
    """
    check_kind(weights)
    check_on_cpu(f"device of {what}", w.device)
    if w.dtype not in DTYPES.values():
        fix = "Convert the model with model.to(torch.bfloat16) (or float32) first."
        Field(w, f"dtype of {what}", fix, DtypeError).wrong("float32, bfloat16 or float16", dtype_name(w.dtype))
    if w.dim() != 2 or not w.shape[1]:
        Field(w, what, "Pass the weight of a linear layer.", ShapeError).wrong("[rows, columns]", str(tuple(w.shape)))
    most = _LARGEST_SCALE * max(-FORMATS[weights].least, FORMATS[weights].most)
    check_finite(what, w, most, f"for {weights} with float16 scales")


def quantize(what: str, w: torch.Tensor, weights: str) -> torch.Tensor:
    """:func:`torch_pi2.ops.quantize.quantize` in C++, after the checks above; ``what``: the weight's name."""
    load()
    check_quantizable(what, w, weights)
    return torch.ops.pi2.quantize(w.detach(), weights)


class RelativeError:
    """``|found - wanted| / |wanted|`` (Frobenius norms) of a matrix given in parts."""

    def __init__(self) -> None:
        self._wrong, self._all = 0.0, 0.0

    def add(self, wanted: torch.Tensor, found: torch.Tensor) -> None:
        """Add a part; ``found`` (float32) is overwritten."""
        wanted = wanted.float()
        self._all += float(wanted.square().sum(dtype=torch.float64))
        self._wrong += float(found.sub_(wanted).square_().sum(dtype=torch.float64))

    @property
    def relative(self) -> float:
        """0 where ``wanted`` is 0."""
        return math.sqrt(self._wrong / self._all) if self._all else 0.0
