"""``plan_for``: the plan of an optimised model for one machine; PowerInfer-2's hardware plan, solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.base.units import parse_bytes
from torch_pi2.errors import CalibrationError, ConfigError
from torch_pi2.machine.find import find_hardware
from torch_pi2.machine.hardware import Hardware
from torch_pi2.observe.accesses import Accesses
from torch_pi2.ops.constants import lists
from torch_pi2.planner.misses import MissCurve, ReplayMisses
from torch_pi2.planner.model_shape import ModelShape
from torch_pi2.planner.request import BATCHES
from torch_pi2.planner.solve import solve
from torch_pi2.rewrite.handle import parts_of, stored_stats
from torch_pi2.types.machine_plan import HardwarePlan
from torch_pi2.types.method import Method
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import ActivationStats

#: Steps of recorded accesses that are replayed for each question: enough for hit rates, in seconds even for 7B.
_REPLAYED = 64
#: Policies that plans do not choose: they do not follow what is wanted.
_NO_CACHE = ("static", "none")


@checked
@fresh_settings()
def plan_for(
    model: nn.Module,
    hardware: str | Path | Hardware = "measured",
    *,
    stats: ActivationStats | None = None,
    budget: float | str | None = None,
    accelerator_memory: float | str = 0,
    batches: Sequence[int] = BATCHES,
    context: int = 1024,
    accesses: Accesses | str | Path | None = None,
    compiled: bool = True,
    progress: bool = False,
    **quality: Any,
) -> Plan:
    """The model's plan with a part for ``hardware``: what is hot, resident and cached for each number of sequences.

    ::

        torch_pi2.follow(model, torch_pi2.plan_for(model, "measured"))

    Args:
        model: optimised or loaded, in memory or over a store; it is left as it is.
        hardware: ``measured`` (``torch-pi2 doctor --measure``), a preset (``sm8650-ufs4.0``), a file, or a profile.
        stats: how often neurons fire (default: those that the model was optimised with, or its folder has).
        budget: bytes of memory (or ``"2.5GiB"``) of a model over a store; None: everything is in memory.
        accelerator_memory: for hot neurons there.
        batches: numbers of sequences to plan for. context: tokens of each that memory has room for.
        accesses: of :class:`torch_pi2.record_accesses`: what the cache misses is then replayed, not estimated.
        compiled: whether steps are going to be (:class:`~torch_pi2.decode.decoder.Decoder`).
        progress: a line on standard error, on terminals only, if it takes over two seconds.
        quality: ``min_recall``, ``one_boundary``: see :func:`torch_pi2.planner.solve.solve`.

    Raises:
        CalibrationError: there are no statistics.
        ConfigError: the model is dense, no such hardware, a budget that cannot be met (the least that can is named), or
            settings that make no sense, ``min_recall`` with statistics that do not see what predictors miss among them.
        UnsupportedModelError: memory of an accelerator for neurons of two formats, which it cannot have.
    """
    parts = parts_of(model)
    found = stats or parts.stats or stored_stats(model)
    if found is None:
        raise CalibrationError(
            f"planning a {type(model).__name__}",
            expected="statistics: how often neurons fire decides which are hot",
            found="none",
            fix="Pass stats=: of torch_pi2.profile, torch_pi2.watch or torch_pi2.observe.watched.watched_stats.",
        )
    machine = hardware if isinstance(hardware, Hardware) else find_hardware(hardware)
    base = free(parts.plan)
    shape = ModelShape.of(model, found, base, compiled=compiled)
    check_recall(shape, found, quality.get("min_recall"))
    solved = solve(
        shape,
        machine,
        budget_bytes=None if budget is None else parse_bytes(budget),
        accelerator_bytes=parse_bytes(accelerator_memory),
        batches=batches,
        context=context,
        misses=None if accesses is None else replayed(accesses, shape),
        progress=progress,
        **quality,
    )
    return with_hardware(base, solved)


def check_recall(shape: ModelShape, stats: ActivationStats, min_recall: float | None) -> None:
    """Raises ConfigError: a floor of recall, and ``stats`` that were watched: what predictors miss is not in them."""
    predicted = any(layer.predictor is not None for layer in shape.layers)
    if min_recall is not None and predicted and stats.made_by.get("watched"):
        raise ConfigError(
            f"min_recall of {min_recall:g}",
            expected="statistics of torch_pi2.profile, which see what predictors miss",
            found="statistics of a model that was watched with its predictors",
            fix="Profile the dense model (torch-pi2 profile) and pass its statistics, or leave min_recall out.",
        )


def replayed(accesses: Accesses | str | Path, shape: ModelShape) -> Mapping[str, MissCurve]:
    """By policy of the cache, what it would have missed of ``accesses``."""
    recorded = accesses if isinstance(accesses, Accesses) else Accesses.load(accesses)
    return {
        policy: ReplayMisses(recorded, shape, policy, passes=_REPLAYED)
        for policy in lists().policies
        if policy not in _NO_CACHE
    }


def free(plan: Plan) -> Plan:
    """``plan`` with no neuron hot in layers where that changes no bit: of methods without a predictor but ``dense``."""
    layers = [replace(layer, n_hot=0) if layer.method == Method.EXACT else layer for layer in plan.layers]
    return Plan(layers, plan.model_hash, dict(plan.made_by))


def with_hardware(plan: Plan, hardware: HardwarePlan, stats: ActivationStats | None = None) -> Plan:
    """``plan`` for a machine, of ``stats``; ``n_hot``: those of the bucket with the fewest, where it may change."""
    layers = []
    for index, layer in enumerate(plan.layers):
        fewest = min(bucket.hot[index] for bucket in hardware.buckets)
        layers.append(replace(layer, n_hot=fewest) if layer.method == Method.EXACT else layer)
    made_by = plan.made_by | {"planner": hardware.made_for["planner"]}
    if stats is not None:
        made_by["stats"] = stats.made_by
    return Plan(layers, plan.model_hash, made_by, hardware)
