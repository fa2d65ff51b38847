"""``Batch``: sequences that join and leave what is decoded together, between steps (continuous batching).

One thread reads prompts and steps; whoever submits a :class:`Sequence` is told of its tokens by a function that this
thread calls. Greedy tokens are those that the sequence has alone where products are ours
(:meth:`torch_pi2.decode.decode.Decoder.join`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from torch_pi2.decode.decode import Decoder
from torch_pi2.decode.generate import Sampling, pick
from torch_pi2.decode.growing import Growing
from torch_pi2.errors import BusyError, ConfigError, ShapeError
from torch_pi2.serve.prefix import PrefixCache

if TYPE_CHECKING:
    from torch_pi2.serve.constraint import Constraint

_log = logging.getLogger("torch_pi2")


@dataclass(frozen=True)
class Taken:
    """A token of a sequence.

    Attributes:
        token: its id. logprob: of it, natural, before temperature and bias; None: not asked for.
        top: the most likely ids with theirs, descending.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Ended:
    """Nothing more comes. ``reason``: ``stop``, ``length``, ``cancelled`` or ``error``, with what was raised."""

    reason: str
    error: Exception | None = None


@dataclass(eq=False)
class Sequence:
    """A prompt and how it is to go on.

    Attributes:
        prompt: token ids, one or more. limit: of new tokens. ends: ids after which nothing more comes.
        tell: called in the decoding thread with each :class:`Taken` and, once, an :class:`Ended`; it must not wait.
        sampling: None: greedy. seed: of its own generator. bias: id -> what is added to its logit.
        top: log probabilities of so many most likely tokens are wanted, and of the one taken; None: of none.
        constraint: which tokens may come; None: any.
    """

    prompt: list[int]
    limit: int
    tell: Callable[[Taken | Ended], object]
    ends: Collection[int] = ()
    sampling: Sampling | None = None
    seed: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)
    top: int | None = None
    constraint: Constraint | None = None
    _cancelled: bool = field(default=False, init=False)
    _growing: Growing = field(init=False)

    def __post_init__(self) -> None:
        self._growing = Growing(0, self.seed, self.limit, self.ends)

    def cancel(self) -> None:
        """It leaves before the next step, from whatever thread this is called."""
        self._cancelled = True

    def _take(self, logits_V: torch.Tensor) -> None:
        scores_V = logits_V.float()
        if self.bias:
            scores_V = scores_V.clone()
            for token, bias in self.bias.items():
                scores_V[token] += bias
        if self.constraint is not None:
            scores_V = self.constraint.allowed(scores_V)
        token = pick(scores_V, self.sampling, self._growing.random)
        self._growing.take(token)
        if self.constraint is not None and self.constraint.take(token):
            self._growing.ended = "eos"
        self.tell(_with_logprobs(token, logits_V, self.top))


def _with_logprobs(token: int, logits_V: torch.Tensor, top: int | None) -> Taken:
    if top is None:
        return Taken(token)
    logprobs_V = logits_V.float().log_softmax(-1)
    best = logprobs_V.topk(min(top, len(logprobs_V))) if top else None
    pairs = () if best is None else tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Taken(token, float(logprobs_V[token]), pairs)


@dataclass
class Counts:
    """Since the start: tokens read and answered, sequences by how they ended, seconds of prompts and steps."""

    prompt_tokens: int = 0
    answer_tokens: int = 0
    steps: int = 0
    prompt_seconds: float = 0.0
    step_seconds: float = 0.0
    ended: dict[str, int] = field(default_factory=dict)


