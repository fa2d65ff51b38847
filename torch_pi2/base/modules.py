"""Running modules of a user's model without side effects, and respecting their hooks, or refusing them by name.

Hooks on a module whose ``forward`` is replaced run as before. A replacement must not silence a hook: an FFN with hooks
inside runs through lazy tensors (:mod:`torch_pi2.layers.lazy`), where they can read and change every value, or stays
dense. Modules that no longer run have :class:`NoHooks`, where registering a hook raises.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import ConfigError


@contextmanager
def evaluating(*roots: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's training flag is restored afterwards.

    The fused fast path of ``nn.TransformerEncoderLayer``, which hides the FFN's matmuls, is off meanwhile.
    """
    flags = [(module, module.training) for root in roots for module in root.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        for root in roots:
            root.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, training in flags:
            module.training = training


@contextmanager
def fresh_settings() -> Iterator[None]:
    """Torch settings of a new process in the block: default dtype, device, gradients, autocast, precision, and more."""
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # not needlessly: a default device makes captures take twice as long; with it torch.jit.trace misses our trial runs
    is_cpu = torch.get_default_device().type == "cpu" and not torch._C._is_tracing()
    on_cpu: AbstractContextManager[object] = nullcontext() if is_cpu else torch.device("cpu")
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), on_cpu:
        try:
            torch.set_default_dtype(torch.float32)
            torch.set_float32_matmul_precision("highest")
            if deterministic:  # a call imports Inductor, which takes seconds
                torch.use_deterministic_algorithms(False)
            yield
        finally:
            if deterministic != torch.are_deterministic_algorithms_enabled():
                torch.use_deterministic_algorithms(deterministic, warn_only=warns)
            torch.set_float32_matmul_precision(precision)
            torch.set_default_dtype(dtype)


@contextmanager
def other_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forwards of these modules during the block."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class NoHooks(OrderedDict[int, Any]):
    """The forward hooks of a module that does not run: always empty; registering one raises ConfigError."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def __setitem__(self, key: int, hook: Any) -> None:
        found = "a part of a feed-forward layer that the optimised model computes as a whole"
        fix = "Register it before torch_pi2.optimize, or on the layer; torch_pi2.restore(model) undoes optimize."
        raise ConfigError(f"a hook inside {self._key}", expected="a module that runs", found=found, fix=fix)

    def __reduce__(self) -> Any:
        return NoHooks, (self._key,)


def refuse_hooks(module: nn.Module, key: str) -> None:
    """Refuse hooks on ``module``, which no longer runs, as a part of the FFN ``key``."""
    for attribute in _HOOKS:
        object.__setattr__(module, attribute, NoHooks(key))


def allow_hooks(module: nn.Module) -> None:
    """Undo :func:`refuse_hooks`."""
    for attribute in _HOOKS:
        if isinstance(getattr(module, attribute), NoHooks):
            object.__setattr__(module, attribute, OrderedDict())


def share_hooks(original: nn.Module, replacement: nn.Module) -> None:
    """Register present and future hooks of either module on both."""
    for attribute, value in vars(original).items():
        if attribute.endswith("_hooks") or "_hooks_" in attribute:
            object.__setattr__(replacement, attribute, value)


def has_hooks(module: nn.Module, *, pre: bool = True, post: bool = True) -> bool:
    """Whether ``module`` has hooks before, or after, its forward."""
    return bool((pre and module._forward_pre_hooks) or (post and module._forward_hooks))


def own_forward(modules: Mapping[str, nn.Module]) -> str | None:
    """Describe the first module whose forward was replaced on the instance, and may change again; None: none was."""
    for name, module in modules.items():
        if "forward" in vars(module):
            return f"{name} has a forward of its own (accelerate, or a patch)"
    return None


def hooks_inside(prefix: str, module: nn.Module) -> str | None:
    """Describe a part of ``module`` whose hooks would not run if ``module`` were computed as a whole; None: no part."""
    parts = {name: part for name, part in module.named_modules(prefix=prefix) if part is not module}
    for name, part in parts.items():
        if has_hooks(part):
            return f"{name} has a hook"
    return own_forward({prefix: module, **parts})


def has_sparse_layers(model: nn.Module) -> bool:
    """Whether ``model`` is optimised, by an attribute, because some packages must not import the sparse layers."""
    return any(getattr(part, "is_sparse_layer", False) for part in model.modules())


def is_input_sparse(model: nn.Module) -> bool:
    """Whether an ``InputMethod`` chooses the input channels of linear layers of ``model``, likewise."""
    return any(getattr(part, "is_input_sparse", False) for part in model.modules())


def refuse_global_hooks(what: str) -> None:
    """Raises ConfigError, about ``what``: PyTorch has global hooks around every module's forward."""
    common = nn.modules.module
    if common._global_forward_hooks or common._global_forward_pre_hooks:
        found = "hooks on all modules (register_module_forward_hook), some of which do not run in an optimised model"
        fix = "Remove them, or register them on the modules that they are for."
        raise ConfigError(what, expected="hooks on modules of the model", found=found, fix=fix)
