"""The calls of a step as programs of the C++ core (``csrc/include/pi2/step_program.h``), with the same bits.

PyTorch takes 1 to 4 us for each small operator, however few its numbers, and a step of a small model has a thousand. A
program computes norms, rotations, residuals, linear layers and attention in one call. Calls that it does not know stay
PyTorch's, between two programs.
"""

import operator
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from torch_pi2.formats import FORMATS
from torch_pi2.ops import attention, linear
from torch_pi2.ops.library import load, unseen_by_modes
from torch_pi2.ops.operators import arguments_of

aten = torch.ops.aten

#: In the order of ``pi2/step_program.h``.
_OPS = "copy add sub mul div neg square rsqrt less less_equal and is_finite where mean argmax gather take_rows"
_OP = {name: i for i, name in enumerate(f"{_OPS} dequantize index_copy linear attention call write_kv".split())}
_BINARY = {aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.div.Tensor: "div"}
_BINARY |= {aten.lt.Tensor: "less", aten.le.Tensor: "less_equal", aten.gt.Tensor: "less", aten.ge.Tensor: "less_equal"}
_BINARY |= {aten.__and__.Tensor: "and", aten.bitwise_and.Tensor: "and", aten.logical_and.default: "and"}
_SWAPPED = {aten.gt.Tensor, aten.ge.Tensor}
_UNARY = {aten.neg.default: "neg", aten.pow.Tensor_Scalar: "square", aten.rsqrt.default: "rsqrt"}
#: As in ``csrc/bindings/torch/step_program.cc``.
_CALLED = (aten.silu, aten.sigmoid, aten.tanh, aten.exp, aten.relu, aten.sqrt, aten.cos, aten.sin)
_COPIES = {"_to_copy", "to", "clone", "contiguous", "reshape", "type_as", "flatten"}
#: Operators that change recurrent states, and which argument is the state.
_CHANGED = {"aten::copy_": 0, "pi2::recurrence": 0, "pi2::conv_step": 1}
_FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ELEMENTS = _FLOATS | {torch.int64: 3, torch.uint8: 4, torch.int8: 4, torch.bool: 4}
#: pi2::DType of keys and values.
_KV_CODES = _FLOATS | {torch.int8: 3, torch.uint8: 4}

Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]
#: Op, operands (the result first) and parameters.
_Instruction = tuple[str, list[torch.Tensor], list[int]]


class _Observer(TorchDispatchMode):
    """Notes the calls of PyTorch's operators and keeps their tensors alive, and what parts of ``fixed`` were."""

    def __init__(self, fixed: list[torch.Tensor]) -> None:
        super().__init__()
        self.made: list[Call] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fixed = {tensor.untyped_storage().data_ptr() for tensor in fixed}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import Dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if (place := _CHANGED.get(func._schema.name)) is not None:
            state = args[place]
            if state.untyped_storage().data_ptr() in self._fixed:
                self.before.append((state, state.clone()))
        result = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, result))
        return result


class _Unknown(Exception):
    """A call that no instruction computes."""


def translated(run: Callable[..., Any], ids_BT: torch.Tensor, fixed: list[torch.Tensor]) -> tuple[Any, Any]:
    """The result of ``run(ids_BT, *fixed)``, and its :class:`Translation`; None: that would have other bits."""
    load()
    with _Observer(fixed) as observer:
        result = run(ids_BT, *fixed)
    made = Translation(observer.made, ids_BT, fixed, result)
    after = [(tensor, tensor.clone()) for tensor, _ in observer.before]
    try:
        for tensor, value in reversed(observer.before):
            tensor.copy_(value)
        made.translate()
    except (_Unknown, RuntimeError):
        close(made.programs)
        return result, None
    finally:
        for tensor, value in after:
            tensor.copy_(value)
    return result, made


def close(programs: list[int]) -> None:
    with unseen_by_modes():
        for number in programs:
            torch.ops.pi2.step_close(number)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []


class _Program:
    """Instructions under way. made: tensors that they make, in order. used: those of before."""

    def __init__(self) -> None:
        self.instructions: list[_Instruction] = []
        self.made: dict[int, torch.Tensor] = {}
        self.used: dict[int, torch.Tensor] = {}
        self.written: set[int] = set()


