"""Speculative decoding: tokens are drafted cheaply, and one pass over the weights verifies them.

Drafts do not change the text: the model's own token is taken at each position (Leviathan et al., arXiv 2211.17192, for
greedy decoding). They come from the text so far (prompt lookup, as in transformers and vLLM) or a smaller model.
:class:`Pace` measures while decoding whether they pay.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from torch_pi2.decode.chunked_prefill import most_positions
from torch_pi2.decode.decoder import VERIFIED, Decoder
from torch_pi2.decode.sequence import GeneratedSequence
from torch_pi2.errors import ConfigError

#: Maximum tokens drafted at a time: they are verified together with the one before them.
MOST_DRAFTED = VERIFIED - 1


@dataclass(frozen=True)
class Drafts:
    """Statistics of drafts: tokens ``drafted`` and verified, and ``accepted``; ``passes``: forwards that verified
    drafts, the others being plain steps; ``switched_off``: drafting had been paused (:class:`Pace`).
    """

    drafted: int
    accepted: int
    passes: int
    switched_off: bool


class Source(Protocol):
    """Drafts the next tokens."""

    def read(self, prompt_1T: torch.Tensor) -> None:
        """Read the prompt, int64 ``[1, T]``, before the first draft (drafting is timed)."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens after ``tokens`` (prompt and answer, which only grow between calls), or none."""


