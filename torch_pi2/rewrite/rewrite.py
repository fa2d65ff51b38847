"""Put sparse layers into an eager model, and take them out again.

Where they stand is decided in :mod:`torch_pi2.rewrite.ways`; :mod:`torch_pi2.rewrite.install` puts them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_pi2.base.evaluating import evaluating, fresh_settings
from torch_pi2.base.hooks import refuse_global_hooks
from torch_pi2.base.progress import bar
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.fitting.calibrated import ROLES, neuron_key
from torch_pi2.graph.coverage import same_tokens
from torch_pi2.graph.experts import probe_experts
from torch_pi2.graph.find import Found
from torch_pi2.layers.experts import SparseExperts, expert_groups
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import is_optimized, sparse_layers
from torch_pi2.ops import reference
from torch_pi2.ops.activations import cuts
from torch_pi2.ops.quantized import check_quantizable
from torch_pi2.rewrite.fits import check_names
from torch_pi2.rewrite.gpu import refuse_split
from torch_pi2.rewrite.install import Swap, install, put_back
from torch_pi2.rewrite.linears import Storage, relative
from torch_pi2.rewrite.ways import Probe, experts_way, find_way, left_of, no_way, probes_of
from torch_pi2.types.formula import dense_reference
from torch_pi2.types.method import Method
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite, FFNWeights, check_weights


@fresh_settings()
def rewrite(
    model: nn.Module,
    plan: Plan,
    predictors: Mapping[str, Any] | None = None,
    *,
    check_hash: bool = True,
    progress: bool = False,
    storage: Storage | None = None,
    ways: Mapping[str, str] | None = None,
) -> nn.Module:
    """Replace every FFN of ``plan`` in ``model`` by its sparse form, in place; returns ``model``.

    The memory of the dense weights is given back layer by layer. If any layer fails, the model is restored.

    Args:
        predictors: site key -> low-rank predictor in original neuron order: an object with ``tensors()`` and
            ``threshold`` or a mapping of tensors (see :class:`~torch_pi2.layers.ffn.SparseFFN`). Needed for
            layers whose method is ``lowrank``.
        check_hash: verify that the plan was made from these weights (reads them all once).
        progress: a progress bar on standard error if it is a terminal.
        storage: how the weights are to be stored (None: float). Quantised layers cannot be restored; what can be
            refused is refused before the first of them is made. Should one fail all the same, the model is put
            together again from what its rows stand for, and the error says so.
        ways: what :func:`replaceable` has found of these layers, which is not tried again.

    Raises:
        StaleArtifactError: the plan is for other weights. ConfigError: already rewritten, predictors missing, or there
            are hooks on all modules.
        UnsupportedModelError: no way of rewriting a layer computes the same; the message names it.
        DeviceError, DtypeError, NonFiniteError, ShapeError: weights that cannot be used.
    """
    if is_optimized(model):
        raise ConfigError(
            type(model).__name__,
            expected="a dense model",
            found="one that torch_pi2 has already rewritten",
            fix="Call torch_pi2.restore(model) first.",
        )
    refuse_global_hooks("torch_pi2.optimize")
    check_names(model, plan)
    if check_hash:
        plan.check_model(model)
    storage, groups, known = storage or Storage(), expert_groups(plan.layers), dict(ways or {})
    if storage.quantised:
        for group in groups:
            known[group[0].site.key] = _check_group(model, group, predictors or {}, storage, known)
    try:
        for group in bar(groups, "rewrite", progress):
            way = known.get(group[0].site.key)
            if group[0].site.experts is not None:
                _rewrite_experts(model, group, predictors or {}, storage, way)
            else:
                _rewrite_layer(model, group[0], (predictors or {}).get(group[0].site.key), storage, way)
    except BaseException as error:
        abandon(model, error)
        raise
    return model


def abandon(model: nn.Module, error: BaseException) -> None:
    """Put the dense modules back after ``error``, which gets a note where their numbers are not what they were."""
    if any(layer.weights != "float" for layer in sparse_layers(model)):
        error.add_note("Layers quantised before have their dequantised weights now: load the checkpoint again.")
    put_back(model, lossy=True)


@fresh_settings()
def restore(model: nn.Module) -> nn.Module:
    """Put the original modules and parameters back, bit for bit; the same objects. Returns ``model``.

    Raises:
        ConfigError: something is quantised, which cannot be undone, or neurons are on a GPU; nothing is changed then.
    """
    refuse_split(model, "restoring")
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            raise ConfigError(
                f"restoring {type(model).__name__}",
                expected="float weights",
                found=f"{module.weights} in {name}, which is lossy: the original numbers are gone",
                fix="Load the checkpoint again (from_pretrained, or torch_pi2.load) instead.",
            )
    return put_back(model)


@fresh_settings()
def replaceable(model: nn.Module, found: Found, needed: bool = True) -> tuple[Found, dict[str, str]]:
    """``found`` without layers that no way can replace where they stand, which stay dense and stop no other.

    Also the way of each of the others (of experts: of the first), for :func:`rewrite`. Tried as rewriting tries it,
    before anything that takes long.

    Raises:
        UnsupportedModelError: there is no other layer, and one is ``needed``.
        DeviceError, DtypeError, NonFiniteError: weights that cannot be used.
    """
    layers = [LayerPlan(site, Method.EXACT, 0, torch.arange(site.intermediate).int()) for site in found.sites]
    ways: dict[str, str] = {}
    refused: dict[str, UnsupportedModelError] = {}
    for group in expert_groups(layers):
        try:
            ways[group[0].site.key] = _check_group(model, group, {}, Storage(), {})
        except UnsupportedModelError as error:
            refused |= dict.fromkeys((layer.site.key for layer in group), error)
    left = found.left | left_of(refused, bool(ways) or not needed)
    return Found([site for site in found.sites if site.key not in refused], left), ways


def predictor_tensors(predictor: Any) -> tuple[Mapping[str, torch.Tensor] | None, float]:
    """Tensors and threshold of a predictor in either of its forms; ``(None, 0)`` of None."""
    if predictor is None:
        return None, 0.0
    if isinstance(predictor, Mapping):
        return predictor, float(predictor.get("threshold", 0.0))
    return predictor.tensors(), float(predictor.threshold)


def _make_layer(model: nn.Module, layer: LayerPlan, predictor: Any, storage: Storage) -> SparseFFN:
    lowrank, threshold = predictor_tensors(predictor)
    site, weights = layer.site, layer.site.weights(model)
    ffn = SparseFFN(
        site,
        weights,
        layer,
        lowrank,
        threshold,
        kind=storage.weights,
        int8_activations=storage.int8_activations,
        importance=storage.importance(site.key),
        given={r: rows for r in ROLES if (rows := storage.rows.get(neuron_key(site, r))) is not None},
    )
    x_TH = storage.sample(site.key) if storage.quantised else None
    if x_TH is not None:
        ffn.output_error = relative(ffn.forward_dense(x_TH), dense_reference(site, weights, x_TH))
    return ffn


def _rewrite_experts(
    model: nn.Module, group: Sequence[LayerPlan], predictors: Mapping[str, Any], storage: Storage, way: str | None
) -> None:
    parts = (_make_layer(model, layer, predictors.get(layer.site.key), storage) for layer in group)
    with torch.no_grad():
        sparse = SparseExperts(parts, len(group)).eval()
        swap = experts_way(model, group, sparse, tried=0 if way else None)
        if storage.quantised:
            x_TH = torch.randn((8, sparse.site.hidden), generator=torch.Generator().manual_seed(0))
            _check_quantised(sparse.expert(0), x_TH)
        elif all(layer.method == Method.EXACT for layer in group):
            arguments, wanted = probe_experts(model, sparse.sites)
            if not same_tokens(sparse(*arguments), wanted):
                raise no_way(sparse.site, ["the sparse operator does not reproduce the experts (a damaged build?)"])
        install(model, sparse, [swap])


def _rewrite_layer(model: nn.Module, layer: LayerPlan, predictor: Any, storage: Storage, way: str | None) -> None:
    site = layer.site
    with torch.no_grad():
        ffn = _make_layer(model, layer, predictor, storage)
        probes = probes_of(site, site.weights(model))
        if storage.quantised:
            _check_quantised(ffn, probes[0][0])
        elif not all(same_tokens(ffn.forward_dense(x), _as_computed(model, site, x, y)) for x, y in probes):
            raise no_way(site, ["the sparse operator does not reproduce the layer (a damaged build?)"])
        _, swaps = find_way(model, site, ffn, probes) if way is None else find_way(model, site, ffn, [], [way])
        if swaps[0].stand_in is ffn and _varies_in_training(swaps, probes[0]):
            layer.site = ffn.site = replace(site, drops="inside")
        install(model, ffn, swaps)


def _varies_in_training(swaps: Sequence[Swap], probe: Probe) -> bool:
    """Whether modules that are to be replaced do something else in training mode, as dropout does."""
    modules = [swap.original for swap in swaps]
    with evaluating(*modules), torch.random.fork_rng(devices=[]):
        for module in modules:
            module.train()
        h = probe[0].clone()
        for module in modules:
            h = module.forward(h)
    return not same_tokens(h, probe[1])


def _as_computed(model: nn.Module, site: FFNSite, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``y``, the layer's result on ``x``; with a cut in float32, for half precision moves the cut of all neurons."""
    if not cuts(site.activation) or x.dtype == torch.float32:
        return y
    wide: Any = (None if w is None else w.float() for w in site.weights(model))
    return dense_reference(site, FFNWeights(*wide), x.float()).to(x.dtype)


