"""``Batch``: continuous batching. Sequences join and leave the batch between decoding steps.

One thread does all the work: it steps, and reads one chunk of a prompt between two steps. It passes the tokens of a
:class:`Sequence` to a callback. If matrix products are ours, greedy tokens do not depend on the other sequences
(:meth:`torch_pi2.decode.decoder.Decoder.add`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_pi2.base.progress import log
from torch_pi2.decode.broadcast import group_of
from torch_pi2.decode.chunked_prefill import prompt_path_lengths, takes_several_lengths
from torch_pi2.decode.decoder import Decoder, check_vocabulary
from torch_pi2.decode.sequence import GeneratedSequence, Sampling, pick
from torch_pi2.decode.speculate import Drafts, Speculator, speculator
from torch_pi2.errors import BusyError, ClosedError, ConfigError, GroupError, ShapeError
from torch_pi2.serve.prefix import PrefixCache

if TYPE_CHECKING:
    from torch_pi2.serve.constraint import Constraint


@dataclass(frozen=True)
class TokenEvent:
    """A new token of a sequence. ``logprob``: natural log probability, before temperature and bias, if requested.
    ``top``: the most likely ids with theirs, descending.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class EndEvent:
    """The sequence has ended. ``reason``: ``stop``, ``length``, ``cancelled``, or ``error`` with the exception."""

    reason: str
    error: Exception | None = None


@dataclass(eq=False)
class Sequence:
    """A prompt (one token id or more) and how to continue it.

    Attributes:
        limit: maximum new tokens. ends: ids that end the sequence. tell: called in the decoding thread with each
            :class:`TokenEvent` and one :class:`EndEvent`; must not block. sampling: None: greedy. seed: of this
            sequence's generator. bias: id -> addition to its logit. top: number of most likely tokens to report with
            each token; None: no log probabilities at all. constraint: on the tokens; None: any may come.
    """

    prompt: list[int]
    limit: int
    tell: Callable[[TokenEvent | EndEvent], object]
    ends: Collection[int] = ()
    sampling: Sampling | None = None
    seed: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)
    top: int | None = None
    constraint: "Constraint | None" = None
    _cancelled: str | None = field(default=None, init=False)
    _failed: Exception | None = field(default=None, init=False)
    _growing: GeneratedSequence = field(init=False)

    def __post_init__(self) -> None:
        self._growing = GeneratedSequence(0, self.seed, self.limit, self.ends)

    def cancel(self, reason: str = "cancelled") -> None:
        """End it before the next step; from any thread. The first ``reason`` counts."""
        self._cancelled = self._cancelled or reason

    def _last(self) -> int:
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
        self._growing.append(token)
        if self.constraint is not None and self.constraint.take(token):
            self._growing.ended = "eos"
        self.tell(_token_event(token, logits_V, self.top))


def _token_event(token: int, logits_V: torch.Tensor, top: int | None) -> TokenEvent:
    if top is None:
        return TokenEvent(token)
    logprobs_V = logits_V.float().log_softmax(-1)
    best = logprobs_V.topk(min(top, len(logprobs_V))) if top else None
    pairs = () if best is None else tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenEvent(token, float(logprobs_V[token]), pairs)


@dataclass
class Counts:
    """Since the start: tokens read and answered, steps, sequences by how they ended, seconds of prefill and steps."""

    prompt_tokens: int = 0
    answer_tokens: int = 0
    steps: int = 0
    prompt_seconds: float = 0.0
    step_seconds: float = 0.0
    ended: dict[str, int] = field(default_factory=dict)


