"""Partitions a model among machines: chunks of each layer, or whole layers, with work in proportion to shares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from torch_pi2.errors import ConfigError
from torch_pi2.ops.constants import chunk_neurons
from torch_pi2.types.method import PREDICTED
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.shard import MOST_RANKS, Shard, ShardLayer
from torch_pi2.types.site import block_of, row_of_blocks
from torch_pi2.types.stats import ActivationStats


def partition_neurons(
    plan: Plan, ranks: int, shares: Sequence[float] | None = None, stats: ActivationStats | None = None
) -> list[Shard]:
    """The shard of each of ``ranks`` machines: as many chunks of each layer as its share.

    Chunks that are read most are spread evenly: the most frequent neurons are in the first chunks.

    Args:
        shares: of neurons, for each machine, in any unit (default: the same for all).
        stats: how often neurons fire. Without them, hot neurons count as always firing, others as the plan expects.

    Raises:
        ConfigError: not 2 to 64 machines, shares that are not one number above 0 for each, or more machines than a
            layer has chunks.
    """
    weights = _normalised(ranks, shares)
    chunks = {layer.site.key: _chunks(layer, weights, stats) for layer in plan.layers}
    return [
        Shard(rank, ranks, {y.site.key: ShardLayer(y.site.intermediate, chunks[y.site.key][rank]) for y in plan.layers})
        for rank in range(ranks)
    ]


def partition_layers(plan: Plan, ranks: int, shares: Sequence[float] | None = None) -> list[Shard]:
    """The stage of each of ``ranks`` machines: consecutive decoder blocks, with its share of the neurons' weights.

    Raises:
        ConfigError: as :func:`partition_neurons`; or the layers are not in a row of blocks, or in fewer than machines.
    """
    weights = _normalised(ranks, shares)
    sizes: dict[str, int] = {}
    for layer in plan.layers:
        site, block = layer.site, block_of(layer.site.key)
        sizes[block] = sizes.get(block, 0) + site.intermediate * site.rows_per_neuron * site.hidden
    if row_of_blocks(layer.site.key for layer in plan.layers) is None:
        raise ConfigError(
            "stages of layers",
            expected="feed-forward layers in the blocks of one row, such as model.layers.0, model.layers.1",
            found=", ".join([*sizes][:3]),
            fix="Partition by neurons, by='neurons'.",
        )
    if len(sizes) < ranks:
        raise ConfigError(
            f"{ranks} machines for {len(sizes)} blocks of layers",
            expected=f"at most {len(sizes)}",
            found=str(ranks),
            fix="Use fewer machines, or partition by neurons, by='neurons'.",
        )
    before, ends = [0, *accumulate(sizes.values())], list[int]()
    for rank in range(1, ranks):  # each ends nearest to its share, and has at least one block
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
    """Shares that add up to 1. Raises ConfigError, see :func:`partition_neurons`."""
    check_ranks(ranks, shares)
    given = shares or [1.0] * ranks
    parts = [share / max(given) for share in given]  # so that their sum is finite
    return [part / sum(parts) for part in parts]


def check_ranks(ranks: int, shares: Sequence[float] | None) -> None:
    """Raises ConfigError, see :func:`partition_neurons`."""
    if not 2 <= ranks <= MOST_RANKS:
        expected = f"2 to {MOST_RANKS} machines"
        raise ConfigError("ranks", expected=expected, found=str(ranks), fix="Choose another number.")
    if shares is not None and (len(shares) != ranks or not all(0 < share < float("inf") for share in shares)):
        raise ConfigError(
            "shares",
            expected=f"{ranks} numbers above 0, one for each machine",
            found=", ".join(f"{share:g}" for share in shares) or "none",
            fix="Give each machine its share of the neurons, such as 2,1.",
        )


def _chunks(layer: LayerPlan, shares: Sequence[float], stats: ActivationStats | None) -> list[tuple[int, ...]]:
    """Chunks of a layer for each machine: the heaviest first, to the one with least work for its share."""
    size = chunk_neurons(layer.site.intermediate)
    work = [float(part.sum()) for part in _work(layer, stats).split(size)]
    if len(work) < len(shares):
        raise ConfigError(
            f"{len(shares)} machines for {layer.site.key}",
            expected=f"at most {len(work)}, as it has {len(work)} chunks of {size} neurons",
            found=str(len(shares)),
            fix="Use fewer machines.",
        )
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
    """``count`` things divided by ``shares`` of 1, at least one each."""
    left = count - len(shares)
    exact = [max(0.0, share * count - 1) for share in shares]
    total = sum(exact) or 1.0
    wanted = [left * one / total for one in exact]
    counts = [1 + int(one) for one in wanted]
    by_remainder = sorted(range(len(shares)), key=lambda r: (int(wanted[r]) - wanted[r], r))
    for rank in by_remainder[: count - sum(counts)]:
        counts[rank] += 1
    return counts


def _work(layer: LayerPlan, stats: ActivationStats | None) -> torch.Tensor:
    """For each neuron in plan order, the share of its rows that a token reads."""
    hot = torch.arange(layer.site.intermediate) < layer.n_hot
    seen = None if stats is None else stats.layers.get(layer.site.key)
    if seen is None or seen.tokens == 0:
        fires = torch.full((len(hot),), layer.expected_active)
    else:
        fires = seen.frequency()[layer.order.long()].float()
    if layer.method in PREDICTED:
        return torch.where(hot, 1.0, fires)
    rows = layer.site.rows_per_neuron
    return (1 + (rows - 1) * fires) / rows  # its first row decides
