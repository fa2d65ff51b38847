"""``sparsify_inputs``: linear layers that use some of their input channels, by an ``InputMethod``."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from torch_pi2.base.modules import evaluating, has_sparse_layers, is_input_sparse
from torch_pi2.base.progress import bar
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.layers.inputs import InputSparseLinear
from torch_pi2.predict.method import InputMethod
from torch_pi2.predict.samples import LinearSamples
from torch_pi2.profiling.data import Batch
from torch_pi2.rewrite.install import replace_modules
from torch_pi2.rewrite.linears import find_linears
from torch_pi2.types.config import Config, check_patterns, method_for

#: Tokens that methods are fitted to: the inputs of all layers are in memory at once.
_TOKENS = 1024


def sparsify_inputs(model: nn.Module, data: list[Batch], config: Config, progress: bool) -> None:
    """Replace the linear layers of ``model`` but its output layer, in place, each with a fitted copy of its
    method in ``config``. Raises ConfigError: sparse layers are there. UnsupportedModelError: no linear layer.
    """
    if has_sparse_layers(model) or is_input_sparse(model):
        found, fix = "sparse layers", "Load the model again."
        raise ConfigError("an InputMethod", expected="a dense model", found=found, fix=fix)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linears = {name: m for name, m in find_linears(model, [], data[0])[0].items() if m is not head}
    check_patterns(config, list(linears))
    linears = {name: linear for name, linear in linears.items() if _method(config, name) is not None}
    if not linears:
        what, fix = type(model).__name__, "Use a SparseMethod."
        raise UnsupportedModelError(what, expected="linear layers that can be replaced", found="none", fix=fix)
    inputs, made = _inputs(model, data, linears), dict[nn.Module, nn.Module]()
    with torch.no_grad():
        for name, linear in bar(list(linears.items()), "fit", progress):
            own, x_TK = _method(config, name).copy(), inputs.pop(name)
            own.fit(LinearSamples(name, linear.weight.detach().float(), x_TK.float()))
            own.used(x_TK[:1])  # raises what decoding would
            made[linear] = InputSparseLinear(linear, own, config.weights, name).train(linear.training)
    replace_modules(model, made)


def _method(config: Config, name: str) -> Any:
    """That of a linear layer, or None. Raises ConfigError: one that chooses neurons."""
    method = method_for(config, name)
    if method is not None and not isinstance(method, InputMethod):
        what, fix = f"method of {name}", "Give all patterns an InputMethod, or all a SparseMethod."
        raise ConfigError(what, expected="an InputMethod, as other layers have", found=type(method).__name__, fix=fix)
    return method


def _inputs(model: nn.Module, data: list[Batch], linears: dict[str, nn.Linear]) -> dict[str, torch.Tensor]:
    """Name -> inputs of real tokens ``[T, K]``; layers with the same input share them."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in linears}
    same: dict[int, tuple[Any, torch.Tensor]] = {}
    mask: list[torch.Tensor | None] = [None]

    def keep(name: str, x: torch.Tensor) -> None:
        if id(x) not in same:
            rows = x.detach().reshape(-1, x.shape[-1])
            real = mask[0]
            same[id(x)] = x, rows[real.flatten()] if real is not None and real.numel() == len(rows) else rows
        found[name].append(same[id(x)][1])

    with ExitStack() as hooks, torch.no_grad(), evaluating(model):
        for name, linear in linears.items():
            hook = linear.register_forward_pre_hook(lambda _, args, name=name: keep(name, args[0]))
            hooks.enter_context(hook)
        tokens = 0
        for batch in data:
            mask[0] = batch.mask_BT
            batch.call(model, logits=False)
            same.clear()
            tokens += max(1, batch.n_tokens)
            if tokens >= _TOKENS:
                break
    return {name: torch.cat(parts) for name, parts in found.items() if parts}
