"""Processes that share work: those of ``torch.distributed``'s default group (``torchrun``), or this one alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

Item = TypeVar("Item")
Made = TypeVar("Made")


class Ranks:
    """The processes that make the same calls.

    Args:
        together: with those of the default group, if there is one; else this one is alone.

    Attributes:
        rank: number of this process. size: how many there are.
    """

    def __init__(self, together: bool = False) -> None:
        grouped = together and dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)

    def map(self, function: Callable[[Item], Made], items: Sequence[Item]) -> list[Made]:
        """``function`` of each of ``items``, each computed by one of the processes and known to all (as a pickle).

        They are through when this returns: what one has written to a file, all others can read.
        """
        mine = [function(item) for item in items[self.rank :: self.size]]
        if self.size == 1:
            return mine
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return [found[i % self.size][i // self.size] for i in range(len(items))]

    def first(self, function: Callable[[], Made]) -> Made:
        """What ``function`` returns in the first process, to all of them."""
        return self.map(lambda _: function(), [None])[0]
