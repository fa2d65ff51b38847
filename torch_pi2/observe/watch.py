"""Counts which neurons of a model's layers fire in use; costs nothing while no watch runs.

The C++ core counts (csrc/ffn/firing.h) in every call of a layer's operator, from any thread, decoder or compiled graph;
results are bitwise the same. A neuron fires if its score exceeds the threshold of its layer (0 except for method
``threshold``); with a predictor, if it was computed and is not zero. Prompts computed as matrix products
(:mod:`torch_pi2.layers.prompt`) are not counted.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Self

import torch

from torch_pi2.errors import ConfigError
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.offloaded import OffloadedFFN, explained
from torch_pi2.ops import load
from torch_pi2.ops.library import unseen_by_modes


class Watch:
    """Counts which neurons of ``layers`` of one model fire, from :meth:`start` to :meth:`stop` or in a ``with`` block.

    Each start begins at zero. Copies of a model that share a store are counted together; calls after a conversion
    (``model.to``) are not. ``start`` raises ConfigError: a layer is already watched. ArtifactError: its store has been
    closed.
    """

    def __init__(self, layers: Sequence[SparseFFN]) -> None:
        self.layers = layers
        self._turn = threading.RLock()
        self._numbers = list[int]()  # of the core's watch, while one is under way
        weakref.finalize(self, _drop, self._numbers).atexit = False

    def start(self) -> Self:
        load()
        first, sizes = self.layers[0], list[int]()
        # neurons with thresholds of their own are zero below them
        cuts = [layer.threshold if layer.thresholds is None else 0.0 for layer in self.layers]
        with self._turn:
            if isinstance(first, OffloadedFFN):
                numbers = [layer.store_layer for layer in self.layers if isinstance(layer, OffloadedFFN)]
                with explained(str(first.store.path)):
                    number = torch.ops.pi2.firing_start_stored(first.store.number, numbers, cuts, sizes)
            else:
                number = torch.ops.pi2.firing_start([layer.neuron_rows for layer in self.layers], cuts, sizes)
            if not number:
                fix = "Stop that one first; its counts can be read meanwhile."
                expected, found = "one watch of it at a time", "another one running"
                raise ConfigError("watching a model", expected=expected, found=found, fix=fix)
            self._numbers.append(number)
        return self

    def stop(self) -> None:
        with self._turn:
            _drop(self._numbers)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def counts(self, *, reset: bool = False) -> list[torch.Tensor]:
        """By layer int64 ``[1 + I]``: tokens, and for how many each neuron fired, in plan order; from any thread, while
        it runs. ``reset``: then count from zero.
        """
        with self._turn:
            return [torch.ops.pi2.firing_read(self._numbers[0], i, reset)[0] for i in range(len(self.layers))]


def fired(layer: SparseFFN, x_TH: torch.Tensor) -> torch.Tensor:
    """Which neurons of ``layer`` fire for each token as a call of its own, bool ``[T, I]`` in the plan's order."""
    fired_TI = torch.zeros((len(x_TH), layer.site.intermediate), dtype=torch.bool)
    with Watch([layer]) as watched:
        for x_1H, fired_I in zip(x_TH.split(1), fired_TI):
            layer.whole(x_1H)
            fired_I.copy_(watched.counts(reset=True)[0][1:] > 0)
    return fired_TI


def _drop(numbers: list[int]) -> None:
    with unseen_by_modes():
        while numbers:
            torch.ops.pi2.firing_stop(numbers.pop())
