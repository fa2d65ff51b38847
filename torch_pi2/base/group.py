"""``Group``: processes that compute one model together, and who of them it was when something goes wrong.

A process that fails says so where the group met (its key-value store) before it raises; one that was killed, or hangs,
says nothing, and is known by that.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_pi2.errors import ConfigError, GroupError

#: How long the others are waited for when it is asked who has failed: they notice within milliseconds of each other
#: that one was killed, and within a second that one hangs.
_ASKING_S = 2.0
#: What gloo's errors have in them, wherever they come from.
_OF_GLOO = ("gloo", "onnection closed by peer", "onnection reset", "Timed out waiting", "Broken pipe")


#: By the names that operators call them, which is all that compiled code knows of one.
groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


def _sent(own: torch.Tensor, root: int, group_name: str) -> torch.Tensor:
    """What the process with number ``root`` in a group has for ``own``, of one shape in all of it."""
    # Not by PyTorch's wrapper, whose results wait when they are first used: a recorded graph would not see that.
    ops = torch.ops._c10d_functional
    found: torch.Tensor = ops.wait_tensor(ops.broadcast(own.contiguous(), root, group_name))
    return found


class Group:
    """Those of the default group, on CPUs. All of them make one at the same time.

    Args:
        patience_s: after which one that does not answer counts as lost.

    Attributes:
        rank: number of this process. size: how many there are. name: what operators call it.
        led: whether the first process tells the others what they compute; leader: in the first one, its
            :class:`~torch_pi2.base.calls.Leader`. divides_kv: whether each process has keys and values that the others
            have not, of its own layers or heads.
    """

    led = False
    leader: Any = None
    divides_kv = False

    def __init__(self, patience_s: float) -> None:
        self.rank, self.size, self.patience_s = dist.get_rank(), dist.get_world_size(), patience_s
        self._groups = list[Any]()
        self.name = self._made(range(self.size))
        self._store = dist.distributed_c10d._get_default_store()
        self._failed: BaseException | None = None
        self._pairs: list[str] = []

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """``own`` of all processes, of one shape, along the first dimension in the order of ranks."""
        ops = torch.ops._c10d_functional  # as in _sent
        found: torch.Tensor = ops.wait_tensor(ops.all_gather_into_tensor(own.contiguous(), self.size, self.name))
        return found

    def check_same(self, what: str, ids: torch.Tensor, settings: Mapping[str, int]) -> None:
        """Raises ConfigError, in all processes, unless they have the same ``ids``, int64 of any shape, and settings."""
        own = [*ids.shape, *ids.flatten().tolist()]
        digest = int.from_bytes(hashlib.sha256(repr(own).encode()).digest()[:7], "little")
        with self.together():
            row = [[ids.numel(), digest, *settings.values()]]
            found = self.gather(torch.tensor(row, dtype=torch.int64, device="cpu")).tolist()
        for rank in range(1, self.size):
            for name, first, other in zip(settings, found[0][2:], found[rank][2:], strict=True):
                if first != other:
                    raise ConfigError(
                        f"{name} of process {rank} of {self.size}",
                        expected=f"{first}, as process 0 has",
                        found=str(other),
                        fix="All processes make the same calls: they compute one model together.",
                    )
            if found[rank] != found[0]:
                raise ConfigError(
                    f"{what} of process {rank} of {self.size}",
                    expected=f"the {found[0][0]} tokens that process 0 has",
                    found=f"{found[rank][0]} tokens, others",
                    fix="All processes make the same calls: they compute one model together.",
                )

    def of(self, own: torch.Tensor, rank: int) -> torch.Tensor:
        """What process ``rank`` has for ``own``."""
        return _sent(own, rank, self.name)

    def pair_up(self) -> None:
        """Each process and the next can :meth:`hand_on` from now on. All processes call this at the same time."""
        self.divides_kv = True
        for rank in range(self.size - 1):
            self._pairs.append(self._made((rank, rank + 1)))

    def _made(self, ranks: Sequence[int]) -> str:
        """The name of a group of these processes; all make it at the same time, "" where this one is not in it."""
        group = dist.new_group([*ranks], backend="gloo", timeout=timedelta(seconds=self.patience_s))
        if self.rank not in ranks:
            return ""
        self._groups.append(group)
        groups[str(group.group_name)] = self
        return str(group.group_name)

    def hand_on(self, own: torch.Tensor, rank: int) -> torch.Tensor:
        """What process ``rank`` has for ``own``, in that and the next one, which both call this."""
        return _sent(own, 0, self._pairs[rank])

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done within it all processes do. Where it fails here, nothing more is done together: the others would
        take what comes next for something else.

        Raises:
            GroupError: it has failed before, or another process has ended, hangs, or has failed.
        """
        if self._failed is not None:
            raise GroupError(
                f"process {self.rank} of {self.size} that compute one model",
                expected="a group of which no process has failed",
                found=f"that {type(self._failed).__name__} was raised before",
                fix="See what it said, and start all of them again.",
            )
        try:
            yield
        except BaseException as error:
            if self._failed is not None:  # within another one, which has said it
                raise
            found = self._explained(error)
            self._failed = found or error
            if found is not None:
                raise found from error
            self.fail(error)
            self._leave()
            raise

    def fail(self, error: BaseException) -> None:
        """Nothing more is done together, because of what this process has raised, of which the others are told."""
        self._failed = error
        self._say(f"failed/{self.rank}", f"{type(error).__name__}: {error}")

    @property
    def failure(self) -> GroupError | None:
        """Why nothing more is done together; None: it is."""
        error = self._failed
        if error is None or isinstance(error, GroupError):
            return error
        return self._lost(f"process {self.rank}", f"{type(error).__name__}: {error}")

    def _leave(self) -> None:
        """Close connections, so that who waits for this process notices at once."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    def _explained(self, error: BaseException) -> GroupError | None:
        """Who has ended or hangs, if that is what ``error`` is about."""
        if type(error) is not RuntimeError or not any(word in str(error) for word in _OF_GLOO):
            return None  # an error of ours may have such words in it, too
        return self._lost(*self._who())

    def _lost(self, who: str, said: str) -> GroupError:
        return GroupError(
            f"{self.size} processes that compute one model (this is {self.rank})",
            expected=f"an answer of each within {self.patience_s:g} s",
            found=f"none of {who}" + (f", which says: {said}" if said else ""),
            fix="See what it says; what is killed has often taken more memory than there is. Start all of them again.",
        )

    def _who(self) -> tuple[str, str]:
        """Which processes are lost, and why, as far as they have said so; this one, where no other is."""
        self._say(f"noticed/{self.rank}", "")
        self._leave()
        others, until = [rank for rank in range(self.size) if rank != self.rank], time.monotonic() + _ASKING_S
        while True:
            failed = [rank for rank in others if self._has(f"failed/{rank}")]
            silent = [rank for rank in others if rank not in failed and not self._has(f"noticed/{rank}")]
            if failed or len(silent) <= 1 or time.monotonic() > until:
                break
            time.sleep(0.01)
        if failed:
            return f"process {failed[0]}", self._get(f"failed/{failed[0]}")
        if not silent:
            return "this one in time: all others have given up, as they do where one is stopped", ""
        return f"process {' and '.join(map(str, silent))}", ""

    def _say(self, name: str, text: str) -> None:
        self._ask(name, lambda key: self._store.set(key, text))

    def _has(self, name: str) -> bool:
        return bool(self._ask(name, lambda key: self._store.check([key])))

    def _get(self, name: str) -> str:
        found = self._ask(name, self._store.get)
        return "" if found is None else str(found.decode(errors="replace"))

    def _ask(self, name: str, call: Callable[[str], Any]) -> Any:
        """Of the key-value store; None: it was with the process that has ended, which is no error of its own."""
        try:
            return call(f"torch_pi2/{self.name}/{name}")
        except RuntimeError:  # all of torch.distributed's are
            return None

    def __deepcopy__(self, _memo: Any) -> Group:
        return self
