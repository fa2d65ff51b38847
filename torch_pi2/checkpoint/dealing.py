"""Which chunks of each layer go to which machine: as much work for each as its share, and as many neurons."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_pi2.errors import ConfigError
from torch_pi2.ops.constants import chunk_neurons
from torch_pi2.spec.method import PREDICTED
from torch_pi2.spec.plan import LayerPlan, Plan
from torch_pi2.spec.shard import MOST_RANKS, Shard, ShardLayer
from torch_pi2.spec.stats import ActivationStats


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
        ConfigError: not 2 to 16 machines, or other shares than one above 0 for each, or more machines than a layer has
            chunks.
    """
    check_ranks(ranks, shares)
    given = shares or [1.0] * ranks
    parts = [share / max(given) for share in given]  # so that their sum is a number
    weights = [part / sum(parts) for part in parts]
    dealt = {layer.site.key: _chunks(layer, weights, stats) for layer in plan.layers}
    return [
        Shard(rank, ranks, {y.site.key: ShardLayer(y.site.intermediate, dealt[y.site.key][rank]) for y in plan.layers})
        for rank in range(ranks)
    ]


def check_ranks(ranks: int, shares: Sequence[float] | None) -> None:
    """Raises ConfigError, see :func:`deal`."""
    if not 2 <= ranks <= MOST_RANKS:
        raise ConfigError(
            "ranks",
            expected=f"2 to {MOST_RANKS} machines, as a layer has {MOST_RANKS} chunks",
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
    room = _rooms(len(work), shares)
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


def _rooms(chunks: int, shares: Sequence[float]) -> list[int]:
    """How many chunks each machine has, at least one."""
    left = chunks - len(shares)
    exact = [max(0.0, share * chunks - 1) for share in shares]
    total = sum(exact) or 1.0
    wanted = [left * one / total for one in exact]
    rooms = [1 + int(one) for one in wanted]
    by_rest = sorted(range(len(shares)), key=lambda r: (int(wanted[r]) - wanted[r], r))
    for rank in by_rest[: chunks - sum(rooms)]:
        rooms[rank] += 1
    return rooms
