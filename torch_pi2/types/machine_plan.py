"""``HardwarePlan``: how a planned model runs on one machine, by the number of sequences that are decoded together.

PowerInfer-2's offline planner (arXiv 2406.06282, section 5) makes a *neuron plan*, which neurons are hot, and a
*hardware plan*: threads, cache sizes, I/O patterns, and a graph for each batch size. This is the second, and the part
of the first that depends on the batch. docs/PLAN.md has the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from torch_pi2.base.fields import Field, Limits, from_json, limited, to_json
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.types.offload import OffloadConfig

#: An accelerator computes a multiple of this many neurons of a layer, or all of them.
ACCELERATOR_CHUNK = 512
#: Settings of :class:`torch_pi2.OffloadConfig` that a plan may choose; all are lossless.
OFFLOAD_SETTINGS = ("policy", "io_threads", "in_flight", "run_bytes", "gap_bytes", "lookahead")
#: What threads are for.
THREAD_ROLES = ("compute", "io")
_FIX = "Make the plan again (torch-pi2 plan)."


@dataclass(frozen=True)
class Bucket:
    """How a model runs with up to ``batch`` sequences.

    Attributes:
        batch: the largest number of tokens of a decoding step.
        hot: by layer, how many neurons, the first in plan order, are computed without asking a predictor; if all, the
            layer is dense. At least the ``n_hot`` of its :class:`~torch_pi2.types.plan.LayerPlan`.
        accelerator: by layer, how many of them an accelerator computes: a multiple of 512, or all neurons.
        resident: by layer, how many neurons, the first in plan order, never leave the cache of a store.
        cache_bytes: size of a store's neuron cache; 0 if all neurons are in memory, or if the budget leaves none.
        ms: predicted milliseconds of a step, by part (:data:`torch_pi2.planner.cost.PARTS`); empty: no prediction.
    """

    batch: Annotated[int, Limits(1)]
    hot: tuple[int, ...]
    accelerator: tuple[int, ...]
    resident: tuple[int, ...]
    cache_bytes: int = 0
    ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_ms(self) -> float:
        """Milliseconds of a step."""
        return math.fsum(self.ms.values())


@dataclass(frozen=True)
class PromptPlan:
    """How prompts are read.

    Attributes:
        dense_from: by layer, from how many tokens in one call on every neuron is computed; 0: never. Calls of no more
            tokens than the largest bucket has sequences are steps, whatever it says.
        chunk_tokens: tokens of a long prompt for which layers in a store are read once.
    """

    dense_from: tuple[int, ...]
    chunk_tokens: int = limited(1, default=512)


@dataclass(frozen=True)
class HardwarePlan:
    """See the module.

    Attributes:
        made_for: ``hardware`` (a name), ``hash`` (of the profile), ``source`` (``measured``, ``published``) and the
            planner's settings.
        budget_bytes: memory for everything; None: everything is in memory. accelerator_bytes: for hot neurons there.
        context: tokens of each sequence that the budget includes.
        buckets: ascending by ``batch``, at least one.
        prompt: for prompts.
        offload: settings of :class:`torch_pi2.OffloadConfig`, of ``OFFLOAD_SETTINGS``.
        threads: by role, of ``THREAD_ROLES``.
        cluster: neurons in a slot of the store, as it is or should be packed.
    """

    made_for: Mapping[str, Any]
    budget_bytes: int | None
    accelerator_bytes: int
    context: int
    buckets: tuple[Bucket, ...]
    prompt: PromptPlan
    offload: Mapping[str, Any] = field(default_factory=dict)
    threads: Mapping[str, int] = field(default_factory=dict)
    cluster: int = limited(1, default=1)

    def bucket(self, batch: int) -> Bucket:
        """The smallest for at least so many sequences; the largest if none is."""
        return next((b for b in self.buckets if b.batch >= batch), self.buckets[-1])

    def layer_hot(self, layer: int) -> tuple[tuple[int, int], ...]:
        """(batch, hot neurons) of one layer, ascending by batch."""
        return tuple((b.batch, b.hot[layer]) for b in self.buckets)

    def to_json(self) -> dict[str, Any]:
        """For plan.json: the same numbers give the same text."""
        data: dict[str, Any] = to_json(self)
        for bucket in data["buckets"]:
            bucket["ms"] = {part: round(ms, 4) for part, ms in bucket["ms"].items()}
        for name in ("made_for", "offload", "threads"):
            data[name] = dict(sorted(data[name].items()))
        return data

    @staticmethod
    def from_json(data: Any, layers: Sequence[tuple[str, int, int]], where: str) -> HardwarePlan:
        """Inverse of :meth:`to_json`.

        Args:
            layers: the key, the ``n_hot`` and the number of neurons of each layer.

        Raises:
            ArtifactError: a field is missing or wrong, or a layer cannot do what the plan says.
        """
        if isinstance(data, dict):
            data = {name: value for name, value in data.items() if name != "passes"}  # older plans have it
        plan = from_json(HardwarePlan, data, f"{where}, hardware", _FIX)
        _check(plan, Field(data, f"{where}, hardware", _FIX), layers)
        return plan


#: Key, least and most neurons of a layer.
Bounds = Sequence[tuple[str, int, int]]


def _check(plan: HardwarePlan, data: Field, layers: Bounds) -> None:
    """Raises ArtifactError for what types and limits of single fields do not say."""
    buckets = data.at("buckets")
    buckets.items(1)
    batches = [bucket.batch for bucket in plan.buckets]
    if sorted(set(batches)) != batches:
        buckets.wrong("ascending batch sizes", batches)
    for bucket, fields in zip(plan.buckets, buckets.items(), strict=True):
        most = [(key, 0, n) for (key, _, _), n in zip(layers, bucket.hot)]
        _check_counts(fields.at("hot"), layers)
        _check_counts(fields.at("accelerator"), most)
        _check_counts(fields.at("resident"), [(key, 0, n) for key, _, n in layers])
        for count, (key, _, size) in zip(bucket.accelerator, layers, strict=True):
            if count % ACCELERATOR_CHUNK and count != size:
                _of_layer(fields.at("accelerator"), key).wrong(f"a multiple of {ACCELERATOR_CHUNK}, or {size}", count)
        if any(bucket.resident) and plan.budget_bytes is None and not bucket.cache_bytes:
            fields.at("resident").wrong("0 where everything is in memory", sum(bucket.resident))
    _check_counts(data.at("prompt").at("dense_from"), [(key, 0, 1 << 30) for key, _, _ in layers])
    data.at("threads").names((), THREAD_ROLES)
    settings = data.at("offload")
    try:
        OffloadConfig(**settings.names((), OFFLOAD_SETTINGS))
    except ConfigError as error:
        setting = settings.at(error.what.removeprefix("OffloadConfig."))
        raise ArtifactError(setting.path, expected=error.expected, found=error.found, fix=setting.fix) from error


def _check_counts(counts: Field, bounds: Bounds) -> None:
    """Raises ArtifactError unless there is a number for each layer, within its bounds."""
    if len(counts.value) != len(bounds):
        counts.wrong(f"{len(bounds)} numbers, one for each layer", f"{len(counts.value)}")
    for count, (key, least, most) in zip(counts.value, bounds, strict=True):
        if not least <= count <= most:
            _of_layer(counts, key).wrong(f"{least} to {most}", count)


def _of_layer(counts: Field, key: str) -> Field:
    return Field(counts.value, f"{counts.path} of {key}", counts.fix)
