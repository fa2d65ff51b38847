"""``Live``: activity of a served model, as events several times a second for ``/v1/live``."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch_pi2.eval.work import Work
from torch_pi2.observe import counters
from torch_pi2.observe.live import Firing
from torch_pi2.rewrite.state import ModelState, SparseState, store_of
from torch_pi2.serve.batch import Counts
from torch_pi2.serve.model import ServedModel

#: Minimum and maximum seconds between two readings. The pause is 100 times a reading's CPU time, so readings take 1 %.
EVERY_S, _MOST_S = 0.25, 2.0
_PAUSE = 100
#: Maximum events queued for a slow client; then the oldest is dropped.
_MOST_QUEUED = 16
#: Seconds without an event before an ``alive`` event, which detects dead connections.
_ALIVE_S = 5.0
#: Name and data of an event.
Event = tuple[str, dict[str, Any]]
_Queue = asyncio.Queue[Event | Exception | None]


@dataclass(frozen=True)
class _Reading:
    """Counters at one time."""

    at: float
    counts: Counts
    work: dict[str, int]
    store: dict[str, int] | None


class Live:
    """Reads the counters of ``served`` while someone listens; ``together``: models here, which share some sums."""

    def __init__(self, served: ServedModel, together: int = 1) -> None:
        self._served, self._together = served, together
        self._listeners: set[_Queue] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._firing = Firing(served.model)
        self._idle: Event | None = None  # the event that was sent when work ended; None: there is work
        self._before: _Reading | None = None

    async def events(self) -> AsyncGenerator[Event, None]:
        """``model`` once, then ``figures`` while there is work, ``idle`` after it, and ``alive``."""
        queue: _Queue = asyncio.Queue()
        if self._closed:
            return
        self._listeners.add(queue)
        try:
            if self._task is None:
                self._task = asyncio.create_task(self._run())
            elif self._idle is not None:
                queue.put_nowait(self._idle)
            yield "model", await asyncio.to_thread(self._about)
            while (event := await _next(queue)) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self._listeners.discard(queue)

    def close(self) -> None:
        """End all streams; no other begins."""
        self._closed = True
        self._send(None)

    def _send(self, event: Event | Exception | None) -> None:
        for queue in self._listeners:
            while queue.qsize() >= _MOST_QUEUED:
                queue.get_nowait()
            queue.put_nowait(event)

    async def _run(self) -> None:
        try:
            while self._listeners and not self._closed:
                await self._watch()
        except Exception as error:  # the listeners get it
            self._send(error)
        finally:
            self._task = None

    async def _watch(self) -> None:
        await asyncio.to_thread(self._start)
        try:
            while self._listeners and not self._closed:
                figures, took_s = await asyncio.to_thread(self._figures)
                if figures["busy"]:
                    self._idle = None
                    self._send(("figures", figures))
                elif self._idle is None:
                    self._idle = ("idle", figures)
                    self._send(self._idle)
                await asyncio.sleep(max(EVERY_S, min(_MOST_S, _PAUSE * took_s)))
        finally:
            self._idle = None
            await asyncio.to_thread(self._firing.stop)

    def _start(self) -> None:
        self._firing.start()
        self._before = self._reading()

    def _about(self) -> dict[str, Any]:
        served, firing, parts = self._served, self._firing, ModelState.of(self._served.model)
        weights = parts.weights if isinstance(parts, SparseState) else "float"
        about = {"model": served.name, "sparse": bool(firing.layers), "weights": weights, "layers": firing.layers}
        about |= {"max_batch_size": served.batch.max_batch_size, "store": store_of(served.model) is not None}
        return about | {"together": self._together}

    def _reading(self) -> _Reading:
        store = store_of(self._served.model)
        stats = None if store is None else store.stats()
        return _Reading(time.perf_counter(), replace(self._served.batch.counts), counters.read(), stats)

    def _figures(self) -> tuple[dict[str, Any], float]:
        """Differences since the last reading, and the CPU time that reading took."""
        started = time.thread_time()
        before, now = self._before, self._reading()
        assert before is not None
        self._before = now
        state = self._served.batch.state()
        seconds, counts, then = now.at - before.at, now.counts, before.counts
        answered, read = counts.answer_tokens - then.answer_tokens, counts.prompt_tokens - then.prompt_tokens
        steps, step_s = counts.steps - then.steps, counts.step_seconds - then.step_seconds
        step = {"rounds": steps, "ms": 1e3 * step_s / steps} if steps else None
        prompt = {"tokens": read, "ms": 1e3 * (counts.prompt_seconds - then.prompt_seconds)} if read else None
        layers = self._firing.read(state["live"])  # slightly later than ``now``
        fired = any(layer["tokens"] for layer in layers)
        work = Work(**_since(before.work, now.work, [field.name for field in fields(Work)]))
        figures: dict[str, Any] = {"seconds": seconds, **state, "answer_tokens": answered, "prompt_tokens": read}
        figures |= {"tokens_per_second": answered / seconds, "layers": layers}
        figures["ffn"] = {name: getattr(work, name) for name in ("neurons_computed", "neurons_used", "rows_used")}
        busy = bool(state["live"] or state["waiting"] or answered or read or fired or steps)
        figures |= {"step": step, "prompt": prompt, "store": _store_figures(before.store, now.store), "busy": busy}
        return figures, time.thread_time() - started


async def _next(queue: _Queue) -> Event | Exception | None:
    try:
        return await asyncio.wait_for(queue.get(), _ALIVE_S)
    except TimeoutError:
        return "alive", {}


def _since(before: Mapping[str, int], now: Mapping[str, int], names: list[str]) -> dict[str, int]:
    """Differences of counters. If one has decreased, all were reset and count from 0."""
    reset = any(now[name] < before[name] for name in names)
    return {name: now[name] - (0 if reset else before[name]) for name in names}


def _store_figures(before: Mapping[str, int] | None, now: Mapping[str, int] | None) -> dict[str, int] | None:
    """Neurons wanted and cached, reads and bytes since the last reading; the cache now."""
    if before is None or now is None:
        return None
    sums = _since(before, now, ["calls", "wanted", "hits", "reads", "bytes_read"])
    del sums["calls"]
    return {**sums, **{name: now[name] for name in ("resident", "slots", "cache_bytes")}}
