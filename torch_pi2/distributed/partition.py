"""Which neurons go to which machine: chunks of each layer, or whole layers, as much work for each as its share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from torch_pi2.errors import ConfigError
from torch_pi2.ops.constants import chunk_neurons
from torch_pi2.types.method import PREDICTED
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.shard import MOST_RANKS, Shard, ShardLayer, apportioned
from torch_pi2.types.site import block_of, row_of_blocks
from torch_pi2.types.stats import ActivationStats


def deal(
    plan: Plan, ranks: int, shares: Sequence[float] | None = None, stats: ActivationStats | None = None
) -> list[Shard]:
    """The shard of each of ``ranks`` machines.

    Of each layer a machine gets as many chunks as its share, those that are read most spread evenly: the most frequent
    neurons lie in the first chunks.

    Args:
        shares: of neurons, for each machine, in any unit (default: the same for all).
        stats: how often neurons fire; without, hot ones are taken to fire always, and the others as the plan expects.

    Raises:
        ConfigError: not 2 to 64 machines, or other shares than one above 0 for each, or more machines than a layer has
            chunks.
    """
    weights = _shares(ranks, shares)
    dealt = {layer.site.key: _chunks(layer, weights, stats) for layer in plan.layers}
    return [
        Shard(rank, ranks, {y.site.key: ShardLayer(y.site.intermediate, dealt[y.site.key][rank]) for y in plan.layers})
        for rank in range(ranks)
    ]


def deal_layers(plan: Plan, ranks: int, shares: Sequence[float] | None = None) -> list[Shard]:
    """The stage of each of ``ranks`` machines: decoder blocks that follow each other, with as many of the model's
    weights of neurons as its share, nearly.

    Raises:
        ConfigError: as :func:`deal`; or the layers are in no row of blocks, or in fewer blocks than machines.
    """
    weights = _shares(ranks, shares)
    size: dict[str, int] = {}
    for layer in plan.layers:
        site, block = layer.site, block_of(layer.site.key)
        size[block] = size.get(block, 0) + site.intermediate * site.rows_per_neuron * site.hidden
    if row_of_blocks(layer.site.key for layer in plan.layers) is None:
        raise ConfigError(
            "stages of layers",
            expected="feed-forward layers in the blocks of one row, such as model.layers.0, model.layers.1",
            found=", ".join([*size][:3]),
            fix="Deal out neurons, by='neurons'.",
        )
    if len(size) < ranks:
        raise ConfigError(
            f"{ranks} machines for {len(size)} blocks of layers",
            expected=f"at most {len(size)}",
            found=str(ranks),
            fix="Use fewer machines, or deal out neurons, by='neurons'.",
        )
    ends = _ends([*size.values()], weights)
    rank_of = {block: sum(i >= end for end in ends) for i, block in enumerate(size)}

    def here(layer: LayerPlan, rank: int) -> ShardLayer:
        whole = layer.site.intermediate
        own = range(-(-whole // chunk_neurons(whole))) if rank_of[block_of(layer.site.key)] == rank else ()
        return ShardLayer(whole, tuple(own))

    return [Shard(rank, ranks, {y.site.key: here(y, rank) for y in plan.layers}) for rank in range(ranks)]


def _ends(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """After how many blocks each machine but the last ends: nearest to its share, and at least one for each."""
    before = [0, *accumulate(sizes)]
    ends: list[int] = []
    for rank in range(1, len(weights)):
        target = sum(weights[:rank]) * before[-1]
        free = range(ends[-1] + 1 if ends else 1, len(sizes) - len(weights) + rank + 1)
        ends.append(min(free, key=lambda end: abs(before[end] - target)))
    return ends


def _shares(ranks: int, shares: Sequence[float] | None) -> list[float]:
    """Of each machine, of 1. Raises ConfigError, see :func:`deal`."""
    check_ranks(ranks, shares)
    given = shares or [1.0] * ranks
    parts = [share / max(given) for share in given]  # so that their sum is a number
    return [part / sum(parts) for part in parts]


def check_ranks(ranks: int, shares: Sequence[float] | None) -> None:
    """Raises ConfigError, see :func:`deal`."""
    if not 2 <= ranks <= MOST_RANKS:
        raise ConfigError(
            "ranks",
            expected=f"2 to {MOST_RANKS} machines",
            found=str(ranks),
            fix="Choose another number.",
        )
    if shares is not None and (len(shares) != ranks or not all(0 < share < float("inf") for share in shares)):
        raise ConfigError(
            "shares",
            expected=f"{ranks} numbers above 0, one for each machine",
            found=", ".join(f"{share:g}" for share in shares) or "none",
            fix="Give each machine its share of the neurons, such as 2,1.",
        )


def _chunks(layer: LayerPlan, shares: Sequence[float], stats: ActivationStats | None) -> list[tuple[int, ...]]:
    """Chunks of a layer for each machine: the heaviest first, to whoever has done least for its share."""
    size = chunk_neurons(layer.site.intermediate)
    work = [float(part.sum()) for part in _work(layer, stats).split(size)]
    if len(work) < len(shares):
        raise ConfigError(
            f"{len(shares)} machines for {layer.site.key}",
            expected=f"at most {len(work)}, as it has {len(work)} chunks of {size} neurons",
            found=str(len(shares)),
            fix="Use fewer machines.",
        )
    room = apportioned(len(work), shares)
    mine: list[list[int]] = [[] for _ in shares]
    done = [0.0] * len(shares)
    for chunk in sorted(range(len(work)), key=lambda c: (-work[c], c)):
        free = [rank for rank in range(len(shares)) if len(mine[rank]) < room[rank]]
        rank = min(free, key=lambda r: (done[r] / shares[r], r))
        mine[rank].append(chunk)
        done[rank] += work[chunk]
    return [tuple(sorted(chunks)) for chunks in mine]


def _work(layer: LayerPlan, stats: ActivationStats | None) -> torch.Tensor:
    """Of each neuron in plan order, the share of its rows that a token reads."""
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
