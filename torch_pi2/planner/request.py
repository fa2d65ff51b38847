"""``Request``: the inputs of a plan, its budgets in slots and bytes, and the predicted time of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch_pi2.base.fields import Field, argument
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.formats import has_two_formats
from torch_pi2.machine.hardware import Hardware
from torch_pi2.planner.cost import step_ms, without_gpu
from torch_pi2.planner.model_shape import ModelShape
from torch_pi2.types.offload import Budget, OffloadConfig

#: Batch sizes that are planned for by default.
BATCHES = (1, 2, 4, 8, 16)
#: Share of the cache that is never evicted, as measured for ``lfu`` (:class:`torch_pi2.OffloadConfig`).
_RESIDENT_SHARE = 0.25
#: Reads over which a rate is averaged.
_READS = 4096
_SECTOR, _LONGEST_RUN, _LONGEST_GAP = 4096, 1 << 20, 1 << 18
#: Share of the best bandwidth that the longest read must reach.
_ENOUGH = 0.9

#: Neurons by layer.
Counts = tuple[int, ...]


@dataclass
class Request:
    """Inputs of :func:`torch_pi2.planner.for_machine.plan_for`."""

    shape: ModelShape
    hardware: "Hardware"
    budget_bytes: int | None = None
    accelerator_bytes: int = 0
    batches: Sequence[int] = BATCHES
    context: int = 1024
    fixed_hot_set: bool = False
    _slots: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _steps: dict[Any, dict[str, float]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.batches or not all(type(b) is int and b >= 1 for b in self.batches):
            raise _refused("batches", "batch sizes of 1 or more", self.batches)
        self.batches = tuple(sorted(set(self.batches)))

    @property
    def stored(self) -> bool:
        return self.budget_bytes is not None

    @property
    def used(self) -> "Hardware":
        """The machine, without a GPU that may hold no neurons."""
        return self.hardware if self.accelerator_bytes else without_gpu(self.hardware)

    @cached_property
    def offload(self) -> OffloadConfig:
        """How the store is read from the drive.

        * ``io_threads``: the queue depth with the most reads per second of a slot. ``in_flight``: no more than that.
        * ``run_bytes``: the smallest power of two from 64 KiB with 90 % of the best bandwidth.
        * ``gap_bytes``: bytes the drive transfers in the overhead of a read; shorter gaps are read along.
        """
        default, slot = OffloadConfig(), self.shape.place_bytes
        reads, whole = self.hardware.reads, self.shape.store_bytes
        depth = reads.best_depth(slot, whole)
        sizes = (slot, *(1 << n for n in range(16, 21)))
        us = {size: reads.us(_READS, size, whole, depth) / _READS for size in sizes}
        us_per_byte = (us[_LONGEST_RUN] - us[slot]) / max(1, _LONGEST_RUN - slot)
        fixed_us = max(0.0, us[slot] - us_per_byte * slot)
        gap = int(fixed_us / us_per_byte) if us_per_byte > 0 else _LONGEST_GAP
        speed = {size: size / us[size] for size in us if size >= 1 << 16}
        run = next(size for size in sorted(speed) if speed[size] >= _ENOUGH * max(speed.values()))
        in_flight, gap_bytes = max(2, min(default.in_flight, depth)), min(_LONGEST_GAP, gap // _SECTOR * _SECTOR)
        return OffloadConfig(io_threads=depth, in_flight=in_flight, run_bytes=max(run, slot), gap_bytes=gap_bytes)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Batch sizes that have the same hot neurons."""
        return [tuple(self.batches)] if self.fixed_hot_set else [(batch,) for batch in self.batches]

    def smallest(self) -> int:
        """The smallest budget that fits every batch size, with all neurons read from flash."""
        return max(self._empty(batch).smallest for batch in self.batches)

    def _empty(self, batch: int) -> Budget:
        return self.shape.budget(0, batch=batch, context=self.context, config=self.offload)

    def slots(self, batch: int) -> int:
        """Cache slots within the budget."""
        if self.budget_bytes is None:
            return self.shape.slots
        if batch not in self._slots:
            empty = self._empty(batch)
            room = (self.budget_bytes - empty.smallest) // empty.in_slots(1)
            self._slots[batch] = max(0, min(self.shape.slots, room))
        return self._slots[batch]

    def cache_bytes(self, batch: int) -> int:
        return self.slots(batch) * self.shape.place_bytes if self.stored else 0

    def step(self, batch: int, hot: Counts, accelerator: Counts = ()) -> dict[str, float]:
        """Predicted milliseconds of a step, by part; cached."""
        key = (batch, hot, accelerator)
        if key not in self._steps:
            cache_bytes, resident = self.cache_bytes(batch) if self.stored else None, self.resident(batch, accelerator)
            how: Any = {"context": self.context, "offload": self.offload, "cache_bytes": cache_bytes}
            how |= {"hot": hot, "accelerator": accelerator, "resident": resident}
            self._steps[key] = step_ms(self.shape, self.used, batch=batch, **how)
        return self._steps[key]

    def resident(self, batch: int, accelerator: Counts) -> Counts:
        """Neurons per layer that never leave the cache: an equal share of each layer, in whole clusters."""
        share = int(_RESIDENT_SHARE * self.slots(batch)) / self.shape.slots if self.stored else 0.0
        firsts = accelerator or (0,) * len(self.shape.layers)
        pairs = zip(self.shape.layers, firsts, strict=True)
        return tuple(min(int(share * y.slots), (y.intermediate - n) // y.cluster) * y.cluster for y, n in pairs)


def _refused(name: str, expected: str, value: object) -> ConfigError:
    return ConfigError(f"plan_for({name})", expected=expected, found=str(value), fix="Correct it.")


def check(request: Request) -> None:
    """Raises ConfigError: wrong settings, too little memory. UnsupportedModelError: an accelerator and two formats."""
    if request.context < 1:
        raise _refused("context", "1 or more tokens", request.context)
    if request.accelerator_bytes < 0:
        raise _refused("accelerator_memory", "0 or more bytes", request.accelerator_bytes)
    theirs, hardware = request.hardware.accelerator, request.hardware
    if request.budget_bytes is not None and request.budget_bytes < (least := request.smallest()):
        steps = f"batches to {request.batches[-1]} of {request.context} tokens"
        what, found = f"budget of {request.budget_bytes / 2**20:.1f} MiB for {steps}", f"{request.budget_bytes} bytes"
        expected = f"at least {least} bytes ({-(-least // 2**20)} MiB), for all but neurons"
        fix = "Give it more, or plan for fewer sequences (batches) or a shorter context."
        raise ConfigError(what, expected=expected, found=found, fix=fix)
    if request.accelerator_bytes > (theirs.memory_bytes if theirs else 0):
        what = f"accelerator memory of {request.accelerator_bytes} bytes"
        expected = f"at most {theirs.memory_bytes} bytes, which {theirs.name} has" if theirs else "0 bytes"
        found = "more" if theirs else f"{hardware.name}, which has no accelerator"
        raise ConfigError(what, expected=expected, found=found, fix="Give it less, or leave it out.")
    two = next((layer for layer in request.shape.layers if has_two_formats(layer.weights)), None)
    if request.accelerator_bytes and two is not None:
        fix = "Leave it out, or import the model's file with neurons='int8'."
        expected = "neurons of one format"
        Field(two, f"accelerator memory for {two.key}", fix, UnsupportedModelError).wrong(expected, two.weights)
    _check_memory(request)


def _check_memory(request: Request) -> None:
    """Raises ConfigError: less memory than the budget and an NPU's, or than the model, of which the CPU has all."""
    shape, theirs, batch = request.shape, request.hardware.accelerator, request.batches[-1]
    if request.budget_bytes is not None:
        needed, what = request.budget_bytes, f"budget of {request.budget_bytes} bytes"
        fix = "Give it less, or plan for fewer sequences (batches) or a shorter context."
        if request.accelerator_bytes and theirs is not None and not theirs.holds_rest:
            needed += request.accelerator_bytes
            what += f" and accelerator memory of {request.accelerator_bytes} bytes, which is the same memory"
    else:
        budget = shape.budget(0, batch=batch, context=request.context, config=OffloadConfig())
        neurons = sum(layer.intermediate * layer.neuron_bytes for layer in shape.layers)
        needed = budget.fixed + budget.predictors + budget.kv + neurons
        what = f"everything in memory, for batches to {batch} of {request.context} tokens"
        fix = "Pack the model and plan it with a budget, or for fewer sequences (batches) or a shorter context."
    if needed > request.hardware.memory_bytes:
        expected = f"at most {request.hardware.memory_bytes} bytes, which {request.hardware.name} has"
        argument(request.budget_bytes, what, fix).wrong(expected, f"{needed} bytes")
