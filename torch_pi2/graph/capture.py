"""Run a model once under Dynamo and keep its graphs, before AOTAutograd decomposes them.

At this level an FFN is still ``linear, act, linear, mul, linear``, and example inputs are the model's own ``Parameter``
objects, so names follow by identity.
"""

import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import fake_tensor_tls

from torch_pi2.base.modules import evaluating
from torch_pi2.errors import CalibrationError, DeviceError, UnsupportedModelError


@dataclass
class CapturedGraph:
    """One Dynamo graph; ``tensors``: placeholder -> the real tensor."""

    gm: fx.GraphModule
    tensors: dict[fx.Node, torch.Tensor]


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """``input_ids [2, 8]`` for a Hugging Face model. Raises CalibrationError: no ``config.vocab_size``."""
    config = getattr(model, "config", None)
    text_config: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    vocab_size = getattr(text_config, "vocab_size", None)
    if not isinstance(vocab_size, int) or vocab_size < 1:
        expected = "args or kwargs for one forward call of the model"
        found = f"none, and {type(model).__name__} has no config.vocab_size to make them from"
        folders = "Folders are read by pack and quantize only if their models take input_ids."
        fix = f"Pass them: optimize(model, calibration=[(x,)]), find_sites(model, args=(x,)). {folders}"
        raise CalibrationError("example inputs", expected=expected, found=found, fix=fix)
    ids_BT = (torch.arange(16, dtype=torch.int64).reshape(2, 8) + 3) % vocab_size
    inputs: dict[str, Any] = {"input_ids": ids_BT}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids_BT.clone()
    return inputs


def capture(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, on_meta: bool = False
) -> list[CapturedGraph]:
    """Graphs of one forward call (several after graph breaks), in order of execution.

    The model runs in eval mode without gradients; its mode, the random state and the user's compiled code are
    preserved. Only after graph breaks is ``torch._dynamo.reset()`` called, to drop what the capture left on other code
    objects. ``on_meta``: the whole model is on ``meta``; only shapes are computed, without caches.

    Raises:
        DeviceError: parameters on ``meta``, without ``on_meta``. CalibrationError: no inputs given and none can be
            guessed, or the model refuses those given. UnsupportedModelError: Dynamo cannot capture the model; the
            message has its reason.
    """
    valueless = [] if on_meta else [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if valueless:
        found = f"meta ({len(valueless)} parameters without data, e.g. {valueless[0]})"
        fix = "Load the weights first (from_pretrained, or load_state_dict(..., assign=True))."
        raise DeviceError("device of the model", expected="cpu", found=found, fix=fix)
    if isinstance(model, torch._dynamo.OptimizedModule):
        fix = "Pass the model before torch.compile, and compile afterwards."
        expected = "an ordinary nn.Module"
        raise UnsupportedModelError("model", expected=expected, found="the result of torch.compile", fix=fix)
    if not args and not kwargs:
        kwargs = example_inputs(model)
    kwargs = dict(kwargs or {})
    if on_meta:
        kwargs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        if hasattr(getattr(model, "config", None), "use_cache"):
            kwargs.setdefault("use_cache", False)
    graphs: list[CapturedGraph] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        tensors = {n: t for n, t in zip(placeholders, inputs, strict=True) if isinstance(t, torch.Tensor)}
        graphs.append(CapturedGraph(gm, tensors))
        return gm.forward

    try:
        limits = torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=65536)
        with _quietly(model), _constants_on_meta(on_meta), limits:
            torch.compile(_fresh_caller(), backend=keep, dynamic=False)(model, args, kwargs)
    except Exception as error:
        _explain(model, args, kwargs, error)
    finally:
        if len(graphs) > 1:
            torch._dynamo.reset()
    if not graphs:
        found = "no graph at all (its forward is excluded from compilation or computes nothing)"
        expected = "a forward that torch.compile can capture"
        fix = "Pass the part of the model that holds the FFN layers."
        raise UnsupportedModelError(type(model).__name__, expected=expected, found=found, fix=fix)
    kept = graphs.copy()
    graphs.clear()  # Dynamo keeps its backends alive, and would keep this list and the weights
    return kept


def _fresh_caller() -> Any:
    """A caller with its own code object: Dynamo's cache is attached to code, and goes away with it."""

    def call(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return model(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, "call")


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """Eval mode without backward hooks, which break graphs; mode, hooks and random state are restored afterwards."""
    hooks = ("_backward_hooks", "_backward_pre_hooks")
    kept = [(module, name, vars(module)[name]) for module in model.modules() for name in hooks if vars(module)[name]]
    try:
        for module, name, _ in kept:
            vars(module)[name] = OrderedDict()
        with evaluating(model), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, name, those in kept:
            vars(module)[name] = those


@contextmanager
def _constants_on_meta(on: bool) -> Iterator[None]:
    """Context that lets constants made on ``meta`` (``torch.tensor(0.95, device="meta")``) enter graphs."""
    before = fake_tensor_tls.allow_non_fake_inputs_override
    fake_tensor_tls.allow_non_fake_inputs_override = True if on else before
    try:
        yield
    finally:
        fake_tensor_tls.allow_non_fake_inputs_override = before


def _explain(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], error: Exception) -> None:
    """Raise the right error: either the model refuses these inputs, or only Dynamo refuses the model."""
    try:
        with _quietly(model):
            model(*args, **kwargs)
    except Exception as eager_error:
        raise CalibrationError(
            f"example inputs of {type(model).__name__}",
            expected="arguments that its forward accepts",
            found=f"{type(eager_error).__name__}: {_first_line(eager_error)}",
            fix="Its code makes tensors on the CPU wherever its weights are (torch.arange(n) for torch.arange(n, "
            "device=x.device)): correct it, or load the whole model and torch_pi2.optimize it."
            if any(p.is_meta for p in model.parameters())
            else "Pass args and kwargs as you would call the model.",
        ) from eager_error
    expected, found = "a forward that torch.compile can capture", f"{type(error).__name__}: {_first_line(error)}"
    fix = "Pass the part of the model that holds the FFN layers, or use NeuronClusterMode."
    raise UnsupportedModelError(type(model).__name__, expected=expected, found=found, fix=fix) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"
