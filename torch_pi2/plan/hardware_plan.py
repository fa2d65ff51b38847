"""``HardwarePlan``: how a planned model runs on one machine, by the number of sequences that are decoded together.

PowerInfer-2's offline planner (arXiv 2406.06282, section 5) makes a *neuron plan*, which neurons are hot, and a
*hardware plan*: threads, cache sizes, I/O patterns, and a graph for each batch size. This is the second, and the part
of the first that depends on the batch. docs/PLAN.md has the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_pi2.errors import ArtifactError, ConfigError

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
#: Of a step: what sums of parts are still exact to a microsecond with.
_MOST_MS = 1e15
#: What threads are for.
THREAD_ROLES = ("compute", "io")


@dataclass(frozen=True)
class Bucket:
    """How a model runs with up to ``batch`` sequences.

    Attributes:
        batch: tokens of a decoding step, at most.
        hot: by layer, so many neurons, the first in plan order, are computed without asking a predictor; all of them:
            the layer is dense. At least the ``n_hot`` of its :class:`~torch_pi2.plan.plan.LayerPlan`.
        accelerator: by layer, those of them that an accelerator computes: a multiple of 512, or all neurons.
        resident: by layer, so many neurons, the first in plan order, never leave the cache of a store.
        cache_bytes: of a store's neuron cache; 0 if all neurons are in memory, or if the budget leaves none.
        ms: predicted milliseconds of a step, by part (:data:`torch_pi2.plan.cost.PARTS`); empty if nobody predicted.
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
        }

    @staticmethod
    def from_json(data: Any, layers: Sequence[tuple[str, int, int]], where: str) -> HardwarePlan:
        """Inverse of :meth:`to_json`.

        Args:
            layers: of each layer its key, its ``n_hot`` and its number of neurons.

        Raises:
            ArtifactError: something is missing, of another type, or no such plan can be followed.
        """
        return _Reader(where).plan(data, layers)