class PromptLookup:
    """Drafts the tokens that followed the last two to four tokens earlier in the text; at its end, repeats them."""

    _LENGTHS = (4, 3, 2)

    def __init__(self) -> None:
        self._positions: dict[tuple[int, ...], int] = {}  # tokens -> the position after their last occurrence
        self._indexed = 0  # tokens that have been indexed

    def read(self, prompt_1T: torch.Tensor) -> None:
        self._index(prompt_1T[0].tolist())

    def _index(self, tokens: Sequence[int]) -> None:
        for end in range(self._indexed + 1, len(tokens)):  # without the last token, which nothing follows
            for n in self._LENGTHS:
                if n <= end:
                    self._positions[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        self._index(tokens)
        for n in self._LENGTHS:
            start = self._positions.get(tuple(tokens[-n:])) if n < len(tokens) else None
            if start is not None:
                return [tokens[start + i % (len(tokens) - start)] for i in range(count)]
        return []


class Assistant:
    """Drafts with a smaller causal language model of the same vocabulary, up to its ``max_position_embeddings``, for
    the model ``of``. Raises ConfigError: another vocabulary, no head or weights. UnsupportedModelError: no Decoder.
    """

    def __init__(self, model: nn.Module, of: nn.Module, max_tokens: int, compiled: bool) -> None:
        vocab, found = _vocabulary(of), _vocabulary(model)
        if found != vocab or any(parameter.is_meta for parameter in model.parameters()):
            expected = f"a causal language model with the vocabulary of the one that it helps, {vocab} tokens"
            has = "one without weights (on meta)" if found == vocab else f"a vocabulary of {found}"
            has = f"a {type(model).__name__}, which says nothing about next tokens" if found is None else has
            fix = "Pass a smaller model of the same family, or use prompt_lookup, which takes none."
            raise ConfigError("assistant_model", expected=expected, found=has, fix=fix)
        places = getattr(model.config, "max_position_embeddings", None)
        self._most = min(max_tokens, max_tokens if places is None else places, most_positions(model))
        self._decoder = Decoder(model, max_tokens=self._most, compiled=compiled, logits=True)
        self._decoder.check_parts("assistant_model")
        self._read: list[int] = []  # tokens in its KV cache

    def read(self, prompt_1T: torch.Tensor) -> None:
        if prompt_1T.shape[1] < self._most:
            self._decoder.prompt(prompt_1T)
            self._read = prompt_1T[0].tolist()

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """The greedy continuation; none if there is no room for it."""
        if len(tokens) + count > self._most:
            return []
        agreed = min(len(self._read), len(tokens) - 1)
        while self._read[:agreed] != tokens[:agreed]:
            agreed -= 1
        self._decoder.rollback(len(self._read) - agreed)
        self._read, guessed = list(tokens), list[int]()
        piece = 1 if self._decoder.compiled else VERIFIED  # so that there is one graph
        for start in range(agreed, len(tokens), piece):
            logits_V = self._fed(tokens[start : start + piece])
        while True:
            guessed.append(int(logits_V.argmax()))
            if len(guessed) == count:
                return guessed
            logits_V = self._fed(guessed[-1:])
            self._read.append(guessed[-1])

    def _fed(self, tokens: Sequence[int]) -> torch.Tensor:
        ids_1T = torch.tensor([list(tokens)], dtype=torch.int64, device="cpu")
        return (self._decoder.step if len(tokens) == 1 else self._decoder.verify)(ids_1T)[-1]


def _vocabulary(model: nn.Module) -> int | None:
    """Size of the vocabulary of the logits of ``model``; None: it has no logits."""
    inputs, head = (getattr(model, f"get_{which}_embeddings", lambda: None)() for which in ("input", "output"))
    if inputs is None or head is None:
        return None
    known: int = inputs.num_embeddings
    return known if getattr(head, "out_features", known) == known else None


class Pace:
    """Decides how many tokens to draft, by the measured times of steps and passes.

    A pass with n drafted tokens takes ``1 + n x`` plain steps (x is measured and includes drafting) and gives
    ``1 + a + ... + a^n`` tokens, where a is the share of recent drafts that were right. The n with the most tokens per
    time is taken, if that is at least ``GAIN`` times the rate of plain steps. Otherwise drafting pauses, for ``REST``
    tokens at first and twice as long each time.

    The net cost of drafts so far, plus that of the next ones if all were wrong, must stay below ``LOST`` steps plus
    ``LOSS`` of the time of plain steps. So an answer of 128 tokens or more takes at most 1.03 times as long (1.05 if a
    draft costs 0.9 of a step, as the first pass assumes less), not counting some 15 us of bookkeeping per token. Times
    are medians of the latest few; the first step, which may compile code, is not counted.

    Args:
        counts: numbers of tokens to choose from, ascending.
    """

    GAIN, LOSS, LOST, REST = 1.03, 0.015, 1.5, 32
    #: A plain step is measured once in ``EVERY`` forwards. Nothing is drafted before ``LEAST_STEPS`` are measured.
    EVERY, LEAST_STEPS = 32, 3
    #: Assumed at first: 3 in 4 of ``_BELIEVED`` drafted tokens were right, and each costs 0.3 of a step.
    _BELIEVED, _RIGHT, _COST, _LEAST_COSTS = 2.0, 1.5, 0.3, 3
    #: Decay of earlier drafts with each new one; maximum credit for good drafts, in steps.
    _FADES, _MOST_SAVED = 0.95, 4.0

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts
        self._plain_ms: deque[float] = deque(maxlen=8)
        self._costs: deque[float] = deque(maxlen=8)  # x of the latest passes
        self._steps = self._tokens = self._since_plain = 0
        self._saved = 0.0  # in plain steps; negative: lost
        self._believe()
        self._rest_until, self._rest = 0, self.REST

    def _believe(self) -> None:
        self._tried, self._right = self._BELIEVED, self._RIGHT
        self._costs.clear()
        self._cost: float | None = None  # x: the median of the latest, if there are enough

    @property
    def off(self) -> bool:
        """Whether drafting is paused, or has to be paid for with plain steps first."""
        return self._tokens < self._rest_until or not self._payable(self._counts[0])

    def _cost_of(self, n: int) -> float:
        return n * (self._COST if self._cost is None else self._cost)

    def _payable(self, n: int) -> bool:
        return self._saved - self._cost_of(n) >= -(self.LOST + self.LOSS * self._tokens)

    def count(self, most: int) -> int:
        """Number of tokens to draft now, at most ``most``; 0: take a plain step."""
        if len(self._plain_ms) < self.LEAST_STEPS or self._since_plain >= self.EVERY or self.off:
            return 0
        counts = [n for n in self._counts if n <= most and self._payable(n)]
        if not counts:
            return 0
        best = max(counts, key=self._gain)
        if self._gain(best) >= self.GAIN:
            return best
        if most >= self._counts[-1]:  # else the end of the answer limits it
            self._rest_until, self._rest = self._tokens + self._rest, 2 * self._rest
            self._believe()  # for the next try
        return 0

    def _gain(self, n: int) -> float:
        """Expected speedup of passes with n drafted tokens over plain steps."""
        share = self._right / self._tried
        return sum(share**i for i in range(n + 1)) / (1 + self._cost_of(n))

    def plain(self, ms: float) -> None:
        """Count a plain step of ``ms`` milliseconds."""
        self._steps += 1
        self._tokens += 1
        self._since_plain = 0
        if self._steps > 1:
            self._plain_ms.append(ms)

    def passed(self, ms: float, guesses: int, right: int) -> None:
        """Count a pass of ``ms`` milliseconds with ``guesses`` drafted tokens, of which ``right`` were right."""
        self._tokens += right + 1
        self._since_plain += 1
        for was_right in [True] * right + [False] * (right < guesses):
            self._tried = self._FADES * self._tried + 1
            self._right = self._FADES * self._right + was_right
        # a pass that takes longer was disturbed, no reason to pause for long
        took = min(ms / statistics.median(self._plain_ms), 1 + 2 * guesses)
        self._costs.append(max(0.0, took - 1) / guesses)
        if len(self._costs) >= self._LEAST_COSTS:  # one disturbed pass is no reason to stop
            self._cost = statistics.median(self._costs)
        self._saved = min(self._MOST_SAVED, self._saved + right + 1 - took)
        if self._saved > 0:
            self._rest = self.REST


def speculate(
    decoder: Decoder,
    sequence: GeneratedSequence,
    prompt: Sequence[int],
    logits_V: torch.Tensor,
    choose: Callable[[torch.Tensor], int],
    source: Source,
    pace: Pace,
    limit: int,
) -> tuple[Drafts, list[float]]:
    """Decode ``sequence`` until it ends or has ``limit`` new tokens; returns statistics of drafts, and milliseconds of
    each forward. ``decoder`` has read ``prompt`` and returned ``logits_V``; ``choose`` picks a token from such logits.
    """
    tokens, forward_ms, drafted, accepted, passes = list(prompt), list[float](), 0, 0, 0

    def append(logits_V: torch.Tensor) -> int:
        tokens.append(choose(logits_V))
        sequence.append(tokens[-1])
        return tokens[-1]

    append(logits_V)
    while sequence.ended is None:
        started = time.perf_counter()
        # times and drafts differ from process to process, if several compute the model
        (count,) = decoder.agreed([pace.count(limit - len(sequence.tokens) - 1)])
        guesses = source.propose(tokens, count) if count else []
        guesses = decoder.agreed(guesses) if guesses else []
        ids_1T = torch.tensor([[tokens[-1], *guesses]], dtype=torch.int64, device="cpu")
        logits_TV = (decoder.verify(ids_1T) if guesses else decoder.step(ids_1T)).cpu()  # waits for a GPU
        forward_ms.append((time.perf_counter() - started) * 1e3)
        if not guesses:
            pace.plain(forward_ms[-1])
            append(logits_TV[0])
            continue
        before = len(tokens)
        try:
            for logits_V, guess in zip(logits_TV, [*guesses, None], strict=True):
                if append(logits_V) != guess or sequence.ended is not None:
                    break
        finally:  # a streamer may raise
            decoder.rollback(decoder.length - (len(tokens) - 1))
        # the last token is the model's own, unless a draft ended the answer
        right = sum(a == b for a, b in zip(tokens[before:], guesses, strict=False))
        drafted, accepted, passes = drafted + len(guesses), accepted + right, passes + 1
        pace.passed(forward_ms[-1], len(guesses), right)
    return Drafts(drafted, accepted, passes, pace.off), forward_ms
