"""``HardwarePlan``: how a planned model runs on one machine, by the number of sequences that are decoded together.

PowerInfer-2's offline planner (arXiv 2406.06282, section 5) makes a *neuron plan*, which neurons are hot, and a
*hardware plan*: threads, cache sizes, I/O patterns, and a graph for each batch size. This is the second, and the part
of the first that depends on the batch. docs/PLAN.md has the format.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch_pi2.base.fields import Field, shown
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.types.offload import OffloadConfig

#: Neurons of which an accelerator computes a whole number of, or all.
ACCELERATOR_CHUNK = 512

#: Settings of :class:`torch_pi2.OffloadConfig` that a plan chooses, all of them lossless, and their types.
OFFLOAD_SETTINGS: dict[str, type] = {
    "policy": str,
    "io_threads": int,
    "in_flight": int,
    "run_bytes": int,
    "gap_bytes": int,
    "lookahead": bool,
}
#: What threads are for.
THREAD_ROLES = ("compute", "io")


@dataclass(frozen=True)
class Bucket:
    """How a model runs with up to ``batch`` sequences.

    Attributes:
        batch: tokens of a decoding step, at most.
        hot: by layer, so many neurons, the first in plan order, are computed without asking a predictor; all of them:
            the layer is dense. At least the ``n_hot`` of its :class:`~torch_pi2.types.plan.LayerPlan`.
        accelerator: by layer, those of them that an accelerator computes: a multiple of 512, or all neurons.
        resident: by layer, so many neurons, the first in plan order, never leave the cache of a store.
        cache_bytes: of a store's neuron cache; 0 if all neurons are in memory, or if the budget leaves none.
        ms: predicted milliseconds of a step, by part (:data:`torch_pi2.planner.cost.PARTS`); empty if nobody predicted.
    """

    batch: int
    hot: tuple[int, ...]
    accelerator: tuple[int, ...]
    resident: tuple[int, ...]
    cache_bytes: int = 0
    ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_ms(self) -> float:
        """Of a step."""
        return math.fsum(self.ms.values())


@dataclass(frozen=True)
class PromptPlan:
    """How prompts are read.

    Attributes:
        dense_from: by layer, from so many tokens in one call on every neuron is computed; 0: never. Calls of no more
            tokens than the largest bucket has sequences are steps, whatever it says.
        chunk_tokens: tokens of a long prompt for which layers in a store are read once.
    """

    dense_from: tuple[int, ...]
    chunk_tokens: int = 512


@dataclass(frozen=True)
class HardwarePlan:
    """See the module.

    Attributes:
        made_for: ``hardware`` (a name), ``hash`` (of the profile), ``source`` (``measured``, ``published``) and the
            solver's settings.
        budget_bytes: of memory for everything; None: everything is in memory. accelerator_bytes: for hot neurons there.
        context: tokens of each sequence that the budget has room for.
        buckets: ascending by ``batch``, at least one.
        prompt: for prompts.
        offload: settings of :class:`torch_pi2.OffloadConfig`, of ``OFFLOAD_SETTINGS``.
        threads: by role, of ``THREAD_ROLES``.
        cluster: neurons in a slot of the store, as it is or should be packed.
        passes: by tokens of one sequence that are verified together, predicted time over that of a step of one; empty
            if nobody predicted.
    """

    made_for: Mapping[str, Any]
    budget_bytes: int | None
    accelerator_bytes: int
    context: int
    buckets: tuple[Bucket, ...]
    prompt: PromptPlan
    offload: Mapping[str, Any] = field(default_factory=dict)
    threads: Mapping[str, int] = field(default_factory=dict)
    cluster: int = 1
    passes: Mapping[int, float] = field(default_factory=dict)

    def guess_costs(self) -> dict[int, float]:
        """By number of guesses that a pass verifies: what each costs, in plain steps."""
        return {tokens - 1: max(0.0, steps - 1) / (tokens - 1) for tokens, steps in self.passes.items()}

    def bucket(self, batch: int) -> Bucket:
        """The smallest that is for so many sequences; for more than any, the largest."""
        return next((b for b in self.buckets if b.batch >= batch), self.buckets[-1])

    def layer_hot(self, layer: int) -> tuple[tuple[int, int], ...]:
        """(batch, hot neurons) of one layer, ascending by batch."""
        return tuple((b.batch, b.hot[layer]) for b in self.buckets)

    def to_json(self) -> dict[str, Any]:
        """For plan.json: the same numbers give the same text."""
        return {
            "made_for": dict(sorted(self.made_for.items())),
            "budget_bytes": self.budget_bytes,
            "accelerator_bytes": self.accelerator_bytes,
            "context": self.context,
            "buckets": [
                {
                    "batch": b.batch,
                    "hot": list(b.hot),
                    "accelerator": list(b.accelerator),
                    "resident": list(b.resident),
                    "cache_bytes": b.cache_bytes,
                    "ms": {part: round(ms, 4) for part, ms in b.ms.items()},
                }
                for b in self.buckets
            ],
            "prompt": {"dense_from": list(self.prompt.dense_from), "chunk_tokens": self.prompt.chunk_tokens},
            "offload": dict(sorted(self.offload.items())),
            "threads": dict(sorted(self.threads.items())),
            "cluster": self.cluster,
            "passes": {str(tokens): round(steps, 4) for tokens, steps in sorted(self.passes.items())},
        }

    @staticmethod
    def from_json(data: Any, layers: Sequence[tuple[str, int, int]], where: str) -> HardwarePlan:
        """Inverse of :meth:`to_json`.

        Args:
            layers: of each layer its key, its ``n_hot`` and its number of neurons.

        Raises:
            ArtifactError: something is missing, of another type, or no such plan can be followed.
        """
        return _read(Field(data, f"{where}, hardware", "Make the plan again (torch-pi2 plan)."), layers)


#: Key, least and most neurons of a layer.
Bounds = Sequence[tuple[str, int, int]]


def _read(plan: Field, layers: Bounds) -> HardwarePlan:
    plan.names([f.name for f in fields(HardwarePlan) if f.name != "passes"], None)  # which older ones have not
    budget = plan.at("budget_bytes")
    buckets = [_bucket(bucket, layers, budget.value is None) for bucket in plan.at("buckets").items(1)]
    batches = [bucket.batch for bucket in buckets]
    if sorted(set(batches)) != batches:
        plan.at("buckets").wrong("ascending batch sizes", batches)
    prompt = plan.at("prompt")
    dense_from = _counts(prompt.at("dense_from"), [(key, 0, 1 << 30) for key, _, _ in layers])
    return HardwarePlan(
        plan.at("made_for").names(allowed=None),
        None if budget.value is None else budget.whole(0),
        plan.at("accelerator_bytes").whole(0),
        plan.at("context").whole(0),
        tuple(buckets),
        PromptPlan(dense_from, prompt.at("chunk_tokens").whole(1)),
        _offload(plan.at("offload")),
        {role: count.whole(0) for role, count in _of(plan.at("threads"), THREAD_ROLES).items()},
        plan.at("cluster").whole(1),
        _passes(plan.at("passes", {})),
    )


def _passes(found: Field) -> dict[int, float]:
    """Numbers of steps by tokens, which are names in JSON."""
    numbers = {}
    for name, steps in found.each().items():
        if not (name.isascii() and name.isdigit() and name[0] != "0" and 2 <= int(name[:9]) == int(name)):
            found.wrong("numbers of tokens, 2 or more, as names", shown(name))
        numbers[int(name)] = steps.number()
    return numbers


def _of(found: Field, allowed: Collection[str]) -> dict[str, Field]:
    """Some of the fields ``allowed``."""
    found.names((), allowed)
    return found.each()


def _counts(numbers: Field, bounds: Bounds) -> tuple[int, ...]:
    """A number for each layer, between its bounds."""
    found = numbers.items()
    if len(found) != len(bounds):
        numbers.wrong(f"{len(bounds)} numbers, one a layer", f"{len(found)}")
    for number, (key, least, most) in zip(found, bounds, strict=True):
        if type(number.value) is not int or not least <= number.value <= most:
            _of_layer(numbers, key).wrong(f"{least} to {most}", number.value)
    return tuple(numbers.value)


def _of_layer(numbers: Field, key: str) -> Field:
    return Field(numbers.value, f"{numbers.path} of {key}", numbers.fix)


def _offload(settings: Field) -> dict[str, Any]:
    """Settings of the right names and types."""
    for name, setting in _of(settings, OFFLOAD_SETTINGS).items():
        kind = OFFLOAD_SETTINGS[name]
        setting.whole() if kind is int else setting.flag() if kind is bool else setting.text()
    try:
        OffloadConfig(**settings.value)
    except ConfigError as error:
        setting = settings.at(error.what.removeprefix("OffloadConfig."))
        raise ArtifactError(setting.path, expected=error.expected, found=error.found, fix=setting.fix) from error
    return dict(settings.value)


def _bucket(bucket: Field, layers: Bounds, in_memory: bool) -> Bucket:
    bucket.names([f.name for f in fields(Bucket)], None)
    hot = _counts(bucket.at("hot"), layers)
    numbers = bucket.at("accelerator")
    accelerator = _counts(numbers, [(key, 0, n) for (key, _, _), n in zip(layers, hot, strict=True)])
    for count, (key, _, most) in zip(accelerator, layers, strict=True):
        if count % ACCELERATOR_CHUNK and count != most:
            _of_layer(numbers, key).wrong(f"a multiple of {ACCELERATOR_CHUNK}, or {most}", count)
    resident = _counts(bucket.at("resident"), [(key, 0, most) for key, _, most in layers])
    cache_bytes = bucket.at("cache_bytes").whole(0)
    if any(resident) and in_memory and not cache_bytes:
        bucket.at("resident").wrong("0 where everything is in memory", sum(resident))
    ms = {part: value.number() for part, value in bucket.at("ms").each().items()}
    return Bucket(bucket.at("batch").whole(1), hot, accelerator, resident, cache_bytes, ms)
