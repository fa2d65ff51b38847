"""Verbs that several processes of ``torchrun`` or ``accelerate launch`` run together."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch_pi2.errors import ConfigError

#: Of waiting for a process that has more to do.
_PATIENCE = timedelta(days=7)
#: The same while a model is loaded, which a slow disk takes its time for.
_LOADING = timedelta(minutes=30)


@contextmanager
def of_one_model(args: argparse.Namespace) -> Iterator[None]:
    """As :func:`together`, for a verb that runs ``args.model``: of shards, which this makes the folder of this
    process' own. The others say nothing on standard output, of what is the same in all of them.

    Raises:
        ConfigError: shards and one process, or as many as there are no shards, or one model for several processes.
    """
    import torch.distributed as dist

    from torch_pi2.checkpoint.shards import own_shard
    from torch_pi2.store.shards import shards_in

    several, folder = int(os.environ.get("WORLD_SIZE", "1")), Path(args.model)
    if several > 1 and folder.is_dir() and not shards_in(folder):
        raise ConfigError(
            f"{args.model} in {several} processes",
            expected="a folder of shards, of which each process has one",
            found="no shards",
            fix=f"Make them (torch-pi2 pack {args.model} OUT --ranks {several}), or start one process.",
        )
    with together(args, _LOADING):
        if shards_in(folder):
            args.model = str(own_shard(folder))
        if several > 1 and dist.get_rank():
            _tell_nothing(args)
        yield


@contextmanager
def together(args: argparse.Namespace, patience: timedelta = _PATIENCE) -> Iterator[None]:
    """Within it they are one group, on CPUs, if there are several (``WORLD_SIZE``); the first tells what there is."""
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    dist.init_process_group("gloo", timeout=patience)
    args.quiet = args.quiet or dist.get_rank() > 0
    try:
        yield
    finally:
        end_of_group(args)


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
