"""Calls of which one process knows what comes next: it tells the others, who make the same (docs/DISTRIBUTED.md).

What is told is numbers, text and tensors, nothing that could be run: which methods these are for is up to who makes
them.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Self, SupportsIndex

import torch
import torch.distributed as dist

from torch_pi2.base.group import Group
from torch_pi2.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    GroupError,
    Pi2Error,
    ShapeError,
    UnsupportedModelError,
)
from torch_pi2.ops.dtypes import dtype_name

#: Bytes that are sent at once, enough for a step; what is longer takes a second send.
_FIRST_BYTES = 1024
#: Between two signs of life of the first process, in seconds, at most.
_BEAT_S = 1.0
#: Names of what is no method: nothing is to be done yet; nothing will be any more.
_WAIT, _END = "", "."
#: What is called, of all leaders that this process has had: no two objects have one number.
_numbers = itertools.count(1)
#: What is raised where a call makes no sense, before any of it is done: in all processes alike.
_REFUSALS = (ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedModelError)


@dataclass(frozen=True)
class Call:
    """What all processes do.

    Attributes:
        name: of a method. of: number of the object that has it; None: the model.
        args, kwargs: None, numbers, texts, tensors, a :class:`Part`, and lists of these.
        sparse: whether it is made within :func:`~torch_pi2.layers.prompt.sparse_only`.
        gone: numbers of objects that nobody calls any more. raised: whether the call before this one ended so.
    """

    name: str
    of: int | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sparse: bool = False
    gone: Sequence[int] = ()
    raised: bool = False


class Part(list[torch.Tensor]):
    """Of something of which every process has a part, that of this one. In calls it is named by ``number``
    (:meth:`Leader.number`), for which each process takes its own. A copy is a plain list: the others have none of it.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = (), number: int | None = None) -> None:
        super().__init__(tensors)
        self.number = number

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple[Any, ...]:
        return list, ([*self],)


class _Line:
    """Between the first process, which sends, and all others. All of them make one at the same time."""

    def __init__(self, group: Group) -> None:
        self._group = group
        with group.together():
            self._gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=group.patience_s))

    def send(self, message: torch.Tensor) -> None:
        """``message``: uint8 ``[n]``. Raises GroupError."""
        size = torch.tensor([len(message)], dtype=torch.int64, device="cpu").view(torch.uint8)
        room = message.new_zeros(max(0, _FIRST_BYTES - len(size) - len(message)))
        first, rest = torch.cat([size, message, room]).tensor_split([_FIRST_BYTES])
        with self._group.together():
            self._broadcast(first)
            if len(rest):
                self._broadcast(rest)

    def receive(self) -> torch.Tensor:
        """What was sent. Raises GroupError."""
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8, device="cpu")
        with self._group.together():
            self._broadcast(first)
            size, message = int(first[:8].view(torch.int64)), first[8:]
            if size > len(message):
                rest = torch.empty(size - len(message), dtype=torch.uint8, device="cpu")
                self._broadcast(rest)
                message = torch.cat([message, rest])
        return message[:size]

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, 0, group=self._gloo)


class Leader:
    """What :func:`torch_pi2.lead` gives the first process: while it is open, the others make its calls.

    Calls of several threads are made one after another. SIGINT and SIGTERM that come during one are handled after it,
    in the main thread's (the second one at once): a call that only some of the processes make ends them all.

    Attributes:
        within: whether a call is being made, of which the others know.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._line = group, _Line(group)
        self._lock, self._closed = threading.RLock(), threading.Event()
        self.within = self._raised = False
        self._known, self._gone = set[int](), list[int]()
        group.leader, group.led = self, True
        self._beats = threading.Thread(target=self._beat, name="pi2-leader", daemon=True)
        self._beats.start()

    @contextmanager
    def call(self, call: Call) -> Iterator[None]:
        """Within it the others do the same. Of a call within another one they are not told.

        Raises:
            ConfigError: an argument that cannot be sent. GroupError: a process is lost, or has failed.
        """
        with _signals_later(), self._lock:
            if self.within:
                yield
                return
            self._send(call)
            self.within = self._raised = True
            try:
                yield
                self._raised = False
            finally:
                self.within = False

    def number(self, called: object) -> int:
        """By which the others know ``called``, until it is gone."""
        number = next(_numbers)
        self._known.add(number)
        weakref.finalize(called, self._forget, number).atexit = False
        return number

    def knows(self, number: int | None) -> bool:
        """Whether the others know an object by it: not by that of a leader before this one."""
        return number in self._known

    def _forget(self, number: int) -> None:
        self._known.discard(number)
        self._gone.append(number)

    def close(self) -> None:
        """The others are told that there is nothing more to do: :func:`torch_pi2.lead` returns there."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            with suppress(GroupError):  # of who is not needed any more
                self._send(Call(_END))
            self._group.leader, self._group.led = None, False
        self._beats.join()

    def _send(self, call: Call) -> None:
        gone = self._gone[:]
        self._line.send(_packed(replace(call, gone=gone, raised=self._raised)))
        del self._gone[: len(gone)]
        self._raised = False

    def _beat(self) -> None:
        """While there is nothing to do the others are told so, and who of them has ended is noticed."""
        while not self._closed.wait(min(_BEAT_S, self._group.patience_s / 4)):
            if not self._lock.acquire(blocking=False):
                continue
            try:
                if not self._closed.is_set():
                    self._send(Call(_WAIT))
            except Exception:  # it is the group's ``failure``, and the next call raises it
                return
            finally:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, _memo: Any) -> Self:
        return self  # of a copied model: of the same processes


