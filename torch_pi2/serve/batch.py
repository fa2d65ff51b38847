"""``Batch``: sequences that join and leave what is decoded together, between steps (continuous batching).

One thread reads prompts, a piece between two steps of the others, and steps; whoever submits a :class:`Sequence` is
told of its tokens by a function that this thread calls. Greedy tokens are those that the sequence has alone where
products are ours (:meth:`torch_pi2.decode.decode.Decoder.joining`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from torch_pi2.base.tensorfile import Spec
from torch_pi2.decode.calls import group_of
from torch_pi2.decode.decode import Decoder
from torch_pi2.decode.generate import Sampling, pick
from torch_pi2.decode.growing import Growing
from torch_pi2.decode.pieces import takes_several_lengths, ways_of_prompts
from torch_pi2.errors import BusyError, ClosedError, ConfigError, GroupError, ShapeError
from torch_pi2.observe.meter import Meter
from torch_pi2.serve.identity import identity
from torch_pi2.serve.prefix import BLOCK_TOKENS, PrefixCache
from torch_pi2.serve.prefix_folder import PrefixFolder

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
    _cancelled: str | None = field(default=None, init=False)
    _failed: Exception | None = field(default=None, init=False)
    _growing: Growing = field(init=False)

    def __post_init__(self) -> None:
        self._growing = Growing(0, self.seed, self.limit, self.ends)

    def cancel(self, reason: str = "cancelled") -> None:
        """It leaves before the next step, from whatever thread this is called. ``reason``: it ends by, the first."""
        self._cancelled = self._cancelled or reason

    def _last(self) -> int:
        """The token that the next step feeds."""
        tokens = self._growing.tokens
        return tokens[-1] if tokens else self.prompt[-1]

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
        lanes: sequences decoded together, at most; one where a model needs them of one length.
            waiting: those that may wait for a lane.
        compiled: steps are compiled, those of each number of sequences when it first comes: a pause of seconds.
        prefix_bytes: of keys and values of prompts that are kept for others that begin alike.
        prefix_folder: where they are kept on disk, too (as far as ``prefix_folder_bytes``), for other runs.

    Attributes:
        counts: what has been done. prefixes: what is kept of prompts. most: sequences that are taken at a time.
        meter: is told what the thread does: ``idle``, ``prompt`` or ``step``; None: nobody looks.
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
        prefix_folder: str | Path | None = None,
        prefix_folder_bytes: int = 4 << 30,
    ) -> None:
        if waiting < 0:
            raise ConfigError("waiting", expected="0 or more", found=str(waiting), fix="Choose a larger number.")
        if lanes > 1 and not takes_several_lengths(model, max_tokens):
            _log.warning("%s answers one request at a time: its sequences need one length", type(model).__name__)
            lanes = 1
        self.max_tokens, self.lanes, self.counts = max_tokens, lanes, Counts()
        self.most = lanes + waiting
        self.meter: Meter | None = None
        self._group = group_of(model)
        if prefix_folder is not None and self._group is not None and self._group.divides_kv:
            raise ConfigError(
                "prefix_folder of a model whose keys and values are divided among processes",
                expected="none: each process has those of its own layers or heads",
                found=str(prefix_folder),
                fix="Leave it out (--prefix-dir), or leave attention whole (neurons, --attention whole).",
            )
        self._decoder = Decoder(model, max_tokens=max_tokens, batch=lanes, compiled=compiled, logits=True)
        on_disk = (
            None if prefix_folder is None else self._folder(model, prefix_folder, prefix_folder_bytes, prefix_bytes)
        )
        self.prefixes = PrefixCache(prefix_bytes, ways=ways_of_prompts(model), folder=on_disk)
        self._reading: tuple[Sequence, Generator[int]] | None = None
        self._live: list[Sequence] = []  # by row
        self._waiting: deque[Sequence] = deque()
        self._most_waiting = waiting
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pi2-batch", daemon=True)

    def _folder(self, model: nn.Module, path: str | Path, budget_bytes: int, memory_bytes: int) -> PrefixFolder:
        if memory_bytes == 0:
            raise ConfigError(
                "prefix_bytes",
                expected="memory for keys and values that are in a folder, too",
                found="0",
                fix="Give it some (--prefix-cache), or name no folder (--prefix-dir).",
            )
        of_model = identity(model)
        # the first prompt makes the memory, into which others' keys and values go, and says their shapes
        self._decoder.prompt(torch.zeros(1, 1, dtype=torch.int64))
        shapes = [(tensor.shape, tensor.dtype) for tensor in self._decoder.copied(0, 0, 1)]
        self._decoder.keep([])
        specs = [Spec((heads, BLOCK_TOKENS, width), dtype) for (heads, _, width), dtype in shapes]
        return PrefixFolder(path, budget_bytes, of_model, specs, waiting_bytes=memory_bytes)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float | None = None) -> None:
        """No more is taken; what there is has ``seconds`` (None: as long as it takes) to end, then it is cancelled."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)
            with self._changed:
                reading = [] if self._reading is None else [self._reading[0]]
                for sequence in [*self._waiting, *reading, *self._live]:
                    sequence.cancel()
            self._thread.join()
        self.prefixes.close()

    def submit(self, sequence: Sequence) -> None:
        """Decode it as soon as there is a lane.

        Raises:
            ShapeError: prompt and answer have no room. BusyError: too many wait. ClosedError: no more is taken.
            GroupError: another process that has a part of the model is lost.
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
            if self.failure is not None:
                raise self.failure
            if self._closing:
                raise closed()
            if len(self._waiting) >= self._most_waiting + self._free():
                raise BusyError(
                    "sequences",
                    expected=f"at most {self._most_waiting} that wait for one of {self.lanes} lanes",
                    found=f"{len(self._waiting)} that wait",
                    fix="Try again later.",
                )
            self._waiting.append(sequence)
            self._changed.notify()

    @property
    def failure(self) -> GroupError | None:
        """Why nothing more is decoded: one of several processes that compute the model is lost. None: it is."""
        return None if self._group is None else self._group.failure

    def state(self) -> dict[str, int]:
        """Sequences that are read or decoded (``live``) and that wait (``waiting``) now."""
        with self._changed:
            return {"live": self.lanes - self._free(), "waiting": len(self._waiting)}

    def _enter(self, work: str) -> None:
        if (meter := self.meter) is not None:
            meter.enter(work)

    def _free(self) -> int:
        return self.lanes - len(self._live) - (self._reading is not None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._live or self._reading or self._closing):
                    self._enter("idle")
                    self._changed.wait()
                if self._closing and not (self._waiting or self._live or self._reading):
                    return
            try:
                self._read()
                if self._live:
                    self._step()
            except Exception as error:
                if self.failure is not None:
                    self._end_all(error)
                    return
                _log.exception("a batch of %d sequences failed", len(self._live))
                for sequence in self._live:
                    self._end(sequence, "error", error)
                self._live = []
                self._decoder.keep([])

    def _end_all(self, error: Exception) -> None:
        """Also those that wait: there are no steps any more."""
        with self._changed:
            reading = [] if self._reading is None else [self._reading[0]]
            ended = [*self._live, *reading, *self._waiting]
            self._live, self._reading = [], None
            self._waiting.clear()
        for sequence in ended:
            self._end(sequence, "error", error)

    def _read(self) -> None:
        """Let those that wait join, up to a piece of a prompt: what is known of prompts takes no time."""
        while self._reading is not None or self._begin():
            assert self._reading is not None
            sequence, pieces = self._reading
            self._enter("prompt")
            started = time.perf_counter()
            try:
                left = None if sequence._cancelled else next(pieces, None)
                if left:
                    return
                if left == 0:
                    next(pieces, None)
            except Exception as error:
                sequence._failed = error
            finally:
                self.counts.prompt_seconds += time.perf_counter() - started
            pieces.close()
            self._reading = None
            joined = len(self._decoder.lengths) > len(self._live)
            if joined:
                self.counts.prompt_tokens += len(sequence.prompt)
                self._live.append(sequence)  # who was cancelled meanwhile leaves in the step: there is a row of theirs
            if sequence._failed is not None and joined:
                self._drop([sequence], "error")
            elif joined and left is not None:
                return
            elif not joined:
                self._end(sequence, "error" if sequence._failed else sequence._cancelled or "", sequence._failed)

    def _begin(self) -> bool:
        """Whether there is a lane and somebody who waits for it: theirs is read from now on."""
        with self._changed:
            if not self._waiting or not self._free():
                return False
            sequence = self._waiting.popleft()
            self._reading = sequence, self._pieces(sequence.prompt)
            return True

    def _pieces(self, ids: list[int]) -> Generator[int]:
        """Of a prompt, as :meth:`Decoder.joining` reads them, but for what is kept of others."""
        read = ids[:-1]
        yield from self._decoder.joining(torch.tensor([ids], dtype=torch.int64), self.prefixes.find(read))
        row = len(self._live)
        self.prefixes.add(read, lambda first, last: self._decoder.copied(row, first, last))

    def _step(self) -> None:
        self._forget()
        for reason in ("stop", "cancelled"):
            self._drop([sequence for sequence in self._live if sequence._cancelled == reason], reason)
        if not self._live:
            return
        self._enter("step")
        ids_B1 = torch.tensor([[sequence._last()] for sequence in self._live], dtype=torch.int64)
        started = time.perf_counter()
        logits_BV = self._decoder.step(ids_B1).cpu()  # so that a GPU has done it
        self.counts.step_seconds += time.perf_counter() - started
        self.counts.steps += 1
        self._took(list(zip(self._live, logits_BV, strict=True)))

    def _forget(self) -> None:
        """Who left while they waited are in nobody's way."""
        with self._changed:
            gone = [sequence for sequence in self._waiting if sequence._cancelled]
            for sequence in gone:
                self._waiting.remove(sequence)
        for sequence in gone:
            self._end(sequence, sequence._cancelled or "")

    def _took(self, logits: list[tuple[Sequence, torch.Tensor]]) -> None:
        for sequence, logits_V in logits:
            try:
                sequence._take(logits_V)
            except Exception as error:  # of its constraint: what others say does not depend on it
                sequence._failed, sequence._growing.ended = error, "error"
        self.counts.answer_tokens += len(logits)
        for ended, reason in (("error", "error"), ("eos", "stop"), ("length", "length")):
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
            self._end(sequence, reason, sequence._failed)

    def _end(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        self.counts.ended[reason] = self.counts.ended.get(reason, 0) + 1
        if error is not None:
            error = self.failure or error  # who is lost, not that somebody is
        sequence.tell(Ended(reason, error))


def closed() -> ClosedError:
    return ClosedError(
        "answer", expected="a server that goes on", found="one that ends", fix="Ask again when there is one."
    )
