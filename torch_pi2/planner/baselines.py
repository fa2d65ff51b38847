"""Simple plans, to compare the optimum with: the same budgets, buckets and reading, and the same predicted times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pi2.errors import check_choice
from torch_pi2.planner.choices import STEP, Choice, hot_counts
from torch_pi2.planner.layer_cost import without_rest
from torch_pi2.planner.model_shape import LayerShape, ModelShape
from torch_pi2.planner.prompt_cost import prompt_plan
from torch_pi2.planner.request import Task, assemble, check
from torch_pi2.types.config import Config
from torch_pi2.types.machine_plan import ACCELERATOR_CHUNK, Bucket, HardwarePlan
from torch_pi2.types.method import Method

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

#: ``greedy``: hot is what fires for a large share of tokens, whatever the batch and the machine (the first plan,
#: :mod:`torch_pi2.planner.greedy`). ``all-hot``, ``all-cold``: as far as layers allow. ``random``: as many as
#: chance says. Not so residents: which of equally wanted neurons stay only shifts reads between layers.
KINDS = ("greedy", "all-hot", "all-cold", "random")
#: Of the cache, what never leaves it: as a store does without a plan.
_RESIDENT_SHARE = 0.25


def fixed_plan(
    shape: ModelShape,
    hardware: Hardware,
    kind: str,
    *,
    seed: int = 0,
    **asked: Any,
) -> HardwarePlan:
    """A plan of one of ``KINDS``: the same hot neurons at all batch sizes, resident ones as a store has without a plan.

    An accelerator is filled layer by layer.

    Args:
        seed: of ``random``.
        asked: ``budget_bytes``, ``accelerator_bytes``, ``batches``, ``context`` and ``misses``, as
            :func:`torch_pi2.planner.solve.solve` takes them; ``offload``, how the drive is read (default: as it does).

    Raises:
        ConfigError: no such kind, or a budget that cannot be met, with the smallest that can.
    """
    check_choice("planner", kind, KINDS, "Choose one of them.")
    task = Task(shape, hardware, **asked)
    check(task)
    choice = simple_choice(task, kind, seed)
    buckets = []
    for batch in task.batches:
        resident = _resident(task, batch, choice)
        ms = task.cost(batch, choice, resident).ms
        buckets.append(Bucket(batch, choice.hot, choice.accelerator, resident, task.cache_bytes(batch), ms))
    made = assemble(task, buckets, kind)
    return replace(made, prompt=prompt_plan(shape, without_rest(hardware), buckets[-1], task.stored))


def simple_choice(task: Task, kind: str, seed: int = 0) -> Choice:
    """Hot neurons of a plan of ``kind``, and of them those of an accelerator."""
    step = ACCELERATOR_CHUNK if task.accelerator_bytes else STEP
    random, hot = np.random.default_rng(seed), []
    for layer in task.shape.layers:
        counts = hot_counts(layer, step)
        at = {
            "all-hot": len(counts) - 1,
            "all-cold": 0,
            "greedy": int(np.searchsorted(counts, _greedy(layer), side="right")) - 1,
            "random": int(random.integers(len(counts))),
        }[kind]
        hot.append(int(counts[max(0, at)]))
    return Choice(tuple(hot), _filled(task, hot))


def _greedy(layer: LayerShape) -> int:
    """Neurons that fire for as many tokens as the first plan asks for, by default settings of ``Config``."""
    config = Config()
    cut = config.hot_frequency if layer.exact_zeros else 1 - (1 - config.hot_frequency) * config.sparsity
    return max(layer.base_hot, int((layer.frequency(1) >= cut).sum()))


def _filled(task: Task, hot: Sequence[int]) -> tuple[int, ...]:
    """Hot neurons of the first layers, as many as an accelerator has room for."""
    left, counts = task.accelerator_bytes, []
    for layer, h in zip(task.shape.layers, hot, strict=True):
        may = layer.experts == 1 and layer.chosen == 1 and layer.method != Method.THRESHOLD
        fits = min(h, left // layer.neuron_bytes) if may else 0
        count = fits if fits == layer.intermediate else fits // ACCELERATOR_CHUNK * ACCELERATOR_CHUNK
        counts.append(count)
        left -= count * layer.neuron_bytes
    return tuple(counts)


def _resident(task: Task, batch: int, choice: Choice) -> tuple[int, ...]:
    """A quarter of the cache, the same share of every layer."""
    layers = task.shape.layers
    if not task.stored:
        return (0,) * len(layers)
    slots, total = int(_RESIDENT_SHARE * task.slots(batch)), sum(layer.slots for layer in layers)
    counts = []
    for layer, first in zip(layers, choice.accelerator, strict=True):
        whole = slots * layer.slots // total * layer.cluster
        counts.append(min(whole, (layer.intermediate - first) // layer.cluster * layer.cluster))
    return tuple(counts)