class Batch:
    """Decodes submitted sequences together, in a thread that :meth:`start` starts.

    Args:
        model: see :class:`~torch_pi2.decode.decoder.Decoder`.
        max_tokens: of each sequence, prompt and answer.
        max_batch_size: sequences decoded together (slots of the KV cache); reduced to 1 if the model does not support
            sequences of several lengths.
        max_queue: sequences that may wait for a slot.
        compiled: compile steps; the first step of each number of sequences pauses for seconds.
        prefix_bytes: size of the prefix cache.
        kv: format of keys and values, also in the prefix cache; see :class:`~torch_pi2.decode.decoder.Decoder`.
        drafting: ``prompt_lookup``, or ``assistant_model`` and ``draft_tokens`` of :func:`torch_pi2.generate`, for a
            sequence while it is the only one.

    Attributes:
        prefixes: the prefix cache. capacity: maximum sequences decoded and waiting.
        meter: measures the thread's work (``idle``, ``prompt`` or ``step``), if set.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens: int,
        max_batch_size: int = 8,
        max_queue: int = 64,
        compiled: bool = False,
        prefix_bytes: int = 0,
        kv: str | None = None,
        **drafting: Any,
    ) -> None:
        if max_queue < 0:
            raise ConfigError("max_queue", expected="0 or more", found=str(max_queue), fix="Choose a larger number.")
        if max_batch_size > 1 and not takes_several_lengths(model, max_tokens):
            log.warning("%s answers one request at a time: its sequences need one length", type(model).__name__)
            max_batch_size = 1
        self.max_tokens, self.max_batch_size, self.max_queue = max_tokens, max_batch_size, max_queue
        self.capacity, self.counts = max_batch_size + max_queue, Counts()
        self._group = group_of(model)
        how: Any = {"max_tokens": max_tokens, "batch": max_batch_size, "compiled": compiled, "kv": kv}
        self._decoder, self.kv = Decoder(model, logits=True, **how), kv
        self._drafts = speculator(self._decoder, max_tokens, **drafting)
        self._drafted_for: Sequence | None = None  # whose prompt the source of drafts has read
        self._vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        divided = self._group is not None and self._group.divides_kv
        divided = divided or (self._group is not None and self._decoder.has_states)
        self.prefixes = PrefixCache(0 if divided else prefix_bytes, ways=prompt_path_lengths(model))
        self._reading: tuple[Sequence, Generator[int]] | None = None
        self._live: list[Sequence] = []  # by row
        self._waiting: deque[Sequence] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pi2-batch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float | None = None) -> None:
        """Refuse new sequences, let the others end, and cancel those left after ``seconds`` (None: no limit)."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)
            with self._changed:
                for sequence in [*self._waiting, *self._joining(), *self._live]:
                    sequence.cancel()
            self._thread.join()

    def submit(self, sequence: Sequence) -> None:
        """Decode ``sequence`` as soon as a slot is free. Raises ShapeError: prompt and answer are too long. BusyError:
        the queue is full. ClosedError: after :meth:`close`. GroupError: a process of the model is lost.
        """
        tokens = len(sequence.prompt)
        if not 1 <= tokens < self.max_tokens or tokens + sequence.limit > self.max_tokens or sequence.limit < 1:
            expected = f"1 token of each or more, at most {self.max_tokens} together"
            found, fix = f"{tokens} and {sequence.limit}", "Ask for less, or start with a longer context."
            raise ShapeError("prompt and answer", expected=expected, found=found, fix=fix)
        with self._changed:
            if self.failure is not None:
                raise self.failure
            if self._closing:
                raise closed()
            if len(self._waiting) >= self.max_queue + self._free():
                expected = f"at most {self.max_queue} waiting, beside a batch of {self.max_batch_size}"
                fix = "Try again later."
                raise BusyError("sequences", expected=expected, found=f"{len(self._waiting)} waiting", fix=fix)
            self._waiting.append(sequence)
            self._changed.notify()

    @property
    def failure(self) -> GroupError | None:
        """The error if another process that computes a part of the model is lost; then nothing is decoded."""
        return None if self._group is None else self._group.failure

    def state(self) -> dict[str, int]:
        """Numbers of sequences that are read or decoded (``live``) and that wait (``waiting``)."""
        with self._changed:
            return {"live": self.max_batch_size - self._free(), "waiting": len(self._waiting)}

    @property
    def drafts(self) -> Drafts | None:
        """Statistics of drafts since the start, if there are any."""
        return None if self._drafts is None else self._drafts.drafts

    def _joining(self) -> list[Sequence]:
        """The sequence whose prompt is being read, if any."""
        return [] if self._reading is None else [self._reading[0]]

    def _free(self) -> int:
        return self.max_batch_size - len(self._live) - (self._reading is not None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._live or self._reading or self._closing):
                    self._changed.wait()
                if self._closing and not (self._waiting or self._live or self._reading):
                    return
            try:
                self._read()
                if self._live:
                    self._step()
            except Exception as error:
                if self.failure is not None:
                    with self._changed:
                        ended = [*self._live, *self._joining(), *self._waiting]
                        self._live, self._reading = [], None
                        self._waiting.clear()
                    for sequence in ended:
                        self._end(sequence, "error", error)
                    return
                log.exception("a batch of %d sequences failed", len(self._live))
                for sequence in self._live:
                    self._end(sequence, "error", error)
                self._live = []
                self._decoder.retain([])

    def _read(self) -> None:
        """Add waiting sequences to the batch until a chunk of a prompt has been computed."""
        while self._reading is not None or self._begin():
            assert self._reading is not None
            sequence, chunks = self._reading
            started = time.perf_counter()
            try:
                left = None if sequence._cancelled else next(chunks, None)
                if left:
                    return
                if left == 0:
                    next(chunks, None)
            except Exception as error:
                sequence._failed = error
            finally:
                self.counts.prompt_seconds += time.perf_counter() - started
            chunks.close()
            self._reading = None
            joined = len(self._decoder.lengths) > len(self._live)
            if joined:
                self.counts.prompt_tokens += len(sequence.prompt)
                self._live.append(sequence)  # if it was cancelled meanwhile, the next step drops its row
            if sequence._failed is not None and joined:
                self._drop([sequence], "error")
            elif joined and left is not None:
                return
            elif not joined:
                self._end(sequence, "error" if sequence._failed else sequence._cancelled or "", sequence._failed)

    def _begin(self) -> bool:
        """Start reading the prompt of the first waiting sequence, if a slot is free."""
        with self._changed:
            if not self._waiting or not self._free():
                return False
            sequence = self._waiting.popleft()
            self._reading = sequence, self._chunks(sequence.prompt)
            return True

    def _chunks(self, ids: list[int]) -> Generator[int]:
        """:meth:`Decoder.add` with the prefix cache."""
        read, decoder = ids[:-1], self._decoder
        known = self.prefixes.find(read, decoder.has_states) if decoder.continues else []
        kv, states = [block.kv for block in known if block.kv], known[-1].states if known else None
        yield from decoder.add(torch.tensor([ids], dtype=torch.int64), kv, states)
        row = len(self._live)
        if read and decoder.continues and self.prefixes.budget_bytes:
            after = decoder.copy_states(row) if decoder.has_states else None
            self.prefixes.add(read, lambda first, last: decoder.copy_kv(row, first, last), after)

    def _step(self) -> None:
        with self._changed:
            gone = [sequence for sequence in self._waiting if sequence._cancelled]
            for sequence in gone:
                self._waiting.remove(sequence)
        for sequence in gone:
            self._end(sequence, sequence._cancelled or "")
        for reason in ("stop", "cancelled"):
            self._drop([sequence for sequence in self._live if sequence._cancelled == reason], reason)
        if not self._live:
            return
        started = time.perf_counter()
        if self._drafts is not None and len(self._live) == 1 and self._reading is None:
            self._speculate(self._drafts, self._live[0])
        else:
            ids_B1 = torch.tensor([[sequence._last()] for sequence in self._live], dtype=torch.int64)
            logits_BV = self._decoder.step(ids_B1).cpu()  # waits for a GPU
            self.counts.step_seconds += time.perf_counter() - started
            for sequence, logits_V in zip(self._live, logits_BV, strict=True):
                self._take(sequence, logits_V)
        self.counts.steps += 1
        for ended, reason in (("error", "error"), ("eos", "stop"), ("length", "length")):
            self._drop([sequence for sequence in self._live if sequence._growing.ended == ended], reason)

    def _speculate(self, drafts: Speculator, sequence: Sequence) -> None:
        """Continue the only sequence by one token or more."""
        if self._drafted_for is not sequence:
            drafts.source.begin(sequence.prompt)
            self._drafted_for = sequence
        take = partial(self._take, sequence)
        self.counts.step_seconds += drafts.forward(self._decoder, sequence.prompt, sequence._growing, take) / 1e3

    def _take(self, sequence: Sequence, logits_V: torch.Tensor) -> None:
        try:
            sequence._take(logits_V)
            if sequence._growing.ended is None and sequence._last() >= self._vocabulary:  # the head has more
                check_vocabulary(self._decoder.model, torch.tensor([sequence._last()]), "token")
        except Exception as error:  # of its constraint; the other sequences do not depend on it
            sequence._failed, sequence._growing.ended = error, "error"
        self.counts.answer_tokens += 1

    def _drop(self, sequences: list[Sequence], reason: str) -> None:
        """End ``sequences``; the last rows of the batch move into theirs."""
        if not sequences:
            return
        gone = set(map(id, sequences))
        rows = [row for row, sequence in enumerate(self._live) if id(sequence) not in gone]
        rows = self._decoder.retain(rows)
        self._live = [self._live[row] for row in rows]
        for sequence in sequences:
            self._end(sequence, reason, sequence._failed)

    def _end(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        self.counts.ended[reason] = self.counts.ended.get(reason, 0) + 1
        if error is not None:
            error = self.failure or error  # which process is lost, not only that one is
        sequence.tell(EndEvent(reason, error))


def closed() -> ClosedError:
    return ClosedError("answer", expected="a server that goes on", found="one that ends", fix="Ask again later.")
