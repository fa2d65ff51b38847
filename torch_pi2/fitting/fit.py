"""``fit``: trains one low-rank predictor per FFN and sizes it until the *model's* loss hardly changes.

After PowerInfer (arXiv 2312.12456, section 5.1), whose predictors start at a size guessed from sparsity and
skew and are adjusted until perplexity stays put. Here, per layer:

1. *rank*: from that guess up or down for as long as the layer's cost falls at the same recall; cost is what
   the predictor computes plus what it lets through;
2. *recall*: raised in the layers that hurt the loss most until the whole model is within tolerance, then
   lowered wherever there is slack.

Three disjoint sets of sequences are used: one to fit, one to set thresholds, one to take the losses and the
cards from.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.evaluating import evaluating, fresh_settings
from torch_pi2.errors import CalibrationError, ConfigError, NonFiniteError, StaleArtifactError
from torch_pi2.fitting.train import calibrate, measure, train_lowrank
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.graph.routed import modules_of
from torch_pi2.predict.file import AnyPredictor, FitReport, FittedPredictors
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.profiling.data import Batch, batches
from torch_pi2.profiling.recorder import check_sites
from torch_pi2.profiling.samples import Samples, collect_samples
from torch_pi2.spec.plan import weights_hash
from torch_pi2.spec.predictor import PredictorCard
from torch_pi2.spec.site import FFNSite
from torch_pi2.spec.stats import ActivationStats

#: ``(model, batch) -> (sum of losses, number of tokens they are over)``.
LossFn = Callable[[nn.Module, Batch], tuple[float, int]]
#: ``predictors -> context`` inside which the model skips what they do not predict.
ApplyFn = Callable[[Mapping[str, LowRank]], AbstractContextManager[Any]]


_log = logging.getLogger("torch_pi2")
#: Of calibration data, to fit predictors to.
MIN_SEQUENCES = 10
_HIGHEST_RECALL = 0.999


def causal_lm_loss(model: nn.Module, batch: Batch) -> tuple[float, int]:
    """Next-token negative log likelihood in nats, padding left out. Needs ``batch.input_ids``.

    Raises:
        CalibrationError: the batch has no ids, or the model's output has no logits.
    """
    ids = batch.input_ids
    out = batch.call(model) if ids is not None else None
    logits = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
    if ids is None or not isinstance(logits, torch.Tensor) or logits.shape[:2] != ids.shape:
        raise CalibrationError(
            "loss of the model",
            expected="token ids and logits [B, T, vocabulary]",
            found="no ids" if ids is None else f"output {type(out).__name__}",
            fix="Pass loss_fn=(model, batch) -> (sum of losses, count).",
        )
    assert batch.mask_BT is not None
    real = batch.mask_BT[:, 1:] & batch.mask_BT[:, :-1]
    nll = F.cross_entropy(logits[:, :-1][real].float(), ids[:, 1:][real], reduction="sum")
    return float(nll), int(real.sum())


def cold_neurons(stats: ActivationStats, key: str, hot_frequency: float) -> torch.Tensor:
    """Neurons that fire for less than ``hot_frequency`` of single tokens, int64 ascending."""
    return torch.nonzero(stats.frequency(key) < hot_frequency).flatten()


def initial_rank(site: FFNSite, active_share: float, skew: float) -> int:
    """Where the search starts: larger for dense layers, smaller for skewed ones (PowerInfer), a multiple of 8.

    A quarter of the hidden size where a tenth of the neurons fire; between 8 and half of the hidden size.
    """
    rank = site.hidden / 4 * math.sqrt(active_share / 0.1) * (1.25 - skew)
    return max(min(8, site.hidden), min(site.hidden // 2, 8 * round(rank / 8)))


@dataclass
class _Layer:
    """State of the search for one layer."""

    site: FFNSite
    cold: torch.Tensor
    fit: Samples
    held: Samples
    rank: int
    recall: float
    trained: dict[tuple[int, int], LowRank] = field(default_factory=dict)
    calibrated: dict[tuple[int, int, float], LowRank] = field(default_factory=dict)


class _Search:
    def __init__(self, layers: list[_Layer], predictor_weight: float, steps: int, seed: int) -> None:
        self.layers = layers
        self._weight, self._steps, self._seed = predictor_weight, steps, seed

    def predictor(self, layer: _Layer, rank: int, recall: float, *, probe: bool = False) -> LowRank:
        """Trained and calibrated, once for each argument; a probe is trained for a quarter of the steps."""
        steps = max(1, self._steps // 4) if probe else self._steps
        if (rank, steps) not in layer.trained:
            seed = self._seed + layer.site.layer
            layer.trained[rank, steps] = train_lowrank(layer.fit, rank=rank, neurons=layer.cold, steps=steps, seed=seed)
        if (rank, steps, recall) not in layer.calibrated:
            layer.calibrated[rank, steps, recall] = calibrate(
                layer.trained[rank, steps], layer.held, layer.site, target_recall=recall, neurons=layer.cold
            )
        return layer.calibrated[rank, steps, recall]

    def cost(self, layer: _Layer, rank: int, recall: float, *, probe: bool = False) -> float:
        """Work per token over the dense FFN's: the predictor's, weighted, and that of the neurons let through."""
        card = self.predictor(layer, rank, recall, probe=probe).card
        assert card is not None
        return self._weight * card.cost_share + card.predicted_active * len(layer.cold) / layer.site.intermediate

    def choose_rank(self, layer: _Layer) -> None:
        """Double the rank while that makes the layer cheaper, else halve it while that does (by probes)."""
        best, cost = layer.rank, self.cost(layer, layer.rank, layer.recall, probe=True)
        for factor in (2.0, 0.5):
            moved = False
            while True:
                rank = int(best * factor)
                if not 4 <= rank <= layer.site.hidden:
                    break
                other = self.cost(layer, rank, layer.recall, probe=True)
                if other >= cost:
                    break
                best, cost, moved = rank, other, True
            if moved:
                break
        layer.rank = best

    def predictors(self, only: _Layer | None = None) -> dict[str, LowRank]:
        return {y.site.key: self.predictor(y, y.rank, y.recall) for y in self.layers if only is None or y is only}


@fresh_settings()
def fit(
    model: nn.Module,
    data: Any,
    sites: Sequence[FFNSite],
    stats: ActivationStats,
    *,
    tokenizer: Callable[..., Any] | None = None,
    loss_fn: LossFn = causal_lm_loss,
    apply: ApplyFn | None = None,
    cold: Mapping[str, torch.Tensor] | None = None,
    hot_frequency: float = 0.4,
    tolerance: float = 0.01,
    margin: float = 0.5,
    target_recall: float = 0.9,
    predictor_weight: float = 0.5,
    n_tokens: int = 20_000,
    eval_tokens: int = 16_384,
    steps: int = 500,
    max_rounds: int = 24,
    batch_size: int = 8,
    seq_len: int = 128,
    seed: int = 0,
    max_bytes: int = 2 << 30,
    progress: bool = True,
) -> FittedPredictors:
    """Fit low-rank predictors for the cold neurons of every site.

    Those of the experts of one module get the rank of the largest among them.

    Args:
        model, data, tokenizer, batch_size, seq_len: as ``profile``; at least 10 sequences.
        stats: of this model; its thresholds decide what firing means.
        loss_fn: what must hardly change (default: causal language modelling).
        apply: how predictors are applied while the loss is taken; None: :class:`PredictedMaskMode`.
        cold: site key -> cold neurons; None: those that fire for less than ``hot_frequency`` of tokens.
        tolerance: largest relative loss increase, 0.01 = 1 %.
        margin: share of the tolerance that the search may use up; the rest is for text unlike the calibration
            data (on the trained dReLU model the change on other files was up to 1.25 times that measured here).
        target_recall: where the search for each layer's recall starts.
        predictor_weight: cost of a predictor's multiply-add over an FFN's (0.5: int8 against 16 bits).
        n_tokens: samples per layer to fit to; eval_tokens: upper bound on evaluation tokens.
        steps: optimiser steps per training.
        max_rounds: bound on evaluations of the whole model with all predictors; each round that finds the worst
            layer evaluates every layer alone besides.
        max_bytes: bound on the memory of the samples of all layers.

    Returns:
        Predictors with cards measured on the evaluation sequences, and ``report``. Those sequences also steer the
        search, so the loss to quote is one taken on other text (``torch-pi2 eval``).

    Raises:
        StaleArtifactError: ``stats`` are of other weights. CalibrationError: too few sequences.
        ConfigError: a setting that makes no sense, or samples that exceed ``max_bytes``.
    """
    from tqdm import tqdm

    _check_settings(tolerance, margin, target_recall, hot_frequency, max_rounds)
    check_sites(model, sites)
    model_hash = weights_hash(model, list(sites))
    if stats.model_hash != model_hash:
        raise StaleArtifactError(
            "activation statistics",
            expected=f"a profile of FFN weights {model_hash[:12]}",
            found=stats.model_hash[:12],
            fix="Profile this model again.",
        )
    parts = _split(list(batches(data, tokenizer=tokenizer, batch_size=batch_size, seq_len=seq_len)), batch_size)
    parts["evaluate"] = _at_most(parts["evaluate"], eval_tokens)
    colds = {s.key: (cold[s.key] if cold is not None else cold_neurons(stats, s.key, hot_frequency)) for s in sites}
    sites = [s for s in sites if len(colds[s.key])]
    tokens = {name: sum(b.n_tokens for b in part) for name, part in parts.items()}
    cuts = {s.key: stats[s.key].threshold for s in sites}
    held = max(1, min(n_tokens // 4, 4096))
    samples = (
        {
            name: collect_samples(
                model, part, sites, n, thresholds=cuts, seed=seed, max_bytes=max_bytes, progress=progress
            )
            for (name, part), n in zip(parts.items(), (n_tokens, held, held))
        }
        if sites
        else {name: {} for name in parts}
    )
    layers = []
    for s in sites:
        share, skew = stats[s.key].active_share, stats[s.key].skew()
        fit_samples, held_back = samples["fit"][s.key], samples["calibrate"][s.key]
        layers.append(_Layer(s, colds[s.key], fit_samples, held_back, initial_rank(s, share, skew), target_recall))
    search = _Search(layers, predictor_weight, steps, seed)
    bar = tqdm(total=len(layers) + max_rounds, desc="fit", unit="step", disable=not (progress and sys.stderr.isatty()))
    for layer in layers:
        search.choose_rank(layer)
        bar.update(1)

    mask_cold = {s.key: colds[s.key] for s in sites}
    rounds: list[dict[str, Any]] = []
    dense_loss, _ = _loss(model, parts["evaluate"], loss_fn, None)

    def evaluate(step: str, only: _Layer | None = None) -> float:
        predictors = search.predictors(only)
        context = apply(predictors) if apply else PredictedMaskMode(model, sites, predictors, mask_cold, cuts)
        loss, skipped = _loss(model, parts["evaluate"], loss_fn, context)
        change = loss / dense_loss - 1
        if only is None:
            rounds.append({"step": step, "change": change, "skipped": skipped})
            bar.update(1)
        return change

    change = evaluate("start") if layers else 0.0
    change = _repair(search, evaluate, change, tolerance * margin, rounds, max_rounds)
    change = _shrink(search, evaluate, change, tolerance * margin, rounds, max_rounds)
    bar.close()

    result = FittedPredictors(_of_one_rank(search.predictors(), sites))
    result.model_hash = model_hash
    for layer in layers:
        result[layer.site.key].card = measure(
            result[layer.site.key],
            samples["evaluate"][layer.site.key],
            layer.site,
            neurons=layer.cold,
            weights=layer.site.weights(model),
        )
    accepted = [r for r in rounds if r["change"] == change]
    result.report = FitReport(
        dense_loss=dense_loss,
        loss=dense_loss * (1 + change),
        change=change,
        tolerance=tolerance,
        met=change <= tolerance,
        skipped=accepted[-1]["skipped"] if accepted else 0.0,
        rounds=rounds,
        layers=[
            {"key": y.site.key, "cold": len(y.cold), "rank": y.rank, "target_recall": y.recall}
            | _card(result[y.site.key]).to_json()
            for y in layers
        ],
        tokens=tokens,
    )
    if not result.report.met:
        _log.warning(
            "predictors change the loss by %.2f %%, more than the tolerance of %.2f %%, after %d rounds: "
            "calibrate on more text or raise max_rounds",
            100 * change,
            100 * tolerance,
            len(rounds),
        )
    return result


def _of_one_rank(predictors: dict[str, LowRank], sites: Sequence[FFNSite]) -> dict[str, LowRank]:
    """``predictors``, of which those of the experts of one module have the rank of the largest."""
    result = dict(predictors)
    for own in modules_of(sites).values():
        rank = max(predictors[site.key].rank for site in own)
        result |= {site.key: predictors[site.key].padded(rank) for site in own}
    return result


def _repair(
    search: _Search,
    evaluate: Callable[..., float],
    change: float,
    tolerance: float,
    rounds: list[dict[str, Any]],
    max_rounds: int,
) -> float:
    """Halve the misses of the worst quarter of the layers until the model is within tolerance."""
    while change > tolerance and len(rounds) < max_rounds:
        alone = sorted(search.layers, key=lambda y: evaluate("alone", y), reverse=True)
        for layer in alone[: max(1, len(alone) // 4)]:
            layer.recall = 1 - (1 - layer.recall) / 2
            if layer.recall > _HIGHEST_RECALL and 2 * layer.rank <= layer.site.hidden:
                layer.recall, layer.rank = 1 - 2 * (1 - layer.recall), 2 * layer.rank
            search.choose_rank(layer)
        change = evaluate("raise " + alone[0].site.key)
    return change


def _shrink(
    search: _Search,
    evaluate: Callable[..., float],
    change: float,
    tolerance: float,
    rounds: list[dict[str, Any]],
    max_rounds: int,
) -> float:
    """Allow half as many misses again, in all layers and then one by one, for as long as the model bears it."""

    def attempt(layers: Sequence[_Layer], step: str) -> bool:
        nonlocal change
        before = [(y.rank, y.recall) for y in layers]
        cost = sum(search.cost(y, y.rank, y.recall) for y in layers)
        for y in layers:
            y.recall = max(0.05, 1 - 1.5 * (1 - y.recall))
            search.choose_rank(y)
        cheaper = sum(search.cost(y, y.rank, y.recall) for y in layers) < cost
        new = evaluate(step) if cheaper else math.inf
        if new <= tolerance:
            change = new
            return True
        for y, (rank, recall) in zip(layers, before):
            y.rank, y.recall = rank, recall
        return False

    if change > tolerance or not search.layers:
        return change
    while len(rounds) < max_rounds and attempt(search.layers, "lower all"):
        pass
    waiting = sorted(search.layers, key=lambda y: search.cost(y, y.rank, y.recall), reverse=True)
    while waiting and len(rounds) < max_rounds:
        layer = waiting.pop(0)
        if attempt([layer], "lower " + layer.site.key):
            waiting.append(layer)
    return change


def _loss(model: nn.Module, data: Sequence[Batch], loss_fn: LossFn, context: Any) -> tuple[float, float]:
    """Mean loss over ``data`` inside ``context``, and the share of cold pairs skipped (nan if unknown)."""
    total, count = 0.0, 0
    with evaluating(model):
        for batch in data:
            if context is None:
                part, n = loss_fn(model, batch)
            else:
                with context:
                    part, n = loss_fn(model, batch)
            total, count = total + part, count + n
    if not count or not math.isfinite(total):
        raise NonFiniteError(
            "loss on the evaluation sequences",
            expected="a finite number over at least one token",
            found=f"{total} over {count} tokens",
            fix="Check the checkpoint and that sequences have at least two tokens.",
        )
    skipped = 1 - context.cold_share if isinstance(context, PredictedMaskMode) else math.nan
    return total / count, skipped


def rows_of(data: list[Batch]) -> list[Batch]:
    """Calibration data by sequences; a batch that cannot be taken apart counts as one."""
    rows: list[Batch] = []
    for batch in data:
        ids, mask = batch.input_ids, batch.mask_BT
        if ids is None or mask is None or batch.kwargs:
            rows.append(batch)
        else:
            rows.extend(Batch(ids[b : b + 1], mask[b : b + 1]) for b in range(len(ids)))
    return rows


def _split(data: list[Batch], batch_size: int) -> dict[str, list[Batch]]:
    """Sequences dealt out 6 : 2 : 2 to fit, calibrate and evaluate."""
    rows = rows_of(data)
    if len(rows) < MIN_SEQUENCES:
        raise CalibrationError(
            "sequences to fit predictors on",
            expected=f"at least {MIN_SEQUENCES} (6 to fit, 2 to calibrate, 2 to evaluate)",
            found=str(len(rows)),
            fix="Pass more text or a smaller seq_len.",
        )
    names = ("fit",) * 6 + ("calibrate",) * 2 + ("evaluate",) * 2
    parts: dict[str, list[Batch]] = {"fit": [], "calibrate": [], "evaluate": []}
    for i, row in enumerate(rows):
        parts[names[i % 10]].append(row)
    return {name: _regroup(part, batch_size) for name, part in parts.items()}


def _regroup(rows: list[Batch], batch_size: int) -> list[Batch]:
    """Single rows of equal length back into batches."""
    out: list[Batch] = []
    by_length: dict[int, list[Batch]] = {}
    for row in rows:
        if row.input_ids is None or row.kwargs:
            out.append(row)
        else:
            by_length.setdefault(row.input_ids.shape[1], []).append(row)
    for group in by_length.values():
        for i in range(0, len(group), batch_size):
            part = group[i : i + batch_size]
            ids = torch.cat([b.input_ids for b in part if b.input_ids is not None])
            out.append(Batch(ids, torch.cat([b.mask_BT for b in part if b.mask_BT is not None])))
    return out


def _at_most(data: list[Batch], n_tokens: int) -> list[Batch]:
    kept: list[Batch] = []
    for batch in data:
        if kept and sum(b.n_tokens for b in kept) + batch.n_tokens > n_tokens:
            break
        kept.append(batch)
    return kept


def _check_settings(
    tolerance: float, margin: float, target_recall: float, hot_frequency: float, max_rounds: int
) -> None:
    checks = (
        ("tolerance", tolerance > 0, "more than 0 (0.01 is 1 %)", tolerance),
        ("margin", 0 < margin <= 1, "more than 0, at most 1", margin),
        ("target_recall", 0 < target_recall < 1, "between 0 and 1", target_recall),
        ("hot_frequency", 0 < hot_frequency <= 1.01, "between 0 and 1", hot_frequency),
        ("max_rounds", max_rounds >= 1, "at least 1", max_rounds),
    )
    for name, good, expected, found in checks:
        if not good:
            raise ConfigError(name, expected=expected, found=str(found), fix="Leave it out for the default.")


def _card(predictor: AnyPredictor) -> PredictorCard:
    assert predictor.card is not None
    return predictor.card
