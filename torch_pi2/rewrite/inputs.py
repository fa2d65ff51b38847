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

#: Tokens that methods are fitted to: the inputs of all layers are in memory at once.
_TOKENS = 1024


def sparsify_inputs(model: nn.Module, data: list[Batch], method: InputMethod, weights: str, progress: bool) -> None:
    """Replace the linear layers of ``model`` but its output layer, in place, each with a fitted copy of ``method``.
    ``weights``: their format. Raises ConfigError: sparse layers are there. UnsupportedModelError: no linear layer.
    """
    if has_sparse_layers(model) or is_input_sparse(model):
        found, fix = "sparse layers", "Load the model again."
        raise ConfigError(f"method {method.name}", expected="a dense model", found=found, fix=fix)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linears = {name: m for name, m in find_linears(model, [], data[0])[0].items() if m is not head}
    if not linears:
        what, fix = type(model).__name__, "Use a SparseMethod."
        raise UnsupportedModelError(what, expected="linear layers that can be replaced", found="none", fix=fix)
    inputs, made = _inputs(model, data, linears), dict[nn.Module, nn.Module]()
    with torch.no_grad():
        for name, linear in bar(list(linears.items()), "fit", progress):
            own, x_TK = method.copy(), inputs.pop(name)
            own.fit(LinearSamples(name, linear.weight.detach().float(), x_TK.float()))
            own.used(x_TK[:1])  # raises what decoding would
            made[linear] = InputSparseLinear(linear, own, weights, name).train(linear.training)
    replace_modules(model, made)


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
