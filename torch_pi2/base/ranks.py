"""Processes that share work: those of ``torch.distributed``'s default group (``torchrun``), or this one alone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from torch_pi2.errors import ConfigError

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

    def each(self, own: Made) -> list[Made]:
        """What each of the processes has for ``own``, in their order."""
        return self.map(lambda _: own, range(self.size))

    def check_same(self, what: str, own: str) -> None:
        """Raises ConfigError, in all processes, unless ``own``, which stands for ``what``, is the same in all."""
        found = self.each(own)
        if len(set(found)) > 1:
            other = next(rank for rank, value in enumerate(found) if value != found[0])
            raise ConfigError(
                f"{what} of {self.size} processes that share work",
                expected="the same in each, of which every process takes its part",
                found=f"others in process {other} than in process 0",
                fix="Give all of them the same model, text and settings, none of it dealt out (DistributedSampler) or "
                "shuffled; or call this outside of torch.distributed's group.",
            )


@contextmanager
def shared_folder(ranks: Ranks) -> Iterator[Path | None]:
    """A temporary folder that all of ``ranks`` see; None if there is one process alone, which needs none.

    Raises:
        ConfigError: in all processes, where one does not see it.
    """
    if ranks.size == 1:
        yield None
        return
    folder = Path(ranks.first(lambda: tempfile.mkdtemp(prefix="torch_pi2-")))
    try:
        if not all(ranks.each(folder.is_dir())):
            raise ConfigError(
                f"folder that {ranks.size} processes share",
                expected=f"{folder} in each, as they are on one machine",
                found="none in some of them",
                fix="Call torch_pi2.fit(work=...) with a folder that all see, and optimize(predictors=...).",
            )
        yield folder
    finally:
        ranks.first(lambda: shutil.rmtree(folder, ignore_errors=True))
