"""``deal_out``: which of several machines has what of a model, some neurons of every layer or whole layers, and why.

PowerInfer-2 has one phone. prima.cpp (arXiv 2504.08791) gives layers to unlike machines by an integer program over
their memory, drives and links; here both ways are solved with the cost model of one machine, and the faster one wins:
layers by dynamic programming, neurons by moving chunks from one machine to another while a step gets faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from torch_pi2.types.shard import MOST_RANKS

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

#: Ways to deal out a model; the first two are ``GroupConfig.reduction`` of shards of neurons.
ATTENTION = ("whole",)
WAYS = ("chunks", "ranks", "layers")
#: Of stages that take as long in all, those of equal length are better (prompts): a stage of 100 ms counts 0.1 % more.
_EVEN = 1e-5
_FLOAT = 4


@dataclass(frozen=True)
class Member:
    """A machine: its profile (docs/HARDWARE.md), and the memory that it has for the model; None: for all of it."""

    hardware: Hardware
    budget_bytes: int | None = None


@dataclass(frozen=True)
class Dealt:
    """A model dealt out in one way, and what a decoding step is predicted to take.

    Attributes:
        way: of ``WAYS``. attention: of neurons, see ``GroupConfig``. shares: by machine, chunks of each layer, or
            decoder blocks. ms: of a step, ``link_ms`` of it for exchanges. sent_bytes: by a machine in a step, to each
            of the others (``layers``: to the next).
        members: by machine, ``ms`` of its own by part of :data:`torch_pi2.planner.cost.PARTS`, ``memory_bytes``, and
            ``in_memory``, the share of its neurons that its cache holds.
    """

    way: str
    shares: tuple[int, ...]
    ms: float
    link_ms: float
    sent_bytes: float
    members: tuple[dict[str, Any], ...] = field(repr=False)
    batch: int = 1
    attention: str = ATTENTION[0]

    @property
    def name(self) -> str:
        return name_of(self.way, self.attention)

    @property
    def by(self) -> str:
        """Of :func:`torch_pi2.pack`."""
        return "layers" if self.way == "layers" else "neurons"

    @property
    def tokens_per_s(self) -> float:
        return self.batch * 1e3 / self.ms


def name_of(way: str, attention: str) -> str:
    """Of a way to deal out, in tables and results."""
    return way + (", heads" if attention == "heads" else "")


def read_machines(path: str | Path) -> tuple[list[Member], Link]:
    """Machines and their link, of a file (docs/DISTRIBUTED.md).

    Raises:
        ArtifactError: it is missing, or is no such description. ConfigError: no such hardware, or budget.
    """
    said = Field(parse(read_bytes(path), path), str(path), "See docs/DISTRIBUTED.md, and correct it.")
    said.names(("machines", "link"))
    said.at("link").names(("mbit_per_s", "exchange_us"))
    link = Link(
        *(said.at("link").at(name).number(above=name == "mbit_per_s") for name in ("mbit_per_s", "exchange_us"))
    )
    members = []
    for one in said.at("machines").items(2, MOST_RANKS):
        one.names(("hardware",), ("budget",))
        name, budget = one.at("hardware").text(), one.value.get("budget")
        beside = Path(path).parent / name
        hardware = find_hardware(beside if beside.is_file() else name)
        members.append(Member(hardware, None if budget is None else parse_bytes(budget)))
    return members, link


def deal_out(
    shape: ModelShape,
    members: Sequence[Member],
    link: Link,
    *,
    batch: int = 1,
    context: int = 1024,
    costs: dict[Any, Any] | None = None,
) -> list[Dealt]:
    """``shape`` dealt out to ``members`` in each way that is possible, the fastest step of ``batch`` tokens first.

    Neurons: machines compute a layer side by side and wait for the slowest, then all partial sums go to all (a ring).
    With attention by heads each has keys and values of as many as its share of the neurons, at least one, and their
    outputs go to all before the linear layer of outputs, which each computes whole: one exchange of a layer more.
    Layers: one machine after another computes, and hands on hidden states. Blocks of the same sizes count as alike.

    Args:
        costs: what calls for this shape, batch and context have found, and this one adds to.

    Raises:
        ConfigError: not 2 to 64 machines, a link that makes no sense, or no way in which every machine has memory for
            what it is given.
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
    asked = _Asked(shape, tuple(members), link, batch, context, {} if costs is None else costs)
    by_chunk = all(layer.experts == 1 for layer in shape.layers)  # experts' sums are by machine in any case
    attention = ATTENTION if _divisible(shape, len(members)) else ATTENTION[:1]
    ways = [_neurons(asked, way, of) for way in WAYS[:2] if by_chunk or way == "ranks" for of in attention]
    found = [dealt for dealt in (*ways, _layers(asked)) if dealt]
    if not found:
        raise ConfigError(
            f"memory of {len(members)} machines",
            expected="room on each of them for what is not a neuron, whichever way the model is dealt out",
            found=", ".join("any" if m.budget_bytes is None else f"{m.budget_bytes / 2**20:.0f} MiB" for m in members),
            fix="Give them more, lower the context, or use more machines.",
        )
    return sorted(found, key=lambda dealt: dealt.ms)


