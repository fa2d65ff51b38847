"""``StepGraph``: the calls of a step to PyTorch, recorded once and replayed without the model's Python code.

A step makes the same calls every time, on the same tensors except for the ids. Replaying them gives the same bits
without a compiler, and saves the Python code of Hugging Face's modules, which takes as long as a sparse layer of a
small model. Inductor can also compile the recorded graph. That avoids Dynamo, which takes longer to trace a model than
Inductor to load code from its disk cache.

On a GPU a step is captured as one CUDA graph (:func:`captured`): launching the hundreds of kernels of a small model
takes longer than running them.
"""

import operator
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.base.progress import log_once
from torch_pi2.decode.guards import PLAIN
from torch_pi2.decode.step_program import close, translated
from torch_pi2.layers.gpu import on_gpu

Forward = Callable[[torch.Tensor], torch.Tensor]

#: One capture at a time: a second one would synchronise the GPU, which a capture forbids.
_lock = threading.Lock()
#: Calls that ask a tensor for a property that is the same in every step.
_FACTS = {"size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "storage_offset", "data_ptr"}
_FACTS |= {"is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_same_size", "is_set_to", "_is_view"}
_FACTS |= {"__len__", "__hash__", "get_device", "type", "result_type"}
#: Types of results that are such a property, of whichever call.
_SIZES = {torch.Size, torch.dtype, torch.device}
#: Calls whose results have a size that depends on values.
_SIZED_BY_VALUES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
#: Steps before one is recorded.
_BEFORE = 8
#: The model's own code makes every so many steps, and its calls are compared with the recorded ones.
_COMPARED_STEPS = 64


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` the current GPU, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def captured(run: Forward, ids_BT: torch.Tensor) -> Forward:
    """``run`` for ids of this shape as one CUDA graph; ``run`` itself if it cannot be captured or is not on a GPU. It
    must have run before, and use the same memory each time except for the ids. A capture computes nothing.
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


class _Ref:
    """A tensor of a step, in its calls. ``like``: size, stride, dtype and device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.like = tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@dataclass
class Calls:
    """The calls of a step. ``inputs``: the ids, then the tensors that existed before and are the same in every step,
    each with its name here. ``made``: function, arguments and results of each call, with names in place of tensors.
    """

    inputs: list[tuple[torch.Tensor, _Ref]]
    made: list[tuple[Any, Any, Any, Any]]
    result: _Ref

    def graph(self) -> tuple[fx.Graph, list[tuple[fx.Node, _Ref]]]:
        """As a graph over the inputs, and its tensors."""
        graph, nodes, seen = fx.Graph(), dict[_Ref, fx.Node](), list[tuple[fx.Node, _Ref]]()

        def bind(made: Any, node: fx.Node) -> None:
            if isinstance(made, _Ref):
                nodes[made] = node
                seen.append((node, made))
            elif made is not None:
                for i, part in enumerate(made):
                    bind(part, graph.call_function(operator.getitem, (node, i)))

        for i, (_, ref) in enumerate(self.inputs):
            bind(ref, graph.placeholder(f"input_{i}" if i else "ids_BT"))
        for func, *given, made in self.made:
            args, kwargs = fx.node.map_aggregate(given, lambda leaf: nodes[leaf] if isinstance(leaf, _Ref) else leaf)
            name = getattr(func, "__name__", "")
            if name == "__get__":
                node = graph.call_function(getattr, (args[0], func.__self__.__name__))
            elif name in ("__getitem__", "__setitem__"):
                node = graph.call_function(getattr(operator, name.strip("_")), tuple(args), kwargs)
            elif getattr(torch.Tensor, name, None) is func:
                node = graph.call_method(name, tuple(args), kwargs)
            else:
                node = graph.call_function(func, tuple(args), kwargs)
            bind(made, node)
        graph.output((nodes[self.result],))
        return graph, seen


def _code(graph: fx.Graph) -> Callable[..., Any]:
    """A function of the graph's inputs; a GraphModule would stay in caches for ever."""
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, "<recorded step>", "exec"), names)
    forward = names["forward"]
    return lambda *given: forward(None, *given)[0]


class StepGraph:
    """The calls of a step as code, which runs for other ids. ``inputs``: tensors that are the same in every step."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self.inputs = calls, [tensor for tensor, _ in calls.inputs[1:]]
        self._run, self._given = _code(calls.graph()[0]), self.inputs
        self._translates = not on_gpu(calls.inputs[0][0])

    def __call__(self, ids_BT: torch.Tensor) -> torch.Tensor:
        if self._translates:
            return self._translate(ids_BT)
        return self._run(ids_BT, *self._given)

    def _translate(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The result of this step; the next ones run programs (:mod:`torch_pi2.decode.step_program`)."""
        self._translates = False
        result, made = translated(self._run, ids_BT, self.inputs)
        if made is not None:
            self._run, self._given = _code(made.graph), made.fixed
            weakref.finalize(self, close, made.programs)
        return result

    def compiled(self, backend: Callable[..., Any], ids_BT: torch.Tensor, model: nn.Module) -> Forward:
        """The graph compiled by ``backend`` of ``torch.compile``."""
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # with sympy: a second

        mode, (graph, seen) = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True), self._calls.graph()
        with mode:
            for node, ref in seen:
                size, stride, dtype, device = ref.like
                node.meta["example_value"] = torch.empty_strided(size, stride, dtype=dtype, device=device)
        module = fx.GraphModule({}, graph)
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        inputs, names = self.inputs, {id(tensor): name for name, tensor in named}
        for node, tensor in zip(module.graph.find_nodes(op="placeholder")[1:], inputs, strict=True):
            if id(tensor) in names:
                node.meta["grapharg"] = SimpleNamespace(source=SimpleNamespace(name=_source(names[id(tensor)], tensor)))
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            code = backend(module, [ids_BT, *inputs])
        return lambda ids_BT: code(ids_BT, *inputs)[0]


def record(forward: Forward, ids_BT: torch.Tensor) -> tuple[torch.Tensor, Calls | None]:
    """The result of ``forward`` and its calls; None in place of these if the next step may make other calls."""
    recorder = _Recorder(ids_BT)
    with recorder:
        result = forward(ids_BT)
    return result, recorder.end(result)


def repeat(forward: Forward, ids_BT: torch.Tensor, calls: Calls) -> tuple[torch.Tensor, bool]:
    """The result of ``forward``, and whether it makes ``calls``, with the same constants and on the same tensors."""
    comparer = _Comparer(ids_BT, calls)
    with comparer:
        result = forward(ids_BT)
    return result, comparer.end(result)


class GraphRunner:
    """Runs steps of one shape: at first ``forward``, whose code is noted, then a recorded step, and after one that
    makes the same calls the recorded calls. The first step after :meth:`begin`, and every 64th, is compared again.

    Args:
        may_record: called before each recording; False if hooks have to see every step. recording: entered while a step
            is recorded or compared.
        same: whether the model and its code are as they were. Called after a recorded step; before it, it may refer to
            the state of the model then.
        may_repeat: whether ``forward`` may repeat a step whose recorded calls fail: unless other processes would not,
            or the calls have changed recurrent states.
        wait: steps before one is recorded; None: ``_BEFORE``.

    Attributes:
        took_longer: whether the latest step was recorded, compared or translated.
    """

    def __init__(
        self,
        forward: Forward,
        may_record: Callable[[], bool],
        recording: Callable[[], AbstractContextManager[Any]] = nullcontext,
        same: Callable[[], bool] = lambda: True,
        may_repeat: bool = True,
        wait: int | None = None,
    ) -> None:
        self.took_longer = False
        self._may_repeat, self._recording, self._same = may_repeat, recording, same
        self._forward, self._may_record = forward, may_record
        self._wait, self._replayed, self._left = _BEFORE if wait is None else wait, 0, 0
        self._known = False
        self._calls: Calls | None = None
        self._run: Forward | None = None

    @property
    def is_stable(self) -> bool:
        return self._run is not None

    def begin(self, retry: bool = False) -> None:
        """Another answer begins. ``retry``: record even if that was given up before."""
        self._replayed = self._left = 0
        self._wait = _BEFORE if retry and self._run is None else self._wait

    def forget(self) -> None:
        """The model has changed."""
        self._calls = self._run = None
        self._known, self._wait = False, _BEFORE

    def __call__(self, ids_BT: torch.Tensor) -> torch.Tensor:
        self.took_longer = False
        if self._run is None:
            return self._observe(ids_BT)
        if not self._left:
            return self._compare(ids_BT)
        self.took_longer = not self._replayed  # it is translated then
        try:
            result = self._run(ids_BT)
        except Exception:
            if not self._may_repeat:
                raise
            result = self._forward(ids_BT)  # raises an error that explains it, if the step itself is wrong
            self.forget()
            return result
        self._left, self._replayed = self._left - 1, self._replayed + 1
        return result

    def _observe(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Run ``forward``, recording it if it is time to. A second one with equal calls stands for all later steps."""
        self._wait -= self._wait > 0
        if self._wait or not self._may_record():
            return self._forward(ids_BT)
        self.took_longer = True
        if self._calls is not None:
            return self._compare(ids_BT)
        self._wait = -1
        self._same()  # as the model is now
        if not self._known:  # recording itself can change what a patched method of tensors does
            with self._recording():
                result = self._forward(ids_BT)
            if self._same():
                self._known, self._wait = True, 0
            return result
        try:
            with self._recording():
                result, calls = record(self._forward, ids_BT)
        except torch.OutOfMemoryError:  # of a GPU: recording keeps all that is between
            if not self._may_repeat:
                raise
            return self._forward(ids_BT)
        if calls is not None and self._same():
            self._calls, self._wait = calls, 0  # the next one is compared
        return result

    def _compare(self, ids_BT: torch.Tensor) -> torch.Tensor:
        assert self._calls is not None
        self.took_longer = True
        with self._recording() if self._run is None else nullcontext():
            result, equal = repeat(self._forward, ids_BT, self._calls)
        if not (equal and (self._run is not None or self._same())):
            if self._replayed:
                log_once(
                    f"a step of the model is not the one that was recorded, and up to {self._replayed} steps before "
                    "it were: something that nobody could see has changed. Make a Decoder with recorded=False"
                )
            self._calls, self._run, self._wait = None, None, -1
        elif self._run is None:
            self._run = captured(StepGraph(self._calls), ids_BT)
        self._left, self._replayed = _COMPARED_STEPS - 1, 0
        return result


class _NotRecorded(Exception):
    """A call that the next step may not repeat."""


class _Recorder(TorchFunctionMode):
    def __init__(self, ids_BT: torch.Tensor) -> None:
        super().__init__()
        ids = _Ref(ids_BT)
        self.calls = Calls([(ids_BT, ids)], [], ids)
        self._refs: dict[int, _Ref] = {id(ids_BT): ids}
        self._alive: list[torch.Tensor] = [ids_BT]  # so that no other tensor gets the id of one of these
        self.failed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (self.failed or type(result) in _SIZES):
            try:
                if self._is_call(func, args, kwargs or {}, result):
                    named = {name: self._named(value) for name, value in kwargs.items()} if kwargs else {}
                    self._add(func, [self._named(value) for value in args], named, result)
            except _NotRecorded:
                self.failed = True
        return result

    def end(self, result: torch.Tensor) -> Calls | None:
        if self.failed or id(result) not in self._refs:
            return None
        self.calls.result = self._refs[id(result)]
        return self.calls

    def _is_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        name = getattr(func, "__name__", "")
        is_operator = isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        changes = name == "__setitem__" or (result is None and is_operator)
        if not (isinstance(result, torch.Tensor) or changes or _has_tensors(result)):
            if name != "__get__" and name not in _FACTS and _has_tensors((args, kwargs)):
                raise _NotRecorded(name)
            return False
        if _is_sized_by_values(name, args, kwargs):
            raise _NotRecorded(name)
        return True

    def _add(self, func: Any, args: list[Any], kwargs: Any, result: Any) -> None:
        self.calls.made.append((func, args, kwargs, self._made(result)))

    def _made(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return self._is(result, _Ref(result))
        return tuple(map(self._made, result)) if isinstance(result, (tuple, list)) else None

    def _is(self, tensor: torch.Tensor, ref: _Ref) -> _Ref:
        self._refs[id(tensor)] = ref
        self._alive.append(tensor)
        return ref

    def _named(self, value: Any) -> Any:
        """``value`` with names in place of tensors."""
        if (ref := self._refs.get(id(value))) is not None:
            return ref
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._input(value)
        if kind is tuple or kind is torch.Size:
            return tuple(map(self._named, value))
        if kind is list:
            return list(map(self._named, value))
        if kind is dict:
            return {key: self._named(held) for key, held in value.items()}
        if kind is slice and {type(value.start), type(value.stop), type(value.step)} <= PLAIN:
            return value
        raise _NotRecorded(kind.__name__)

    def _input(self, tensor: torch.Tensor) -> _Ref:
        if isinstance(tensor, OffloadedParameter):
            raise _NotRecorded("a tensor that is not there")
        ref = self._is(tensor, _Ref(tensor))
        self.calls.inputs.append((tensor, ref))
        return ref


class _Comparer(_Recorder):
    """Compares calls with those of ``calls``."""

    def __init__(self, ids_BT: torch.Tensor, calls: Calls) -> None:
        super().__init__(ids_BT)
        self._expected, self._next = calls, iter(calls.made)
        self._refs = {id(tensor): ref for tensor, ref in calls.inputs[1:]} | {id(ids_BT): calls.inputs[0][1]}

    def _is_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        return isinstance(result, torch.Tensor) or super()._is_call(func, args, kwargs, result)

    def _add(self, func: Any, args: list[Any], kwargs: Any, result: Any) -> None:
        called, given, named, made = next(self._next, (None, None, None, None))
        if not (func == called and args == given and kwargs == named and self._matches(result, made)):
            raise _NotRecorded("another call")

    def _matches(self, result: Any, made: Any) -> bool:
        if isinstance(made, _Ref):
            self._refs[id(result)] = made
            self._alive.append(result)
            return isinstance(result, torch.Tensor)
        if isinstance(result, (tuple, list)) and isinstance(made, tuple):
            return len(result) == len(made) and all(map(self._matches, result, made))
        return made is None and not isinstance(result, torch.Tensor)

    def _input(self, tensor: torch.Tensor) -> _Ref:
        raise _NotRecorded("another tensor")

    def end(self, result: torch.Tensor) -> bool:  # type: ignore[override]
        complete = next(self._next, None) is None and self._refs.get(id(result)) is self._expected.result
        return complete and not self.failed


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensors, value))
    return any(map(_has_tensors, value.values())) if isinstance(value, dict) else isinstance(value, torch.Tensor)


def _is_sized_by_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "__getitem__":
        given = args[1] if isinstance(args[1], tuple) else args[1:]
        return any(isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in given)
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        return _has_tensors((args[1:], kwargs)) or len(args) + len(kwargs) == 1
    return name in _SIZED_BY_VALUES


def _source(name: str, tensor: torch.Tensor) -> str:
    """Dynamo's name of a model's tensor."""
    *modules, last = name.split(".")
    kind = "_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"
    return "".join(["self.model", *(f"._modules['{part}']" for part in modules), f".{kind}['{last}']"])
