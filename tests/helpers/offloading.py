"""A small model and its store, and the ways to read one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import torch_pi2
from torch_pi2.types.offload import OffloadConfig

IDS = torch.arange(1, 25).reshape(2, 12)


def smallest(folder: Path) -> int:
    return int(torch_pi2.stats(torch_pi2.load(folder, budget="1GiB"))["budget"].smallest)


def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


CONFIGS = {
    "default": OffloadConfig(),
    "pread, buffered, no pipeline": OffloadConfig(engine="pread", direct=False, pipeline=False, io_threads=2),
    "sieve, no preload": OffloadConfig(policy="sieve", preload=False, in_flight=1),
    "static": OffloadConfig(policy="static", hot_share=1.0),
    "lru": OffloadConfig(policy="lru"),
    "look-ahead": OffloadConfig(lookahead=True, spin=False),
    "window": OffloadConfig(window=2, hot_share=0.0, run_bytes=512),
    "mmap": OffloadConfig(engine="mmap"),
}
