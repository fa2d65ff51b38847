"""Fitting of a ``SparseMethod``: each layer's copy gets calibration tokens of that layer, and a card on others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_pi2.base.memory import let_go
from torch_pi2.errors import CalibrationError, ConfigError, ShapeError
from torch_pi2.fitting.train import measure
from torch_pi2.graph.routed import intermediate
from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.predict.method import SparseMethod
from torch_pi2.profiling.samples import Samples
from torch_pi2.types.method import PredictorCard
from torch_pi2.types.site import FFNSite, FFNWeights


@dataclass(frozen=True)
class LayerSamples:
    """What :meth:`torch_pi2.SparseMethod.fit` is given: a layer, and calibration tokens that reach it.

    Attributes:
        site: its key, number, sizes and activation (:class:`torch_pi2.types.site.FFNSite`).
        weights: float32 ``gate`` ``[I, H]`` (None in a layer without one), ``up`` ``[I, H]``, ``down`` ``[H, I]``,
            ``bias_gate``, ``bias_up`` ``[I]`` and ``bias_down`` ``[H]`` or None.
        x_TH: the layer's inputs, float32.
        fired_TI: which neurons fire, bool: those that are not exactly zero; with smooth activations those above the
            magnitude of ``Config.sparsity``.
    """

    site: FFNSite
    weights: FFNWeights
    x_TH: torch.Tensor
    fired_TI: torch.Tensor

    def gate_TI(self) -> torch.Tensor:
        """``act(gate)`` of each token, float32 ``[T, I]``; ``act(up)`` in a layer without a gate."""
        return ACTIVATIONS[self.site.activation](intermediate(self.site, self.weights, self.x_TH)[0])

    def h_TI(self) -> torch.Tensor:
        """What ``down`` is multiplied by, float32 ``[T, I]``."""
        return intermediate(self.site, self.weights, self.x_TH)[1]

    def y_TH(self) -> torch.Tensor:
        """The dense layer's output without its bias, float32."""
        return self.h_TI() @ self.weights.down.T


def fit_method(method: SparseMethod, model: nn.Module, site: FFNSite, samples: Samples) -> SparseMethod:
    """A copy of ``method``, fitted to three quarters of the samples; its card is of the others. Raises ConfigError,
    ShapeError: what it has made cannot be used. CalibrationError: fewer than two tokens.
    """
    if len(samples) < 2:
        fix, found = "Pass more text.", str(len(samples))
        raise CalibrationError(f"tokens of {site.key}", expected="at least 2", found=found, fix=fix)
    own, (some, others) = method.copy(), samples.split(0.25)
    weights = site.weights(model)
    floats = FFNWeights(*(None if w is None else w.detach().float() for w in weights))  # type: ignore[arg-type]
    with torch.no_grad():
        own.fit(LayerSamples(site, floats, some.x_NH.float(), some.fired()))
        cut_I = getattr(own, "cut_I", None)
        if cut_I is None:
            own.selected(others.x_NH[:1], site.intermediate)
            own.card = measure(own, others, site, weights=weights)
        else:
            own.card = _card_of_cuts(own, cut_I, site, floats, others)
    let_go(model, weights)
    own.settings()
    return own


def _card_of_cuts(
    method: SparseMethod, cut_I: Any, site: FFNSite, weights: FFNWeights, others: Samples
) -> PredictorCard:
    if not isinstance(cut_I, torch.Tensor) or cut_I.shape != (site.intermediate,):
        found = str(tuple(getattr(cut_I, "shape", ()))) or type(cut_I).__name__
        fix = "Set a threshold for each neuron in fit."
        raise ShapeError(f"{type(method).__name__}.cut_I", expected=f"({site.intermediate},)", found=found, fix=fix)
    if not bool(((cut_I >= 0) & cut_I.isfinite()).all()):
        fix = "Use a large finite number for a neuron that is never computed."
        raise ConfigError(
            f"{type(method).__name__}.cut_I", expected="finite numbers of 0 or more", found="others", fix=fix
        )
    gate_NI, h_NI = intermediate(site, weights, others.x_NH.float())
    kept_NI, fired_NI = ACTIVATIONS[site.activation](gate_NI).abs() > cut_I, others.fired()
    mass_NI = h_NI.abs() * weights.down.norm(dim=0)
    both, share = float((kept_NI & fired_NI).sum()), float(kept_NI.float().mean())
    recall, precision = both / max(1.0, float(fired_NI.sum())), both / max(1.0, float(kept_NI.sum()))
    mass = float((mass_NI * kept_NI).sum() / mass_NI.sum().clamp(min=1e-30))
    return PredictorCard(recall, precision, share, cut_I.nbytes, cost_share=0.0, mass_recall=mass)
