"""Fitting of a ``SparseMethod``: each layer's copy gets calibration tokens of that layer, and a card on others."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torch_pi2.base.fields import argument
from torch_pi2.base.memory import let_go
from torch_pi2.errors import CalibrationError, ConfigError, ShapeError
from torch_pi2.predict.method import SparseMethod
from torch_pi2.predict.samples import LayerSamples, WhenLookedUp
from torch_pi2.profiling.samples import Samples
from torch_pi2.types.method import Fitted, PredictorCard
from torch_pi2.types.site import FFNSite, FFNWeights


def fit_method(method: SparseMethod, model: nn.Module, site: FFNSite, samples: Samples) -> SparseMethod:
    """A copy of ``method``, fitted to three quarters of the samples; its card is of the others. Raises ConfigError,
    ShapeError: what it has made cannot be used. CalibrationError: fewer than two tokens.
    """
    _check_method(method, site.key)
    if len(samples) < 2:
        fix, found = "Pass more text.", str(len(samples))
        raise CalibrationError(f"tokens of {site.key}", expected="at least 2", found=found, fix=fix)
    own, (some, others) = method.copy(), samples.split(0.25)
    weights = site.weights(model)
    given = layer_samples(model, site, some)
    with torch.no_grad():
        own.fit(given)
        if taken := own.taken(vars(own)):
            found, fix = f"the attribute {taken}, a name of the class's own", "Rename it."
            raise ConfigError(f"method {type(own).__name__}", expected="attributes beside it", found=found, fix=fix)
        own.card = _card(own, LayerSamples(site, given.weights, others.x_NH.float(), others.fired()))
    let_go(model, weights)
    bias_H: Any = own.bias_H
    if bias_H is not None:
        what, fix = f"{type(own).__name__}.bias_H", "Set float32 [H] in fit, or select with scope 'token'."
        argument(own.scope, f"scope of {type(own).__name__} with bias_H", fix).text(("token",))
        if not isinstance(bias_H, torch.Tensor) or bias_H.shape != (site.hidden,) or not bias_H.isfinite().all():
            found = str(tuple(bias_H.shape)) if isinstance(bias_H, torch.Tensor) else type(bias_H).__name__
            found = "NaN or infinity" if found == f"({site.hidden},)" else found
            raise ShapeError(what, expected=f"finite numbers ({site.hidden},)", found=found, fix=fix)
    own.settings()
    return own


def layer_samples(model: nn.Module, site: FFNSite, samples: Samples) -> LayerSamples:
    floats = (None if w is None else w.detach().float() for w in site.weights(model))
    return LayerSamples(site, FFNWeights(*floats), samples.x_NH.float(), samples.fired())  # type: ignore[arg-type]


def allocated(methods: Mapping[str, Any], samples: Callable[[str], Any]) -> dict[str, Any]:
    """Layer -> the method it is to have a copy of, itself a copy that has seen the ``samples`` of all its layers."""
    made = {id(method): method.copy() for method in methods.values() if method is not None}
    for number, method in made.items():
        with torch.no_grad():
            method.allocate(WhenLookedUp([key for key, own in methods.items() if id(own) == number], samples))
    return {key: made.get(id(method)) for key, method in methods.items()}


def _check_method(method: object, key: str) -> None:
    """Raises ConfigError: ``method`` does not choose neurons of layer ``key``."""
    what, found = f"method of {key}", f"{type(method).__name__}, an InputMethod or another"
    if isinstance(method, SparseMethod):
        own, base, found = type(method), SparseMethod, f"scope {method.scope!r} of {type(method).__name__}"
        needed = {"token": (own.select is not base.select or own.fit is not base.fit)}
        needed["prompt"] = own.choose is not base.choose and own.prompt_scores is not base.prompt_scores
        if needed.get(method.scope):
            return
    expected = "select or cut_I with scope 'token', prompt_scores and choose with scope 'prompt'"
    raise ConfigError(what, expected=f"a SparseMethod with {expected}", found=found, fix="See docs/RESEARCH.md.")


def _card(method: SparseMethod, held_back: LayerSamples) -> PredictorCard:
    site, h_NI, cut_I = held_back.site, held_back.h_TI(), getattr(method, "cut_I", None)
    if cut_I is not None:
        _check_cuts(f"{type(method).__name__}.cut_I", cut_I, site.intermediate)
        kept_NI = held_back.gate_TI().abs() > cut_I
    elif method.scope == "prompt":  # one sequence, whose first half chooses for the other
        half = -(-len(h_NI) // 2)
        chosen_I = method.chosen(method.prompt_scores(held_back.x_TH[:half], h_NI[:half]).float())
        kept_NI = chosen_I.expand_as(h_NI)
    elif type(method).select is SparseMethod.select:
        found, fix = "neither", "Set cut_I in fit, or write select."
        raise ConfigError(f"method {type(method).__name__}", expected="select or cut_I", found=found, fix=fix)
    else:
        kept_NI = torch.cat([method.selected(x, site.intermediate) for x in held_back.x_TH.split(1024)])
    fired_NI, mass_NI = held_back.fired_TI, h_NI.abs() * held_back.weights.down.norm(dim=0)
    own_bytes = 0 if cut_I is not None else method.read_bytes()
    dense_bytes = 2 * site.rows_per_neuron * site.hidden * site.intermediate  # of 16-bit weights
    return card_of(method, kept_NI, fired_NI, mass_NI, own_bytes, dense_bytes)


def card_of(
    method: Fitted, kept: torch.Tensor, fired: torch.Tensor, mass: torch.Tensor, own_bytes: int, dense_bytes: int
) -> PredictorCard:
    """The card of the pairs of a token and a neuron or channel that ``method`` keeps, of those that fire."""
    both, n_fired, n_kept = (float(mask.sum()) for mask in (kept & fired, fired, kept))
    total = float(mass.sum(dtype=torch.float64))
    return PredictorCard(
        recall=both / n_fired if n_fired else 1.0,
        precision=both / n_kept if n_kept else 1.0,
        predicted_active=float(kept.float().mean()),
        bytes=sum(tensor.nbytes for tensor in method.tensors().values()),
        cost_share=own_bytes / dense_bytes,
        mass_recall=float((mass * kept).sum(dtype=torch.float64)) / total if total else 1.0,
    )


def _check_cuts(what: str, cut_I: Any, neurons: int) -> None:
    if not isinstance(cut_I, torch.Tensor) or cut_I.shape != (neurons,):
        found = str(tuple(cut_I.shape)) if isinstance(cut_I, torch.Tensor) else type(cut_I).__name__
        raise ShapeError(what, expected=f"({neurons},)", found=found, fix="Set a threshold for each neuron in fit.")
    if not bool(((cut_I >= 0) & cut_I.isfinite()).all()):
        fix = "Use a large finite number for a neuron that is never computed."
        raise ConfigError(what, expected="finite numbers of 0 or more", found="others", fix=fix)
