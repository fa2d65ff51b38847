"""Rewriting an eager model: checking, making and installing its sparse layers, and restoring the dense ones."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_pi2.base.fields import argument
from torch_pi2.base.modules import fresh_settings, has_sparse_layers, is_input_sparse, refuse_global_hooks
from torch_pi2.base.progress import bar, log
from torch_pi2.errors import CalibrationError, UnsupportedModelError
from torch_pi2.fitting.gptq_model import ROLES, calibrated_rows, neuron_key, warn_rounded
from torch_pi2.graph.find import Found
from torch_pi2.layers.experts import SparseExperts, expert_groups
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops.quantized import check_quantizable
from torch_pi2.predict import check_known
from torch_pi2.profiling.data import Batch
from torch_pi2.rewrite.gpu import refuse_split
from torch_pi2.rewrite.install import install, uninstall
from torch_pi2.rewrite.linears import Storage, check_linears, check_some, find_linears, quantize_linears
from torch_pi2.rewrite.place import check_names
from torch_pi2.rewrite.state import SparseState
from torch_pi2.rewrite.strategies import find_strategy, log_skipped, no_strategy
from torch_pi2.rewrite.trial import changed_by
from torch_pi2.types.config import Config
from torch_pi2.types.method import Method
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite, check_weights


@fresh_settings()
def rewrite(
    model: nn.Module,
    plan: Plan,
    predictors: Mapping[str, Any] | None = None,
    *,
    progress: bool = False,
    storage: Storage | None = None,
    strategies: Mapping[str, str] | None = None,
) -> nn.Module:
    """Replace every FFN of ``plan`` in ``model`` by its sparse form, in place; returns ``model``.

    Dense weights are freed layer by layer. If any layer fails, the model is restored.

    Args:
        predictors: site key -> predictor in original neuron order: one of ours
            (:func:`torch_pi2.predict.check_known`), or a mapping of tensors (see
            :class:`~torch_pi2.layers.ffn.SparseFFN`). Needed for methods with predictors.
        progress: show a progress bar.
        storage: how the weights are stored (None: float). Quantised layers cannot be restored, so everything is checked
            before the first is made. If one fails all the same, the dense modules get dequantised weights, and the
            error says so.
        strategies: result of :func:`replaceable` for these layers, which are not tried again.

    Raises:
        StaleArtifactError: the plan is for other weights. ConfigError: already rewritten, or predictors are missing.
        UnsupportedModelError: no strategy works for a layer; the message names it.
        DeviceError, DtypeError, NonFiniteError, ShapeError: weights that cannot be used.
    """
    if has_sparse_layers(model):
        fix, rewritten = "Call torch_pi2.restore(model) first.", "one that torch_pi2 has already rewritten"
        argument(model, type(model).__name__, fix).wrong("a dense model", rewritten)
    refuse_global_hooks("torch_pi2.optimize")
    check_names(model, plan)
    plan.check_model(model)
    storage, predictors, groups = storage or Storage(), predictors or {}, expert_groups(plan.layers)
    known = dict(strategies or {})
    for group in groups:
        if storage.quantised or group[0].site.key not in known:
            known[group[0].site.key] = _check_group(model, group, predictors, storage, known)
    _warn_of_aliases(model, plan)
    try:
        for group in bar(groups, "rewrite", progress):
            _rewrite_group(model, group, predictors, storage, known[group[0].site.key])
    except BaseException as error:
        abandon(model, error)
        raise
    return model


def _warn_of_aliases(model: nn.Module, plan: Plan) -> None:
    """Log parameters of ``plan`` whose memory is also that of tensors outside of the model."""
    inside = Counter(t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers()) if not t.is_meta)
    found = {name: model.get_parameter(name) for layer in plan.layers for name in layer.site.parameter_names}
    count: Any = torch._C._storage_Use_Count
    storages = {name: p.untyped_storage()._cdata for name, p in found.items() if not p.is_meta}
    others = [name for name, storage in storages.items() if count(storage) > inside[storage] + 1]
    if others:
        log.warning(
            "tensors outside of the model have the memory of %s%s (values of state_dict, or .data): it is not freed, "
            "and the sparse layers do not see what is written there",
            others[0],
            f" and {len(others) - 1} more parameters" if len(others) > 1 else "",
        )


def abandon(model: nn.Module, error: BaseException) -> None:
    """Restore the dense modules after ``error``, with a note on it if their weights are dequantised."""
    if any(layer.weights != "float" for layer in sparse_layers(model)):
        error.add_note("Layers quantised before have their dequantised weights now: load the checkpoint again.")
    uninstall(model, lossy=True)


@fresh_settings()
def restore(model: nn.Module) -> nn.Module:
    """Restore the original modules and parameters, the same objects, bit for bit. Returns ``model``. Raises
    ConfigError: something is quantised, or neurons are on a GPU; nothing is changed then.
    """
    refuse_split(model, "restoring")
    if is_input_sparse(model):
        found, fix = "linear layers with sparse inputs, whose dense weights are gone", "Load the model again."
        argument(model, f"restoring {type(model).__name__}", fix).wrong("layers that keep their weights", found)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            fix = "Load the checkpoint again (from_pretrained, or torch_pi2.load) instead."
            lossy = f"{module.weights} in {name}, which is lossy: the original numbers are gone"
            argument(model, f"restoring {type(model).__name__}", fix).wrong("float weights", lossy)
    return uninstall(model)


@fresh_settings()
def replaceable(model: nn.Module, found: Found, needed: bool = True) -> tuple[Found, dict[str, str]]:
    """``found`` without layers that no strategy can replace; and the strategy of each other layer (of experts: by the
    key of the first), for :func:`rewrite`. Checks everything that can be checked before long computations. Raises
    UnsupportedModelError: there is no other layer, and one is ``needed``. DeviceError, DtypeError, NonFiniteError:
    weights that cannot be used.
    """
    layers = [LayerPlan(site, Method.EXACT, 0, torch.arange(site.intermediate).int()) for site in found.sites]
    strategies: dict[str, str] = {}
    refused: dict[str, UnsupportedModelError] = {}
    groups: dict[str, list[LayerPlan]] = {group[0].site.key: group for group in expert_groups(layers)}
    for key, group in groups.items():
        try:
            strategies[key] = _check_group(model, group, {}, Storage(), {})
        except UnsupportedModelError as error:
            refused |= dict.fromkeys((layer.site.key for layer in group), error)
    tried = [groups[key] for key in strategies] if found.example is not None else []
    for key, change in changed_by(model, tried, strategies, found.example).items():
        del strategies[key]
        unlike = no_strategy(groups[key][0].site, [f"whole model: {change}"])
        refused |= dict.fromkeys((layer.site.key for layer in groups[key]), unlike)
    skipped = found.left | log_skipped(refused, bool(strategies) or not needed)
    return replace(found, sites=[s for s in found.sites if s.key not in refused], left=skipped), strategies


def predictor_tensors(predictor: Any) -> tuple[Any, float]:
    """Tensors and threshold of a predictor, an object or a mapping; a ``SparseMethod`` itself; ``(None, 0)`` for None.
    Raises ConfigError.
    """
    if predictor is None:
        return None, 0.0
    if isinstance(predictor, Mapping):
        return predictor, float(predictor.get("threshold", 0.0))
    check_known("a layer", predictor)
    return predictor if predictor.kind == Method.CUSTOM else predictor.tensors(), float(predictor.threshold)


def _make_layer(model: nn.Module, layer: LayerPlan, predictor: Any, storage: Storage) -> SparseFFN:
    lowrank, threshold = predictor_tensors(predictor)
    site, weights = layer.site, layer.site.weights(model)
    given = {r: rows for r in ROLES if (rows := storage.rows.get(neuron_key(site, r))) is not None}
    how: Any = {"kind": storage.weights, "int8_activations": storage.int8_activations, "given": given}
    return SparseFFN(site, weights, layer, lowrank, threshold, **how)


@torch.no_grad()
def _rewrite_group(
    model: nn.Module, group: Sequence[LayerPlan], predictors: Mapping[str, Any], storage: Storage, known: str
) -> None:
    """Make and install one layer, or all experts of a module; ``known``: the strategy."""
    made = (_make_layer(model, layer, predictors.get(layer.site.key), storage) for layer in group)
    sparse = next(made) if group[0].site.experts is None else SparseExperts(made, len(group)).eval()
    _, overrides = find_strategy(model, group, sparse, [known], tried=0)
    install(model, sparse, overrides)


def _check_group(
    model: nn.Module, group: Sequence[LayerPlan], predictors: Mapping, storage: Storage, known: Mapping
) -> str:
    """Raise what rewriting would raise, without changing anything; returns the strategy, tried unless ``known``."""
    empty = [_check_layer(model, layer, predictors.get(layer.site.key), storage) for layer in group]
    site = group[0].site
    sparse = empty[0] if site.experts is None else SparseExperts(empty, len(group))
    if site.key in known:
        return known[site.key]
    with torch.no_grad():
        return find_strategy(model, group, sparse)[0]


def _check_layer(model: nn.Module, layer: LayerPlan, predictor: Any, storage: Storage) -> SparseFFN:
    site = layer.site
    weights = site.weights(model)
    check_weights(site, weights)
    for ref, w in ((site.gate, weights.gate), (site.up, weights.up), (site.down, weights.down)):
        if ref is not None and w is not None and storage.quantised:
            check_quantizable(f"{ref.weight} of {site.key}", w, storage.weights)
    lowrank, threshold = predictor_tensors(predictor)
    return SparseFFN.empty(site, layer, storage.weights, lowrank, threshold)


def apply(
    model: nn.Module,
    parts: SparseState,
    progress: bool,
    config: Config | None = None,
    data: list[Batch] | None = None,
    strategies: Mapping[str, str] | None = None,
) -> nn.Module:
    """Rewrite ``model`` as ``parts`` and ``config`` say, and attach ``parts``. ``strategies``: see :func:`rewrite`."""
    config, storage, linears = config or Config(), Storage(), dict[str, nn.Linear]()
    if config.weights != "float":
        storage, linears = _storage(model, [layer.site for layer in parts.plan.layers], progress, config, data)
    rewrite(model, parts.plan, parts.predictors, progress=progress, storage=storage, strategies=strategies)
    if storage.quantised:
        try:
            for layer in sparse_layers(model):
                parts.quantization[layer.site.key] = layer.error
            parts.quantization |= quantize_linears(model, linears, storage, progress=progress)
        except BaseException as error:  # includes interruption
            abandon(model, error)
            raise
        parts.weights = config.weights
    parts.attach(model)
    return model


def _storage(
    model: nn.Module, sites: list[FFNSite], progress: bool, config: Config, data: list[Batch] | None
) -> tuple[Storage, dict[str, nn.Linear]]:
    """How ``config`` stores weights, and the linear layers to quantise, all checked."""
    if config.quantization != "rtn" and not data:
        fix = "Pass calibration=..., or leave quantization out."
        what = f"optimize(quantization='{config.quantization}')"
        raise CalibrationError(what, expected="calibration data", found="none", fix=fix)
    linears, _ = find_linears(model, sites, data[0] if data else None)
    check_some(f"quantising {type(model).__name__}", sites, linears)
    check_linears(linears, config.weights)
    rows: dict[str, torch.Tensor] = {}
    if data and config.quantization == "gptq":
        keep = rows.__setitem__
        left = calibrated_rows(model, data, sites, linears, config.weights, keep, progress=progress)
        warn_rounded(left)
    return Storage(config.weights, config.activations == "int8", rows), linears
