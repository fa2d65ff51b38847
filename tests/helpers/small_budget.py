"""Models over a store without a cache: they read every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_pi2
from torch_pi2.types.offload import OffloadConfig

IDS = torch.arange(1, 13)[None]


def small(folder: Path, **settings: Any) -> nn.Module:
    """The model with the smallest budget there is: without a cache, so that it reads every time."""
    config = OffloadConfig(preload=False, io_threads=4, **settings)
    budget = torch_pi2.stats(torch_pi2.load(folder, budget="1GiB", offload=config))["budget"].smallest
    return torch_pi2.load(folder, budget=budget, offload=config)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits
