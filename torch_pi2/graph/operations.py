"""Names of operations that may stand between an FFN's projections, and coverage of a formula's branches by probes.

:class:`BranchCoverage` watches code while it runs: every comparison, clamp, minimum and the like must be seen on both
sides. It is used wherever a formula is recognised by its results: regions of graphs, notes of lazy tensors, modules of
experts, owners of feed-forward layers.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ACTIVATIONS = """relu relu6 silu swish gelu sigmoid tanh erf erfc softplus mish hardswish hardsigmoid hardtanh
    leaky_relu elu celu selu prelu threshold logsigmoid softsign tanhshrink softshrink hardshrink rrelu dropout
    native_dropout alpha_dropout glu swiglu geglu reglu"""
_ARITHMETIC = """add sub rsub mul multiply div divide true_divide truediv neg negative pow square sqrt rsqrt exp expm1
    exp2 log log1p abs absolute sign reciprocal clamp clip clamp_min clamp_max minimum maximum addcmul addcdiv lerp
    heaviside where gt ge lt le eq ne greater less greater_equal less_equal logical_and logical_not masked_fill
    zeros_like ones_like full_like fmax fmin positive pos logical_or logical_xor and or xor invert bitwise_and
    bitwise_or bitwise_xor bitwise_not nan_to_num isnan isinf isfinite isposinf isneginf round floor ceil
    trunc fix frac erfinv"""
#: Casts between these are ignored in recognising a region: they change precision, not the formula.
_FLOATS = frozenset([torch.float64, torch.float32, torch.bfloat16, torch.float16])
CASTS = frozenset(["to", "float", "double", "half", "bfloat16", "type", "type_as"])
_COPIES = "contiguous clone detach"
#: These carry literal sizes, so a region with one of them is probed at its real shape.
_SIZED = "view reshape flatten unflatten view_as reshape_as squeeze unsqueeze unbind select"
RESHAPES = frozenset(_SIZED.split())
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
    """The bare name with in-place marks (``relu_``, ``imul``)."""
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
    """The value to use for ``result``, a cast of ``x``: ``x`` for casts between floats; casts to integers count."""
    if result.dtype not in _FLOATS:
        return result
    return x if x.dtype in _FLOATS else result.double()


#: Magnitudes of probes.
MAGNITUDES = tuple(10.0**k for k in range(-3, 5))

#: Tensors of more bounds than this are not recorded as constants.
_MAX_CONSTANTS = 64

_COMPARED = """gt ge lt le eq ne greater greater_equal less less_equal not_equal minimum maximum fmin fmax min
    max"""
_COMPARISONS = frozenset(_COMPARED.split())
#: name -> names and defaults of the arguments after the first that are bounds.
_BOUNDS: dict[str, tuple[tuple[str, Any], ...]] = {
    "clamp": (("min", None), ("max", None)),
    "clip": (("min", None), ("max", None)),
    "clamp_min": (("min", None),),
    "clamp_max": (("max", None),),
    "hardtanh": (("min_val", -1.0), ("max_val", 1.0)),
    "threshold": (("threshold", None),),
}
_FINITE = frozenset(["nan_to_num", "isnan", "isinf", "isfinite", "isposinf", "isneginf"])
#: Operations that give a number to Python, which may branch on it.
_TO_PYTHON = frozenset(["item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__"])

#: Largest difference, relative to the largest value, between two orders of summation.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass
class _Seen:
    """A comparison in the code, and the sides on which values were seen."""

    what: str
    above: bool = False
    not_above: bool = False


def token_magnitudes(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """``[*shape, 1]`` float32: one of ``MAGNITUDES`` per token; small ones only if ``dtype`` can square them."""
    some = [m for m in MAGNITUDES if m >= 1 or dtype != torch.float16]
    return torch.tensor(some, dtype=torch.float32)[torch.arange(torch.Size(shape).numel()) % len(some)].view(*shape, 1)


def same_tokens(found: Any, wanted: torch.Tensor) -> bool:
    """Whether ``[..., H]`` agree, relative to the largest value of each token; overflowing tokens are ignored."""
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape:
        return False
    found, tolerance = found.float(), _TOLERANCE[wanted.dtype]
    wanted = wanted.float()
    scale = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    near = ((found - wanted).abs() <= tolerance * scale).all(-1)
    finite = found.isfinite().all(-1) & wanted.isfinite().all(-1)
    return bool((near | ~finite).all() and finite.any())


class BranchCoverage(TorchFunctionMode):
    """``with coverage: code()``, several times; then :meth:`missed`; ``constants``: finite numbers compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.constants: set[float] = set()
        self._places: dict[tuple[int, str, int], _Seen] = {}
        self._calls = itertools.count()

    def __enter__(self) -> "BranchCoverage":
        self._calls = itertools.count()  # the same code runs again
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op_name(func)
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            number = next(self._calls)
            for index, bound in enumerate(_bounds(name, args, kwargs)):
                if bound is x and x.dim() == 0:  # torch.distributions validates its parameters so
                    continue
                self._look((number, name, index), x.detach(), bound)
            if name in _FINITE:
                self._note((number, name, 0), name, x.isfinite())
            elif getattr(func, "__name__", "") in _TO_PYTHON:
                self._places[number, name, 0] = _Seen("a number that Python code is given")
        return func(*args, **kwargs)

    def missed(self) -> str:
        """Comparisons seen on one side only, for messages; empty if there are none."""
        return ", ".join(dict.fromkeys(s.what for s in self._places.values() if not (s.above and s.not_above)))

    def _look(self, place: tuple[int, str, int], x: torch.Tensor, bound: Any) -> None:
        if isinstance(bound, torch.Tensor):
            if bound.numel() <= _MAX_CONSTANTS:
                self.constants |= {abs(c) for c in bound.detach().double().flatten().tolist() if _counts(c)}
        elif _counts(bound):
            self.constants.add(abs(float(bound)))
        else:
            return  # probes of both signs cover zero, and nothing lies beyond infinity
        shown = f"{place[1]} at {bound:g}" if isinstance(bound, int | float) else place[1]
        self._note(place, shown, x == bound if place[1] in ("eq", "ne") else x > bound)

    def _note(self, place: tuple[int, str, int], what: str, above: torch.Tensor) -> None:
        seen = self._places.setdefault(place, _Seen(what))
        seen.above |= bool(above.any())
        seen.not_above |= not bool(above.all())


def _counts(bound: Any) -> bool:
    return isinstance(bound, int | float) and bound != 0 and abs(bound) < float("inf")


def _bounds(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The bounds that ``args[0]`` is compared with."""
    if name in _COMPARISONS:
        other = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(other, torch.Tensor) or not name.startswith(("min", "max")):  # x.max(-1) compares with nothing
            yield other
    elif name in ("hardshrink", "softshrink"):
        most = args[1] if len(args) > 1 else kwargs.get("lambd", 0.5)
        yield from (-most, most)
    elif name == "relu6":
        yield 6.0
    for index, (keyword, default) in enumerate(_BOUNDS.get(name, ()), 1):
        yield args[index] if len(args) > index else kwargs.get(keyword, default)
