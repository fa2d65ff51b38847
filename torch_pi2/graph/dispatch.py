"""Dispatch modes that run an *unmodified* model sparsely, for research and for measuring predictors.

* :class:`NeuronClusterMode` computes only the neurons that a plan asks for: the FFN's matmuls are intercepted
  below autograd and a tensor subclass carries the active neurons between them. Readable rather than fast.
* :class:`PredictedMaskMode` computes everything and zeroes what a predictor would have skipped: the same
  result in fewer lines, used to size predictors before there is a plan.

Semantics are those of ``torch_pi2.ops.reference.sparse_ffn``: a cold neuron counts for a token iff it is
predicted and ``|act(gate)| > threshold``; a hot one counts always.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_pi2.base.arguments import checked
from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.base.hooks import has_hooks, has_stand_ins
from torch_pi2.errors import ConfigError, GradientError
from torch_pi2.graph.active import ActiveNeurons
from torch_pi2.graph.matmuls import Matmul, MatmulIndex, Member, site_tensors
from torch_pi2.graph.routed import masked
from torch_pi2.ops.activations import ACTIVATIONS, cuts
from torch_pi2.types.method import PREDICTED, Method
from torch_pi2.types.plan import Plan
from torch_pi2.types.site import FFNSite

aten = torch.ops.aten


@runtime_checkable
class Scorer(Protocol):
    """The part of a predictor that the modes use."""

    @property
    def threshold(self) -> float: ...

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor: ...


def first_role(site: FFNSite) -> str:
    """The matmul whose activation decides what fires."""
    return "gate" if site.gated else "up"


def add_bias(z_TI: torch.Tensor, site: FFNSite, role: str, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """``z`` plus the bias that the model adds in a later operation, if there is one."""
    ref = getattr(site, role)
    if ref.bias is None:
        return z_TI
    bias = params[ref.bias]
    return z_TI + (bias if ref.rows is None or len(bias) == site.intermediate else bias[slice(*ref.rows)])


class PredictedMaskMode(TorchDispatchMode):
    """Zeroes, before ``down``, every cold neuron that its layer's predictor does not predict, or below its threshold.

    Experts are computed by code of ours meanwhile (:func:`torch_pi2.graph.routed.masked`), those without a predictor in
    full.

    Args:
        model: whose parameters the sites name.
        sites: all FFNs, of a module of experts every one; those without an entry in ``predictors`` stay dense.
        predictors: site key -> predictor; None: of a layer that has a threshold alone.
        cold: site key -> indices of its cold neurons; None: all are.
        thresholds: site key -> cut on ``|act(gate)|`` of cold neurons, one or ``[I]``; None: 0 everywhere.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[FFNSite],
        predictors: Mapping[str, Scorer | None],
        cold: Mapping[str, torch.Tensor] | None = None,
        thresholds: Mapping[str, float | torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        modules = {s.experts for s in sites if s.experts is not None and s.key in predictors}
        self._model, self._experts = model, [s for s in sites if s.experts in modules]
        sites = [s for s in sites if s.key in predictors]
        self._inside: list[AbstractContextManager[None]] = []
        every, sites = sites, [s for s in sites if s.experts is None]
        self._params = site_tensors(sites, lambda name: model.get_parameter(name).detach())
        self._index = MatmulIndex(sites, self._params)
        self._thresholds = {k: v for k, v in (thresholds or {}).items() if isinstance(v, torch.Tensor) or v > 0}
        self._predictors = predictors
        self._hot: dict[str, torch.Tensor] = {}
        for s in every:
            self._hot[s.key] = torch.ones(s.intermediate, dtype=torch.bool, device="cpu")
            self._hot[s.key][slice(None) if cold is None else cold[s.key]] = False
        self._keep: dict[str, torch.Tensor] = {}
        self._cold_pairs = 0
        self._kept_pairs = 0

    @property
    def pairs(self) -> tuple[int, int]:
        """Pairs of a token and a cold neuron so far: those that were computed, and all."""
        return self._kept_pairs, self._cold_pairs

    @property
    def cold_share(self) -> float:
        """Share of (token, cold neuron) pairs that were computed, so far."""
        return self._kept_pairs / max(1, self._cold_pairs)

    def __enter__(self) -> PredictedMaskMode:
        inside = masked(self._model, self._experts, self._keep_of_expert)
        inside.__enter__()
        self._inside.append(inside)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inside.pop().__exit__(*error)

    def _keep_of_expert(self, site: FFNSite, x_NH: torch.Tensor, gate_NI: torch.Tensor) -> torch.Tensor:
        if site.key not in self._predictors:
            return torch.ones_like(gate_NI, dtype=torch.bool)
        keep_NI = self._predict(site, x_NH)
        if site.key in self._thresholds:
            fires_NI = ACTIVATIONS[site.activation](gate_NI).abs() > self._thresholds[site.key]
            keep_NI &= fires_NI | self._hot[site.key]
        return self._counted(site.key, keep_NI)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hit = self._index.find(func, args, kwargs)
        if hit is None:
            return func(*args, **kwargs)
        for member in hit.members:
            if member.role == "down" and member.site.key in self._keep:
                keep_TI = self._counted(member.site.key, self._keep.pop(member.site.key))
                h = hit.x * keep_TI.view(hit.x.shape)
                return func(*[h if a is hit.x else a for a in args], **kwargs)
        out = func(*args, **kwargs)
        for member in hit.members:
            site, role = member.site, member.role
            if role == "down":
                continue
            if site.key not in self._keep:
                self._keep[site.key] = self._predict(site, hit.x.reshape(-1, hit.x.shape[-1]))
            if site.key in self._thresholds and role == first_role(site):
                gate_TI = out.reshape(-1, out.shape[-1])[:, member.start - hit.start : member.stop - hit.start]
                if hit.bias is None:
                    gate_TI = add_bias(gate_TI, site, role, self._params)
                fires_TI = ACTIVATIONS[site.activation](gate_TI.float()).abs() > self._thresholds[site.key]
                self._keep[site.key] &= fires_TI | self._hot[site.key]
        return out

    def _predict(self, site: FFNSite, x_TH: torch.Tensor) -> torch.Tensor:
        predictor, hot_I = self._predictors[site.key], self._hot[site.key]
        if predictor is None:
            return torch.ones((len(x_TH), len(hot_I)), dtype=torch.bool)
        return (predictor.scores(x_TH) >= predictor.threshold) | hot_I

    def _counted(self, key: str, keep_TI: torch.Tensor) -> torch.Tensor:
        hot_I = self._hot[key]
        self._cold_pairs += len(keep_TI) * int((~hot_I).sum())
        self._kept_pairs += int((keep_TI & ~hot_I).sum())
        return keep_TI


@dataclass
class _Layer:
    """Constants of one site inside ``NeuronClusterMode``."""

    site: FFNSite
    hot_I: torch.Tensor
    threshold_I: torch.Tensor
    predictor: Scorer | None


@dataclass
class _Call:
    """What is known about the FFN call in progress: which neurons are wanted, and the gate once computed."""

    wanted_TI: torch.Tensor
    fires_TI: torch.Tensor | None = None


def _refuse_hooks(model: nn.Module, site: FFNSite) -> None:
    firsts = [ref.weight.rpartition(".")[0] for ref in (site.gate, site.up) if ref is not None]
    down = site.down.weight.rpartition(".")[0]
    between = [(name, False, True) for name in firsts] + [(name, True, True) for name in site.inner]
    for name, pre, post in [*between, (down, True, False)]:
        if has_hooks(model.get_submodule(name), pre=pre, post=post):
            raise ConfigError(
                f"NeuronClusterMode at {site.key}",
                expected="nothing between its matmuls that could change what fires",
                found=f"a hook on {name}",
                fix="Remove it meanwhile, or plan this layer as 'dense'.",
            )


class NeuronClusterMode(TorchDispatchMode):
    """Runs an unmodified eager model sparsely inside ``with``.

    ``gate`` (or the first matmul of a plain FFN) computes only hot and predicted neurons, ``up`` only those of
    them that fire, ``down`` gathers only their columns; tokens of a call share the union. Layers whose method
    is ``"dense"``, and experts, are left alone. ``generate`` works inside the block.

        plan.bind(model)
        with torch.no_grad(), NeuronClusterMode(plan, predictors) as mode:
            model(ids)
        print(mode.computed_share())

    Args:
        plan: bound to the model by ``plan.bind(model)``.
        predictors: site key -> predictor, for layers planned as ``"lowrank"`` or ``"signbit"``.

    Raises:
        ConfigError: the plan is not bound, or a layer's predictor is missing.
        GradientError: (inside) a gradient would be needed through a sparse matmul. ConfigError: (on entering) hooks
            between the matmuls of a layer: what fires is decided before them.
    """

    @checked
    @fresh_settings()
    def __init__(self, plan: Plan, predictors: Mapping[str, Scorer] | None = None) -> None:
        super().__init__()
        predictors, model = predictors or {}, plan.model()
        if model is not None and has_stand_ins(model):
            raise ConfigError(
                "NeuronClusterMode",
                expected="a dense model",
                found="one that torch_pi2 has rewritten",
                fix="Call torch_pi2.restore(model) first.",
            )
        self._plan = plan
        self._layers: dict[str, _Layer] = {}
        for layer in plan.layers:
            if layer.method == Method.DENSE or layer.n_cold == 0 or layer.site.experts is not None:
                continue
            if cuts(layer.site.activation):  # needs every gate between its matmuls
                continue
            key = layer.site.key
            predicted = layer.method in PREDICTED
            if predicted and key not in predictors:
                raise ConfigError(
                    f"predictor of {key}",
                    expected=f"one for every layer planned as '{layer.method}'",
                    found=f"predictors for {', '.join(list(predictors)[:4]) or 'no layer'}",
                    fix="Pass predictors=torch_pi2.fit(...) or load_predictors(folder).",
                )
            hot_I = torch.zeros(layer.site.intermediate, dtype=torch.bool)
            hot_I[layer.order[: layer.n_hot].long()] = True
            scorer = predictors[key] if predicted else None
            own_I = layer.thresholds
            threshold_I = torch.full(hot_I.shape, layer.threshold) if own_I is None else own_I
            self._layers[key] = _Layer(layer.site, hot_I, threshold_I, scorer)
        sites = [y.site for y in self._layers.values()]
        self._params = site_tensors(sites, plan.parameters().__getitem__)
        self._index = MatmulIndex(sites, self._params)
        self._bias_of = {
            self._params[ref.bias].data_ptr(): ref.bias
            for s in sites
            for ref in (s.gate, s.up)
            if ref is not None and ref.bias
        }
        self._calls: dict[str, _Call] = {}
        #: per site: ``tokens`` seen, multiply-adds ``computed`` of a ``dense`` layer's, ``needed`` (token, neuron)
        #: pairs that fire and ``pairs`` of them in all.
        self.counters: dict[str, dict[str, int]] = {
            key: dict.fromkeys(("tokens", "computed", "dense", "needed", "pairs"), 0) for key in self._layers
        }

    def __enter__(self) -> NeuronClusterMode:
        self._calls.clear()  # a call that an exception cut short
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError(
                "NeuronClusterMode",
                expected="to be entered without torch.autocast, which gives matmuls copies of the weights",
                found="autocast",
                fix="Turn it off, or use torch_pi2.optimize, which works with it.",
            )
        model = self._plan.model()
        if model is not None:
            for layer in self._layers.values():
                _refuse_hooks(model, layer.site)
        super().__enter__()
        return self

    def computed_share(self, key: str | None = None) -> float:
        """Multiply-adds done over the dense FFN's, for one site or all intercepted ones (unions counted in full)."""
        chosen = self.counters.values() if key is None else [self.counters[key]]
        return sum(c["computed"] for c in chosen) / max(1, sum(c["dense"] for c in chosen))

    def needed_share(self, key: str | None = None) -> float:
        """Share of (token, neuron) pairs that are hot, or predicted and fire: what batching cannot blur."""
        chosen = self.counters.values() if key is None else [self.counters[key]]
        return sum(c["needed"] for c in chosen) / max(1, sum(c["pairs"] for c in chosen))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hit = self._index.find(func, args, kwargs)
        if hit is not None:
            self._refuse_gradients(func, hit)
            if hit.members[0].role == "down":
                return self._down(func, args, kwargs, hit, hit.members[0])
            return self._first(func, args, kwargs, hit)
        if func is aten.add.Tensor and isinstance(args[0], ActiveNeurons) and self._is_bias(args[1]):
            x = args[0]  # a bias the model adds itself: only for the neurons that were computed
            return x.like(x.values + args[1][x.index])
        return func(*args, **kwargs)

    def _is_bias(self, tensor: Any) -> bool:
        plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, ActiveNeurons)
        return plain and tensor.dim() == 1 and tensor.data_ptr() in self._bias_of

    def _refuse_gradients(self, func: Any, hit: Matmul) -> None:
        if torch.is_grad_enabled() and (hit.x.requires_grad or self._params[hit.weight].requires_grad):
            raise GradientError(
                f"NeuronClusterMode at {hit.members[0].site.key} ({func})",
                expected="inference",
                found="grad mode on and tensors that require gradients",
                fix="Wrap the call in torch.no_grad().",
            )

    def _wanted(self, layer: _Layer, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, I]`` bool: hot, or predicted (without a predictor: all)."""
        if layer.predictor is None:
            return x_TH.new_ones((len(x_TH), len(layer.hot_I)), dtype=torch.bool)
        return (layer.predictor.scores(x_TH) >= layer.predictor.threshold) | layer.hot_I

    def _first(self, func: Any, args: Any, kwargs: Any, hit: Matmul) -> Any:
        """``gate``, ``up``, or both of them fused: only the wanted rows."""
        x = hit.x.dense() if isinstance(hit.x, ActiveNeurons) else hit.x
        x_TH = x.reshape(-1, x.shape[-1])
        parts = [self._rows(x_TH, hit, member) for member in hit.members]
        if not hit.covered:
            return func(*args, **kwargs)  # fused with something that is no FFN's: down still sees what fires
        shape = (*x.shape[:-1], hit.stop - hit.start)
        index = torch.cat([p.index + (m.start - hit.start) for p, m in zip(parts, hit.members)])
        values = torch.cat([p.values for p in parts], 1)
        return ActiveNeurons(index, values, torch.cat([p.mask for p in parts], 1), shape)

    def _rows(self, x_TH: torch.Tensor, hit: Matmul, member: Member) -> ActiveNeurons:
        site, role = member.site, member.role
        layer, ref = self._layers[site.key], getattr(site, role)
        call = self._calls.get(site.key)
        if call is None or role == first_role(site):  # gate may come after up; a repeated gate is a new call
            wanted_TI = self._wanted(layer, x_TH) if call is None or call.fires_TI is not None else call.wanted_TI
            call = self._calls[site.key] = _Call(wanted_TI)
        mask_TI = call.wanted_TI if call.fires_TI is None else call.fires_TI
        index = torch.nonzero(mask_TI.any(0)).flatten()
        bias = None if hit.bias is None else hit.bias[member.start - hit.start :][: site.intermediate][index]
        weight = self._params[ref.weight][member.start : member.stop][index]
        values = torch.nn.functional.linear(x_TH, weight.to(x_TH.dtype), bias)
        if role == first_role(site):
            z = values
            if hit.bias is None and ref.bias is not None:
                own = self._params[ref.bias]
                z = values + (own if len(own) == site.intermediate else own[member.start : member.stop])[index]
            fires_TA = ACTIVATIONS[site.activation](z.float()).abs() > layer.threshold_I[index]
            call.fires_TI = call.wanted_TI.clone()
            call.fires_TI[:, index] &= fires_TA | layer.hot_I[index]
        self._count(site, len(x_TH), len(index))
        return ActiveNeurons(index, values, mask_TI[:, index], (len(x_TH), site.intermediate))

    def _down(self, func: Any, args: Any, kwargs: Any, hit: Matmul, member: Member) -> Any:
        """Only the columns of neurons that some token needs."""
        site = member.site
        call = self._calls.pop(site.key, None)
        if call is None:
            return func(*[hit.x.dense() if a is hit.x and isinstance(a, ActiveNeurons) else a for a in args], **kwargs)
        keep_TI = call.wanted_TI if call.fires_TI is None else call.fires_TI
        if isinstance(hit.x, ActiveNeurons):
            h, index = hit.x, hit.x.index
            h_TA = torch.where(h.mask & keep_TI[:, index], h.values, 0)
        else:  # something in between needed the whole tensor
            index = torch.arange(site.intermediate, dtype=torch.int64, device=hit.x.device)
            h_TA = torch.where(keep_TI, hit.x.reshape(-1, site.intermediate), 0)
        some = torch.nonzero((h_TA != 0).any(0)).flatten()
        h_TA, index = h_TA[:, some], index[some]
        weight = self._params[hit.weight][hit.start : hit.stop][:, index]
        y_TH = torch.nn.functional.linear(h_TA, weight.to(h_TA.dtype), hit.bias)
        self._count(site, len(h_TA), len(index))
        counters = self.counters[site.key]
        counters["tokens"] += len(h_TA)
        counters["dense"] += len(h_TA) * site.rows_per_neuron * site.intermediate * site.hidden
        counters["needed"] += int(keep_TI.sum())
        counters["pairs"] += keep_TI.numel()
        return y_TH.view(*hit.x.shape[:-1], hit.stop - hit.start)

    def _count(self, site: FFNSite, tokens: int, neurons: int) -> None:
        self.counters[site.key]["computed"] += tokens * neurons * site.hidden