class _Reader:
    """Reads the part ``hardware`` of the plan.json at ``where``, and says which field is wrong."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _check(self, good: bool, name: str, expected: str, found: Any) -> None:
        if not good:
            text = repr(found)
            raise ArtifactError(
                f"{self._where}, hardware.{name}",
                expected=expected,
                found=text if len(text) <= 80 else text[:77] + "...",
                fix="Make the plan again (torch-pi2 plan).",
            )

    def _fields(self, data: Any, name: str, wanted: Sequence[str]) -> None:
        self._check(isinstance(data, dict), name, "an object", data)
        missing = [field for field in wanted if field not in data]
        self._check(not missing, name, f"fields {', '.join(wanted)}", f"no {', '.join(missing)}")

    def _whole(self, value: Any, name: str, least: int) -> int:
        self._check(type(value) is int and least <= value < 1 << 62, name, f"a whole number, {least} or more", value)
        return int(value)

    def _counts(self, value: Any, name: str, bounds: Sequence[tuple[str, int, int]]) -> tuple[int, ...]:
        """A number for each layer, between its bounds."""
        self._check(isinstance(value, list), name, "a list", value)
        self._check(len(value) == len(bounds), name, f"{len(bounds)} numbers, one a layer", f"{len(value)}")
        for found, (key, least, most) in zip(value, bounds, strict=True):
            good = type(found) is int and least <= found <= most
            self._check(good, f"{name} of {key}", f"{least} to {most}", found)
        return tuple(value)

    def plan(self, data: Any, layers: Sequence[tuple[str, int, int]]) -> HardwarePlan:
        needed = ("made_for", "budget_bytes", "accelerator_bytes", "context", "buckets", "prompt")
        self._fields(data, "plan", (*needed, "offload", "threads", "cluster"))
        made_for, offload, threads = data["made_for"], data["offload"], data["threads"]
        self._check(isinstance(made_for, dict), "made_for", "an object", made_for)
        budget = data["budget_bytes"]
        self._check(isinstance(data["buckets"], list) and bool(data["buckets"]), "buckets", "at least one", "none")
        buckets = [self._bucket(entry, i, layers, budget is None) for i, entry in enumerate(data["buckets"])]
        batches = [bucket.batch for bucket in buckets]
        self._check(sorted(set(batches)) == batches, "buckets", "ascending batch sizes", batches)
        self._fields(data["prompt"], "prompt", ("dense_from", "chunk_tokens"))
        dense_from = self._counts(
            data["prompt"]["dense_from"], "prompt.dense_from", [(key, 0, 1 << 30) for key, _, _ in layers]
        )
        chunk = self._whole(data["prompt"]["chunk_tokens"], "prompt.chunk_tokens", 1)
        self._check(isinstance(offload, dict), "offload", "an object", offload)
        for name, value in offload.items():
            self._check(name in OFFLOAD_SETTINGS, "offload", f"settings of {', '.join(OFFLOAD_SETTINGS)}", name)
            kind = OFFLOAD_SETTINGS[name]
            self._check(type(value) is kind, f"offload.{name}", kind.__name__, value)
            if kind is int:
                self._whole(value, f"offload.{name}", 0)
        self._offload(offload)
        self._fields(threads, "threads", ())
        for role, count in threads.items():
            self._check(role in THREAD_ROLES, "threads", " or ".join(THREAD_ROLES), role)
            self._whole(count, f"threads.{role}", 0)
        return HardwarePlan(
            made_for,
            None if budget is None else self._whole(budget, "budget_bytes", 0),
            self._whole(data["accelerator_bytes"], "accelerator_bytes", 0),
            self._whole(data["context"], "context", 0),
            tuple(buckets),
            PromptPlan(dense_from, chunk),
            offload,
            threads,
            self._whole(data["cluster"], "cluster", 1),
        )

    def _offload(self, settings: dict[str, Any]) -> None:
        """Settings of the right names and types."""
        from torch_pi2.runtime.offload import OffloadConfig  # it imports plans

        try:
            OffloadConfig(**settings)
        except ConfigError as error:
            name = error.what.removeprefix("OffloadConfig.")
            raise ArtifactError(
                f"{self._where}, hardware.offload.{name}",
                expected=error.expected,
                found=error.found,
                fix="Make the plan again (torch-pi2 plan).",
            ) from error

    def _bucket(self, data: Any, index: int, layers: Sequence[tuple[str, int, int]], in_memory: bool) -> Bucket:
        name = f"buckets[{index}]"
        self._fields(data, name, ("batch", "hot", "accelerator", "resident", "cache_bytes", "ms"))
        hot = self._counts(data["hot"], f"{name}.hot", layers)
        computed = [(key, 0, n) for (key, _, _), n in zip(layers, hot, strict=True)]
        accelerator = self._counts(data["accelerator"], f"{name}.accelerator", computed)
        for count, (key, _, most) in zip(accelerator, layers, strict=True):
            whole = count % ACCELERATOR_CHUNK == 0 or count == most
            self._check(whole, f"{name}.accelerator of {key}", f"a multiple of {ACCELERATOR_CHUNK}, or {most}", count)
        ms = data["ms"]
        self._check(isinstance(ms, dict), f"{name}.ms", "an object", ms)
        for part, value in ms.items():
            good = type(value) in (int, float) and 0 <= value < _MOST_MS
            self._check(good, f"{name}.ms.{part}", "milliseconds, 0 or more", value)
        resident = self._counts(data["resident"], f"{name}.resident", [(key, 0, most) for key, _, most in layers])
        cache_bytes = self._whole(data["cache_bytes"], f"{name}.cache_bytes", 0)
        cached = cache_bytes > 0 or not in_memory
        self._check(cached or not any(resident), f"{name}.resident", "0 where everything is in memory", sum(resident))
        return Bucket(self._whole(data["batch"], f"{name}.batch", 1), hot, accelerator, resident, cache_bytes, ms)
