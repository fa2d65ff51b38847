"""A small store and the same tokens every time, so that accesses can be compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_pi2
from torch_pi2.decode.kv_cache import cache_name, cache_of
from torch_pi2.types.offload import Budget, OffloadConfig

IDS = torch.arange(1, 25).reshape(2, 12)


CLOSED = r"model\.pi2: expected an open store, found a store that has been closed"


@cache
def _budget(folder: Path, policy: str) -> Budget:
    return torch_pi2.stats(torch_pi2.load(folder, budget="1GiB", offload=OffloadConfig(policy=policy)))["budget"]


def loaded(folder: Path, share: float, **config: Any) -> nn.Module:
    """With a cache for ``share`` of the neurons."""
    parts = _budget(folder, config.get("policy", "lru"))
    budget = parts.smallest + parts.in_slots(int(share * parts.neurons))
    return torch_pi2.load(folder, budget=budget, offload=OffloadConfig(**config))


def decoded(model: nn.Module, between: Callable[[int], object] = lambda i: None) -> torch.Tensor:
    """Logits of a prompt's last token and of twelve more, with keys and values kept."""
    logits = []
    with torch.no_grad():
        out = model(IDS[:1], use_cache=True)
        for i in range(12):
            logits.append(out.logits[0, -1])
            between(i)
            out = model(torch.tensor([[3 + 5 * i]]), use_cache=True, **{cache_name(model): cache_of(out)})
    return torch.stack([*logits, out.logits[0, -1]])
