"""``ActiveNeurons``: a tensor ``[..., I]`` of which only some neurons were computed.

It travels between the intercepted matmuls of :class:`torch_pi2.graph.dispatch.NeuronClusterMode`, through
whatever the model does in between. Written to be read: the compiled operator is where speed is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

#: Operations with f(0) = 0, applied to one tensor: what was not computed stays zero.
_KEEP_ZERO = frozenset(
    {
        aten.relu.default,
        aten.silu.default,
        aten.gelu.default,
        aten.abs.default,
        aten.neg.default,
        aten.square.default,
        aten.tanh.default,
        aten.leaky_relu.default,
        aten.relu_.default,
        aten.silu_.default,
        aten.gelu_.default,
        aten.detach.default,
        aten.alias.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.pow.Tensor_Scalar,
    }
)
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten._reshape_alias.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.flatten.using_ints,
    }
)
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar})
_PIECES = frozenset(
    {
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.slice.Tensor,
        aten.narrow.default,
    }
)


class ActiveNeurons(torch.Tensor):
    """Logical tensor ``[..., I]``, zero except where computed.

    Attributes:
        index: ``[A]`` int64, ascending: neurons computed for at least one token.
        values: ``[T, A]``, T the product of the leading dimensions.
        mask: ``[T, A]`` bool: which of them count for which token; elsewhere the logical value is zero.
    """

    index: torch.Tensor  # type: ignore[assignment]
    values: torch.Tensor  # type: ignore[assignment]
    mask: torch.Tensor

    @staticmethod
    def __new__(
        cls, index: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, shape: tuple[int, ...]
    ) -> ActiveNeurons:
        made: ActiveNeurons = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)
        made.index, made.values, made.mask = index, values, mask
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # everything was set in __new__, as torch requires of wrapper subclasses

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ActiveNeurons(shape={tuple(self.shape)}, computed={len(self.index)}, dtype={self.dtype})"

    @property
    def neurons(self) -> int:
        """I, the logical size."""
        return int(self.shape[-1])

    def dense(self) -> torch.Tensor:
        """The ordinary tensor, zeros where not computed."""
        out_TI = self.values.new_zeros(len(self.values), self.neurons)
        out_TI[:, self.index] = torch.where(self.mask, self.values, 0)
        return out_TI.view(self.shape)

    def like(self, values: torch.Tensor, shape: tuple[int, ...] | None = None) -> ActiveNeurons:
        """Other values for the same neurons."""
        return ActiveNeurons(self.index, values, self.mask, tuple(self.shape) if shape is None else shape)

    def take(self, positions: torch.Tensor, *, shift: int = 0, neurons: int | None = None) -> ActiveNeurons:
        """Only some of the computed neurons (positions in ``index``), renumbered by ``-shift``."""
        shape = (*self.shape[:-1], self.neurons if neurons is None else neurons)
        return ActiveNeurons(self.index[positions] - shift, self.values[:, positions], self.mask[:, positions], shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        sparse = _sparse_form(func, args, kwargs)
        if sparse is not None:
            return sparse
        plain_args, plain_kwargs = tree_map_only(ActiveNeurons, ActiveNeurons.dense, (tuple(args), dict(kwargs)))
        out = func(*plain_args, **plain_kwargs)
        first = args[0] if args else None
        if func._schema.is_mutable and isinstance(first, ActiveNeurons):
            _become(first, plain_args[0])
            return first
        return out


def _become(target: ActiveNeurons, dense: torch.Tensor) -> None:
    """In-place result of an operation we have no sparse form for: every neuron is now known."""
    target.values = dense.reshape(-1, target.neurons)
    target.index = torch.arange(target.neurons, dtype=torch.int64, device=dense.device)
    target.mask = torch.ones_like(target.values, dtype=torch.bool)


def _sparse_form(func: Any, args: Any, kwargs: Any) -> Any:
    """The result without densifying, or None if there is no such form."""
    x = args[0] if args else None
    if func in _PRODUCTS:
        return _multiply(func, *args[:2])
    if not isinstance(x, ActiveNeurons):
        return None
    if func in _KEEP_ZERO:
        if func is aten.pow.Tensor_Scalar and not (isinstance(args[1], (int, float)) and args[1] > 0):
            return None
        allowed = {k: v for k, v in kwargs.items() if k != "memory_format"}
        if allowed.get("layout") not in (None, torch.strided):
            return None
        values = func(x.values, *args[1:], **allowed)
        return x if func._schema.is_mutable else x.like(values)
    if func in (aten.dropout.default, aten.native_dropout.default):
        training = args[2]
        return x if func is aten.dropout.default and not training else None
    if func is aten.div.Tensor and not isinstance(args[1], torch.Tensor):
        return x.like(x.values / args[1])
    if func in _RESHAPES:
        return _reshape(func, args, kwargs)
    if func is aten.squeeze_.dim and args[1] not in (-1, x.dim() - 1):
        with no_dispatch():  # only the shape changes (a matmul of one vector is done as a matrix of one row)
            return func(*args)
    if func in _PIECES:
        return _pieces(func, args, kwargs)
    return None


def _multiply(func: Any, x: Any, y: Any) -> Any:
    """Zero times anything is zero: the product lives on the neurons that both sides have."""
    if not isinstance(x, ActiveNeurons):
        if func._schema.is_mutable:
            return None  # an ordinary tensor cannot become sparse in place
        x, y = y, x
    if not isinstance(y, torch.Tensor) or y.dim() == 0:
        out: Any = x.like(x.values * y)
    elif isinstance(y, ActiveNeurons):
        if tuple(x.shape) != tuple(y.shape):
            return None
        in_x, in_y = torch.isin(x.index, y.index), torch.isin(y.index, x.index)
        left, right = x.take(in_x), y.take(in_y)
        out = ActiveNeurons(left.index, left.values * right.values, left.mask & right.mask, tuple(x.shape))
    elif y.shape[-1:] == x.shape[-1:] and torch.broadcast_shapes(x.shape, y.shape) == x.shape:
        y_TA = y.expand(x.shape).reshape(-1, x.neurons)[:, x.index]
        out = x.like(x.values * y_TA)
    else:
        return None
    if func._schema.is_mutable:
        x.index, x.values, x.mask = out.index, out.values, out.mask
        return x
    return out


def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    """Only reshapes that leave the neuron dimension whole and last."""
    x: ActiveNeurons = args[0]
    shape = tuple(func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args[1:], **kwargs).shape)
    whole = len(shape) >= 1 and shape[-1] == x.neurons
    if not whole or (func is aten.unsqueeze.default and args[1] in (-1, x.dim())):
        return None
    return x.like(x.values, shape)


def _pieces(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Contiguous ranges of the neuron dimension (the halves of a fused ``gate_up``)."""
    x: ActiveNeurons = args[0]
    # Let torch do the argument handling on neuron numbers: which columns would each piece hold?
    names = [a.name for a in func._schema.arguments]  # type: ignore[attr-defined]
    given = {**dict(zip(names, args)), **kwargs}
    dim = given.get("dim", 0)
    if dim not in (-1, x.dim() - 1):
        return None
    numbers = torch.arange(x.neurons, dtype=torch.int64, device=x.index.device)
    pieces = func(numbers, *[0 if n == "dim" else v for n, v in zip(names[1:], args[1:])], **{**kwargs, **_dim(kwargs)})
    single = isinstance(pieces, torch.Tensor)
    out = []
    for piece in [pieces] if single else pieces:
        if len(piece) and int(piece[-1]) - int(piece[0]) + 1 != len(piece):
            return None  # a strided slice
        start = int(piece[0]) if len(piece) else 0
        inside = (x.index >= start) & (x.index < start + len(piece))
        out.append(x.take(inside, shift=start, neurons=len(piece)))
    return out[0] if single else out


def _dim(kwargs: Any) -> dict[str, int]:
    return {"dim": 0} if "dim" in kwargs else {}
