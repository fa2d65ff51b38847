"""``plan_partition``: which part of a model each of several machines should have, and how fast a step would be.

prima.cpp (arXiv 2504.08791) assigns layers to unlike machines by an integer program over their memory, drives and
links. Here both partitions are planned with the cost model of one machine: layers by dynamic programming, neurons by
moving chunks from one machine to another as long as a step becomes faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torch_pi2.base.fields import Field
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.base.units import parse_bytes
from torch_pi2.errors import ConfigError
from torch_pi2.machine.find import find_hardware
from torch_pi2.machine.link import Link
from torch_pi2.ops.constants import chunk_neurons
from torch_pi2.planner.cost import Cost
from torch_pi2.planner.model_shape import LayerShape, ModelShape, numbers
from torch_pi2.planner.request import Request
from torch_pi2.types.shard import MOST_RANKS, REDUCTIONS

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

#: By neurons, with either reduction of ``GroupConfig``; or by layers.
WAYS = (*REDUCTIONS, "layers")
#: Among stages that take equally long in all, those of equal length are better for prompts: a stage of 100 ms counts
#: 0.1 % more.
_PREFER_EQUAL = 1e-5
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Member:
    """A machine: its profile (docs/HARDWARE.md), and the memory that it has for the model; None: enough for all."""

    hardware: Hardware
    budget_bytes: int | None = None


@dataclass(frozen=True)
class PartitionPlan:
    """A model partitioned in one way, and the predicted time of a decoding step of one sequence.

    Attributes:
        way: of ``WAYS``. shares: by machine, chunks of each layer, or decoder blocks.
        ms: of a step, ``link_ms`` of it for exchanges. sent_bytes: by a machine in a step, to each of the others
            (``layers``: to the next one).
        members: by machine, its ``ms`` by :data:`torch_pi2.planner.cost.PARTS`, ``memory_bytes``, and ``in_memory``,
            the share of its neurons that its cache holds.
    """

    way: str
    shares: tuple[int, ...]
    ms: float
    link_ms: float
    sent_bytes: float
    members: tuple[dict[str, Any], ...] = field(repr=False)

    @property
    def by(self) -> str:
        """The argument of :func:`torch_pi2.pack`."""
        return "layers" if self.way == "layers" else "neurons"

    @property
    def tokens_per_s(self) -> float:
        return 1e3 / self.ms


def read_machines(path: str | Path) -> tuple[list[Member], Link]:
    """The machines and the link that a file describes (docs/DISTRIBUTED.md).

    Raises:
        ArtifactError: it is missing, or is no such description. ConfigError: no such hardware, or budget.
    """
    described = Field(parse(read_bytes(path), path), str(path), "See docs/DISTRIBUTED.md, and correct it.")
    described.names(("machines", "link"))
    described.at("link").names(("mbit_per_s", "exchange_us"))
    link = Link(
        *(described.at("link").at(name).number(above=name == "mbit_per_s") for name in ("mbit_per_s", "exchange_us"))
    )
    members = []
    for one in described.at("machines").items(2, MOST_RANKS):
        one.names(("hardware",), ("budget",))
        name, budget = one.at("hardware").text(), one.value.get("budget")
        beside = Path(path).parent / name
        hardware = find_hardware(beside if beside.is_file() else name)
        members.append(Member(hardware, None if budget is None else parse_bytes(budget)))
    return members, link


def plan_partition(
    shape: ModelShape, members: Sequence[Member], link: Link, *, context: int = 1024
) -> list[PartitionPlan]:
    """``shape`` partitioned among ``members`` in each way that is possible, the fastest step first.

    By neurons, machines compute a layer side by side, wait for the slowest, and send partial sums to each other in a
    ring. By layers, one machine after another computes and hands on hidden states.

    Raises:
        ConfigError: not 2 to 64 machines, a link that makes no sense, or no way in which every machine has enough
            memory for its part.
    """
    if (
        not 2 <= len(members) <= MOST_RANKS
        or not 0 < link.mbit_per_s < math.inf
        or not 0 <= link.exchange_us < math.inf
    ):
        raise ConfigError(
            "machines",
            expected=f"2 to {MOST_RANKS} machines, a link of more than 0 Mbit/s, an exchange of 0 us or more",
            found=f"{len(members)}, {link.mbit_per_s:g} Mbit/s, {link.exchange_us:g} us",
            fix="Correct the description.",
        )
    task = Task(shape, tuple(members), link, context)
    by_chunk = all(layer.experts == 1 for layer in shape.layers)  # sums of experts are by machine in any case
    plans = [_best_neurons(task, way) for way in REDUCTIONS if by_chunk or way == "ranks"] + [_best_layers(task)]
    possible = [plan for plan in plans if plan is not None]
    if not possible:
        raise ConfigError(
            f"memory of {len(members)} machines",
            expected="room on each of them for what is not a neuron, whichever way the model is partitioned",
            found=", ".join("any" if m.budget_bytes is None else f"{m.budget_bytes / 2**20:.0f} MiB" for m in members),
            fix="Give them more, lower the context, or use more machines.",
        )
    return sorted(possible, key=lambda plan: plan.ms)


class _Part(NamedTuple):
    """A step of a part of the model on a machine: its cost, milliseconds by layer, and bytes of its neurons."""

    cost: Cost
    layer_ms: list[float]
    neuron_bytes: int


@dataclass
class Task:
    """A model, machines, and the costs of parts on them that have been predicted."""

    shape: ModelShape
    members: tuple[Member, ...]
    link: Link
    context: int = 1024
    _parts: dict[Any, _Part | None] = field(default_factory=dict)

    def _part(self, rank: int, name: Any, make: Callable[[], ModelShape]) -> _Part | None:
        """``make()``, known by ``name``, on a machine; None: its memory is too small."""
        member = self.members[rank]
        key = id(member.hardware), member.budget_bytes, name
        if key not in self._parts:
            own = make()
            request = Request(own, member.hardware, member.budget_bytes, batches=(1,), context=self.context)
            fits = member.budget_bytes is None or member.budget_bytes >= request.smallest()
            self._parts[key] = None
            if fits:
                cost = request.cost(1, tuple(layer.base_hot for layer in own.layers))
                layer_ms = [sum(row[part] for part in cost.ms if part in row) for row in cost.layers]
                neuron_bytes = sum(layer.intermediate * layer.neuron_bytes for layer in own.layers)
                self._parts[key] = _Part(cost, layer_ms, neuron_bytes)
        return self._parts[key]

    def _logits_ms(self) -> float:
        """Sending logits to all, in a tree."""
        size = _FLOAT_BYTES * numbers(self.shape.head_kernel, self.shape.head_bytes) / self.shape.hidden
        return self.link.ms(size, math.ceil(math.log2(len(self.members))))

    def by_neurons(self, way: str, shares: Sequence[int]) -> PartitionPlan | None:
        """With this many chunks of each layer on each machine; None: one has too little memory."""
        parts = [part for rank, share in enumerate(shares) if (part := self._neurons(rank, share)) is not None]
        if len(parts) < len(shares):
            return None
        slowest = map(max, zip(*(part.layer_ms for part in parts), strict=True))
        computing = sum(slowest) + max(part.cost.ms["head"] for part in parts)
        exchanges = sum(1 / layer.experts for layer in self.shape.layers)
        each = _FLOAT_BYTES * self.shape.hidden * (max(shares) if way == "chunks" else 1)
        link_ms = exchanges * self.link.ms(each, len(shares) - 1) + self._logits_ms()
        return _plan(way, shares, computing, link_ms, exchanges * each, parts)

    def _neurons(self, rank: int, chunks: int) -> _Part | None:
        return self._part(rank, chunks, partial(neurons_of, self.shape, chunks))

    def rating(self, way: str, shares: Sequence[int]) -> tuple[int, float]:
        """Less is better: chunks on machines with too little memory, milliseconds."""
        if (plan := self.by_neurons(way, shares)) is not None:
            return 0, plan.ms
        return sum(share for rank, share in enumerate(shares) if self._neurons(rank, share) is None), math.inf

    def by_layers(self, blocks: Sequence[int]) -> PartitionPlan | None:
        """With this many decoder blocks on each machine, in order; None: one has too little memory."""
        ends = [*accumulate(blocks)]
        stages = [self.stage(rank, last - n, last) for rank, (n, last) in enumerate(zip(blocks, ends, strict=True))]
        parts = [part for part in stages if part is not None]
        if len(parts) < len(blocks):
            return None
        each = (2 if self.shape.kv_dtype != "float32" else _FLOAT_BYTES) * self.shape.hidden
        link_ms = self.link.ms(each, len(blocks) - 1) + self._logits_ms()
        return _plan("layers", blocks, sum(part.cost.total_ms for part in parts), link_ms, each, parts)

    def stage(self, rank: int, first: int, last: int) -> _Part | None:
        """The blocks ``[first, last)``; with the head on the last machine."""
        head = rank == len(self.members) - 1
        starts = self._starts[first], self._starts[last]
        name = tuple(map(_size, self.shape.layers[slice(*starts)])), head
        return self._part(rank, name, lambda: stage_of(self.shape, *starts, head=head))

    @cached_property
    def _starts(self) -> list[int]:
        """The first layer of each block, and the number of layers."""
        return [i for i, layer in enumerate(self.shape.layers) if layer.block] + [len(self.shape.layers)]

    @property
    def blocks(self) -> int:
        return len(self._starts) - 1


def _plan(
    way: str, shares: Sequence[int], computing: float, link_ms: float, sent: float, parts: Sequence[_Part]
) -> PartitionPlan:
    members = tuple(
        {
            "ms": cost.ms,
            "memory_bytes": cost.memory_bytes,
            "in_memory": min(1.0, (cost.memory["resident"] + cost.memory["cold"]) / neuron_bytes),
        }
        for cost, _, neuron_bytes in parts
    )
    return PartitionPlan(way, tuple(shares), computing + link_ms, link_ms, sent, members)


def _best_neurons(task: Task, way: str) -> PartitionPlan | None:
    """None: more machines than chunks, or one has too little memory however few neurons it has."""
    count, total = len(task.members), min(map(_chunks, task.shape.layers))
    if count > total:
        return None
    best = tuple(total // count + (rank < total % count) for rank in range(count))
    while True:
        moves = [(a, b) for a in range(count) for b in range(count) if a != b and best[a] > 1]
        tried = [tuple(n - (rank == a) + (rank == b) for rank, n in enumerate(best)) for a, b in moves]
        better = min([best, *tried], key=partial(task.rating, way))
        if better == best:
            return task.by_neurons(way, best)
        best = better


def _best_layers(task: Task) -> PartitionPlan | None:
    """None: fewer blocks than machines, or a machine has too little memory for a block."""
    count = len(task.members)
    # by the number of blocks on the machines so far: milliseconds, and blocks on each
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for rank in range(count):
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (ms, blocks) in best.items():
            for last in [task.blocks] if rank == count - 1 else range(first + 1, task.blocks):
                own = task.stage(rank, first, last) if last > first else None
                if own is not None:
                    rated = own.cost.total_ms * (1 + _PREFER_EQUAL * own.cost.total_ms)
                    after[last] = min(after.get(last, (math.inf, ())), (ms + rated, (*blocks, last - first)))
        best = after
    return task.by_layers(best[task.blocks][1]) if task.blocks in best else None


# --- parts of a model ---


def _chunks(layer: LayerShape) -> int:
    return -(-layer.intermediate // chunk_neurons(layer.intermediate))


def _size(layer: LayerShape) -> tuple[int, ...]:
    """Layers with the same sizes cost the same, except for how often their neurons fire."""
    attention = layer.attention_bytes if layer.block else -1
    return attention, layer.intermediate, layer.neuron_bytes, layer.predictor_bytes, layer.base_hot


def neurons_of(shape: ModelShape, chunks: int) -> ModelShape:
    """The part with this many chunks of every layer: an even sample of its neurons, and everything else."""

    def part(layer: LayerShape) -> LayerShape:
        size = max(1, round(layer.intermediate * chunks / _chunks(layer)))
        at = np.arange(size) * layer.intermediate // size
        kept = size / layer.intermediate
        if layer.rank:  # every machine computes the half of the predictor that sees the input
            kept = (layer.hidden + size) / (layer.hidden + layer.intermediate)
        return replace(
            layer,
            intermediate=size,
            base_hot=int((at < layer.base_hot).sum()),
            predictor_bytes=round(layer.predictor_bytes * kept),
            frequencies=tuple((tokens, f_I[at]) for tokens, f_I in layer.frequencies),
        )

    parts = {id(layer): layer for layer in shape.layers}  # layers may be the same object, which costs are kept by
    parts = {name: part(layer) for name, layer in parts.items()}
    return replace(shape, layers=tuple(parts[id(layer)] for layer in shape.layers))


def stage_of(shape: ModelShape, first: int, last: int, *, head: bool) -> ModelShape:
    """The layers ``[first, last)``; ``head``: and logits."""
    layers = shape.layers[first:last]
    elsewhere = sum(y.attention_bytes for y in shape.layers) - sum(y.attention_bytes for y in layers)
    return replace(
        shape, layers=layers, fixed_bytes=shape.fixed_bytes - elsewhere, head_bytes=shape.head_bytes if head else 0
    )