#: Chunks of every layer, and key-value heads; None: all.
_Part = tuple[int, int | None]


@dataclass
class _Asked:
    """What is dealt out, and what parts of it cost on which machine."""

    shape: ModelShape
    members: tuple[Member, ...]
    link: Link
    batch: int = 1
    context: int = 1024
    costs: dict[Any, Any] = field(default_factory=dict)

    def cost(self, member: int, what: Any, part: Callable[[], ModelShape]) -> Cost | None:
        """Of ``part()``, which ``what`` names, on a machine; None: it has no memory for it."""
        machine, key = self.members[member], self._key(member, what)
        if key not in self.costs:
            own = part()
            request = Request(own, machine.hardware, machine.budget_bytes, batches=(self.batch,), context=self.context)
            hot = tuple(layer.base_hot for layer in own.layers)
            fits = machine.budget_bytes is None or machine.budget_bytes >= request.smallest()
            self.costs[key] = request.cost(self.batch, hot) if fits else None
        found: Cost | None = self.costs[key]
        return found

    def _key(self, member: int, what: Any) -> Any:
        machine = self.members[member]
        return id(machine.hardware), machine.budget_bytes, what

    def neurons(self, member: int, part: _Part) -> Cost | None:
        """Of so many chunks and heads (:func:`neurons_of`)."""
        return self.cost(member, part, partial(neurons_of, self.shape, *part))

    def phases(self, member: int, part: _Part, cost: Cost) -> list[float]:
        """See :func:`_phases_ms`."""
        key = self._key(member, ("phases", part))
        if key not in self.costs:
            self.costs[key] = _phases_ms(cost, self.shape, part[1])
        found: list[float] = self.costs[key]
        return found

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Of each block: a number, the same for blocks that cost the same."""
        numbers_of: dict[tuple[int, ...], int] = {}
        return tuple(numbers_of.setdefault(sizes, len(numbers_of)) for sizes in _block_sizes(self.shape))

    def stage(self, member: int, first: int, last: int) -> Cost | None:
        """Of the blocks ``[first, last)``, on the last machine with the head."""
        head = member == len(self.members) - 1
        what = self.kinds[first:last], head
        return self.cost(member, what, lambda: stage_of(self.shape, first, last, head=head))

    @property
    def logits_bytes(self) -> float:
        return _FLOAT * self.batch * numbers(self.shape.head_kernel, self.shape.head_bytes) / self.shape.hidden


def predicted(
    way: str,
    shares: Sequence[int],
    shape: ModelShape,
    members: Sequence[Member],
    link: Link,
    *,
    attention: str = "whole",
    **how: Any,
) -> Dealt | None:
    """As :func:`deal_out`, of one ``way`` and with these ``shares``; None: a machine has no memory for its own.

    ``attention="heads"``: of a model whose heads can be dealt out so.
    """
    asked = _Asked(shape, tuple(members), link, **how)
    return _of_layers(asked, [*accumulate(shares)]) if way == "layers" else _of_neurons(asked, way, attention, shares)


def _facts(cost: Cost, shape: ModelShape) -> dict[str, Any]:
    every = sum(layer.intermediate * layer.neuron_bytes for layer in shape.layers)
    cached = cost.memory["resident"] + cost.memory["cold"]
    return {"ms": cost.ms, "memory_bytes": cost.memory_bytes, "in_memory": min(1.0, cached / every)}


# --- some neurons of every layer ---


def neurons_of(shape: ModelShape, chunks: int, heads: int | None = None) -> ModelShape:
    """What a machine with so many of every layer's chunks computes: of neurons an even part, of all else everything.

    ``heads``: of every layer's attention, queries, keys and values of so many key-value heads; None: of all.
    """
    parts: dict[int, LayerShape] = {}
    for layer in shape.layers:
        if id(layer) not in parts:
            parts[id(layer)] = _part(layer, chunks, heads)
    layers = tuple(parts[id(layer)] for layer in shape.layers)
    away = sum(y.attention_bytes for y in shape.layers) - sum(y.attention_bytes for y in layers)
    return replace(shape, layers=layers, fixed_bytes=shape.fixed_bytes - away)


def _divisible(shape: ModelShape, machines: int) -> bool:
    """Whether each machine can have some heads of every layer's attention."""
    return all(y.heads is not None and y.heads.number >= machines for y in shape.layers if y.block)


