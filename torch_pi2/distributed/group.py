"""``Group``: processes that compute one model together, and diagnosis of which one caused a failure.

A process that fails writes the reason into the group's key-value store before it raises. One that was killed or hangs
writes nothing, which identifies it.
"""

import hashlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_pi2.base.fields import argument
from torch_pi2.errors import GroupError, Pi2Error

Result = TypeVar("Result")

#: Seconds to wait for the others' reports after a failure. They notice a killed process within milliseconds of each
#: other, and one that hangs within a second.
_ASKING_S = 2.0
#: Texts in gloo's errors.
_GLOO_ERRORS = ("gloo", "onnection closed by peer", "onnection reset", "Timed out waiting", "Broken pipe")


#: Groups by name: compiled code knows only the name.
groups: "weakref.WeakValueDictionary[str, Group]" = weakref.WeakValueDictionary()


def _broadcast(own: torch.Tensor, root: int, group_name: str) -> torch.Tensor:
    """The tensor of process ``root`` of a group; the tensors of all processes have one shape."""
    # PyTorch's wrapper waits when its result is first used, which a recorded graph would not see.
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.broadcast(own.contiguous(), root, group_name))


def of_each(make: Callable[[], Result]) -> list[Result]:
    """Results of ``make`` in all processes of the default group, by rank. An error in one of them is raised in all."""
    result, own = None, None
    try:
        result = make()
    except Exception as error:
        own = error
    found: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(found, (result, None if own is None else _as_message(own)))
    except RuntimeError as error:
        what, none = f"{len(found)} processes that load one model", f"none of one of them ({error})"
        fix = "See what the others say; a process that is killed has often taken more memory than there is."
        raise own or Pi2Error(what, expected="an answer of each", found=none, fix=fix) from error
    if own is not None:
        raise own
    for _, message in found:
        if message is not None:
            kind, parts = message
            raise kind(**parts)
    return [result for result, _ in found]


def _as_message(error: Exception) -> tuple[type[Pi2Error], dict[str, str]]:
    """An error in a form that can always be pickled."""
    if isinstance(error, Pi2Error):
        return type(error), {name: getattr(error, name) for name in ("what", "expected", "found", "fix")}
    what = f"process {dist.get_rank()} of {dist.get_world_size()} that load one model"
    found = f"{type(error).__name__}: {error}"
    return Pi2Error, {"what": what, "expected": "its shard", "found": found, "fix": "See what that process says."}


