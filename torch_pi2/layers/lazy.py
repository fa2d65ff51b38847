"""FFNs whose activation is code of a bigger block: ``x + fc2(F.relu(fc1(norm(x))))``.

No module computes such an FFN alone, and the block's code cannot be replaced. So the first linears return a
:class:`LazyFFN`, a tensor without values that records the operations applied to it, and the down linear reads this
record (the note). If the note is the planned formula (checked numerically once per distinct note), the sparse layer
runs on the remembered input. Otherwise the values are computed densely: slower, never wrong.

A lazy tensor whose values were needed keeps them and behaves like an ordinary one, and so do its views: later in-place
changes could not be recorded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from torch_pi2.base.offloaded import is_metadata
from torch_pi2.base.progress import log, log_once
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.graph.activation import computes
from torch_pi2.graph.operations import CASTS, ELEMENTWISE, RESHAPES, is_in_place, op_name, uncast
from torch_pi2.layers.checks import result_dtype
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.sequence import only_input
from torch_pi2.types.site import Formula

#: Calls whose result may be a view of their first argument, or that argument itself.
_MAY_ALIAS = RESHAPES | CASTS | {"chunk", "split", "tensor_split", "getitem", "narrow"}
_MAY_ALIAS |= {"contiguous", "detach", "dropout", "pos", "positive"}

#: Checked notes remembered per layer; a new sequence length needs a new one only where sizes are written into the code.
_MAX_NOTES = 256


@dataclass(frozen=True, eq=False)
class Leaf:
    """``source(x)`` of one first linear; ``x`` is a copy, since the caller may change its own tensor later."""

    source: "LazySource"
    x: torch.Tensor
    shape: tuple[int, ...]

    @cached_property
    def key(self) -> Any:
        return ("leaf", self.source.stream, len(self.shape))


@dataclass(frozen=True, eq=False)
class Call:
    """``func(*args, **kwargs)[item]`` over other notes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None = None

    @cached_property
    def key(self) -> Any:
        flat, spec = tree_flatten((self.args, self.kwargs))
        keys = tuple(f.key if isinstance(f, Leaf | Call) else repr(f) for f in flat)
        shapes = tuple(leaf.shape for leaf in leaves(self)) if op_name(self.func) in RESHAPES else ()
        return (self.func, keys, str(spec), self.item, shapes)


Note = Leaf | Call


def leaves(note: Any) -> Iterator[Leaf]:
    """All leaves of a note, repeated as often as they are used."""
    if isinstance(note, Leaf):
        yield note
    elif isinstance(note, Call):
        for part in tree_flatten((note.args, note.kwargs))[0]:
            yield from leaves(part)


def evaluate(
    note: Note, leaf_value: Callable[[Leaf], torch.Tensor], *, ignore_casts: bool, known: Sequence = ()
) -> Any:
    """Compute a note's value; each node once, nodes in ``known`` not at all."""
    done: dict[int, Any] = {id(part): tensor for part, tensor in known}

    def value(part: Any) -> Any:
        if not isinstance(part, Leaf | Call):
            return part
        if id(part) not in done:
            if isinstance(part, Leaf):
                done[id(part)] = leaf_value(part)
            else:
                args, kwargs = tree_map(value, (part.args, part.kwargs))
                # in-place calls must not reach into values that other parts of the note still need
                if is_in_place(part.func, part.args, part.kwargs):
                    args = (args[0].clone(), *args[1:])
                out = part.func(*args, **kwargs)
                if ignore_casts and op_name(part.func) in CASTS:
                    out = uncast(args[0], out)
                done[id(part)] = out if part.item is None else out[part.item]
        return done[id(part)]

    return value(note)