def follow(group: Group, make: Callable[[Call], object], forget: Callable[[Sequence[int]], object]) -> None:
    """``make`` the first process's calls, until it has closed its :class:`Leader`; ``forget`` objects with these
    numbers.

    Errors of which calls are refused are the first process's, too, and are its to tell. With any other this process is
    of no use any more.

    Raises:
        GroupError: the first process has ended, shows no sign of life, or has made of a call something else.
    """
    line, refused = _Line(group), list[Pi2Error]()
    group.led = True
    try:
        while (call := _unpacked(line.receive())).name != _END:
            if call.raised != bool(refused):
                raise _differs(group, refused)
            refused = []
            forget(call.gone)
            try:
                if call.name != _WAIT:
                    make(call)
            except _REFUSALS as error:
                if group.failure is not None:
                    raise
                refused = [error]
    except BaseException as error:
        if group.failure is None:
            group.fail(error)
        raise
    finally:
        group.led = False


def _differs(group: Group, refused: Sequence[Pi2Error]) -> GroupError:
    """To be raised where the first process has refused a call that is not refused here, or the other way round."""
    return GroupError(
        f"call of process 0 in process {group.rank}",
        expected="the same end of it in all processes",
        found=f"that it was refused here alone: {refused[0]}" if refused else "that it failed there alone",
        fix="See what process 0 says. Start all of them again.",
    )


def _packed(call: Call) -> torch.Tensor:
    """uint8 ``[n]``: length of what is said, JSON, and the bytes of tensors. Raises ConfigError."""
    tensors: list[torch.Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Part):
            return {"part": value.number}
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach().cpu().contiguous())
            return {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
        if isinstance(value, (list, tuple, range)):
            return [plain(part) for part in value]
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise ConfigError(
            f"{call.name}(...) of a model that several processes compute",
            expected="numbers, text and tensors, which can be sent to the others",
            found=f"a {type(value).__name__}",
            fix="Leave it out; a Decoder keeps keys and values by itself.",
        )

    said = {
        **vars(call),
        "args": plain(call.args),
        "kwargs": {name: plain(value) for name, value in call.kwargs.items()},
    }
    text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    size = torch.tensor([len(text)], dtype=torch.int64, device="cpu").view(torch.uint8)
    return torch.cat([size, text, *(tensor.view(-1).view(torch.uint8) for tensor in tensors)])


def _unpacked(message: torch.Tensor) -> Call:
    """Inverse of :func:`_packed`, but for parts: they are empty."""
    at = 8 + int(message[:8].clone().view(torch.int64))
    said = json.loads(bytes(message[8:at].tolist()))

    def whole(value: Any) -> Any:
        nonlocal at
        if isinstance(value, list):
            return [whole(part) for part in value]
        if not isinstance(value, dict):
            return value
        if "part" in value:
            return Part(number=value["part"])
        dtype = getattr(torch, value["dtype"])
        first, at = at, at + math.prod(value["shape"]) * dtype.itemsize
        return message[first:at].clone().view(dtype).view(value["shape"])

    args, kwargs = whole(said["args"]), {name: whole(value) for name, value in said["kwargs"].items()}
    return Call(**said | {"args": args, "kwargs": kwargs})


@contextmanager
def _signals_later() -> Iterator[None]:
    """SIGINT and SIGTERM that come meanwhile are handled afterwards, but for a second one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def later(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        if came and callable(handler):
            handler(number, frame)
        came.append(number)

    python = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in python:
        signal.signal(number, later)
    try:
        yield
    finally:
        for number, handler in python.items():
            signal.signal(number, handler)
        if len(came) == 1:
            signal.raise_signal(came[0])
