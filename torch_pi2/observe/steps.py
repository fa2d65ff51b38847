"""Times decoding steps on given tokens (greedy text repeats itself)."""

import time
from dataclasses import dataclass

import torch

from torch_pi2.decode.decoder import Decoder
from torch_pi2.layers.offloaded import Store
from torch_pi2.observe import timings


@dataclass(frozen=True)
class TimedSteps:
    """Total time, rows of the core's clock, counters of the store or None, and the results of :meth:`Decoder.step`."""

    seconds: float
    timings: list[list[int]]
    stats: dict[str, int] | None
    answers: list[torch.Tensor]

    def ms(self, kind: int) -> float:
        """Milliseconds of one kind of :mod:`torch_pi2.observe.timings`, summed over all steps."""
        return timings.milliseconds(self.timings, kind)

    @property
    def misses(self) -> float:
        """Neurons that were read because they were not in the cache."""
        return float(self.stats["wanted"] - self.stats["hits"]) if self.stats else 0.0


def timed_steps(decoder: Decoder, ids_BT: torch.Tensor, store: Store | None = None) -> TimedSteps:
    """Decode with the tokens ``ids_BT``, one column per step."""
    if store is not None:
        store.stats(reset=True)
    timings.read()  # resets the clock
    started = time.perf_counter()
    answers = [decoder.step(next_B1) for next_B1 in ids_BT.split(1, dim=1)]
    seconds = time.perf_counter() - started
    return TimedSteps(seconds, timings.read(), None if store is None else store.stats(), answers)
