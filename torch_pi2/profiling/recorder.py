"""``ActivationRecorder``: a dispatch mode that shows each FFN's firing to a sink while the model runs.

The model is neither changed nor traced. Matmuls are recognised by their weight (:mod:`.graph.matmuls`); what
the sink receives lives until the sink returns, so nothing grows with the length of the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_pi2.base.evaluating import evaluating
from torch_pi2.base.mapped import let_go, letting_go
from torch_pi2.base.progress import bar
from torch_pi2.distributed.ranks import Ranks
from torch_pi2.errors import CalibrationError, ConfigError, NonFiniteError, UnsupportedModelError
from torch_pi2.graph.matmuls import MatmulIndex, site_tensors
from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.profiling.data import Batch, digest
from torch_pi2.profiling.firing import Firing, Sink, real_tokens
from torch_pi2.profiling.routed import RoutedRecorder
from torch_pi2.types.site import FFNSite, check_weights

#: A threshold for all neurons of a layer, or ``[I]``, one for each.
Cut = TypeVar("Cut", bound=float | torch.Tensor)


class ActivationRecorder(TorchDispatchMode):
    """Calls ``sink`` once per call of an FFN that is no expert. Set :attr:`batch`, and :attr:`part`, its number, before
    each call of the model.

    Raises (while the model runs):
        NonFiniteError: NaN or infinity in the activations of a real token, naming layer and site.
        UnsupportedModelError: the FFN sees another number of rows than the batch has tokens, and some of
            those are padding that can then not be told apart.
    """

    def __init__(self, model: nn.Module, sites: Sequence[FFNSite], sink: Sink) -> None:
        super().__init__()
        sites = [site for site in sites if site.experts is None]
        self._sink = sink
        self._params = site_tensors(sites, lambda name: model.get_parameter(name).detach())
        self._index = MatmulIndex(sites, self._params)
        self._x: dict[str, torch.Tensor] = {}
        self._gate: dict[str, torch.Tensor] = {}
        self.batch: Batch | None = None
        self.part = 0
        self.calls: dict[str, int] = {s.key: 0 for s in sites}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        hit = self._index.find(func, args, kwargs)
        if hit is None:
            return out
        for site, role, start, stop in hit.members:
            if role == "down":
                self._emit(site, hit.x)
                continue
            self._x[site.key] = hit.x
            if role == "gate" and not site.activation_on_up:
                gate = out.reshape(-1, out.shape[-1])[:, start - hit.start : stop - hit.start].float()
                assert site.gate is not None
                if hit.bias is None and site.gate.bias:  # added by a later operation
                    gate = gate + site.gate.take_bias(self._params[site.gate.bias])
                self._gate[site.key] = gate
        return out

    def _emit(self, site: FFNSite, h: torch.Tensor) -> None:
        h_TI = h.detach().reshape(-1, h.shape[-1])
        x, gate_TI = self._x.pop(site.key, None), self._gate.pop(site.key, None)
        if x is None:
            return  # down alone, e.g. a weight used elsewhere too
        real_T, grid = real_tokens(site.key, self.batch, len(h_TI))
        finite_T = torch.isfinite(h_TI).all(-1)
        if not bool(finite_T[real_T].all()):
            raise NonFiniteError(
                f"activations of {site.key} (layer {site.layer})",
                expected="finite numbers",
                found=f"NaN or infinity for {int((~finite_T & real_T).sum())} of {int(real_T.sum())} tokens",
                fix="Check the checkpoint and the dtype (float16 overflows at 65504: try bfloat16).",
            )
        if site.gated and not site.activation_on_up and gate_TI is not None:
            score_TI = ACTIVATIONS[site.activation](gate_TI).abs()
        else:
            score_TI = h_TI.float().abs()
        self.calls[site.key] += 1
        self._sink(Firing(site, x.detach().reshape(-1, x.shape[-1]), score_TI, real_T, grid, part=self.part))


def check_sites(model: nn.Module, sites: Sequence[FFNSite]) -> None:
    """Refuse an empty list of sites, and weights that cannot be used (see ``check_weights``)."""
    if not sites:
        raise ConfigError(
            "FFN sites", expected="at least one", found="none", fix="Pass torch_pi2.graph.find_sites(model, ...)."
        )
    for site in sites:
        check_weights(site, weights := site.weights(model))
        let_go(model, weights)


def record(
    model: nn.Module,
    data: Iterable[Batch],
    sites: Sequence[FFNSite],
    sink: Sink,
    *,
    progress: bool = True,
    label: str = "profile",
    ranks: Ranks | None = None,
) -> dict[str, int]:
    """Run ``model`` over ``data`` and show every FFN call of ``sites`` to ``sink``, of experts those with tokens.

    Experts that had few are shown some more at the end: see :class:`~torch_pi2.profiling.routed.RoutedRecorder`.

    Args:
        ranks: processes that make this call with the same ``data`` and share its batches: a sink sees those of its
            process. None: this one takes all.

    Returns:
        Token and sequence counts ``{"tokens", "sequences", "batches"}``, of all processes.

    Raises:
        ConfigError: processes have other data than each other.
        UnsupportedModelError: a site's matmuls never ran with its own weights.
        CalibrationError: token ids outside the model's vocabulary.
    """

    check_sites(model, sites)
    ranks = ranks or Ranks()
    counts = {"tokens": 0, "sequences": 0, "batches": 0}
    recorder, routed = ActivationRecorder(model, sites, sink), RoutedRecorder(model, sites, sink)
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    shown = bar(data, label, progress, unit="batch")

    def read() -> str:
        """The batches of this process; a digest of all."""
        seen = ""
        for part, batch in enumerate(shown):
            if ranks.size > 1:
                seen = digest([seen, batch])
            if part % ranks.size != ranks.rank:
                continue
            _check_vocabulary(batch, vocabulary)
            recorder.batch = routed.batch = batch
            recorder.part = routed.part = part
            with recorder if recorder.calls else nullcontext():  # a model of experts alone has nothing to intercept
                batch.call(model)
            counts["batches"] += 1
            counts["tokens"] += batch.n_tokens
            counts["sequences"] += 0 if batch.mask_BT is None else batch.mask_BT.shape[0]
        return seen

    with evaluating(model), routed, letting_go(model):
        ranks.check_same("calibration data", read)
        routed.finish(ranks)
    counts = _sums(ranks.each(counts))
    if not counts["batches"]:
        raise CalibrationError(
            "calibration data", expected="at least one batch", found="none", fix="Pass text, ids or batches."
        )
    silent = [key for key, n in (_sums(ranks.each(recorder.calls)) | routed.calls).items() if n == 0]
    if silent:
        raise UnsupportedModelError(
            "FFN sites that never ran",
            expected="every site's up and down matmul to use its own weights",
            found=f"none for {', '.join(silent[:4])}{', ...' if len(silent) > 4 else ''}",
            fix="If it shares a weight with another layer, leave calibration out, or give it its own; "
            "else turn autocast and compiled forwards off meanwhile.",
        )
    return counts


def _sums(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(one[name] for one in counts) for name in counts[0]}


def _check_vocabulary(batch: Batch, vocabulary: Any) -> None:
    ids = batch.input_ids
    if ids is None or not isinstance(vocabulary, int) or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise CalibrationError(
            "calibration token ids",
            expected=f"0 to {vocabulary - 1} (the model's vocabulary)",
            found=f"{low} to {high}",
            fix="Use the model's own tokenizer.",
        )


def finite(threshold: float | torch.Tensor) -> bool:
    """Whether it is a number of 0 or more, or such numbers."""
    if isinstance(threshold, torch.Tensor):
        return bool(((threshold >= 0) & (threshold < float("inf"))).all())
    return 0 <= threshold < float("inf")


def threshold_map(sites: Sequence[FFNSite], thresholds: float | Mapping[str, Cut] | None) -> dict[str, float | Cut]:
    """One firing threshold per site; a number means that for all, None means 0 (exact zeros)."""
    given: Mapping[str, float | Cut] = (
        {s.key: float(thresholds) for s in sites} if isinstance(thresholds, (int, float)) else dict(thresholds or {})
    )
    unknown = set(given) - {s.key for s in sites}
    bad = {k: v for k, v in given.items() if not finite(v)}
    if unknown or bad:
        raise ConfigError(
            "firing thresholds",
            expected="numbers >= 0 for keys of the sites",
            found=f"{sorted(unknown)[:3] or bad}",
            fix="Use ActivationStats.threshold_for(key, share).",
        )
    return {s.key: given.get(s.key, 0.0) for s in sites}