def _chunks(layer: LayerShape) -> int:
    return -(-layer.intermediate // chunk_neurons(layer.intermediate))


def _part(layer: LayerShape, chunks: int, heads: int | None) -> LayerShape:
    size = max(1, round(layer.intermediate * chunks / _chunks(layer)))
    at = np.arange(size) * layer.intermediate // size
    kept = size / layer.intermediate
    if layer.rank:  # what sees the input is computed by each machine
        kept = (layer.hidden + size) / (layer.hidden + layer.intermediate)
    attention: dict[str, Any] = {}
    if layer.heads is not None and heads is not None:
        own = round(layer.heads.nbytes * heads / layer.heads.number)
        attention = {
            "attention_bytes": layer.attention_bytes - layer.heads.nbytes + own,
            "kv_bytes": layer.kv_bytes * heads // layer.heads.number,
            "heads": layer.heads._replace(number=heads, nbytes=own),
        }
    return replace(
        layer,
        intermediate=size,
        base_hot=int((at < layer.base_hot).sum()),
        predictor_bytes=round(layer.predictor_bytes * kept),
        frequencies=tuple((tokens, f_I[at]) for tokens, f_I in layer.frequencies),
        **attention,
    )


def _neurons(asked: _Asked, way: str, attention: str) -> Dealt | None:
    """None: more machines than chunks, or one has no memory for its part, however few neurons it has."""
    count, total = len(asked.members), min(map(_chunks, asked.shape.layers))
    if count > total:
        return None
    best = [total // count + (rank < total % count) for rank in range(count)]
    while True:
        moves = [(a, b) for a in range(count) for b in range(count) if a != b and best[a] > 1]
        tried = [[n - (rank == a) + (rank == b) for rank, n in enumerate(best)] for a, b in moves]
        better = min([best, *tried], key=partial(_rated, asked, way, attention))
        if better is best:  # the first of equals
            return _of_neurons(asked, way, attention, best)
        best = better


def _rated(asked: _Asked, way: str, attention: str, shares: Sequence[int]) -> tuple[int, float]:
    """Less is better: chunks on machines that have no memory for their part, milliseconds."""
    costs = [asked.neurons(rank, part) for rank, part in enumerate(_parts(asked.shape, attention, shares))]
    without = sum(n for n, cost in zip(shares, costs, strict=True) if cost is None)
    return without, math.inf if without else sum(_neurons_ms(asked, way, attention, shares))


def _parts(shape: ModelShape, attention: str, shares: Sequence[int]) -> list[_Part]:
    """What each machine has."""
    return [(share, None) for share in shares]


def _neurons_ms(asked: _Asked, way: str, attention: str, shares: Sequence[int]) -> tuple[float, float]:
    """Of a step: to compute it, and for exchanges; every machine has memory for its part."""
    parts, last = [], 0.0
    for rank, part in enumerate(_parts(asked.shape, attention, shares)):
        cost = asked.neurons(rank, part)
        assert cost is not None
        parts.append(asked.phases(rank, part, cost))
        last = max(last, cost.ms["head"])
    hops, trees = len(shares) - 1, math.ceil(math.log2(len(shares)))
    link_ms = sum(times * asked.link.ms(each, hops) for times, each in _exchanges(asked, way, attention, shares))
    return sum(map(max, zip(*parts, strict=True))) + last, link_ms + asked.link.ms(asked.logits_bytes, trees)


def _exchanges(asked: _Asked, way: str, attention: str, shares: Sequence[int]) -> list[tuple[float, float]]:
    """How often in a step all get from all how many bytes."""
    shape = asked.shape
    number, sums = _FLOAT * asked.batch, max(shares) if way == "chunks" else 1
    found: list[tuple[float, float]] = [(sum(1 / y.experts for y in shape.layers), number * shape.hidden * sums)]
    if attention == "heads":
        most = max(heads or 0 for _, heads in _parts(shape, attention, shares))
        found += [(1, number * y.heads.width * most / y.heads.number) for y in shape.layers if y.heads is not None]
    return found


def _of_neurons(asked: _Asked, way: str, attention: str, shares: Sequence[int]) -> Dealt | None:
    """With so many chunks on each machine; None: one has no memory for them."""
    parts = _parts(asked.shape, attention, shares)
    costs = [asked.neurons(rank, part) for rank, part in enumerate(parts)]
    if None in costs:
        return None
    computing, link_ms = _neurons_ms(asked, way, attention, shares)
    members = tuple(
        _facts(cost, neurons_of(asked.shape, *part)) for cost, part in zip(costs, parts, strict=True) if cost
    )
    sent = sum(times * each for times, each in _exchanges(asked, way, attention, shares))
    return Dealt(way, tuple(shares), computing + link_ms, link_ms, sent, members, asked.batch, attention)


def _phases_ms(cost: Cost, shape: ModelShape, heads: int | None) -> list[float]:
    """Milliseconds of what is between exchanges: of layers; with ``heads``, of these and of the rest of each."""
    found = []
    for row, layer in zip(cost.layers, shape.layers, strict=True):
        ms, before = sum(row[part] for part in cost.ms if part in row), 0.0
        if layer.heads is not None and heads is not None:
            own = layer.heads.nbytes * heads / layer.heads.number
            before = row["sdpa"] + row["attention"] * own / (layer.attention_bytes - layer.heads.nbytes + own)
        found += [before, ms - before]
    return found


# --- whole layers ---


def stage_of(shape: ModelShape, first: int, last: int, *, head: bool) -> ModelShape:
    """The decoder blocks ``[first, last)`` alone; ``head``: and logits."""
    starts = [i for i, layer in enumerate(shape.layers) if layer.block] + [len(shape.layers)]
    layers = shape.layers[starts[first] : starts[last]]
    away = sum(y.attention_bytes for y in shape.layers) - sum(y.attention_bytes for y in layers)
    return replace(
        shape, layers=layers, fixed_bytes=shape.fixed_bytes - away, head_bytes=shape.head_bytes if head else 0
    )


def _layers(asked: _Asked) -> Dealt | None:
    """None: fewer blocks than machines, or a machine has no memory for a block."""
    blocks, count = len(asked.kinds), len(asked.members)
    # best[b]: of the first b blocks on the machines so far, milliseconds and where stages end
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for rank in range(count):
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (ms, ends) in best.items():
            for last in [blocks] if rank == count - 1 else range(first + 1, blocks):
                own = asked.stage(rank, first, last) if last > first else None
                if own is not None:
                    rated = own.total_ms * (1 + _EVEN * own.total_ms)
                    after[last] = min(after.get(last, (math.inf, ())), (ms + rated, (*ends, last)))
        best = after
    if blocks not in best:
        return None
    return _of_layers(asked, best[blocks][1])


def _of_layers(asked: _Asked, ends: Sequence[int]) -> Dealt | None:
    """Stages that end after so many blocks; None: a machine has no memory for its own."""
    count, starts = len(ends), (0, *ends[:-1])
    kv_bytes = 2 if asked.shape.kv_dtype != "float32" else _FLOAT
    each = kv_bytes * asked.batch * asked.shape.hidden
    link_ms = asked.link.ms(each, count - 1) + asked.link.ms(asked.logits_bytes, math.ceil(math.log2(count)))
    members, computing = [], 0.0
    for rank, (first, last) in enumerate(zip(starts, ends, strict=True)):
        own = asked.stage(rank, first, last)
        if own is None:
            return None
        computing += own.total_ms
        members.append(_facts(own, stage_of(asked.shape, first, last, head=rank == count - 1)))
    shares = tuple(last - first for first, last in zip(starts, ends, strict=True))
    return Dealt("layers", shares, computing + link_ms, link_ms, each, tuple(members), asked.batch)


def _block_sizes(shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    """Of each block, what its cost depends on but for how often its neurons fire."""
    found: list[tuple[int, ...]] = []
    for layer in shape.layers:
        about = layer.intermediate, layer.neuron_bytes, layer.predictor_bytes, layer.base_hot
        if layer.block:
            found.append((layer.attention_bytes, *about))
        else:
            found[-1] += about
    return tuple(found)
