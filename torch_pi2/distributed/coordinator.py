"""``Coordinator``: one process decides what a group computes and broadcasts its calls (docs/DISTRIBUTED.md).

A call is a name with numbers, text and tensors; it contains no code. The receiver decides which methods may be called.
"""

import itertools
import json
import math
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.reading import Closing
from torch_pi2.distributed.group import Group
from torch_pi2.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    GroupError,
    NonFiniteError,
    Pi2Error,
    ShapeError,
    UnsupportedModelError,
)

#: Size of the first send in bytes, enough for a decoding step. Longer messages take a second send.
_FIRST_BYTES = 1024
#: Longest interval between heartbeats of the coordinator.
_HEARTBEAT_S = 1.0
#: Names of messages other than calls.
_HEARTBEAT, _END = "", "."
#: Numbers of called objects, unique over all coordinators of this process.
_numbers = itertools.count(1)
#: Errors that all processes raise alike, before a call has any effect.
_REFUSALS = (ConfigError, DeviceError, DtypeError, NonFiniteError, ShapeError, UnsupportedModelError)


@dataclass(frozen=True)
class Call:
    """A call that all processes make: the method ``name`` of object number ``target`` (None: the model) with None,
    numbers, texts, tensors, and lists of these. ``sparse``: it is made within
    :func:`~torch_pi2.layers.prompt.sparse_only`. ``gone``: numbers of objects that are no longer used. ``raised``: the
    previous call raised an error.
    """

    name: str
    target: int | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sparse: bool = False
    gone: Sequence[int] = ()
    raised: bool = False


class _Channel:
    """Broadcasts messages from the first process to the others. All processes make one at the same time."""

    def __init__(self, group: Group) -> None:
        self._group = group
        with group.together():
            self._gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=group.timeout_s))

    def send(self, message: torch.Tensor) -> None:
        """Send ``message``, uint8 ``[n]``. Raises GroupError."""
        size = torch.tensor([len(message)], dtype=torch.int64, device="cpu").view(torch.uint8)
        padding = message.new_zeros(max(0, _FIRST_BYTES - len(size) - len(message)))
        first, rest = torch.cat([size, message, padding]).tensor_split([_FIRST_BYTES])
        with self._group.together():
            self._broadcast(first)
            if len(rest):
                self._broadcast(rest)

    def receive(self) -> torch.Tensor:
        """Raises GroupError."""
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


