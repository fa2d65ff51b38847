"""Verbs that several processes of ``torchrun`` or ``accelerate launch`` run together."""

from __future__ import annotations

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

#: Of waiting for a process that has more to do.
_PATIENCE = timedelta(days=7)
#: The same while a model is loaded, which a slow disk takes its time for.
_LOADING = timedelta(minutes=30)
#: Between two looks at what others have said while a group begins, in seconds.
_ASKING_S = 0.02
#: Seconds after which a process that was told to end does so even if the first one has more for it to do: longer than
#: a server takes to end.
_GRACE_S = 40


def several() -> int:
    """Processes that ``torchrun`` has started together; 1: this one alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def follows() -> bool:
    """Whether another process than this one knows what is to be done."""
    return several() > 1 and int(os.environ.get("RANK", "0")) > 0


@contextmanager
def of_one_model(args: argparse.Namespace, *models: str) -> Iterator[list[str]]:
    """As :func:`together`, for a verb that runs ``models``, one of which may be in shards: gives their folders, of
    shards that of this process' own.

    The first process does what the verb does, and leads. The others load the model (:func:`led`), make its calls, and
    end with it; they say nothing on standard output.

    Raises:
        ConfigError: shards and one process, or as many as there are no shards; no shards for several processes; or
            several models in shards.
        GroupError: another process was lost, whatever else has ended this one.
    """
    from torch_pi2.distributed.join import own_shard
    from torch_pi2.distributed.shard_store import shards_in

    shards = [model for model in models if shards_in(Path(model))]
    if several() > 1 and not shards and Path(models[0]).is_dir():
        raise ConfigError(
            f"{models[0]} in {several()} processes",
            expected="a folder of shards, of which each process has one",
            found="no shards",
            fix=f"Make them (torch-pi2 pack {models[0]} OUT --ranks {several()}), or start one process.",
        )
    if len(shards) > 1 or (shards and shards[0] != models[0]):
        raise ConfigError(
            "models in several processes",
            expected="one in shards, before any other",
            found=", ".join(models),
            fix="Start one group of processes for each model in shards.",
        )
    with together(args, _LOADING), ExitStack() as args.leading:
        if follows():
            _tell_nothing(args)
        yield [str(own_shard(Path(model))) if model in shards else model for model in models]


def led(args: argparse.Namespace, model: nn.Module) -> nn.Module:
    """``model``, just loaded within :func:`of_one_model`. Where the first process leads others these end here."""
    from torch_pi2.decode.broadcast import group_of
    from torch_pi2.decode.lead import lead

    leading: ExitStack | None = getattr(args, "leading", None)
    group = group_of(model)
    if leading is None or group is None:
        return model
    if follows():
        _outlast_signals()
    leader = lead(model)
    if leader is None:
        raise SystemExit(0)

    def end(kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # it is ending, and may have to say why
            signal.signal(number, signal.SIG_IGN)
        leader.close()
        # torchrun ends this process when another one has ended, perhaps before that was noticed here
        if group.failure is not None and (kind is None or not issubclass(kind, Exception)):
            raise group.failure

    leading.push(end)
    return model


def _outlast_signals() -> None:
    """Ctrl-C and SIGTERM, which all processes get, end the first one, which has answers to end, and this one with it;
    if that takes too long, this one alone.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: signal.alarm(_GRACE_S))


@contextmanager
def together(args: argparse.Namespace, patience: timedelta = _PATIENCE) -> Iterator[None]:
    """Within it they are one group, on CPUs, if there are several (``WORLD_SIZE``); the first tells what there is."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if several() < 2:
        yield
        return
    store, rank, size = next(rendezvous("env://", timeout=patience))
    if dist.is_torchelastic_launched():
        store = _of_these_processes(store, rank, size, patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    args.quiet = args.quiet or dist.get_rank() > 0
    try:
        yield
    finally:
        end_of_group(args)


def _of_these_processes(store: Any, rank: int, size: int, patience: timedelta) -> Any:
    """A part of ``torchrun``'s ``store`` with nothing in it of processes that it has started again since.

    Their addresses are still there, and would be taken for those of the new ones. The first process names the part, and
    the others take no name that was not given to themselves.
    """
    import torch.distributed as dist

    own, until = uuid.uuid4().hex, time.monotonic() + patience.total_seconds()
    name, others = own, range(1, size)
    if rank:
        store.set(f"torch_pi2/asks/{rank}", own)
    while time.monotonic() < until:  # else the group says who is missing
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
        time.sleep(_ASKING_S)
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def end_of_group(args: argparse.Namespace) -> None:
    """Of several processes the first one tells what there is to tell."""
    import torch.distributed as dist

    if dist.is_initialized():
        if dist.get_rank():
            _tell_nothing(args)
        dist.destroy_process_group()


def _tell_nothing(args: argparse.Namespace) -> None:
    if getattr(args.stdout, "name", None) != os.devnull:
        args.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
