"""``sparsify_inputs``: linear layers that use some of their input channels, by an ``InputMethod``."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from torch_pi2.base.modules import evaluating, has_sparse_layers, is_input_sparse
from torch_pi2.base.progress import bar, log
from torch_pi2.errors import CalibrationError, ConfigError, UnsupportedModelError
from torch_pi2.fitting.custom import allocated, card_of
from torch_pi2.formats import FLOAT
from torch_pi2.layers.inputs import InputSparseLinear
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.method import InputMethod
from torch_pi2.predict.samples import LinearSamples
from torch_pi2.profiling.data import Batch
from torch_pi2.rewrite.install import replace_modules
from torch_pi2.rewrite.linears import Storage, check_linears, find_linears, quantize_linears
from torch_pi2.rewrite.state import SparseState
from torch_pi2.types.config import Config, check_patterns, described, method_for
from torch_pi2.types.plan import Plan, weights_hash

#: Tokens that methods are fitted to: the inputs of all layers are in memory at once.
_TOKENS = 1024
#: Largest share of channels at which skipping the others takes less time than a dense layer with int8 activations,
#: by ``python -m benchmarks inputs``; than one with float activations it does at any share.
_PAYS_BESIDE_INT8 = 0.5


def of_inputs(config: Config, predictors: Mapping[str, Any] | None = None) -> bool:
    """Whether methods that are given choose input channels."""
    return any(isinstance(y, InputMethod) for y in (*config._custom.values(), *(predictors or {}).values()))


def fit_inputs(model: nn.Module, data: list[Batch], config: Config, progress: bool) -> FittedPredictors:
    """Linear layers of the dense ``model`` but its output layer -> copies of their methods in ``config``, fitted to
    three quarters of some tokens; cards are of the others. Raises ConfigError: sparse layers are there, or one is no
    InputMethod. UnsupportedModelError: no linear layer. CalibrationError: fewer than two tokens.
    """
    if has_sparse_layers(model) or is_input_sparse(model):
        found, fix = "sparse layers", "Load the model again."
        raise ConfigError("an InputMethod", expected="a dense model", found=found, fix=fix)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linears = {name: m for name, m in find_linears(model, [], data[0])[0].items() if m is not head}
    check_patterns(config, list(linears))
    methods = {name: method for name in linears if (method := method_for(config, name)) is not None}
    if others := [name for name, method in methods.items() if not isinstance(method, InputMethod)]:
        what, fix = f"method of {others[0]}", "Give all patterns an InputMethod, or all a SparseMethod."
        raise ConfigError(what, expected="an InputMethod, as other layers have", found="another", fix=fix)
    if not methods:
        what, fix = type(model).__name__, "Use a SparseMethod."
        raise UnsupportedModelError(what, expected="linear layers that can be replaced", found="none", fix=fix)
    inputs, fitted = _inputs(model, data, {name: linears[name] for name in methods}), FittedPredictors()
    fitted.model_hash = weights_hash(model, [])
    if few := [name for name, x_TK in inputs.items() if len(x_TK) < 2]:
        raise CalibrationError(f"tokens of {few[0]}", expected="at least 2", found="fewer", fix="Pass more text.")

    def samples(name: str, held_back: bool = False) -> LinearSamples:
        x_TK, w_NK = inputs[name], linears[name].weight.detach().float()
        some_TK, others_TK = x_TK.split([len(x_TK) - len(x_TK) // 4 - 1, len(x_TK) // 4 + 1])
        return LinearSamples(name, w_NK, (others_TK if held_back else some_TK).float())

    with torch.no_grad():
        for name, method in bar(list(allocated(methods, samples).items()), "fit", progress):
            own = method.copy()
            own.fit(samples(name))
            other = samples(name, held_back=True)
            kept_TK, mass_TK = own.kept(other.x_TK), other.x_TK.abs() * other.weight_NK.norm(dim=0)
            own.card = card_of(own, kept_TK, other.x_TK != 0, mass_TK, 0, 2 * other.weight_NK.numel())
            own.settings()
            fitted[name] = own
            del inputs[name]
    return fitted


def sparsify_inputs(model: nn.Module, methods: dict[str, Any], config: Config, example: Batch, progress: bool) -> None:
    """Replace the linear layers that ``methods`` name, in place, and quantise the others as ``config`` says. Raises
    ConfigError: one cannot be replaced.
    """
    linears = find_linears(model, [], example)[0]
    if unknown := sorted(methods.keys() - linears.keys()):
        fix = "Fit the methods to this model (torch_pi2.fit)."
        raise ConfigError("methods of inputs", expected="linear layers of the model", found=unknown[0], fix=fix)
    int8, made = config.activations == "int8", dict[nn.Module, nn.Module]()
    shares = {name: method.card.predicted_active for name, method in methods.items() if method.card is not None}
    dense = [name for name, share in shares.items() if int8 and share > _PAYS_BESIDE_INT8]
    if dense:
        log.warning(
            "%d of %d linear layers use all channels, as skipping does not pay above a share of %.0f %% beside int8 "
            "activations: %s",
            *(len(dense), len(methods), 100 * _PAYS_BESIDE_INT8, dense[0]),
        )
    if config.weights != FLOAT:
        check_linears(linears, config.weights)
    kept = FittedPredictors({name: method for name, method in methods.items() if name not in dense})
    parts = SparseState(Plan([], weights_hash(model, []), {"config": described(config)}), kept, None)
    for name in kept:
        linear = linears.pop(name)
        made[linear] = InputSparseLinear.from_linear(linear, methods[name], config.weights, name)
    if config.weights != FLOAT:
        storage = Storage(config.weights, int8)
        parts.quantization, parts.weights = quantize_linears(model, linears, storage, progress=progress), config.weights
    replace_modules(model, made)
    parts.attach(model)


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
