"""Whether a plan's hot neurons still are: what fires in use (:mod:`torch_pi2.observe.watch`) beside what was planned.

A neuron of a plan's hot set counts as drifted if, of as many neurons chosen by the live frequencies, it would not be
one, and that is no accident of sampling: its frequency f lies below the boundary c, the smallest frequency of those
that would be chosen, by more than ``SIGNIFICANT`` standard errors of the difference of two proportions p = (f + c) / 2,

    c - f > SIGNIFICANT * sqrt(p (1 - p) (2 / n + 1 / n_plan))

of n live tokens (groups, for a batch) each, and of the n_plan tokens that the plan's own statistics had, if it says.
The tokens of one text are more alike than that assumes, so a few hundredths mean nothing; a shuffled order gives one
less the share of neurons that are hot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torch_pi2.errors import ConfigError, check_made_from
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import ActivationStats, LayerStats, same_thresholds

#: Standard errors from which on a difference of frequencies counts: one in 700 is larger by accident.
SIGNIFICANT = 3.0
#: Share of the hot neurons that has drifted from which on it is time for another plan.
LIMIT = 0.2


@dataclass(frozen=True)
class LayerDrift:
    """Of one layer.

    Attributes:
        hot, resident: how many neurons the plan has there. drifted, resident_drifted: of these, see the module.
        groups: live tokens, or steps of so many sequences, that this is known from; 0: nothing is, and none counts.
    """

    key: str
    hot: int
    drifted: int
    resident: int
    resident_drifted: int
    groups: int

    @property
    def share(self) -> float:
        return self.drifted / self.hot if self.hot else 0.0


@dataclass(frozen=True)
class Drift:
    """What :func:`drift` found. ``tokens``: of the live statistics."""

    batch: int
    tokens: int
    layers: tuple[LayerDrift, ...]

    @property
    def share(self) -> float:
        """Of all hot neurons."""
        return _share(sum(y.drifted for y in self.layers), sum(y.hot for y in self.layers if y.groups))

    @property
    def resident_share(self) -> float:
        """Of all neurons that never leave the cache of a store."""
        return _share(sum(y.resident_drifted for y in self.layers), sum(y.resident for y in self.layers if y.groups))

    @property
    def worst(self) -> LayerDrift:
        """The layer with the largest share."""
        return max(self.layers, key=lambda y: y.share)

    def to_json(self) -> dict[str, Any]:
        shares = {"share": self.share, "resident_share": self.resident_share}
        layers = [asdict(layer) | {"share": layer.share} for layer in self.layers]
        return {"batch": self.batch, "tokens": self.tokens, **shares, "layers": layers}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def drift(plan: Plan, live: ActivationStats, *, batch: int = 1) -> Drift:
    """How much of ``plan``'s hot set (and of what stays in a cache) would no longer be chosen by ``live``.

    The hot set is that of the plan's bucket for ``batch`` sequences, or, without a hardware plan, the first ``n_hot``
    neurons of each layer. Experts are compared by the tokens that they get, whatever the batch.

    Raises:
        StaleArtifactError: ``live`` is of other weights.
        ConfigError: it has no tokens, no steps of so many sequences, or not the plan's layers.
    """
    _check_hash(plan.model_hash, live)
    if not any(layer.tokens for layer in live):
        raise ConfigError(
            "live statistics to compare a plan with",
            expected="some tokens",
            found="none",
            fix="Use the model while it is watched (torch_pi2.watch).",
        )
    bucket = None if plan.hardware is None else plan.hardware.bucket(batch)
    planned = _planned_tokens(plan)
    layers = []
    for i, layer in enumerate(plan.layers):
        stats = live[layer.site.key]
        hot, resident = (layer.n_hot, 0) if bucket is None else (bucket.hot[i], bucket.resident[i])
        groups, drifted = 0, [0, 0]
        if stats.tokens:
            size = 1 if stats.experts is not None else batch
            frequency_I, groups = stats.frequency(size), _groups(stats, size)
            ordered_I = frequency_I[layer.order.long()]
            drifted = [_drifted(ordered_I, count, groups, planned) for count in (hot, resident)]
        layers.append(LayerDrift(layer.site.key, hot, drifted[0], resident, drifted[1], groups))
    return Drift(batch, live.tokens, tuple(layers))


def _check_hash(model_hash: str, live: ActivationStats) -> None:
    check_made_from(
        "live statistics", live.model_hash, model_hash, "FFN weights", "Watch the model that the plan is for."
    )


def _planned_tokens(plan: Plan) -> float:
    """Tokens of the statistics that a plan was made from; infinity if it does not say."""
    made_from = plan.made_by.get("stats")
    tokens = made_from.get("tokens") if isinstance(made_from, Mapping) else None
    return float(tokens) if isinstance(tokens, int) and tokens > 0 else math.inf


def _groups(stats: LayerStats, batch: int) -> int:
    """Groups that ``stats.frequency(batch)`` is known from: of the sizes around it, those of the one with fewer."""
    seen = {size: n for size, n in zip(stats.batch_sizes, stats.batch_groups.tolist(), strict=True) if n > 0}
    lower, upper = max(s for s in seen if s <= batch), min(s for s in seen if s >= batch)
    return int(min(seen[lower], seen[upper]))


def _drifted(frequency_I: torch.Tensor, count: int, groups: int, planned: float) -> int:
    """Of the first ``count`` neurons, in plan order, how many have drifted; see the module."""
    if not 0 < count < len(frequency_I):
        return 0
    boundary = frequency_I.topk(count).values[-1]
    below = boundary - frequency_I[:count]
    p = (boundary + frequency_I[:count]) / 2
    error = (p * (1 - p) * (2 / groups + 1 / planned)).clamp_min(0).sqrt()
    return int(((below > 0) & (below > SIGNIFICANT * error)).sum())


def update(stats: ActivationStats, live: ActivationStats, weight: float | None = None) -> ActivationStats:
    """``stats`` with what a :class:`~torch_pi2.observe.watch.Watch` has counted since: what to plan from anew.

    Counts are added exactly. A batch size that only one of them has seen stays as that one has it; scores and the
    sample of what fires together, which a watch does not see, stay those of ``stats``.

    Args:
        weight: more than 0 and less than 1: the counts of one of them are made fewer, so that this share of the tokens
            is ``live``'s. None: every token counts the same.

    Raises:
        StaleArtifactError: other weights. ConfigError: other layers, neurons or thresholds, or no such weight.
    """
    _check_hash(stats.model_hash, live)
    if list(stats.layers) != list(live.layers):
        raise ConfigError(
            "layers of the live statistics",
            expected=", ".join(stats.layers),
            found=", ".join(live.layers),
            fix="Watch the model that the statistics are of.",
        )
    for ours, theirs in zip(stats, live, strict=True):
        if not same_thresholds(ours, theirs) or ours.intermediate != theirs.intermediate:
            raise ConfigError(
                f"live statistics of {ours.key}",
                expected=f"threshold {ours.threshold}, {ours.intermediate} neurons",
                found=f"threshold {theirs.threshold}, {theirs.intermediate} neurons",
                fix="Watch with the thresholds of the statistics: watch(model, thresholds={s.key: s.threshold for s in "
                "stats}).",
            )
    scale, scale_live = _scales(stats.tokens, live.tokens, weight)
    layers = {ours.key: _added(ours, live.layers[ours.key], scale, scale_live) for ours in stats}
    tokens = _scaled_count(stats.tokens, scale) + _scaled_count(live.tokens, scale_live)
    updated = {"tokens": tokens, "updated": {"tokens": live.tokens, "weight": weight}}
    return ActivationStats(layers, stats.model_hash, stats.made_by | updated)


def _scales(tokens: int, live_tokens: int, weight: float | None) -> tuple[float, float]:
    """What the counts of both are multiplied by; neither is more than 1."""
    if weight is None:
        return 1.0, 1.0
    if not 0 < weight < 1:
        raise ConfigError(
            "weight of the live statistics",
            expected="more than 0, less than 1",
            found=str(weight),
            fix="It is the share of the tokens that is to be theirs; None counts every token.",
        )
    if not tokens or not live_tokens:
        return 1.0, 1.0
    ratio = live_tokens * (1 - weight) / (tokens * weight)
    return min(1.0, ratio), min(1.0, 1 / ratio)


def _scaled_count(count: int, scale: float) -> int:
    return count if scale == 1 else round(count * scale)


def _scaled(counts: torch.Tensor, scale: float) -> torch.Tensor:
    return counts if scale == 1 else (counts.double() * scale).round().long()


def _added(ours: LayerStats, theirs: LayerStats, scale: float, scale_live: float) -> LayerStats:
    sizes = tuple(sorted({*ours.batch_sizes, *theirs.batch_sizes}))
    both = ((ours, scale), (theirs, scale_live))
    tokens, borrowed = (sum(_scaled_count(getattr(s, name), by) for s, by in both) for name in ("tokens", "borrowed"))
    fired, zeros = (
        _scaled(getattr(ours, name), scale) + _scaled(getattr(theirs, name), scale_live) for name in ("fired", "zeros")
    )
    groups = torch.zeros(len(sizes), dtype=torch.int64)
    grouped = torch.zeros((len(sizes), ours.intermediate), dtype=torch.int64)
    for s, by in both:
        rows = [sizes.index(size) for size in s.batch_sizes]
        groups[rows] += _scaled(s.batch_groups, by)
        grouped[rows] += _scaled(s.batch_fired, by)
    return LayerStats(
        key=ours.key,
        layer=ours.layer,
        threshold=ours.threshold,
        tokens=tokens,
        fired=fired,
        zeros=zeros,
        abs_sum=ours.abs_sum,
        batch_sizes=sizes,
        batch_groups=groups,
        batch_fired=grouped,
        score_hist=ours.score_hist,
        thresholds=ours.thresholds,
        cofire_bits=ours.cofire_bits,
        experts=ours.experts,
        borrowed=borrowed,
        up_first=ours.up_first,
    )
