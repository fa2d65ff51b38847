"""Partitions a model among machines, and handles the folders of their shards, stores named ``rank-0-of-2`` and so on.

By neurons, a machine has chunks of each layer, by layers whole decoder blocks, in proportion to its share. Metadata and
superblock of a shard list its chunks of each layer (docs/STORE.md). Plan, predictors and statistics are those of the
complete model. A shard by layers has no weights of other blocks.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.fields import Field, argument
from torch_pi2.base.tensorfile import Spec
from torch_pi2.errors import ConfigError
from torch_pi2.ops.constants import chunk_neurons
from torch_pi2.store.folder import SHARD_NAME
from torch_pi2.store.storefile import StoreReader
from torch_pi2.store.weights import QuantizedWeights
from torch_pi2.types.method import PREDICTED
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.shard import MOST_RANKS, Shard, ShardLayer
from torch_pi2.types.site import FFNSite, block_of, row_of_blocks

#: Tensors with one number per neuron.
_BY_NEURON = ("bias_gate", "bias_up")
#: Metadata with one entry per module.
_BY_MODULE = {"linears", "formats", "sites"}


def partition_neurons(plan: Plan, ranks: int, shares: Sequence[float] | None = None) -> list[Shard]:
    """The shard of each of ``ranks`` machines: chunks of each layer in proportion to ``shares`` (default: equal). The
    chunks read most (the first ones, of the most frequent neurons) are spread evenly. Raises ConfigError: not 2 to 64
    machines, not one positive share for each, or more machines than a layer has chunks.
    """
    weights = _normalised(ranks, shares)
    chunks = {layer.site.key: _chunks(layer, weights) for layer in plan.layers}
    sizes = {y.site.key: y.site.intermediate for y in plan.layers}
    parts = ({key: ShardLayer(n, chunks[key][rank]) for key, n in sizes.items()} for rank in range(ranks))
    return [Shard(rank, ranks, part) for rank, part in enumerate(parts)]


def partition_layers(plan: Plan, ranks: int, shares: Sequence[float] | None = None) -> list[Shard]:
    """The stage of each of ``ranks`` machines: consecutive decoder blocks, with its share of the neurons' weights.
    Raises ConfigError: as :func:`partition_neurons`; or too few layers, or not one sequence of blocks.
    """
    weights = _normalised(ranks, shares)
    sizes: dict[str, int] = {}
    for layer in plan.layers:
        site, block = layer.site, block_of(layer.site.key)
        sizes[block] = sizes.get(block, 0) + site.intermediate * site.rows_per_neuron * site.hidden
    if row_of_blocks(layer.site.key for layer in plan.layers) is None:
        expected = "feed-forward layers in the blocks of one row, such as model.layers.0, model.layers.1"
        fix = "Partition by neurons, by='neurons'."
        argument(plan, "stages of layers", fix).wrong(expected, ", ".join([*sizes][:3]))
    if len(sizes) < ranks:
        fix = "Use fewer machines, or partition by neurons, by='neurons'."
        argument(ranks, f"{ranks} machines for {len(sizes)} blocks of layers", fix).wrong(f"at most {len(sizes)}")
    before, ends = [0, *accumulate(sizes.values())], list[int]()
    for rank in range(1, ranks):  # as near to its share as possible, at least one block
        target = sum(weights[:rank]) * before[-1]
        free = range(ends[-1] + 1 if ends else 1, len(sizes) - ranks + rank + 1)
        ends.append(min(free, key=lambda end: abs(before[end] - target)))
    rank_of = {block: sum(i >= end for end in ends) for i, block in enumerate(sizes)}

    def on(rank: int, layer: LayerPlan) -> ShardLayer:
        whole = layer.site.intermediate
        own = range(-(-whole // chunk_neurons(whole))) if rank_of[block_of(layer.site.key)] == rank else ()
        return ShardLayer(whole, tuple(own))

    return [Shard(rank, ranks, {y.site.key: on(rank, y) for y in plan.layers}) for rank in range(ranks)]


def _normalised(ranks: int, shares: Sequence[float] | None) -> list[float]:
    """Shares with sum 1. Raises ConfigError, see :func:`partition_neurons`."""
    check_ranks(ranks, shares)
    given = shares or [1.0] * ranks
    parts = [share / max(given) for share in given]  # keeps the sum finite
    return [part / sum(parts) for part in parts]


def check_ranks(ranks: int, shares: Sequence[float] | None) -> None:
    """Raises ConfigError, see :func:`partition_neurons`."""
    if not 2 <= ranks <= MOST_RANKS:
        expected = f"2 to {MOST_RANKS} machines"
        raise ConfigError("ranks", expected=expected, found=str(ranks), fix="Choose another number.")
    if shares is not None and (len(shares) != ranks or not all(0 < share < float("inf") for share in shares)):
        argument(shares, "shares", "Give each machine its share of the neurons, such as 2,1.").wrong(
            f"{ranks} numbers above 0, one for each machine", ", ".join(f"{share:g}" for share in shares) or "none"
        )


def _chunks(layer: LayerPlan, shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Chunks of a layer for each machine: the heaviest first, to the machine with least work for its share."""
    size = chunk_neurons(layer.site.intermediate)
    # the share of its rows that a token reads, by neuron in plan order; hot neurons always fire
    hot = torch.arange(layer.site.intermediate) < layer.n_hot
    rows = layer.site.rows_per_neuron
    decided = 0 if layer.method in PREDICTED else 1  # by its first row
    fires = (decided + (rows - decided) * layer.expected_active) / rows
    reads_I = torch.where(hot, 1.0, fires)
    work = [float(part.sum()) for part in reads_I.split(size)]
    if len(work) < len(shares):
        expected = f"at most {len(work)}, as it has {len(work)} chunks of {size} neurons"
        argument(len(shares), f"{len(shares)} machines for {layer.site.key}", "Use fewer machines.").wrong(expected)
    counts = _apportioned(len(work), shares)
    mine: list[list[int]] = [[] for _ in shares]
    done = [0.0] * len(shares)
    for chunk in sorted(range(len(work)), key=lambda c: (-work[c], c)):
        free = [rank for rank in range(len(shares)) if len(mine[rank]) < counts[rank]]
        rank = min(free, key=lambda r: (done[r] / shares[r], r))
        mine[rank].append(chunk)
        done[rank] += work[chunk]
    return [tuple(sorted(chunks)) for chunks in mine]


