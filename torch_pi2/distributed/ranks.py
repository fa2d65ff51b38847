"""``Ranks``: processes that share work, those of ``torch.distributed``'s default group or this one alone."""

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
Result = TypeVar("Result")


class Ranks:
    """Processes that make the same calls.

    Args:
        together: the processes of the default group, if there is one; else this one alone.

    Attributes:
        rank: number of this process. size: number of processes.
    """

    def __init__(self, together: bool = False) -> None:
        grouped = together and dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """``function`` of each of ``items``: one of the processes computes each, and pickle sends it to all.

        All are done when this returns: files that one has written can be read by the others.

        Raises:
            Pi2Error: one of them has raised an error, or has ended. None of the others waits for it.
        """
        results = self.of_each(lambda: [function(item) for item in items[self.rank :: self.size]])
        return [results[i % self.size][i // self.size] for i in range(len(items))]

    def of_each(self, make: Callable[[], Result]) -> list[Result]:
        """What ``make`` returns in each process, by rank. Raises as :meth:`map`."""
        if self.size == 1:
            return [make()]
        made, own = None, None
        try:
            made = make()
        except Exception as error:
            own = error
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, (made, None if own is None else _as_message(own)))
        except RuntimeError as error:
            raise own or _lost(self.size, error) from error
        if own is not None:
            raise own
        for rank, (_, message) in enumerate(found):
            if message is not None:
                raise _error_of(rank, self.size, *message)
        return [made for made, _ in found]

    def first(self, function: Callable[[], Result]) -> Result:
        """What ``function`` returns in the first process."""
        return self.map(lambda _: function(), [None])[0]

    def each(self, own: Result) -> list[Result]:
        """``own`` of each process, by rank."""
        return self.of_each(lambda: own)

    def check_same(self, what: str, make: Callable[[], str]) -> str:
        """What ``make`` returns, a fingerprint of ``what``.

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
                fix="Give all of them the same model, text and settings, none of it divided (DistributedSampler) or "
                "shuffled; or call this outside of torch.distributed's group.",
            )
        return found[0]


def _as_message(error: Exception) -> tuple[type[Pi2Error] | None, dict[str, str]]:
    """An error as it is sent to the others: not all errors can be pickled."""
    if isinstance(error, Pi2Error):
        return type(error), {name: getattr(error, name) for name in ("what", "expected", "found", "fix")}
    return None, {"found": f"{type(error).__name__}: {error}"}


def _error_of(rank: int, size: int, kind: type[Pi2Error] | None, parts: dict[str, str]) -> Pi2Error:
    """The error that process ``rank`` has raised, raised here."""
    if kind is not None:
        return kind(**parts)
    what, fix = f"process {rank} of {size} that share work", "See what that process says."
    return Pi2Error(what, expected="its part of the work", fix=fix, **parts)


def _lost(size: int, error: Exception) -> Pi2Error:
    """The error for a process that was killed, has ended, or takes longer than the group waits."""
    return Pi2Error(
        f"{size} processes that share work",
        expected="an answer of each",
        found=f"none of one of them ({error})",
        fix="See what the others say; a process that is killed has often taken more memory than there is.",
    )


@contextmanager
def shared_folder(ranks: Ranks) -> Iterator[Path | None]:
    """A temporary folder that all of ``ranks`` see; None for one process, which needs none.

    Raises:
        ConfigError: in all processes, if one does not see it.
    """
    if ranks.size == 1:
        yield None
        return
    with ExitStack() as held:
        make = tempfile.TemporaryDirectory
        folder = Path(ranks.first(lambda: held.enter_context(make(prefix="torch_pi2-", ignore_cleanup_errors=True))))
        # after an error any process that is left removes the folder
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        if not all(ranks.each(folder.is_dir())):
            raise ConfigError(
                f"folder that {ranks.size} processes share",
                expected=f"{folder} in each, as they are on one machine",
                found="none in some of them",
                fix="Call torch_pi2.fit(work=...) with a folder that all see, and optimize(predictors=...).",
            )
        yield folder
        ranks.each(None)  # all have finished with it
