"""The plan of a folder as the report shows it: a row per layer, experts of a block together."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from torch_pi2.report.facts import Bucket, Hardware, Planned, Predictor, Row
from torch_pi2.types.loss_curve import LossCurve
from torch_pi2.types.plan import LayerPlan, Plan

if TYPE_CHECKING:
    from torch_pi2.predict.file import AnyPredictor
    from torch_pi2.types.machine_plan import HardwarePlan
    from torch_pi2.types.predictor import PredictorCard

#: By bucket: hot, accelerator and resident neurons of each layer.
_Counts = list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def planned(plan: Plan, predictors: Mapping[str, AnyPredictor], neuron_bytes: Mapping[str, int]) -> Planned:
    """What ``plan`` says; of a plan without a ``hardware`` part, one bucket for any number of sequences."""
    hardware = plan.hardware
    nothing = (0,) * len(plan.layers)
    counts: _Counts = [(tuple(layer.n_hot for layer in plan.layers), nothing, nothing)]
    buckets = [Bucket(0, 0, {})]
    if hardware is not None:
        counts = [(b.hot, b.accelerator, b.resident) for b in hardware.buckets]
        buckets = [Bucket(b.batch, b.cache_bytes, dict(b.ms)) for b in hardware.buckets]
    groups = groupby(enumerate(plan.layers), key=lambda numbered: numbered[1].site.experts or numbered[1].site.key)
    rows = tuple(_row(key, list(group), counts, predictors, neuron_bytes) for key, group in groups)
    made_for = hardware.made_for if hardware else {}
    planner = str(made_for.get("planner", plan.made_by.get("planner", "unknown")))
    made = plan.made_by.get("stats")
    curve = LossCurve.of(made, "statistics of the plan") if isinstance(made, dict) else None
    return Planned(planner, rows, tuple(buckets), _hardware(hardware) if hardware else None, curve)


def _row(
    key: str,
    group: list[tuple[int, LayerPlan]],
    counts: _Counts,
    predictors: Mapping[str, AnyPredictor],
    neuron_bytes: Mapping[str, int],
) -> Row:
    numbers, layers = [i for i, _ in group], [layer for _, layer in group]
    hot, accelerator, resident = (tuple(sum(c[kind][i] for i in numbers) for c in counts) for kind in range(3))
    sizes = [neuron_bytes.get(layer.site.key) for layer in layers]
    cards = [card for layer in layers if (card := _card(predictors.get(layer.site.key))) is not None]
    return Row(
        key=key,
        experts=len(layers),
        neurons=sum(layer.site.intermediate for layer in layers),
        hidden=layers[0].site.hidden,
        method=", ".join(sorted({layer.method for layer in layers})),
        expected_active=float(np.mean([layer.expected_active for layer in layers])),
        hot=hot,
        accelerator=accelerator,
        resident=resident,
        bytes=None if None in sizes else sum(size or 0 for size in sizes),
        predictor=_predictor(cards) if cards else None,
    )


def _card(predictor: AnyPredictor | None) -> PredictorCard | None:
    return None if predictor is None else predictor.card


def _predictor(cards: list[PredictorCard]) -> Predictor:
    return Predictor(
        bytes=sum(card.bytes for card in cards),
        recall=float(np.mean([card.recall for card in cards])),
        precision=float(np.mean([card.precision for card in cards])),
        predicted_active=float(np.mean([card.predicted_active for card in cards])),
        rank=round(float(np.mean([card.rank for card in cards]))),
    )


def _hardware(plan: HardwarePlan) -> Hardware:
    about = plan.made_for
    settings = {
        **{f"{role} threads": str(count) for role, count in plan.threads.items()},
        **{name.replace("_", " "): str(value) for name, value in plan.offload.items()},
        **({"neurons in a slot": str(plan.cluster)} if plan.cluster > 1 else {}),
        "tokens of a prompt's chunk": str(plan.prompt.chunk_tokens),
    }
    return Hardware(
        name=str(about.get("hardware", "unknown")),
        source=str(about.get("source", "unknown")),
        budget_bytes=plan.budget_bytes,
        accelerator_bytes=plan.accelerator_bytes,
        context=plan.context,
        settings=settings,
    )
