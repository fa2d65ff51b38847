"""``Task``: what a plan is made for, its budgets in slots and bytes, and the predicted time of what it might say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.formats import has_two_formats
from torch_pi2.planner.choices import Choice, resident_counts
from torch_pi2.planner.cost import Cost, step_cost
from torch_pi2.planner.drive import offload_settings
from torch_pi2.planner.layer_cost import without_rest
from torch_pi2.planner.misses import FrequencyMisses, MissCurve, resident_slots
from torch_pi2.planner.model_shape import ModelShape
from torch_pi2.types.machine_plan import Bucket, HardwarePlan, PromptPlan
from torch_pi2.types.offload import OffloadConfig

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

#: Sizes that are planned for unless others are asked for.
BATCHES = (1, 2, 4, 8, 16)
_ROUNDING = 1e-9


@dataclass
class Task:
    """What is planned for: see :func:`torch_pi2.planner.solve.solve`.

    ``misses``: by policy of the cache (one curve alone may be given); empty: from frequencies.
    """

    shape: ModelShape
    hardware: Hardware
    budget_bytes: int | None = None
    accelerator_bytes: int = 0
    batches: Sequence[int] = BATCHES
    context: int = 1024
    misses: Any = None
    min_recall: float | None = None
    one_boundary: bool = False
    weights: Mapping[int, float] = field(default_factory=dict)
    offload: dict[str, Any] = field(default_factory=dict)
    progress: bool = False
    _costs: dict[Any, Cost] = field(default_factory=dict, init=False, repr=False)
    _frequency: MissCurve | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_batches(self)
        self.batches = tuple(sorted(set(self.batches)))
        if self.misses is None or not self.stored:
            self.misses = {}
        elif not isinstance(self.misses, Mapping):
            self.misses = {getattr(self.misses, "policy", OffloadConfig().policy): self.misses}
        self.offload = dict(self.offload or offload_settings(self.shape, self.hardware, next(iter(self.misses), "")))

    @property
    def used(self) -> Hardware:
        """The machine, without what has no memory for the model."""
        return self.hardware if self.accelerator_bytes else without_rest(self.hardware)

    @property
    def stored(self) -> bool:
        return self.budget_bytes is not None

    @property
    def curve(self) -> MissCurve:
        """Misses of the policy that is planned for."""
        if self._frequency is None:
            self._frequency = FrequencyMisses(self.shape)
        found: MissCurve = self.misses.get(self.offload["policy"], self._frequency)
        return found

    def smallest(self) -> int:
        """The least budget that every batch size accepts: all but neurons, which then all come from flash."""
        config = OffloadConfig(**self.offload)
        return max(self.shape.budget(0, batch=b, context=self.context, config=config).smallest for b in self.batches)

    def slots(self, batch: int) -> int:
        """Of the cache: what is left of the budget, 0 or more."""
        if self.budget_bytes is None:
            return self.shape.slots
        empty = self.shape.budget(0, batch=batch, context=self.context, config=OffloadConfig(**self.offload))
        one = empty.in_slots(1)
        return max(0, min(self.shape.slots, (self.budget_bytes - empty.smallest) // one))

    def cache_bytes(self, batch: int) -> int:
        return self.slots(batch) * self.shape.place_bytes if self.stored else 0

    def cost(self, batch: int, choice: Choice, resident: Sequence[int] | None = None) -> Cost:
        """A step, predicted; answers are kept."""
        key = (batch, choice, tuple(resident or ()), self.offload["policy"])
        if key not in self._costs:
            self._costs[key] = step_cost(
                self.shape,
                self.used,
                batch=batch,
                hot=choice.hot,
                accelerator=choice.accelerator,
                resident=resident,
                cache_bytes=self.cache_bytes(batch) if self.stored else None,
                misses=self.curve if self.stored else None,
                context=self.context,
                offload=self.offload,
            )
        return self._costs[key]

    def resident(self, batch: int, choice: Choice, share: float) -> tuple[int, ...]:
        """The most wanted neurons, in so much of the cache; none in memory."""
        none = (0,) * len(self.shape.layers)
        if not self.stored:
            return none
        slots = self.slots(batch)
        for room in range(int(share * slots), 0, -max(1, len(none))):  # whole clusters may take a slot more a layer
            found = resident_counts(self.shape, batch, choice, room)
            if resident_slots(self.shape, found, choice.accelerator) <= slots:
                return found
        return none

    def weight(self, batch: int) -> float:
        """Of a millisecond of a step: equal weight to the time of a token at each batch size, unless told otherwise."""
        return self.weights.get(batch, 1.0) / batch

    def objective(self, ms: Mapping[int, float]) -> float:
        return sum(self.weight(batch) * value for batch, value in ms.items())

    def floors(self) -> tuple[tuple[int, float], ...]:
        """By batch size, the least recall: ``min_recall`` but for what sums of so many neurons are rounded by."""
        return () if self.min_recall is None else tuple((b, self.min_recall - _ROUNDING) for b in self.batches)


def check(task: Task) -> None:
    """Raises ConfigError: nothing that is planned for could run, or no setting meets it. UnsupportedModelError."""
    _check_numbers(task)
    if task.budget_bytes is not None and task.budget_bytes < task.smallest():
        least = task.smallest()
        raise ConfigError(
            f"budget of {task.budget_bytes / 2**20:.1f} MiB for batches to {task.batches[-1]} of {task.context} tokens",
            expected=f"at least {least} bytes ({-(-least // 2**20)} MiB), for all but neurons",
            found=f"{task.budget_bytes} bytes",
            fix="Give it more, or plan for fewer sequences (batches) or a shorter context.",
        )
    theirs = task.hardware.accelerator
    if task.accelerator_bytes and (theirs is None or task.accelerator_bytes > theirs.memory_bytes):
        raise ConfigError(
            f"accelerator memory of {task.accelerator_bytes} bytes",
            expected=f"at most {theirs.memory_bytes} bytes, which {theirs.name} has" if theirs else "0 bytes",
            found="more" if theirs else f"{task.hardware.name}, which has no accelerator",
            fix="Give it less, or leave it out.",
        )
    two = next((layer for layer in task.shape.layers if has_two_formats(layer.weights)), None)
    if task.accelerator_bytes and two is not None:
        raise UnsupportedModelError(
            f"accelerator memory for {two.key}",
            expected="neurons of one format",
            found=two.weights,
            fix="Leave it out, or import the model's file with neurons='int8'.",
        )
    _check_memory(task)


def _check_memory(task: Task) -> None:
    """Raises ConfigError: the machine has less memory than the budget, or than everything takes."""
    most, shape = task.hardware.memory_bytes, task.shape
    # Published profiles are of phones, whose accelerators have no memory of their own.
    shares, theirs = task.hardware.source == "published", task.hardware.accelerator
    if task.budget_bytes is not None:
        needed, what = task.budget_bytes, f"budget of {task.budget_bytes} bytes"
        if shares and task.accelerator_bytes:
            needed += task.accelerator_bytes
            what += f" and accelerator memory of {task.accelerator_bytes} bytes, which is the same memory"
    else:
        budget = shape.budget(0, batch=task.batches[-1], context=task.context, config=OffloadConfig())
        every = sum(layer.intermediate * layer.neuron_bytes for layer in shape.layers)
        # What a GPU has stays in the CPU's memory, too.
        stays = shares or (theirs is not None and theirs.holds_rest)
        ours = every if stays else max(0, every - task.accelerator_bytes)
        needed = budget.fixed + budget.predictors + budget.kv + ours
        what = f"everything in memory, for batches to {task.batches[-1]} of {task.context} tokens"
    if needed > most:
        raise ConfigError(
            what,
            expected=f"at most {most} bytes, which {task.hardware.name} has",
            found=f"{needed} bytes",
            fix="Give it less, or plan for fewer sequences (batches) or a shorter context."
            if task.budget_bytes is not None
            else "Pack the model and plan it with a budget, or for fewer sequences (batches) or a shorter context.",
        )


def _check_batches(task: Task) -> None:
    good = bool(task.batches) and all(type(b) is int and b >= 1 for b in task.batches)
    _refuse(("batches", good, "batch sizes of 1 or more", task.batches))
    weights = task.weights if isinstance(task.weights, Mapping) else {0: task.weights}
    good = all(type(w) in (int, float) and w >= 0 for w in weights.values())
    _refuse(
        ("weights", good, "0 or more for each batch size", task.weights),
        ("weights", weights.keys() <= {*task.batches}, f"batch sizes of {list(task.batches)}", task.weights),
        ("weights", good and any(weights.get(b, 1) for b in task.batches), "one above 0", task.weights),
    )


def _check_numbers(task: Task) -> None:
    _refuse(
        ("context", task.context >= 1, "1 or more tokens", task.context),
        ("accelerator_bytes", task.accelerator_bytes >= 0, "0 or more bytes", task.accelerator_bytes),
        ("min_recall", task.min_recall is None or 0 <= task.min_recall <= 1, "0 to 1", task.min_recall),
    )


def _refuse(*checks: tuple[str, bool, str, Any]) -> None:
    for name, good, expected, found in checks:
        if not good:
            raise ConfigError(f"solve({name})", expected=expected, found=str(found), fix="Correct it.")


def assemble(task: Task, buckets: Sequence[Bucket], planner: str) -> HardwarePlan:
    """The plan of ``buckets``; its prompt part is to be filled in."""
    settings = {
        "batches": list(task.batches),
        "min_recall": task.min_recall,
        "one_boundary": task.one_boundary,
        "weights": {str(batch): weight for batch, weight in sorted(task.weights.items())},
        "misses": type(task.curve).__name__ if task.stored else None,
    }
    return HardwarePlan(
        made_for={
            "hardware": task.hardware.name,
            "hash": task.hardware.hash,
            "source": task.hardware.source,
            "planner": planner,
            "objective": "sum of weight / tokens per second over batch sizes",
            "settings": settings,
        },
        budget_bytes=task.budget_bytes,
        accelerator_bytes=task.accelerator_bytes,
        context=task.context,
        buckets=tuple(buckets),
        prompt=PromptPlan((0,) * len(task.shape.layers)),
        offload=dict(task.offload) if task.stored else {},
        threads=_thread_roles(task.used, task.stored),
        cluster=task.shape.layers[0].cluster,
    )


def _thread_roles(hardware: Hardware, stored: bool) -> dict[str, int]:
    """Cores that compute, and cores that only read.

    Where all cores compute, threads that wait for reads share theirs (``io`` 0). A machine with more cores than it
    computes with gives one to I/O; so does a phone, whose storage has one queue (an accelerator beside the CPU, as
    PowerInfer-2, arXiv 2406.06282, section 4.3).
    """
    if not stored:
        return {"compute": hardware.threads, "io": 0}
    if hardware.cores > hardware.threads:
        return {"compute": hardware.threads, "io": 1}
    alone = hardware.accelerator is not None and hardware.threads > 1
    return {"compute": hardware.threads - alone, "io": int(alone)}
