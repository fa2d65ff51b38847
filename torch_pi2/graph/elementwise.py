"""Names of the operations that may stand between an FFN's projections, in any of their spellings."""

from __future__ import annotations

from typing import Any

import torch

_ACTIVATIONS = """relu relu6 silu swish gelu sigmoid tanh erf erfc softplus mish hardswish hardsigmoid hardtanh
    leaky_relu elu celu selu prelu threshold logsigmoid softsign tanhshrink softshrink hardshrink rrelu dropout
    native_dropout alpha_dropout glu swiglu geglu reglu"""
_ARITHMETIC = """add sub rsub mul multiply div divide true_divide truediv neg negative pow square sqrt rsqrt exp expm1
    exp2 log log1p abs absolute sign reciprocal clamp clip clamp_min clamp_max minimum maximum addcmul addcdiv lerp
    heaviside where gt ge lt le eq ne greater less greater_equal less_equal logical_and logical_not masked_fill
    zeros_like ones_like full_like fmax fmin positive pos logical_or logical_xor and or xor invert bitwise_and
    bitwise_or bitwise_xor bitwise_not nan_to_num isnan isinf isfinite isposinf isneginf round floor ceil
    trunc fix frac erfinv"""
#: Casts between these are ignored when a region is recognised: they change precision, not the formula.
_FLOATS = frozenset([torch.float64, torch.float32, torch.bfloat16, torch.float16])
CASTS = frozenset(["to", "float", "double", "half", "bfloat16", "type", "type_as"])
_COPIES = "contiguous clone detach"
#: These carry literal sizes, so a region with one of them is probed at its real shape.
RESHAPES = frozenset(
    ["view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze", "unbind", "select"]
)
_SLICES = "chunk split tensor_split getitem narrow"

ELEMENTWISE = frozenset(f"{_ACTIVATIONS} {_ARITHMETIC} {_COPIES} {_SLICES}".split()) | CASTS | RESHAPES

_IN_PLACE_OPERATORS = frozenset(["iadd", "isub", "imul", "itruediv", "ipow"])


def op_name(target: Any) -> str:
    """``torch.relu_``, ``Tensor.relu``, ``aten.relu.default`` and ``"relu"`` are all ``relu``."""
    name = raw_name(target)
    if name in _IN_PLACE_OPERATORS:
        name = name[1:]
    return name.rstrip("_")


def raw_name(target: Any) -> str:
    """The bare name with its in-place marks (``relu_``, ``imul``) left on."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    name = str(name).split(".")[0]
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def is_in_place(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call changes its first argument."""
    name = raw_name(target)
    if name in _IN_PLACE_OPERATORS or name.endswith("_") or kwargs.get("inplace") is True:
        return True
    # F.relu(x, True), F.silu(x, True), F.dropout(x, p, training, True)
    return (name in {"relu", "silu", "relu6", "mish", "hardswish"} and len(args) == 2 and args[1] is True) or (
        name == "dropout" and len(args) == 4 and args[3] is True
    )


def uncast(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The value used in place of ``result``, a cast of ``x``, when a region is recognised. Casts to integers count."""
    if result.dtype not in _FLOATS:
        return result
    return x if x.dtype in _FLOATS else result.double()