class LazyFFN(torch.Tensor):
    """Shape and dtype of a projection's result, with the note that computes its values (``dense``, once computed).
    ``base``: the lazy tensor that this may be a view of. ``viewed``: whether others may be views of this one.
    """

    note: Note
    base: "LazyFFN | None"
    viewed: bool
    dense: torch.Tensor | None

    @staticmethod
    def wrap(note: Note, like: torch.Tensor, base: "LazyFFN | None" = None) -> "LazyFFN":
        """A lazy tensor with the shape and dtype of ``like``, which may be on ``meta``."""
        device = next(leaves(note)).x.device
        lazy: LazyFFN = torch.Tensor._make_wrapper_subclass(LazyFFN, like.shape, dtype=like.dtype, device=device)
        lazy.note, lazy.base, lazy.viewed, lazy.dense = note, base, False, None
        if base is not None:
            base.viewed = True
        return lazy

    @property
    def computed(self) -> bool:
        """Whether its values or its base's were computed, and may since have been changed in place."""
        return self.dense is not None or (self.base is not None and self.base.computed)

    def values(self) -> torch.Tensor:
        """The dense values, computed at the first call; views share memory as ordinary tensors do."""
        if self.dense is None:
            known = [] if self.base is None else [(self.base.note, self.base.values())]
            self.dense = evaluate(self.note, lambda leaf: leaf.source.dense(leaf.x), ignore_casts=False, known=known)
        assert self.dense is not None
        return self.dense

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        tensors = [f for f in tree_flatten((args, kwargs))[0] if isinstance(f, torch.Tensor)]
        lazy = all(isinstance(t, LazyFFN) and not t.computed for t in tensors)
        if lazy and is_in_place(func, args, kwargs):  # a view would not notice
            lazy = args[0].base is None and not args[0].viewed
        if lazy and op_name(func) in ELEMENTWISE and "out" not in kwargs:
            return _note_down(func, tuple(args), kwargs)
        args, kwargs = _with_values((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # reached from C++ code that bypasses __torch_function__
        args, kwargs = _with_values((args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyFFN({self.values()!r})"


def _with_values(tree: Any) -> Any:
    return tree_map_only(LazyFFN, lambda lazy: lazy.values(), tree)


def _note_down(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The lazy result of an elementwise call; its shape and dtype come from a run on ``meta``."""

    with torch._C.DisableTorchFunctionSubclass():
        meta_args, meta_kwargs = tree_map_only(
            LazyFFN, lambda lazy: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"), (args, kwargs)
        )
    meta_kwargs = {k: "meta" if k == "device" and v is not None else v for k, v in meta_kwargs.items()}
    if op_name(func) == "to":  # a move between devices has no meaning on meta
        meta_args = tuple("meta" if isinstance(a, torch.device | str) else a for a in meta_args)
    out = func(*meta_args, **meta_kwargs)
    note_args, note_kwargs = tree_map_only(LazyFFN, lambda lazy: lazy.note, (args, kwargs))
    first: LazyFFN = next(f for f in tree_flatten((args, kwargs))[0] if isinstance(f, LazyFFN))
    base = first if op_name(func) in _MAY_ALIAS else None
    if isinstance(out, tuple | list):
        calls = (Call(func, note_args, note_kwargs, i) for i in range(len(out)))
        return tuple(LazyFFN.wrap(call, part, base) for call, part in zip(calls, out))
    if not isinstance(out, torch.Tensor):
        return out
    note = Call(func, note_args, note_kwargs)
    if is_in_place(func, args, kwargs):
        first.note = note
        return first
    return LazyFFN.wrap(note, out, base)


def _warn_compiled(_context: Any) -> None:
    log_once(
        "torch.compile computes feed-forward layers densely, and slowly, whose activation is code of a bigger block: "
        "run such a model without it, or move each layer with its activation into a module of its own"
    )


class LazySource:
    """``forward`` of a first linear (gate, up, or both fused): returns a :class:`LazyFFN` of its result."""

    def __init__(self, ffn: SparseFFN, roles: Sequence[str], stream: int) -> None:
        self.ffn = ffn
        self.keyword = "input"
        self.roles = tuple(roles)  # in the order of their rows
        self.stream = stream

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        home = self.ffn
        x = only_input(self.keyword, home.site.key, args, kwargs)
        home.check_input(x)
        if torch.compiler.is_exporting():
            expected = "a feed-forward layer that is a module, or a chain of modules"
            found = "one whose activation is code of a bigger block: it would come out dense"
            moved = "Move it with its activation into a module of its own and optimise the model again"
            fix = f"{moved}, or export what torch_pi2.restore(model) gives, which is dense."
            raise UnsupportedModelError(f"torch.export of {home.site.key}", expected=expected, found=found, fix=fix)
        if torch.compiler.is_compiling():  # Dynamo sees an ordinary dense layer
            from torch._dynamo.comptime import comptime

            comptime(_warn_compiled)
            return self.dense(x)
        width = home.site.intermediate * len(self.roles)
        shape = (*x.shape[:-1], width)
        x = x.values() if isinstance(x, LazyFFN) else x
        # copying [T, H] is cheap beside the matmuls, and protects against later changes of x through any view
        return LazyFFN.wrap(Leaf(self, x.clone(), shape), torch.empty(shape, dtype=result_dtype(x), device="meta"))

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., H] -> [..., I]`` (or ``2I``), every neuron, in original order."""
        outputs = [_linear(x, *self.ffn.projection(role)) for role in self.roles]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


class LazyDown:
    """``forward`` of the down linear: runs the sparse layer on the input remembered by a :class:`LazyFFN`."""

    def __init__(self, ffn: SparseFFN, formula: Formula) -> None:
        self.ffn = ffn
        self.keyword = "input"
        self.formula = formula  # over the sources' streams
        self._verified: dict[Any, bool] = {}

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        home = self.ffn
        h = only_input(self.keyword, home.site.key, args, kwargs)
        if isinstance(h, LazyFFN):
            x = self._input_of(h)
            if x is not None:
                y: torch.Tensor = home(x)
                return y.reshape(*h.shape[:-1], y.shape[-1])
            h = h.values()
        return _linear(h, *home.projection("down"))

    def _input_of(self, h: LazyFFN) -> torch.Tensor | None:
        """The FFN's input if ``h`` is exactly what the site computes between its linears, else None."""
        if h.computed:
            return None
        found = list(leaves(h.note))
        x = found[0].x
        if any(leaf.source.ffn is not self.ffn or not _equal(leaf.x, x) for leaf in found):
            return None
        if h.numel() * x.shape[-1] != x.numel() * self.ffn.site.intermediate:
            return None
        key = (h.note.key, tuple(x.shape) if _has_reshape(h.note) else x.dim())
        if key not in self._verified:
            if len(self._verified) >= _MAX_NOTES:
                self._verified.clear()
            self._verified[key] = self._check(h.note, found)
            if not self._verified[key]:
                log.warning("%s: its block computes another formula than planned; computed densely", self.ffn.site.key)
        return x if self._verified[key] else None

    def _check(self, note: Note, found: Sequence[Leaf]) -> bool:
        streams = {leaf.source.stream: leaf for leaf in found}
        shapes = [streams[stream].shape for stream in sorted(streams)]
        if not _has_reshape(note):
            shapes = [s if len(s) < 2 else (*[1] * (len(s) - 2), 4, s[-1]) for s in shapes]

        def region(probes: Sequence[torch.Tensor]) -> torch.Tensor:
            given = dict(zip(sorted(streams), probes))
            return evaluate(note, lambda leaf: given[leaf.source.stream], ignore_casts=True)

        with temporarily_clear_interpreter_stack():  # under torch.vmap: probes are not mapped over
            return computes(region, shapes, self.ffn.site.intermediate, self.formula)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and torch.equal(one, other))


def _has_reshape(note: Any) -> bool:
    if not isinstance(note, Call):
        return False
    return op_name(note.func) in RESHAPES or any(_has_reshape(p) for p in tree_flatten((note.args, note.kwargs))[0])


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.to(x), None if bias is None else bias.to(x))  # weights are on the CPU, x may be on a GPU
