"""Commands that several processes of ``torchrun`` or ``accelerate launch`` run together."""

import argparse
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

#: How long to wait for other processes, which may load shards from a slow disk.
_LOADING = timedelta(minutes=30)
#: Seconds between polls of the rendezvous store while a group begins.
_POLL_S = 0.02
#: Seconds that a follower outlasts a signal: longer than a server takes to end its answers.
_GRACE_S = 40


def several() -> int:
    """The number of processes that ``torchrun`` started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_alone(verb: str) -> None:
    """Raise ConfigError if ``torchrun`` started several processes of ``verb``, which runs in one."""
    if several() > 1:
        fix = "Start one process; it uses all cores (--threads)."
        raise ConfigError(f"torch-pi2 {verb}", expected="one process", found=str(several()), fix=fix)


def is_follower() -> bool:
    """Whether this process repeats the calls of the first one."""
    return several() > 1 and int(os.environ.get("RANK", "0")) > 0


@contextmanager
def process_group(args: argparse.Namespace, *models: str) -> Iterator[list[str]]:
    """Run a command on ``models``, of which the first may be in shards. Yields their folders; for shards, the folder
    of this process's own shard.

    The first process runs the command and coordinates the others, which load the model (:func:`coordinated`), repeat
    its calls, end with it, and print nothing. Raises ConfigError: the numbers of processes and shards differ, or
    several models are in shards. GroupError: another process was lost, even if this one ended for another reason.
    """
    from torch_pi2.distributed.join import own_shard
    from torch_pi2.distributed.shard_store import shards_in

    shards = [model for model in models if shards_in(Path(model))]
    if several() > 1 and not shards and Path(models[0]).is_dir():
        expected = "a folder of shards, of which each process has one"
        fix = f"Make them (torch-pi2 pack {models[0]} OUT --ranks {several()}), or start one process."
        raise ConfigError(f"{models[0]} in {several()} processes", expected=expected, found="no shards", fix=fix)
    if len(shards) > 1 or (shards and shards[0] != models[0]):
        expected, fix = "one in shards, before any other", "Start one group of processes for each model in shards."
        raise ConfigError("models in several processes", expected=expected, found=", ".join(models), fix=fix)
    with together(args), ExitStack() as args.open_groups:
        if is_follower():
            _silence(args)
        yield [str(own_shard(Path(model))) if model in shards else model for model in models]


def coordinated(args: argparse.Namespace, model: "nn.Module") -> "nn.Module":
    """``model``, just loaded within :func:`process_group`. Processes other than the first follow it here, then exit."""
    from torch_pi2.decode.broadcast import group_of
    from torch_pi2.decode.lead import lead

    open_groups: ExitStack | None = getattr(args, "open_groups", None)
    group = group_of(model)
    if open_groups is None or group is None:
        return model
    if is_follower():
        # All processes get Ctrl-C and SIGTERM. The first one finishes its answers, and the others end with it; an alarm
        # ends a process whose first one takes too long.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: signal.alarm(_GRACE_S))
    coordinator = lead(model)
    if coordinator is None:
        raise SystemExit(0)

    def end(kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # while this process reports why it ends
            signal.signal(number, signal.SIG_IGN)
        coordinator.close()
        # torchrun ends this process when another one has died, perhaps before this one noticed
        if group.failure is not None and (kind is None or not issubclass(kind, Exception)):
            raise group.failure

    open_groups.push(end)
    return model


@contextmanager
def together(args: argparse.Namespace) -> Iterator[None]:
    """Join all processes (``WORLD_SIZE``) into one gloo group. Only the first one prints progress."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if several() < 2:
        yield
        return
    store, rank, size = next(rendezvous("env://", timeout=_LOADING))
    if dist.is_torchelastic_launched():
        store = _own_part(store, rank, size, _LOADING)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_LOADING)
    args.quiet = args.quiet or dist.get_rank() > 0
    try:
        yield
    finally:
        end_of_group(args)


def _own_part(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A part of ``torchrun``'s ``store`` without addresses of processes that it has restarted since. The first process
    names it; the others accept only a name that answers their own request.
    """
    import torch.distributed as dist

    own, until = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    name, others = own, range(1, size)
    if rank:
        store.set(f"torch_pi2/asks/{rank}", own)
    while time.monotonic() < until:  # else the group reports who is missing
        if rank:
            name, _, asked = store.get("torch_pi2/named").decode().partition(" ")
            if own in asked.split():
                store.set(f"{name}/{rank}", own)
                break
        elif all(store.check([f"{own}/{other}"]) for other in others):
            break
        else:
            asks = [f"torch_pi2/asks/{other}" for other in others]
            store.set("torch_pi2/named", " ".join([own, *(store.get(ask).decode() for ask in asks)]))
        time.sleep(_POLL_S)
    return dist.PrefixStore(name, store)


def end_of_group(args: argparse.Namespace) -> None:
    """Leave the group, if there is one. Only the first process prints from then on."""
    import torch.distributed as dist

    if dist.is_initialized():
        if dist.get_rank():
            _silence(args)
        dist.destroy_process_group()


def _silence(args: argparse.Namespace) -> None:
    if getattr(args.stdout, "name", None) != os.devnull:
        args.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
