"""A thread of the CPU in a GPU's place, which has its own queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.of_model import homes


class ThreadLink:
    """What is queued is done in order by a thread; ``together``: it and the CPU must both be at work at some time."""

    device = torch.device("cpu")

    def __init__(self, together: bool = False) -> None:
        self.turn = threading.Lock()
        self._pool = ThreadPoolExecutor(1)
        self._barrier = threading.Barrier(2) if together else None
        self.done: list[str] = []

    def _meet(self) -> None:
        if self._barrier is not None:
            self._barrier.wait(timeout=20)

    def leave(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        sent = self._pool.submit(x.clone)

        def wait() -> torch.Tensor:
            found = sent.result()
            self._meet()  # the CPU has its input, and begins
            self.done.append("cold")
            return found

        return wait

    def queue(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            self._meet()
            self.done.append("hot")
            with torch.no_grad():
                return work()

        return self._pool.submit(run).result

    def enter(self, y: torch.Tensor) -> torch.Tensor:
        return y.clone()


def placed(model: nn.Module) -> dict[str, int]:
    """Neurons of each layer of ``model``, which is divided, that are not on the CPU."""
    found: dict[str, int] = {}
    for home in homes(model):
        if isinstance(home, SparseExperts):
            every, there = home.site.intermediate, home.split.there
            found |= {layer.site.key: every * (i in there) for i, layer in enumerate(home.experts())}
        else:
            found[home.site.key] = home.split.n_gpu
    return found