def _check_group(
    model: nn.Module,
    group: Sequence[LayerPlan],
    predictors: Mapping[str, Any],
    storage: Storage,
    ways: Mapping[str, str],
) -> str:
    """Refuse what rewriting would refuse, without changing anything; the way that it would take, if not in ``ways``."""
    empty = [_check_layer(model, layer, predictors.get(layer.site.key), storage) for layer in group]
    site = group[0].site
    if site.experts is not None:
        SparseExperts(empty, len(group))
    if site.key in ways:
        return ways[site.key]
    with torch.no_grad():
        if site.experts is not None:
            experts_way(model, group, None)
            return "owner"
        return find_way(model, site, empty[0], probes_of(site, site.weights(model)))[0]


def _check_layer(model: nn.Module, layer: LayerPlan, predictor: Any, storage: Storage) -> SparseFFN:
    """An empty layer, if one can be made of the weights and the predictor."""
    site = layer.site
    weights = site.weights(model)
    check_weights(site, weights)
    for ref, w in ((site.gate, weights.gate), (site.up, weights.up), (site.down, weights.down)):
        if ref is not None and w is not None and storage.quantised:
            check_quantizable(f"{ref.weight} of {site.key}", w, storage.weights)
    lowrank, threshold = predictor_tensors(predictor)
    return SparseFFN.empty(site, layer, storage.weights, lowrank, threshold)


def _check_quantised(ffn: SparseFFN, x: torch.Tensor) -> None:
    """The operator against its reference on some neurons: that the rows are near the weights is measured elsewhere."""
    some = slice(0, 64)
    biases = [None if b is None else b[some] for b in (ffn.bias_gate, ffn.bias_up)]
    settings = (None, ffn.site.activation, ffn.site.activation_on_up, 0, 0.0, ffn.weights, ffn.int8_activations)
    args: Any = (x.float(), ffn.neuron_rows[some].contiguous(), *biases, ffn.bias_down, *settings)
    if not same_tokens(torch.ops.pi2.sparse_ffn(*args), reference.sparse_ffn(*args)):
        raise no_way(ffn.site, ["the sparse operator does not reproduce the layer (a damaged build?)"])
