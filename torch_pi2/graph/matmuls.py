"""Recognises the matmuls of FFN sites below autograd, by where their weight lies in memory.

Module names say nothing at this level, and a model may slice, fuse or transpose its weights at will. What
stays true is the storage: an operand that begins inside a site's parameter and has its strides *is* some
rows of it. Used by the profiler (:mod:`torch_pi2.profiling.recorder`) and by the dispatch modes
(:mod:`torch_pi2.graph.dispatch`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_pi2.types.site import FFNSite

aten = torch.ops.aten


class Member(NamedTuple):
    """A site's use of a parameter: ``role`` is ``"gate"``, ``"up"`` or ``"down"``; rows ``[start, stop)``."""

    site: FFNSite
    role: str
    start: int
    stop: int


@dataclass(frozen=True)
class Matmul:
    """One intercepted ``x @ W[start:stop].T (+ bias)``.

    Attributes:
        x: the operand, ``[..., in]``.
        weight: name of the parameter.
        start, stop: its rows used.
        bias: the bias added by the same operation, or None.
        members: sites that own these rows, in row order; all lie within ``[start, stop)``.
    """

    x: torch.Tensor
    weight: str
    start: int
    stop: int
    bias: torch.Tensor | None
    members: tuple[Member, ...]


def _operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, torch.Tensor, Any] | None:
    """``(x, weight as [out, in], bias)`` of a matmul operation, or None if ``func`` is not one."""
    if func is aten.mm.default:
        return args[0], args[1].t(), None
    if func is aten.linear.default:
        return args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
    if func is aten.addmm.default:
        plain = kwargs.get("beta", 1) == 1 and kwargs.get("alpha", 1) == 1
        return (args[1], args[2].t(), args[0]) if plain and args[0].dim() == 1 else None
    if func is aten.matmul.default and args[1].dim() == 2 and args[0].dim() >= 1:
        return args[0], args[1].t(), None
    if func is aten.bmm.default:
        w_Bio = args[1]
        shared = w_Bio.shape[0] == 1 or w_Bio.stride(0) == 0  # one weight, expanded over the batch
        return (args[0], w_Bio[0].t(), None) if shared else None
    if func is aten.mv.default:
        return args[1], args[0], None
    return None


def site_tensors(sites: Sequence[FFNSite], get: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name -> every weight of ``sites`` as ``[out, in]``, and every bias: views of what ``get`` gives for a name."""
    found: dict[str, torch.Tensor] = {}
    for site in sites:
        for ref in (site.gate, site.up, site.down):
            if ref is not None:
                found[ref.weight] = ref.matrix(get(ref.weight))
                if ref.bias:
                    found[ref.bias] = get(ref.bias)
    return found


class MatmulIndex:
    """Finds which of a set of sites an operation belongs to.

    Args:
        sites: the FFNs.
        parameters: name -> tensor for every weight the sites name, as :func:`site_tensors` gives them. Addresses are
            read once, here: build a new index if weights move.
    """

    def __init__(self, sites: Sequence[FFNSite], parameters: Mapping[str, torch.Tensor]) -> None:
        self.members: dict[str, list[Member]] = defaultdict(list)
        for site in sites:
            for role in ("gate", "up", "down"):
                ref = getattr(site, role)
                if ref is not None:
                    start, stop = ref.rows[:2] if ref.rows else (0, parameters[ref.weight].shape[0])
                    self.members[ref.weight].append(Member(site, role, start, stop))
        # A storage may hold several parameters (a flat buffer), so each address has a list.
        self._by_storage: dict[int, list[tuple[str, int, torch.Size, tuple[int, ...], int]]] = defaultdict(list)
        for name in self.members:
            p = parameters[name]
            self.members[name].sort(key=lambda m: m.start)
            entry = (name, p.data_ptr(), p.shape, p.stride(), p.element_size())
            self._by_storage[p.untyped_storage().data_ptr()].append(entry)

    def find(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Matmul | None:
        """The site matmul that ``func(*args, **kwargs)`` is, or None."""
        operands = _operands(func, args, kwargs)
        if operands is None:
            return None
        x, w_OI, bias = operands
        if type(w_OI) not in (torch.Tensor, torch.nn.Parameter) or w_OI.dim() != 2:
            return None
        for name, base, shape, stride, item in self._by_storage.get(w_OI.untyped_storage().data_ptr(), ()):
            start, rest = divmod(w_OI.data_ptr() - base, stride[0] * item)
            stop = start + w_OI.shape[0]
            if rest or start < 0 or stop > shape[0] or w_OI.shape[1] != shape[1] or w_OI.stride() != stride:
                continue
            inside = tuple(m for m in self.members[name] if start <= m.start and m.stop <= stop)
            if inside:
                return Matmul(x, name, start, stop, bias, inside)
        return None
