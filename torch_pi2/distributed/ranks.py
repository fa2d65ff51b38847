"""Processes that share work: those of ``torch.distributed``'s default group (``torchrun``), or this one alone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from torch_pi2.errors import ConfigError, Pi2Error

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

        Raises:
            Pi2Error: one of them has raised something, or has ended. None of the others waits for it.
        """
        found = self.of_each(lambda: [function(item) for item in items[self.rank :: self.size]])
        return [found[i % self.size][i // self.size] for i in range(len(items))]

    def of_each(self, make: Callable[[], Made]) -> list[Made]:
        """What ``make`` returns in each of the processes, in their order. Raises as :meth:`map`."""
        if self.size == 1:
            return [make()]
        made, own = None, None
        try:
            made = make()
        except Exception as error:
            own = error
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, (made, None if own is None else _said(own)))
        except RuntimeError as error:
            raise own or _lost(self.size, error) from error
        if own is not None:
            raise own
        for rank, (_, said) in enumerate(found):
            if said is not None:
                raise _of_other(rank, self.size, *said)
        return [made for made, _ in found]

    def first(self, function: Callable[[], Made]) -> Made:
        """What ``function`` returns in the first process, to all of them."""
        return self.map(lambda _: function(), [None])[0]

    def each(self, own: Made) -> list[Made]:
        """What each of the processes has for ``own``, in their order."""
        return self.of_each(lambda: own)

    def check_same(self, what: str, make: Callable[[], str]) -> str:
        """What ``make`` returns, which stands for ``what``.

        Raises:
            ConfigError: in all processes, unless it is the same in all. Pi2Error: as :meth:`map`.
        """
        found = self.of_each(make)
        if len(set(found)) > 1:
            other = next(rank for rank, value in enumerate(found) if value != found[0])
            raise ConfigError(
                f"{what} of {self.size} processes that share work",
                expected="the same in each, of which every process takes its part",
                found=f"others in process {other} than in process 0",
                fix="Give all of them the same model, text and settings, none of it dealt out (DistributedSampler) or "
                "shuffled; or call this outside of torch.distributed's group.",
            )
        return found[0]


def _said(error: Exception) -> tuple[type[Pi2Error] | None, dict[str, str]]:
    """What a process tells the others of its error: not all errors can be pickled."""
    if isinstance(error, Pi2Error):
        return type(error), {name: getattr(error, name) for name in ("what", "expected", "found", "fix")}
    return None, {"found": f"{type(error).__name__}: {error}"}


def _of_other(rank: int, size: int, kind: type[Pi2Error] | None, parts: dict[str, str]) -> Pi2Error:
    """The error that process ``rank`` has raised."""
    if kind is not None:
        return kind(**parts)
    what, fix = f"process {rank} of {size} that share work", "See what that process says."
    return Pi2Error(what, expected="its part of the work", fix=fix, **parts)


def _lost(size: int, error: Exception) -> Pi2Error:
    """Another process was killed or has ended, or takes longer than the group waits."""
    return Pi2Error(
        f"{size} processes that share work",
        expected="an answer of each",
        found=f"none of one of them ({error})",
        fix="See what the others say; a process that is killed has often taken more memory than there is.",
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
    with ExitStack() as held:
        make = tempfile.TemporaryDirectory
        folder = Path(ranks.first(lambda: held.enter_context(make(prefix="torch_pi2-", ignore_cleanup_errors=True))))
        # after an error whoever has it removes the folder: the others may have ended
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        if not all(ranks.each(folder.is_dir())):
            raise ConfigError(
                f"folder that {ranks.size} processes share",
                expected=f"{folder} in each, as they are on one machine",
                found="none in some of them",
                fix="Call torch_pi2.fit(work=...) with a folder that all see, and optimize(predictors=...).",
            )
        yield folder
        ranks.each(None)  # all are through with it
