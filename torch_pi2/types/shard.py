"""``Shard``: the part of every layer's neurons that one of several machines has (docs/DISTRIBUTED.md).

A layer's neurons are partitioned in whole chunks. Each chunk has its own partial sum (design D5); the sums of all
machines, added in the order of chunks, have the bits of one machine. Alternatively whole layers are partitioned, as
stages of a pipeline: then a machine has all chunks of a layer, or none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from torch_pi2.base.fields import Field, check_fields, limited
from torch_pi2.ops.constants import chunk_neurons
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import MOST_SIZE, block_of, row_of_blocks

#: Most machines; by neurons also at most the number of chunks of a layer, 16.
MOST_RANKS = 64
#: See :class:`GroupConfig`.
REDUCTIONS = ("chunks", "ranks")


@dataclass(frozen=True)
class GroupConfig:
    """How processes that each have a shard compute one model together.

    Attributes:
        reduction: how partial sums of a layer are added. ``chunks``: chunk by chunk, with the bits of one machine,
            except for mixtures of experts and calls with 12 tokens or more. ``ranks``: one sum per machine, which sends
            fewer bytes. Either way all processes get the same bits in every run.
        timeout_s: a process that does not answer for this long counts as lost. One that has ended is noticed at once.

    Raises:
        ConfigError: an invalid setting.
    """

    reduction: str = limited(choices=REDUCTIONS, default=REDUCTIONS[0])
    timeout_s: float = limited(above=True, default=120.0)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ShardLayer:
    """Part of a layer: ``whole``, neurons on all machines; ``chunks``, ascending numbers of local ones, or none."""

    whole: int
    chunks: tuple[int, ...]

    @property
    def chunk(self) -> int:
        """Neurons per chunk; the last one may have fewer."""
        return chunk_neurons(self.whole)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Plan positions ``[first, last)`` of the local neurons, ascending; adjacent chunks are merged."""
        found: list[tuple[int, int]] = []
        for chunk in self.chunks:
            first, last = chunk * self.chunk, min((chunk + 1) * self.chunk, self.whole)
            if found and found[-1][1] == first:
                first = found.pop()[0]
            found.append((first, last))
        return found

    @property
    def neurons(self) -> int:
        """Number of local neurons."""
        return sum(last - first for first, last in self.ranges)

    def positions(self) -> torch.Tensor:
        """int64 ``[neurons]``: plan positions of the local neurons."""
        return torch.cat([torch.arange(first, last) for first, last in self.ranges])


@dataclass(frozen=True)
class Shard:
    """The part of a model that machine ``rank`` of ``ranks`` has; ``layers``: all of the model's, by site key."""

    rank: int
    ranks: int
    layers: Mapping[str, ShardLayer]

    @property
    def whole(self) -> int:
        """Neurons of the model on all machines."""
        return sum(mine.whole for mine in self.layers.values())

    @cached_property
    def by_layers(self) -> bool:
        """Whether this is a pipeline stage: whole layers, with the rest of their blocks."""
        return not all(mine.chunks for mine in self.layers.values())

    def block(self, name: str) -> int | None:
        """Number of the decoder block with a tensor or module; None: it is in no block with neurons."""
        prefix, _, number = block_of(name).rpartition(".")
        return int(number) if number.isdecimal() and prefix == self._blocks[0] else None

    @cached_property
    def _blocks(self) -> tuple[str, int, int | None]:
        """Prefix of blocks, first local one, end of local ones (None: the model's); no neurons: the stage before."""
        keys, own = [*self.layers], [bool(mine.chunks) for mine in self.layers.values()]
        prefix, _, first = block_of(keys[own.index(True)]).rpartition(".")
        after = len(own) - own[::-1].index(True)
        last = int(block_of(keys[after]).rpartition(".")[2]) if after < len(own) else None
        return prefix, int(first) if self.rank else 0, last

    def has(self, name: str) -> bool:
        """Whether a tensor or module is local. All shards have those outside blocks."""
        block = self.block(name) if self.by_layers else None
        _, first, last = self._blocks if block is not None else ("", 0, None)
        return block is None or first <= block < (block + 1 if last is None else last)

    def blocks(self, count: int) -> range:
        """Numbers of the local blocks, of ``count`` in the model."""
        if not self.by_layers:
            return range(count)
        _, first, last = self._blocks
        return range(first, count if last is None else last)

    def layer(self, layer: LayerPlan) -> LayerPlan:
        """The local part of ``layer``, as a layer with neurons numbered in plan order."""
        mine = self.layers[layer.site.key]
        at = mine.positions()
        own = None if layer.thresholds is None else layer.thresholds[layer.order.long()][at]
        site, n_hot = replace(layer.site, intermediate=len(at)), int((at < layer.n_hot).sum())
        return replace(layer, site=site, n_hot=n_hot, order=torch.arange(len(at), dtype=torch.int32), thresholds=own)

    def plan(self, plan: Plan) -> Plan:
        """The local part of ``plan``, without its hardware plan for one machine."""
        here = [layer for layer in plan.layers if self.layers[layer.site.key].chunks]
        return Plan([self.layer(layer) for layer in here], plan.model_hash, plan.made_by)

    def to_json(self) -> str:
        """For a store's metadata (docs/STORE.md)."""
        layers = {key: {"neurons": mine.whole, "chunks": mine.chunks} for key, mine in self.layers.items()}
        return json.dumps({"rank": self.rank, "ranks": self.ranks, "layers": layers})

    @staticmethod
    def from_json(field: Field) -> "Shard":
        """Inverse of :meth:`to_json`. Raises ``field.error``: invalid."""
        field.names(("rank", "ranks", "layers"))
        ranks = field.at("ranks").whole(2, MOST_RANKS)
        layers = {key: _layer(one) for key, one in field.at("layers").each().items()}
        shard = Shard(field.at("rank").whole(0, ranks - 1), ranks, layers)
        if shard.by_layers:
            _check_stage(shard, field.at("layers"))
        elif any(-(-mine.whole // mine.chunk) < ranks for mine in layers.values()):
            field.at("ranks").wrong("no more machines than each layer has chunks")
        return shard


def _check_stage(shard: Shard, field: Field) -> None:
    """Raises ``field.error``: not whole layers of consecutive blocks."""
    numbers, layers = row_of_blocks(shard.layers), [*shard.layers.values()]
    own = [i for i, mine in enumerate(layers) if mine.chunks]
    whole = all(layers[i].neurons == layers[i].whole for i in own)
    if own and whole and numbers is not None:
        first, last = numbers[own[0]], numbers[own[-1]]
        if own == [i for i, number in enumerate(numbers) if first <= number <= last]:
            return
    field.wrong("some chunks of every layer, or all of those of blocks that follow each other")


def _layer(field: Field) -> ShardLayer:
    field.names(("neurons", "chunks"))
    whole = field.at("neurons").whole(1, MOST_SIZE)
    count = -(-whole // chunk_neurons(whole))
    chunks = [chunk.whole(0, count - 1) for chunk in field.at("chunks").items()]
    if chunks != sorted(set(chunks)):
        field.at("chunks").wrong("ascending numbers of chunks")
    return ShardLayer(whole, tuple(chunks))