class Batch:
    """Decodes what is submitted, up to ``lanes`` sequences at a time, in a thread of its own from :meth:`start` on.

    Args:
        model: see :class:`~torch_pi2.decode.decode.Decoder`.
        max_tokens: of each sequence, prompt and answer.
        lanes: sequences decoded together, at most. waiting: those that may wait for a lane.
        compiled: steps are compiled, those of each number of sequences when it first comes: a pause of seconds.
        prefix_bytes: of keys and values of prompts that are kept for others that begin alike.

    Attributes:
        counts: what has been done. prefixes: what is kept of prompts.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens: int,
        lanes: int = 8,
        waiting: int = 64,
        compiled: bool = False,
        prefix_bytes: int = 0,
    ) -> None:
        if waiting < 0:
            raise ConfigError("waiting", expected="0 or more", found=str(waiting), fix="Choose a larger number.")
        self.max_tokens, self.lanes, self.counts = max_tokens, lanes, Counts()
        self._decoder = Decoder(model, max_tokens=max_tokens, batch=lanes, compiled=compiled, logits=True)
        self.prefixes = PrefixCache(prefix_bytes)
        self._live: list[Sequence] = []  # by row
        self._waiting: deque[Sequence] = deque()
        self._most_waiting = waiting
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pi2-batch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float | None = None) -> None:
        """No more is taken; what there is has ``seconds`` (None: as long as it takes) to end, then it is cancelled."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if not self._thread.is_alive():
            return
        self._thread.join(seconds)
        with self._changed:
            for sequence in [*self._waiting, *self._live]:
                sequence.cancel()
        self._thread.join()

    def submit(self, sequence: Sequence) -> None:
        """Decode it as soon as there is a lane.

        Raises:
            ShapeError: prompt and answer have no room. BusyError: too many wait, or the batch is being closed.
        """
        tokens = len(sequence.prompt)
        if not 1 <= tokens < self.max_tokens or tokens + sequence.limit > self.max_tokens or sequence.limit < 1:
            raise ShapeError(
                "prompt and answer",
                expected=f"1 token of each or more, at most {self.max_tokens} together",
                found=f"{tokens} and {sequence.limit}",
                fix="Ask for less, or start with a longer context.",
            )
        with self._changed:
            if self._closing or len(self._waiting) >= self._most_waiting + self._free():
                found = "one that is being closed" if self._closing else f"{len(self._waiting)} that wait"
                raise BusyError(
                    "sequences",
                    expected=f"at most {self._most_waiting} that wait for one of {self.lanes} lanes",
                    found=found,
                    fix="Try again later.",
                )
            self._waiting.append(sequence)
            self._changed.notify()

    def state(self) -> dict[str, int]:
        """Sequences that are decoded (``live``) and that wait (``waiting``) now."""
        with self._changed:
            return {"live": len(self._live), "waiting": len(self._waiting)}

    def _free(self) -> int:
        return self.lanes - len(self._live)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._live or self._closing):
                    self._changed.wait()
                if self._closing and not (self._waiting or self._live):
                    return
            try:
                self._admit()
                if self._live:
                    self._step()
            except Exception as error:
                _log.exception("a batch of %d sequences failed", len(self._live))
                for sequence in self._live:
                    self._end(sequence, "error", error)
                self._live = []
                self._decoder.keep([])

    def _admit(self) -> None:
        """Read prompts of those that wait, while there are lanes."""
        while self._free():
            with self._changed:
                if not self._waiting:
                    return
                sequence = self._waiting.popleft()
            if sequence._cancelled:
                self._end(sequence, "cancelled")
                continue
            ids_1T = torch.tensor([sequence.prompt], dtype=torch.int64)
            started = time.perf_counter()
            try:
                logits_1V = self._read(ids_1T)
            except Exception as error:
                self._end(sequence, "error", error)
                continue
            self.counts.prompt_seconds += time.perf_counter() - started
            self.counts.prompt_tokens += len(sequence.prompt)
            self._live.append(sequence)
            self._took([(sequence, logits_1V[0])])

    def _read(self, ids_1T: torch.Tensor) -> torch.Tensor:
        ids, row = ids_1T[0].tolist(), len(self._live)
        logits_1V = self._decoder.join(ids_1T, self.prefixes.find(ids))
        self.prefixes.add(ids, lambda first, last: self._decoder.copied(row, first, last))
        return logits_1V

    def _step(self) -> None:
        self._drop([sequence for sequence in self._live if sequence._cancelled], "cancelled")
        if not self._live:
            return
        ids_B1 = torch.tensor([[sequence._growing.tokens[-1]] for sequence in self._live], dtype=torch.int64)
        started = time.perf_counter()
        logits_BV = self._decoder.step(ids_B1)
        self.counts.step_seconds += time.perf_counter() - started
        self.counts.steps += 1
        self._took(list(zip(self._live, logits_BV, strict=True)))

    def _took(self, logits: list[tuple[Sequence, torch.Tensor]]) -> None:
        for sequence, logits_V in logits:
            sequence._take(logits_V)
        self.counts.answer_tokens += len(logits)
        for ended, reason in (("eos", "stop"), ("length", "length")):
            self._drop([sequence for sequence, _ in logits if sequence._growing.ended == ended], reason)

    def _drop(self, sequences: list[Sequence], reason: str) -> None:
        """They end, and the last rows move into theirs."""
        if not sequences:
            return
        gone = set(map(id, sequences))
        kept = [row for row, sequence in enumerate(self._live) if id(sequence) not in gone]
        rows = self._decoder.keep(kept)
        self._live = [self._live[row] for row in rows]
        for sequence in sequences:
            self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        self.counts.ended[reason] = self.counts.ended.get(reason, 0) + 1
        sequence.tell(Ended(reason, error))
