"""``StepGraph``: the calls of a step to PyTorch, recorded once and replayed without the model's Python code.

A step makes the same calls every time, on the same tensors except for the ids. Replaying them gives the same bits
without a compiler, and saves the Python code of Hugging Face's modules, which takes as long as a sparse layer of a
small model. Inductor can also compile the recorded graph. That avoids Dynamo, which takes longer to trace a model than
Inductor to load code from its disk cache.

On a GPU a step is captured as one CUDA graph (:func:`captured`): launching the hundreds of kernels of a small model
takes longer than running them.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.base.progress import log_once
from torch_pi2.decode.attention import NAME
from torch_pi2.layers.gpu import on_gpu

Forward = Callable[[torch.Tensor], torch.Tensor]

#: One capture at a time: a second one would synchronise the GPU, which a capture forbids.
_lock = threading.Lock()
#: Calls that ask a tensor for a property that is the same in every step.
_FACTS = {"size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "storage_offset", "data_ptr"}
_FACTS |= {"is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_same_size", "is_set_to", "_is_view"}
_FACTS |= {"__len__", "__hash__", "get_device", "type", "result_type"}
#: Types of arguments besides tensors. No subclasses: generated code has no name for numpy's numbers.
_PLAIN = {bool, int, float, complex, str, type(None), type(...)}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
#: Calls whose results have a size that depends on values.
_SIZED_BY_VALUES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
#: Longer lists and mappings of a module are not compared (:class:`State`).
_COMPARED = 1000

#: Steps before one is recorded, which takes about as long as ten.
_BEFORE = 8


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` the current GPU, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def captured(run: Forward, ids_BT: torch.Tensor) -> Forward:
    """``run`` for ids of this shape as one CUDA graph; ``run`` itself if it cannot be captured or is not on a GPU.

    It must have run before, so that its kernels are compiled and loaded, and must use the same memory each time except
    for the ids. A capture computes nothing.
    """
    if not on_gpu(ids_BT):
        return run
    fed_BT, graph = ids_BT.clone(), torch.cuda.CUDAGraph()
    # The outer block restores the current stream after an error. Other threads may use the GPU meanwhile.
    here = torch.cuda.stream(torch.cuda.current_stream(ids_BT.device))
    try:
        with _lock, here, torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            result = run(fed_BT)
    except Exception as error:
        log_once(f"steps are not captured as CUDA graphs: {' '.join(str(error).split())[:200]}")
        return run

    def replay(ids_BT: torch.Tensor, held: Forward = run) -> torch.Tensor:
        """``held`` keeps the tensors alive whose addresses are in the graph."""
        fed_BT.copy_(ids_BT)
        graph.replay()
        return result.clone()  # the next replay writes there

    return replay


class StepGraph:
    """The calls of a step, as a graph over the ids and the tensors that existed before.

    Args:
        graph: its first placeholder is the ids. inputs: tensors for the other placeholders, in order. seen: nodes with
            size, stride, dtype and device of their results.

    Attributes:
        inputs: tensors that are the same in every step.
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[torch.Tensor], seen: Sequence[tuple[fx.Node, Any]]) -> None:
        self.inputs, self._seen, self._graph = list(inputs), seen, graph
        code = graph.python_code("self")  # a GraphModule would leave a copy in caches that are never emptied
        names = dict(code.globals)
        exec(compile(code.src, "<recorded step>", "exec"), names)
        self._code: Callable[..., Any] = names["forward"]

    def __call__(self, ids_BT: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._code(None, ids_BT, *self.inputs)[0]
        return result

    def is_same(self, other: StepGraph) -> bool:
        """Whether ``other`` has the same calls, with the same constants and on the same tensors."""
        calls, others = (
            [(node.op, node.target, repr(node.args), repr(node.kwargs)) for node in made._graph.nodes]
            for made in (self, other)
        )
        return calls == others and list(map(id, self.inputs)) == list(map(id, other.inputs))

    def compiled(self, backend: Callable[..., Any], ids_BT: torch.Tensor, model: nn.Module) -> Forward:
        """The graph compiled by ``backend`` of ``torch.compile``."""
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        with mode:
            for node, (size, stride, dtype, device) in self._seen:
                node.meta["example_value"] = torch.empty_strided(size, stride, dtype=dtype, device=device)
        module = fx.GraphModule({}, self._graph)
        inputs, names = self.inputs, {id(tensor): name for name, tensor in tensors_of(model)}
        for node, tensor in zip(module.graph.find_nodes(op="placeholder")[1:], inputs, strict=True):
            if id(tensor) in names:
                node.meta["grapharg"] = SimpleNamespace(source=SimpleNamespace(name=_source(names[id(tensor)], tensor)))
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            code = backend(module, [ids_BT, *inputs])
        return lambda ids_BT: code(ids_BT, *inputs)[0]


def record(forward: Forward, ids_BT: torch.Tensor) -> tuple[torch.Tensor, StepGraph | None]:
    """The result of ``forward`` and its calls; None in place of these if the next step may make other calls."""
    recorder = _Recorder(ids_BT)
    with recorder:
        result = forward(ids_BT)
    return result, recorder.end(result)


class GraphRunner:
    """Runs steps of one shape: at first ``forward``, then two recordings, and from then on the recorded calls.

    Args:
        may_record: called before each recording; False if hooks have to see every step.
        state: must be equal before and after each recording, or later steps may make other calls.
        again: whether ``forward`` may repeat a step whose recorded calls fail. Other processes would not repeat it.
    """

    def __init__(
        self,
        forward: Forward,
        may_record: Callable[[], bool],
        state: Callable[[], object] = lambda: None,
        again: bool = True,
    ) -> None:
        self._may_repeat = again
        self._forward, self._may_record, self._state = forward, may_record, state
        self._wait, self._is_stable = _BEFORE, False
        self._graph: StepGraph | None = None
        self._run: Forward | None = None

    def __call__(self, ids_BT: torch.Tensor) -> torch.Tensor:
        if not self._is_stable:
            return self._observe(ids_BT)
        assert self._graph is not None
        try:
            if self._run is None:
                self._run = captured(self._graph, ids_BT)
            return self._run(ids_BT)
        except Exception:
            if not self._may_repeat:
                raise
            result = self._forward(ids_BT)  # raises an error that explains it, if the step itself is wrong
            self._is_stable, self._graph, self._run = False, None, None
            return result

    def _observe(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Run ``forward``, recording it if it is time to. Two equal recordings stand for all later steps."""
        self._wait -= self._wait > 0
        if self._wait or not self._may_record():
            return self._forward(ids_BT)
        self._wait, first, before = -1, self._graph, self._state()
        try:
            result, self._graph = record(self._forward, ids_BT)
        except torch.OutOfMemoryError:  # of a GPU: recording keeps all that is between
            self._graph = None
            return self._forward(ids_BT)
        again = self._graph is not None and before == self._state()
        if first is None and again:
            self._wait = 0  # the next one is the second
        else:
            both = again and first is not None and self._graph is not None
            self._is_stable = both and first.is_same(self._graph)  # type: ignore[union-attr, arg-type]
            self._graph = self._graph if self._is_stable else None
        return result


class _NotRecorded(Exception):
    """A call that the next step may not repeat."""


class _Recorder(TorchFunctionMode):
    def __init__(self, ids_BT: torch.Tensor) -> None:
        super().__init__()
        self._graph, self._inputs = fx.Graph(), list[torch.Tensor]()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # so that no other tensor gets the id of one of these
        self._seen: list[tuple[fx.Node, Any]] = []
        self._last: fx.Node | None = None  # placeholder
        self._failed = False
        self._node(ids_BT)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._failed:
            try:
                self._add(func, args, kwargs or {}, result)
            except _NotRecorded:
                self._failed = True
        return result

    def end(self, result: torch.Tensor) -> StepGraph | None:
        if self._failed or id(result) not in self._nodes:
            return None
        self._graph.output((self._nodes[id(result)],))
        return StepGraph(self._graph, self._inputs[1:], self._seen)

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        changes = name == "__setitem__" or (result is None and _is_operator(func))
        if not changes and not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            asked = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs)))
            if asked and name != "__get__" and name not in _FACTS:
                raise _NotRecorded(name)
            return
        if _is_sized_by_values(name, args, kwargs):
            raise _NotRecorded(name)
        args, kwargs = pytree.tree_map(self._argument, (args, kwargs))
        if name == "__get__":
            node = self._graph.call_function(getattr, (args[0], func.__self__.__name__))
        elif name in ("__getitem__", "__setitem__"):
            node = self._graph.call_function(getattr(operator, name.strip("_")), args, kwargs)
        elif getattr(torch.Tensor, name, None) is func:
            node = self._graph.call_method(name, args, kwargs)
        else:
            node = self._graph.call_function(func, args, kwargs)
        self._found(result, node)

    def _found(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, torch.Tensor):
            self._is(result, node)
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                self._found(part, self._graph.call_function(operator.getitem, (node, i)))

    def _is(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        self._seen.append((node, (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._nodes.get(id(value)) or self._node(value)
        parts = (value.start, value.stop, value.step) if isinstance(value, slice) else (value,)
        if not all(type(part) in _PLAIN for part in parts):
            raise _NotRecorded(type(value).__name__)
        return value

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        if isinstance(tensor, OffloadedParameter):
            raise _NotRecorded("a tensor that is not there")
        if self._last is None:
            self._last = self._graph.placeholder("ids_BT")
        else:
            with self._graph.inserting_after(self._last):
                self._last = self._graph.placeholder(f"input_{len(self._inputs)}")
        self._inputs.append(tensor)
        self._is(tensor, self._last)
        return self._last


def _is_operator(func: Any) -> bool:
    return isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def _is_sized_by_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.Tensor)]
    if name == "__getitem__":
        return any(index.dtype in (torch.bool, torch.uint8) for index in given)
    if name == "where":
        return len(args) + len(kwargs) == 1
    return name in _SIZED_BY_VALUES or (name == "repeat_interleave" and (bool(given) or len(args) + len(kwargs) == 1))


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of ``model`` by name; a shared one has several names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


class State:
    """A snapshot of everything that decides which calls a step makes, for comparison with an earlier one.

    It covers the attributes of modules and their configurations: plain values, also in lists and mappings, and the
    identity of modules, tensors, functions and hooks. The contents of other objects are not compared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._alive: dict[int, Any] = {}  # weak references, as an id can be reused once its object is gone
        parts: dict[int, Any] = {id(module): module for module in model.modules()}
        for module in list(parts.values()):
            parts |= {id(c): c for c in (vars(module).get("config"),) if hasattr(c, "__dict__")}
        self._values: list[Any] = [self._value(vars(part)) for part in parts.values()]
        general = vars(nn.modules.module)
        self._values.append(self._value({k: v for k, v in general.items() if k.startswith("_global_forward")}))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def _value(self, value: Any, depth: int = 0) -> Any:
        if type(value) in _PLAIN:
            return type(value).__name__, repr("sdpa" if value == NAME else value)  # a step may be running elsewhere
        if isinstance(value, (dict, list, tuple, set, frozenset)) and depth < 4 and len(value) <= _COMPARED:
            if isinstance(value, dict):
                return [(repr(k), self._value(v, depth + 1)) for k, v in value.items()]
            return [self._value(v, depth + 1) for v in value]
        try:
            known = weakref.ref(value)
        except TypeError:
            known = value
        self._alive[id(known)] = known
        # CUDA graphs hold addresses, and a tensor can get other memory without becoming another object
        return (id(known), value.data_ptr()) if isinstance(value, torch.Tensor) and value.is_cuda else id(known)


def _source(name: str, tensor: torch.Tensor) -> str:
    """Dynamo's name of a model's tensor."""
    *modules, last = name.split(".")
    kind = "_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"
    return "".join(["self.model", *(f"._modules['{part}']" for part in modules), f".{kind}['{last}']"])
