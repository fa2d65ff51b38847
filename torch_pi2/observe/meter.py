"""Where the time of a decoding thread goes, by kind of work and by part of the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torch_pi2.layers.offloaded import Store
from torch_pi2.observe import timings

#: Parts of a model whose time is known, and the rest.
PARTS = ("linear", "head", "predictor", "ffn", "wait", "rest")


@dataclass
class Spent:
    """Time of one kind of work.

    Attributes:
        rounds: how often it began. seconds: wall time.
        ms: by part of :data:`PARTS`: ``linear`` layers in our formats without the ``head``; ``ffn`` without the
            ``wait`` for reads in it; ``rest``: attention to keys and values, norms, choosing tokens, and linear layers
            that are PyTorch's.
    """

    rounds: int = 0
    seconds: float = 0.0
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


@dataclass(frozen=True)
class _Sample:
    """Wall time, the core's timings, and nanoseconds that threads waited for reads."""

    at: float
    timings: dict[tuple[int, ...], int]
    wait_ns: int


class Meter:
    """Adds up the time that a thread spends on each kind of work.

    The core's clocks are read when the kind changes, and every ``every_s`` while it stays. They count the whole
    process: the time of other models is in the parts too.

    Args:
        vocabulary: rows of the head, which distinguish it from other linear layers.
        store: of the model; None: it is in memory.
    """

    def __init__(self, vocabulary: int, store: Store | None, every_s: float = 0.2) -> None:
        self._vocabulary, self._store, self._every_s = vocabulary, store, every_s
        self._kind: str | None = None
        self._rounds = 0
        self._before: _Sample | None = None
        self._spent: dict[str, Spent] = {}

    def enter(self, kind: str) -> None:
        """The thread begins a round of ``kind``. Only one thread may call this."""
        if kind != self._kind or self._before is None or time.perf_counter() - self._before.at >= self._every_s:
            self._add()
            self._kind = kind
        self._rounds += 1

    def read(self) -> dict[str, Spent]:
        """By kind, since the start, from any thread; the result does not change afterwards."""
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
            self._spent = {**self._spent, self._kind: added}  # a new object: readers keep the old one
        self._before, self._rounds = now, 0

    def _sample(self) -> _Sample:
        wait_ns = 0 if self._store is None else self._store.stats()["wait_ns"] // max(1, torch.get_num_threads())
        rows = timings.read(reset=False)
        return _Sample(time.perf_counter(), {tuple(row[:3]): row[4] for row in rows}, wait_ns)


def _between(before: _Sample, now: _Sample, vocabulary: int) -> dict[str, float]:
    """Milliseconds by part; clocks that were reset in between count from zero."""
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
