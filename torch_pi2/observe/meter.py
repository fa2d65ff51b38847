"""``Meter``: where the time of one thread that decodes goes, by what it does and by part of the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torch_pi2.layers.offloaded import Store
from torch_pi2.observe import timings

#: Parts of a model whose time is known, and what is left.
PARTS = ("linear", "head", "predictor", "ffn", "wait", "rest")


@dataclass
class Spent:
    """What one kind of work took.

    Attributes:
        rounds: so often it began. seconds: on the clock.
        ms: by part of :data:`PARTS`: ``linear`` layers in our formats without the ``head``; ``ffn`` without the
            ``wait`` for reads in it; ``rest``: attention to keys and values, norms, choosing tokens, and linear layers
            that are PyTorch's.
    """

    rounds: int = 0
    seconds: float = 0.0
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


@dataclass(frozen=True)
class _Sample:
    """Clock, the core's timings and the nanoseconds that threads waited for reads."""

    at: float
    timings: dict[tuple[int, ...], int]
    wait_ns: int


class Meter:
    """Adds up what a thread spends on each kind of work that it says it enters.

    The core's clocks are read when the kind changes, and every ``every_s`` while it stays: between these, a round costs
    the reading of one clock. They are the process's: where other models run, their time is in the parts too.

    Args:
        vocabulary: rows of the head, by which it is told from other linear layers.
        store: of the model; None: it is in memory.
    """

    def __init__(self, vocabulary: int, store: Store | None, every_s: float = 0.2) -> None:
        self._vocabulary, self._store, self._every_s = vocabulary, store, every_s
        self._kind: str | None = None
        self._rounds = 0
        self._before: _Sample | None = None
        self._spent: dict[str, Spent] = {}

    def enter(self, kind: str) -> None:
        """From here on the thread does ``kind``, for one round. One thread alone calls this."""
        if kind != self._kind or self._before is None or time.perf_counter() - self._before.at >= self._every_s:
            self._add()
            self._kind = kind
        self._rounds += 1

    def read(self) -> dict[str, Spent]:
        """By kind, since the start, up to some round; any thread. What it gives is not changed any more."""
        return self._spent

    def _add(self) -> None:
        now, before = self._sample(), self._before
        if before is not None and self._kind is not None:
            spent = self._spent.get(self._kind, Spent())
            ms = _between(before, now, self._vocabulary)
            added = Spent(
                spent.rounds + self._rounds,
                spent.seconds + now.at - before.at,
                {part: spent.ms[part] + ms[part] for part in PARTS},
            )
            self._spent = {**self._spent, self._kind: added}  # another one: whoever reads has the old one
        self._before, self._rounds = now, 0

    def _sample(self) -> _Sample:
        wait_ns = 0 if self._store is None else self._store.stats()["wait_ns"] // max(1, torch.get_num_threads())
        rows = timings.read(reset=False)
        return _Sample(time.perf_counter(), {tuple(row[:3]): row[4] for row in rows}, wait_ns)


def _between(before: _Sample, now: _Sample, vocabulary: int) -> dict[str, float]:
    """Milliseconds by part; what somebody has set to zero in between counts from there."""
    rows: list[Sequence[int]] = []
    for key, nanoseconds in now.timings.items():
        earlier = before.timings.get(key, 0)
        rows.append((*key, 0, nanoseconds - earlier if nanoseconds >= earlier else nanoseconds))
    linear, head = timings.split_head(rows, vocabulary)
    ffn, predictor = (timings.milliseconds(rows, kind) for kind in (timings.FFN, timings.PREDICTOR))
    waited = now.wait_ns - before.wait_ns if now.wait_ns >= before.wait_ns else now.wait_ns
    wait = min(ffn, waited / 1e6)
    known = {"linear": linear, "head": head, "predictor": predictor, "ffn": ffn - wait, "wait": wait}
    return {**known, "rest": max(0.0, 1e3 * (now.at - before.at) - sum(known.values()))}