class Coordinator(Closing):
    """Returned by :func:`torch_pi2.lead` in the first process: while it is open, the others repeat its calls.

    Calls from several threads are serialised. SIGINT and SIGTERM during a call of the main thread are handled after it,
    a second one at once, because a call that only some processes make would end them all. ``within`` says whether a
    shared call is in progress.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._channel = group, _Channel(group)
        self._lock, self._closed = threading.RLock(), threading.Event()
        self.within = self._raised = False
        self._known, self._gone = set[int](), list[int]()
        group.coordinator, group.coordinated = self, True
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="pi2-coordinator", daemon=True)
        self._heartbeats.start()

    @contextmanager
    def call(self, call: Call) -> Iterator[None]:
        """While entered, others make the same call; calls within are not broadcast. Raises ConfigError, GroupError."""
        with _deferred_signals(), self._lock:
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

    def number(self, target: object) -> int:
        """The others' number for ``target``, until it is garbage-collected."""
        number = next(_numbers)
        self._known.add(number)
        weakref.finalize(target, self._forget, number).atexit = False
        return number

    def knows(self, number: int | None) -> bool:
        """Whether the others have an object with this number, not one of an earlier coordinator."""
        return number in self._known

    def _forget(self, number: int) -> None:
        self._known.discard(number)
        self._gone.append(number)

    def close(self) -> None:
        """End the others: :func:`torch_pi2.lead` returns there."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            with suppress(GroupError):  # a lost process is no longer needed
                self._send(Call(_END))
            self._group.coordinator, self._group.coordinated = None, False
        self._heartbeats.join()

    def _send(self, call: Call) -> None:
        gone = self._gone[:]
        self._channel.send(_packed(replace(call, gone=gone, raised=self._raised)))
        del self._gone[: len(gone)]
        self._raised = False

    def _send_heartbeats(self) -> None:
        """Between calls, show the others that this process lives, and detect whether one of them has ended."""
        while not self._closed.wait(min(_HEARTBEAT_S, self._group.timeout_s / 4)):
            if not self._lock.acquire(blocking=False):
                continue
            try:
                if not self._closed.is_set():
                    self._send(Call(_HEARTBEAT))
            except Exception:  # stored as the group's ``failure``, which the next call raises
                return
            finally:
                self._lock.release()

    def __deepcopy__(self, _memo: Any) -> Self:
        return self  # a copied model has the same processes


def follow(group: Group, make: Callable[[Call], object], forget: Callable[[Sequence[int]], object]) -> None:
    """Repeat the calls of the first process with ``make`` until it has closed its :class:`Coordinator`.

    ``forget`` gets the numbers of objects that are no longer used. Errors that refuse a call are raised, and reported,
    in the first process too. After any other error this process ends the group.
    """
    channel, refused = _Channel(group), list[Pi2Error]()
    group.coordinated = True
    try:
        while (call := _unpacked(channel.receive())).name != _END:
            if call.raised != bool(refused):
                what = f"call of process 0 in process {group.rank}"
                found = f"that only this process refused it: {refused[0]}" if refused else "that it failed only there"
                fix = "Read what process 0 reports, and start all processes again."
                raise GroupError(what, expected="the same result in all processes", found=found, fix=fix)
            refused = []
            forget(call.gone)
            try:
                if call.name != _HEARTBEAT:
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
        group.coordinated = False


def _packed(call: Call) -> torch.Tensor:
    """uint8 ``[n]``: the length of the JSON text, the text, and the bytes of tensors. Raises ConfigError."""
    tensors: list[torch.Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach().cpu().contiguous())
            return {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
        if isinstance(value, (list, tuple, range)):
            return [plain(part) for part in value]
        if value is None or type(value) in (bool, int, float, str):
            return value
        what = f"{call.name}(...) of a model that several processes compute"
        expected = "numbers, text and tensors, which can be sent to the others"
        fix = "Leave it out. A Decoder has a KV cache of its own."
        raise ConfigError(what, expected=expected, found=f"a {type(value).__name__}", fix=fix)

    args, kwargs = plain(call.args), {name: plain(value) for name, value in call.kwargs.items()}  # in their order
    message = {**vars(call), "args": args, "kwargs": kwargs}
    text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    size = torch.tensor([len(text)], dtype=torch.int64, device="cpu").view(torch.uint8)
    return torch.cat([size, text, *(tensor.view(-1).view(torch.uint8) for tensor in tensors)])


def _unpacked(message: torch.Tensor) -> Call:
    """Inverse of :func:`_packed`."""
    at = 8 + int(message[:8].clone().view(torch.int64))
    fields = json.loads(bytes(message[8:at].tolist()))

    def restored(value: Any) -> Any:
        nonlocal at
        if isinstance(value, list):
            return [restored(part) for part in value]
        if not isinstance(value, dict):
            return value
        dtype = getattr(torch, value["dtype"])
        first, at = at, at + math.prod(value["shape"]) * dtype.itemsize
        return message[first:at].clone().view(dtype).view(value["shape"])

    args, kwargs = restored(fields["args"]), {name: restored(value) for name, value in fields["kwargs"].items()}
    return Call(**fields | {"args": args, "kwargs": kwargs})


@contextmanager
def _deferred_signals() -> Iterator[None]:
    """SIGINT and SIGTERM during the block are handled after it; a second one is handled at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def later(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        if arrived and callable(handler):
            handler(number, frame)
        arrived.append(number)

    python = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in python:
        signal.signal(number, later)
    try:
        yield
    finally:
        for number, handler in python.items():
            signal.signal(number, handler)
        if len(arrived) == 1:
            signal.raise_signal(arrived[0])
