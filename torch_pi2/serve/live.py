"""``Live``: what a served model does right now, told several times a second to whoever looks on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch_pi2.eval.work import Work
from torch_pi2.layers.offloaded import Store
from torch_pi2.observe import counters
from torch_pi2.observe.live import Firing
from torch_pi2.observe.meter import Meter, Spent
from torch_pi2.rewrite.handle import Handle, Optimized, store_of
from torch_pi2.serve.served import Served

#: Between two readings, at least and at most; one that takes a processor longer than others is followed by a longer
#: rest, so that a hundredth of its time goes into them.
EVERY_S, _MOST_S = 0.25, 2.0
_LEAST_REST = 100
#: Events that somebody may be late with before the oldest is lost.
_MOST_HELD = 16
#: So long after the last event it is said that there was none, by which a dead connection is noticed.
_ALIVE_S = 5.0
#: What a batch's thread does that is told of.
WORK = ("step", "prompt")

#: Name and data of what is told.
Told = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class _Reading:
    """What has been counted up to now."""

    at: float
    answer_tokens: int
    prompt_tokens: int
    work: dict[str, int]
    spent: dict[str, Spent]
    store: dict[str, int] | None


class Live:
    """Reads what ``served`` counts while somebody looks on; from the first one on, and until the last has gone.

    Args:
        served: whose batch and model are read. together: models of this process: work and times are of all of them.
    """

    def __init__(self, served: Served, together: int = 1) -> None:
        self._served, self._together = served, together
        self._lookers: set[asyncio.Queue[Told | Exception | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._firing = Firing(served.model)
        self._idle: Told | None = None  # what was told when work ended; None: there is some
        self._before: _Reading | None = None

    async def events(self) -> AsyncGenerator[Told, None]:
        """``model``, once, then ``figures`` while there is work, ``idle`` when there is none any more, and ``alive``.

        Raises:
            ConfigError: somebody else watches the model.
        """
        held: asyncio.Queue[Told | Exception | None] = asyncio.Queue()
        if self._closed:
            return
        self._lookers.add(held)
        try:
            if self._task is None:
                self._task = asyncio.create_task(self._run())
            elif self._idle is not None:
                held.put_nowait(self._idle)
            yield "model", await asyncio.to_thread(self._about)
            while (told := await _next(held)) is not None:
                if isinstance(told, Exception):
                    raise told
                yield told
        finally:
            self._lookers.discard(held)

    def close(self) -> None:
        """All streams end, and no other begins."""
        self._closed = True
        self._tell(None)

    def _tell(self, what: Told | Exception | None) -> None:
        for held in self._lookers:
            while held.qsize() >= _MOST_HELD:
                held.get_nowait()
            held.put_nowait(what)

    async def _run(self) -> None:
        try:
            while self._lookers and not self._closed:
                await self._look()
        except Exception as error:  # it is theirs who look on, as what a request raises is
            self._tell(error)
        finally:
            self._task = None

    async def _look(self) -> None:
        """Until nobody does."""
        await asyncio.to_thread(self._start)
        try:
            while self._lookers and not self._closed:
                figures, took_s = await asyncio.to_thread(self._timed)
                if figures["busy"]:
                    self._idle = None
                    self._tell(("figures", figures))
                elif self._idle is None:
                    self._idle = ("idle", figures)
                    self._tell(self._idle)
                await asyncio.sleep(max(EVERY_S, min(_MOST_S, _LEAST_REST * took_s)))
        finally:
            self._idle = None
            await asyncio.to_thread(self._stop)

    def _store(self) -> Store | None:
        return store_of(self._served.model)

    def _start(self) -> None:
        self._firing.start()
        vocabulary: int = self._served.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self._served.batch.meter = Meter(vocabulary, self._store())
        self._before = self._reading()

    def _stop(self) -> None:
        self._served.batch.meter = None
        self._firing.stop()

    def _about(self) -> dict[str, Any]:
        """What does not change."""
        served, firing, parts = self._served, self._firing, Handle.of(self._served.model)
        return {
            "model": served.name,
            "sparse": bool(firing.layers),
            "weights": parts.weights if isinstance(parts, Optimized) else "float",
            "layers": [asdict(layer) for layer in firing.layers],
            "lanes": served.batch.lanes,
            "store": self._store() is not None,
            "together": self._together,
        }

    def _reading(self) -> _Reading:
        batch, store = self._served.batch, self._store()
        return _Reading(
            at=time.perf_counter(),
            answer_tokens=batch.counts.answer_tokens,
            prompt_tokens=batch.counts.prompt_tokens,
            work=counters.read(),
            spent={} if batch.meter is None else batch.meter.read(),
            store=None if store is None else store.stats(),
        )

    def _timed(self) -> tuple[dict[str, Any], float]:
        """:meth:`_read`, and seconds of a processor that it took."""
        started = time.thread_time()
        return self._read(), time.thread_time() - started

    def _read(self) -> dict[str, Any]:
        """What was done since the last time."""
        before, now = self._before, self._reading()
        assert before is not None
        self._before = now
        state = self._served.batch.state()
        seconds, answered = now.at - before.at, now.answer_tokens - before.answer_tokens
        read = now.prompt_tokens - before.prompt_tokens
        kinds = {kind: _spent(before.spent.get(kind, Spent()), now.spent.get(kind, Spent())) for kind in WORK}
        layers = self._firing.read(state["live"])  # of what came after ``now``, too, which is told for it
        fired = any(layer.tokens for layer in layers)
        return {
            "seconds": seconds,
            **state,
            "answer_tokens": answered,
            "prompt_tokens": read,
            "tokens_per_second": answered / seconds,
            "layers": [asdict(layer) for layer in layers],
            "ffn": _work(before.work, now.work),
            **kinds,
            "store": _stored(before.store, now.store),
            "busy": bool(state["live"] or state["waiting"] or answered or read or fired or any(kinds.values())),
        }


async def _next(held: asyncio.Queue[Told | Exception | None]) -> Told | Exception | None:
    try:
        return await asyncio.wait_for(held.get(), _ALIVE_S)
    except TimeoutError:
        return "alive", {}


def _spent(before: Spent, now: Spent) -> dict[str, Any] | None:
    """Of one round in the mean; None: none ended."""
    rounds = now.rounds - before.rounds
    if not rounds:
        return None
    ms = {part: (now.ms[part] - before.ms[part]) / rounds for part in now.ms}
    return {"rounds": rounds, "ms": 1e3 * (now.seconds - before.seconds) / rounds, "parts_ms": ms}


def _work(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, float | None]:
    """Shares; what somebody has set to zero in between counts from there."""
    names = [field.name for field in fields(Work)]
    restarted = any(now[name] < before[name] for name in names)
    done = Work(**{name: now[name] - (0 if restarted else before[name]) for name in names})
    return {name: getattr(done, name) for name in ("neurons_computed", "neurons_used", "rows_used")}


def _stored(before: Mapping[str, int] | None, now: Mapping[str, int] | None) -> dict[str, int] | None:
    """Of the store: neurons wanted and found, reads and bytes since the last time, and the cache now."""
    if before is None or now is None:
        return None
    restarted = now["calls"] < before["calls"]
    sums = {name: now[name] - (0 if restarted else before[name]) for name in ("wanted", "hits", "reads", "bytes_read")}
    return {**sums, **{name: now[name] for name in ("resident", "slots", "cache_bytes")}}