def _apportioned(count: int, shares: Sequence[float]) -> list[int]:
    """Divide ``count`` by ``shares`` (sum 1), at least one each."""
    left = count - len(shares)
    exact = [max(0.0, share * count - 1) for share in shares]
    total = sum(exact) or 1.0
    wanted = [left * one / total for one in exact]
    counts = [1 + int(one) for one in wanted]
    by_remainder = sorted(range(len(shares)), key=lambda r: (int(wanted[r]) - wanted[r], r))
    for rank in by_remainder[: count - sum(counts)]:
        counts[rank] += 1
    return counts


def shard_name(rank: int, ranks: int) -> str:
    return f"rank-{rank}-of-{ranks}"


def shards_in(folder: Path) -> dict[int, Path]:
    """Rank -> folder of each shard in ``folder``; empty if it has none."""
    if not folder.is_dir():
        return {}
    named = {path: match for path in sorted(folder.iterdir()) if (match := SHARD_NAME.fullmatch(path.name))}
    sizes = {int(match[2]) for match in named.values()}
    if len(sizes) > 1:
        expected, found = "shards of one number of machines", f"of {' and '.join(map(str, sorted(sizes)))}"
        Field(folder, str(folder), "Remove those of an earlier torch-pi2 pack --ranks.").wrong(expected, found)
    return {int(match[1]): path for path, match in named.items()}


def common_hash(reader: StoreReader) -> str:
    """SHA-256 of the parts common to all shards: plan, predictors, and weights outside neurons."""
    checks = {name: check for name, check in reader.checks.items() if name.rpartition(".")[2] not in _BY_NEURON}
    if reader.shard is not None and reader.shard.by_layers:
        checks = {name: check for name, check in checks.items() if reader.shard.block(name) is None}
    return hashlib.sha256(json.dumps(sorted(checks.items())).encode()).hexdigest()


class ShardView:
    """The weights of ``reader``, a complete model, restricted to ``shard``, for writing its store."""

    def __init__(self, reader: QuantizedWeights, plan: Plan, shard: Shard) -> None:
        self._whole, self._shard = reader, shard
        self._sites = {layer.site.key: layer.site for layer in plan.layers}
        self.specs = {name: spec for name, spec in reader.specs.items() if shard.has(name)}
        for key, mine in shard.layers.items():
            for name in (f"{key}.{what}" for what in _BY_NEURON):
                if name in self.specs:
                    self.specs[name] = Spec((mine.neurons,), self.specs[name].dtype)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the shard's modules."""
        metadata = dict(self._whole.metadata)
        for what in _BY_MODULE & metadata.keys():
            named = json.loads(metadata[what]).items()
            metadata[what] = json.dumps({name: value for name, value in named if self._shard.has(name)})
        return metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def read_neurons(self, site: FFNSite, rows: tuple[int, int]) -> torch.Tensor:
        """Neurons ``[first, last)`` of the shard's layer ``site``."""
        whole, parts, at = self._sites[site.key], list[torch.Tensor](), 0
        for first, last in self._shard.layers[site.key].ranges:
            start, stop = max(rows[0] - at, 0), min(rows[1] - at, last - first)
            if start < stop or not parts:
                parts.append(self._whole.read_neurons(whole, (first + start, first + max(start, stop))))
            at += last - first
        return torch.cat(parts)

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes ``[start, stop)`` of a tensor of :attr:`specs`."""
        if self.specs[name] == self._whole.specs[name]:
            return self._whole.read_bytes(name, start, stop)
        values = self._whole.read(name)[self._shard.layers[name.rpartition(".")[0]].positions()]
        return values.view(torch.uint8)[start:stop]


def refuse_shards(folder: Path, shard: Shard | None = None) -> None:
    """Raises ConfigError: ``folder`` has shards in it, or is ``shard``."""
    if shard is not None or shards_in(folder):
        argument(folder, str(folder), "Name the folder that they were packed from.").wrong(
            "a store with all neurons", "shards" if shard is None else f"shard {shard.rank} of {shard.ranks}"
        )


def check_complete(shards: Sequence[Shard], where: str) -> None:
    """Raises ArtifactError: ``shards``, by rank, do not have each chunk of each layer exactly once."""
    chunks: dict[tuple[str, int], list[int]] = {}
    for shard in shards:
        for key, mine in shard.layers.items():
            chunks.setdefault((key, mine.whole), []).extend(mine.chunks)
    counts = {key: -(-whole // chunk_neurons(whole)) for key, whole in chunks}
    numbered = [shard.rank for shard in shards] == list(range(len(shards)))
    if not numbered or any(sorted(found) != list(range(counts[key])) for (key, _), found in chunks.items()):
        fix = "Make them again: torch-pi2 pack FOLDER OUT --ranks N."
        Field(shards, where, fix).wrong("shards that together have each chunk of each layer once", "others")
