"""Verbs that several processes of ``torchrun`` or ``accelerate launch`` run together."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

#: Of waiting for a process that has more to do.
_PATIENCE = timedelta(days=7)


@contextmanager
def together(args: argparse.Namespace) -> Iterator[None]:
    """Within it they are one group, on CPUs, if there are several (``WORLD_SIZE``); the first tells what there is."""
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    dist.init_process_group("gloo", timeout=_PATIENCE)
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
            args.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        dist.destroy_process_group()