class Group:
    """The processes of the default group, on CPUs. All of them make one at the same time. One that does not answer for
    ``timeout_s`` counts as lost.

    Attributes:
        rank: number of this process. size: of processes. name: of the group in operators. coordinated: whether the
            first process broadcasts its calls, by ``coordinator``. divides_kv: each process has only the keys and
            values of its own layers. logits_checked: a pipeline's logits were checked for NaN, which is done once.
    """

    coordinated = False
    coordinator: Any = None
    divides_kv = logits_checked = False

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = dist.get_rank(), dist.get_world_size(), timeout_s
        self._groups = list[Any]()
        self.name = self._new_group(range(self.size))
        self._store = dist.distributed_c10d._get_default_store()
        self._failed: BaseException | None = None
        self._pairs: list[str] = []

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """``own`` of all processes, of one shape, concatenated along the first dimension by rank."""
        ops = torch.ops._c10d_functional  # as in _broadcast
        return ops.wait_tensor(ops.all_gather_into_tensor(own.contiguous(), self.size, self.name))

    def broadcast(self, own: torch.Tensor, rank: int) -> torch.Tensor:
        """``own`` of process ``rank``."""
        return _broadcast(own, rank, self.name)

    def connect_neighbours(self) -> None:
        """Prepare :meth:`send_next` between each process and the next. All processes call this at the same time."""
        self.divides_kv = True
        for rank in range(self.size - 1):
            self._pairs.append(self._new_group((rank, rank + 1)))

    def send_next(self, own: torch.Tensor, rank: int) -> torch.Tensor:
        """``own`` of process ``rank``, in that process and the next one, which both call this."""
        return _broadcast(own, 0, self._pairs[rank])

    def _new_group(self, ranks: Sequence[int]) -> str:
        """The name of a group of these processes, "" in others. All processes make it at the same time."""
        group = dist.new_group([*ranks], backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        if self.rank not in ranks:
            return ""
        self._groups.append(group)
        groups[str(group.group_name)] = self
        return str(group.group_name)

    def check_same(self, what: str, call: object) -> None:
        """Raises ConfigError, in all processes: ``repr(call)`` differs between them."""
        digest = int.from_bytes(hashlib.sha256(repr(call).encode()).digest()[:7], "little")
        with self.together():
            digests = self.gather(torch.tensor([digest], dtype=torch.int64, device="cpu")).tolist()
        other = next((rank for rank, one in enumerate(digests) if one != digests[0]), None)
        if other is not None:
            fix = "All processes make the same calls: they compute one model together."
            expected = "the tokens and settings that process 0 has"
            argument(call, f"{what} of process {other} of {self.size}", fix).wrong(expected, "others")

    def run(self, work: Callable[..., torch.Tensor], *arguments: Any, **named: Any) -> torch.Tensor:
        """``work(*arguments, **named)`` within :meth:`together`; callers of compiled code enter that themselves."""
        if torch.compiler.is_compiling():
            return work(*arguments, **named)
        with self.together():
            return work(*arguments, **named)

    @contextmanager
    def together(self) -> Iterator[None]:
        """The block is executed by all processes. After a failure the group refuses to compute, because the others
        would misread later messages. Raises GroupError: the group or another process failed, ended or hangs.
        """
        if self._failed is not None:
            what = f"process {self.rank} of {self.size} that compute one model"
            expected = "a group of which no process has failed"
            found = f"that {type(self._failed).__name__} was raised before"
            raise GroupError(what, expected=expected, found=found, fix="See what it said, and start all of them again.")
        try:
            yield
        except BaseException as error:
            if self._failed is not None:  # already reported by an inner block
                raise
            explained = self._explained(error)
            self._failed = explained or error
            if explained is not None:
                raise explained from error
            self.fail(error)
            self._leave()
            raise

    def fail(self, error: BaseException) -> None:
        """End the group because of ``error`` in this process, and tell the others."""
        self._failed = error
        self._publish(f"failed/{self.rank}", f"{type(error).__name__}: {error}")

    @property
    def failure(self) -> GroupError | None:
        """Why the group has failed, or None."""
        error = self._failed
        if error is None or isinstance(error, GroupError):
            return error
        return self._lost(f"process {self.rank}", f"{type(error).__name__}: {error}")

    def _leave(self) -> None:
        """Close connections, so that processes that wait for this one notice at once."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    def _explained(self, error: BaseException) -> GroupError | None:
        """The process that has ended or hangs, if that caused ``error``."""
        if type(error) is not RuntimeError or not any(word in str(error) for word in _GLOO_ERRORS):
            return None  # our own errors may contain these texts
        return self._lost(*self._culprit())

    def _lost(self, who: str, message: str) -> GroupError:
        what = f"{self.size} processes that compute one model (this is {self.rank})"
        found = f"none of {who}" + (f", which says: {message}" if message else "")
        fix = "See what it says; what is killed has often taken more memory than there is. Start all of them again."
        return GroupError(what, expected=f"an answer of each within {self.timeout_s:g} s", found=found, fix=fix)

    def _culprit(self) -> tuple[str, str]:
        """The lost processes, with the error that they published, if any; this process if there is no other."""
        self._publish(f"noticed/{self.rank}", "")
        self._leave()
        others, until = [rank for rank in range(self.size) if rank != self.rank], time.monotonic() + _ASKING_S
        while True:
            failed = [rank for rank in others if self._has(f"failed/{rank}")]
            silent = [rank for rank in others if rank not in failed and not self._has(f"noticed/{rank}")]
            if failed or len(silent) <= 1 or time.monotonic() > until:
                break
            time.sleep(0.01)
        if failed:
            said = self._with_store(f"failed/{failed[0]}", self._store.get) or b""
            return f"process {failed[0]}", str(said.decode(errors="replace"))
        if not silent:
            return "this one in time: all others have given up, as they do where one is stopped", ""
        return f"process {' and '.join(map(str, silent))}", ""

    def _publish(self, name: str, text: str) -> None:
        self._with_store(name, lambda key: self._store.set(key, text))

    def _has(self, name: str) -> bool:
        return bool(self._with_store(name, lambda key: self._store.check([key])))

    def _with_store(self, name: str, call: Callable[[str], Any]) -> Any:
        """Result of ``call`` for a key; None: the process with the store has ended."""
        try:
            return call(f"torch_pi2/{self.name}/{name}")
        except RuntimeError:  # base of all errors of torch.distributed
            return None

    def __deepcopy__(self, _memo: Any) -> "Group":
        return self
