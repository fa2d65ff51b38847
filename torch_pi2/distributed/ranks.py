"""``Ranks``: processes that share work, those of ``torch.distributed``'s default group or this one alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from torch_pi2.errors import Pi2Error

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

    def of_each(self, make: Callable[[], Result]) -> list[Result]:
        """What ``make`` returns in each process, by rank.

        Raises:
            Pi2Error: one of them has raised an error, or has ended. None of the others waits for it.
        """
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

    def each(self, own: Result) -> list[Result]:
        """``own`` of each process, by rank."""
        return self.of_each(lambda: own)


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