class Translation:
    """The calls of a step, some as ``programs`` (numbers of ``torch.ops.pi2.step_program``, to be closed); ``graph``:
    over the ids and ``fixed``, tensors that are the same in every step.
    """

    def __init__(
        self, calls: list[Call], ids_BT: torch.Tensor, fixed: list[torch.Tensor], result: torch.Tensor
    ) -> None:
        self._calls, self._result, self.programs, self.graph = calls, result, list[int](), fx.Graph()
        #: Of a view: the tensor whose memory it is, and its call. The last call that uses a tensor's memory.
        self._root: dict[int, torch.Tensor] = {}
        self._views: dict[int, Call] = {}
        self._last: dict[int, int] = {}
        self._now, self._alive = _Program(), list[Any]()
        #: PyTorch's calls that come after the program under way, and what they make.
        self._later, self._waiting = list[Call](), set[int]()
        self._written = self._find_roots()
        self.fixed = fixed + [call[3] for call in calls if _is_constant(call) and id(call[3]) not in self._written]
        self._fixed = {id(tensor) for tensor in self.fixed}
        self._given = self._fixed | {id(ids_BT)}
        given = enumerate((ids_BT, *self.fixed))
        self._nodes = {id(tensor): self.graph.placeholder(f"given_{i}") for i, tensor in given}

    def _find_roots(self) -> set[int]:
        """Finds views and last uses; returns what is written in place."""
        written = set[int]()
        for position, call in enumerate(self._calls):
            given = _tensors(call[1:3])
            for tensor in _tensors(call[3]):
                source = next((other for other in given if _shares(tensor, other)), tensor)
                if source is not tensor:
                    self._root[id(tensor)], self._views[id(tensor)] = self.root(source), call
            for tensor in given:
                self._last[id(self.root(tensor))] = position
            if _changes(call[0]):
                written |= {id(self.root(tensor)) for tensor in given}
        self._last[id(self.root(self._result))] = len(self._calls)
        return written

    def root(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._root.get(id(tensor), tensor)

    def translate(self) -> None:
        for tensor in self.fixed:  # what is written by one name and read by another would lose its order
            if id(tensor) in self._written:
                _known(not any(_overlap(tensor, other) for other in self.fixed if other is not tensor))
        for position, call in enumerate(self._calls):
            changes, made = _changes(call[0]), _tensors(call[3])
            given = {id(tensor) for tensor in _tensors(call[1:3])}
            if not changes and made and all(id(tensor) in self._views.keys() | self._fixed | given for tensor in made):
                continue
            if self._later and (changes or not self._waiting.isdisjoint(self._touched(call))):
                self._end(position)
            try:
                self._add(call)
            except _Unknown:
                self._leave_to_pytorch(position, call)
        self._end(len(self._calls))
        self.graph.output((self._node(self._result),))

    # --- PyTorch's calls ---

    def _touched(self, call: Call) -> set[int]:
        return {id(self.root(tensor)) for tensor in _tensors(call[1:3])}

    def _leave_to_pytorch(self, position: int, call: Call) -> None:
        """Before the program under way; after it, if it needs or changes what that has made or used."""
        changes = _changes(call[0])
        others = self._now.made.keys() | (self._now.used if changes else self._now.written)
        touches = not self._touched(call).isdisjoint(others)
        if touches and not changes:  # what does not need it can still be in the program
            self._later.append(call)
            self._waiting |= {id(self.root(tensor)) for tensor in _tensors(call[3])}
            return
        if touches:
            self._end(position)
        self._emit(call)

    def _emit(self, call: Call) -> None:
        func, args, kwargs, result = call
        named = fx.node.map_aggregate((args, kwargs), lambda leaf: self._node(leaf) if _is_tensor(leaf) else leaf)  # type: ignore[arg-type]
        node = self.graph.call_function(func, *named)
        if isinstance(result, torch.Tensor):
            self._nodes.setdefault(id(result), node)
        elif result is not None:
            for i, part in enumerate(result):
                self._nodes.setdefault(id(part), self.graph.call_function(operator.getitem, (node, i)))

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in self._nodes:
            view, root = self._views.get(id(tensor)), self.root(tensor)
            if view is not None and not _changes(view[0]):
                self._emit(view)
            else:  # of a program; what was given may have other strides one day
                _known(root is not tensor and id(root) not in self._given)
                at = (tensor.data_ptr() - root.data_ptr()) // tensor.element_size() + root.storage_offset()
                given = self._node(root), tuple(tensor.shape), tensor.stride(), at
                self._nodes[id(tensor)] = self.graph.call_function(aten.as_strided.default, given)
        return self._nodes[id(tensor)]

    # --- instructions ---

    def _add(self, call: Call) -> None:
        func, args, kwargs, result = call
        near = _tensors((result, args, kwargs))
        for op, operands, parameters in _instructions(func, args, kwargs, result):
            self._alive.append(operands)  # so that no other tensor gets the id of one of these
            for tensor in operands:
                if all(tensor is not other for other in near):
                    self._root[id(tensor)] = self.root(next(other for other in near if _shares(tensor, other)))
            written, *read = (self.root(tensor) for tensor in operands)
            for tensor in read:
                self._use(tensor)
            if op in ("index_copy", "write_kv") or id(written) in self._now.made:
                self._use(written)
                self._now.written.add(id(written))
            else:
                self._now.made[id(written)] = written
            self._now.instructions.append((op, operands, parameters))

    def _use(self, root: torch.Tensor) -> None:
        if id(root) not in self._now.made:
            self._now.used[id(root)] = root

    def _end(self, position: int) -> None:
        """The instructions under way become a program, which the graph runs here."""
        now, self._now = self._now, _Program()
        if now.instructions:
            self._program(now, position)
        for call in self._later:
            self._emit(call)
        self._later, self._waiting = [], set()

    def _program(self, now: _Program, position: int) -> None:
        used = {root for call in self._later for root in self._touched(call)}
        used |= {root for root in now.made if self._last.get(root, -1) >= position}
        outputs = [root for root in now.made.values() if id(root) in used]
        own = [root for root in now.made.values() if id(root) not in used]
        fixed = [root for root in now.used.values() if id(root) in self._fixed]
        inputs = [root for root in now.used.values() if id(root) not in self._fixed]
        slots = {id(root): i for i, root in enumerate((*fixed, *inputs, *outputs, *own))}
        code = list[int]()
        for op, operands, parameters in now.instructions:
            code += _OP[op], len(operands), len(parameters)
            for tensor in operands:
                root = self.root(tensor)
                offset = tensor.data_ptr() - root.data_ptr()
                code += slots[id(root)], offset, _ELEMENTS[tensor.dtype], tensor.dim(), *tensor.shape, *tensor.stride()
            code += parameters
        flat = [root if root.is_contiguous() else root.new_empty(_numbers(root)) for root in outputs]
        number = torch.ops.pi2.step_program(fixed, inputs, flat, [_bytes(root) for root in own], torch.tensor(code))
        self.programs.append(number)
        run = torch.ops.pi2.step_run.default
        node = self.graph.call_function(run, (number, [self._node(root) for root in inputs]))
        for i, (root, stored, found) in enumerate(zip(outputs, flat, run(number, inputs))):
            output = self.graph.call_function(operator.getitem, (node, i))
            if stored is not root:
                output = self.graph.call_function(aten.as_strided.default, (output, tuple(root.shape), root.stride()))
                found = found.as_strided(root.shape, root.stride())
            self._nodes[id(root)] = output
            if id(root) not in self._written and not _same_bits(found, root):  # PyTorch has since written to others
                raise _Unknown


def _changes(func: Any) -> bool:
    """Whether it writes to its arguments. Schemas of others (such as c10d's) do not say so."""
    return func._schema.is_mutable or func.namespace not in ("aten", "pi2")


def _is_constant(call: Call) -> bool:
    """A tensor that depends on nothing, such as ``arange``."""
    func, args, kwargs, result = call
    changes = torch.Tag.nondeterministic_seeded in func.tags or _changes(func) or "empty" in func.__name__
    return not changes and isinstance(result, torch.Tensor) and not _tensors((args, kwargs))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + _bytes(b) and b.data_ptr() < a.data_ptr() + _bytes(a)


def _numbers(tensor: torch.Tensor) -> int:
    """Numbers of memory that a strided tensor spans."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


def _bytes(tensor: torch.Tensor) -> int:
    return _numbers(tensor) * tensor.element_size()


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _double(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _known(condition: bool) -> None:
    if not condition:
        raise _Unknown


def _instructions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[_Instruction]:
    """The instructions that compute a call."""
    given, name = _tensors((args, kwargs)), func.__name__.split(".")[0]
    made = _tensors(result)
    _known(func is torch.ops.pi2.write_kv.default or (isinstance(result, torch.Tensor) and result.numel() > 0))
    for tensor in (*made, *given):
        _known(type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.dim() <= 6)
        _known(tensor.dtype in _ELEMENTS and tensor.layout is torch.strided and not tensor.is_neg())
    is_float = all(tensor.dtype in _FLOATS for tensor in (*made, *given))
    if func in _BINARY:
        return [_binary(func, args, kwargs, result, given)]
    if func in _UNARY:
        _known(is_float and (func is not aten.pow.Tensor_Scalar or args[1] == 2))
        return [(_UNARY[func], [result, args[0]], [])]
    if name in _COPIES:
        x, widened = args[0], (result.dtype, args[0].dtype) == (torch.float32, torch.int64)
        _known(is_float or result.dtype is x.dtype or widened)
        _known(result.shape == x.shape or result.is_contiguous())
        shaped = result if result.shape == x.shape else result.view(x.shape)
        return [("copy", [shaped, x], [])]
    if func is aten.cat.default:
        parts, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
        _known(all(part.dtype is result.dtype and part.dim() == result.dim() for part in parts))
        starts = [sum(part.shape[dim] for part in parts[:i]) for i in range(len(parts))]
        places = zip(parts, starts, strict=True)
        return [("copy", [result.narrow(dim, at, part.shape[dim]), part], []) for part, at in places if part.numel()]
    if func.overloadpacket in _CALLED:
        _known(is_float and result.is_contiguous() and args[0].is_contiguous())
        return [("call", [result, args[0]], [_CALLED.index(func.overloadpacket)])]
    if func is aten.isfinite.default:
        _known(args[0].dtype in _FLOATS)
        return [("is_finite", [result, args[0]], [])]
    if func is aten.where.ScalarOther:
        _known(result.dtype is args[1].dtype is torch.int64 and args[0].dtype is torch.bool)
        return [("where", [result, args[1].expand(result.shape), args[0].expand(result.shape)], [_double(args[2])])]
    if func in (aten.mean.dim, aten.argmax.default):
        x, dims = args[0], args[1] if len(args) > 1 else None
        last = dims in (-1, x.dim() - 1) or dims in ([-1], [x.dim() - 1])
        _known(last and x.dtype is torch.float32 and x.stride(-1) == 1 and result.dtype in (x.dtype, torch.int64))
        op = "mean" if func is aten.mean.dim else "argmax"
        return [(op, [result if result.dim() == x.dim() else result.unsqueeze(-1), x], [])]
    if func is aten.gather.default:
        x, dim, index = args
        _known(dim in (-1, x.dim() - 1) and index.shape[-1] == 1 and index.shape[:-1] == x.shape[:-1])
        return [("gather", [result, x, index], [])]
    if func in (aten.index_select.default, aten.embedding.default):
        x, index = args[0], args[-1] if func is aten.index_select.default else args[1]
        _known(x.dim() == 2 and x.stride(1) == 1 and index.is_contiguous() and result.is_contiguous())
        _known(index.dtype is torch.int64 and (func is aten.embedding.default or args[1] == 0))
        return [("take_rows", [result.view(-1, x.shape[1]), x, index.view(-1)], [])]
    if func is torch.ops.pi2.dequantize.default:
        _known(args[0].is_contiguous() and is_float is False)
        return [("dequantize", [result, args[0]], [FORMATS[args[1]].code])]
    if func is aten.index_copy_.default:
        y, dim, index, x = args
        _known(x.dtype is y.dtype and index.dim() == 1 and x.dim() == y.dim() > 0)
        return [("index_copy", [y, x, index], [dim % y.dim()])]
    if func in (torch.ops.pi2.linear.default, torch.ops.pi2.linear_blocks.default):
        blocks = func is torch.ops.pi2.linear_blocks.default
        call = arguments_of(linear.linear_blocks if blocks else linear.linear, args)
        _known(not kwargs and call.x.is_contiguous())
        operands = [result, call.x, call.blocks if blocks else call.rows, *([] if call.bias is None else [call.bias])]
        return [("linear", operands, [FORMATS[call.weights].code, int(blocks or call.int8_activations), int(blocks)])]
    if func is torch.ops.pi2.attention.default:
        call = arguments_of(attention.attention, args)
        seen = None if call.mask is None else call.mask.expand(call.query.shape[0], -1, -1, -1)
        operands = [result, call.query, call.key, call.value, *([] if seen is None else [seen])]
        _known(not kwargs and all(operand.stride(-1) == 1 for operand in operands))
        operands += [] if call.sinks is None else [call.sinks]
        flags = int(call.causal), int(seen is not None), int(call.sinks is not None)
        return [("attention", operands, [_double(call.scale), *flags, _KV_CODES[call.key.dtype]])]
    if func is torch.ops.pi2.write_kv.default:
        x, rows, at = args
        _known(x.stride(-1) == 1 and at.is_contiguous())
        return [("write_kv", [rows, x, at], [_KV_CODES[rows.dtype]])]
    raise _Unknown


def _binary(func: Any, args: Any, kwargs: Any, result: torch.Tensor, given: list[torch.Tensor]) -> _Instruction:
    op, (a, b) = _BINARY[func], args
    types = {tensor.dtype for tensor in given}
    if op in ("less", "less_equal", "and"):
        _known(types == {torch.bool if op == "and" else torch.int64} and len(given) == 2)
    else:
        is_float = types | {result.dtype} <= _FLOATS.keys()
        _known(is_float or (op != "div" and types == {torch.int64} and result.dtype is torch.int64))
    _known(_is_tensor(a) and kwargs.get("alpha", 1) == 1 and "rounding_mode" not in kwargs)
    if not _is_tensor(b):
        _known(abs(b) < 1 << 53)
        return op, [result, a.expand(result.shape)], [_double(b)]
    pair = [a.expand(result.shape), b.expand(result.shape)]
    return op, [result, *(pair[::-1] if func in _SWAPPED else pair)], []
