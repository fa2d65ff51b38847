"""Speculative decoding: next tokens are guessed cheaply, and one pass over the weights says which of them are right.

Guesses change no text: what is taken is what the model itself says after each token (Leviathan et al., arXiv
2211.17192, for greedy decoding). Where they come from: text that is there already (prompt lookup, as transformers and
vLLM have it) or a smaller model. When they are worth it is measured while decoding (:class:`Pace`).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from torch_pi2.decode.decode import VERIFIED, Decoder
from torch_pi2.decode.growing import Growing
from torch_pi2.errors import ConfigError

#: Tokens that can be drafted at a time: with the one before them they are verified together.
MOST_DRAFTED = VERIFIED - 1


@dataclass(frozen=True)
class Drafts:
    """What became of guesses.

    Attributes:
        drafted: tokens guessed and verified. accepted: of these, tokens of the answer.
        passes: forwards that verified some; the others were plain steps.
        switched_off: whether at the end, by what was measured, guessing did not pay (:class:`Pace`).
    """

    drafted: int
    accepted: int
    passes: int
    switched_off: bool


class Source(Protocol):
    """Guesses what comes next."""

    def read(self, prompt_1T: torch.Tensor) -> None:
        """Get to know the prompt, int64 ``[1, T]``: before the first guess, which is timed."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens after ``tokens`` (prompt and answer so far, which only grow); or none: no idea."""


class PromptLookup:
    """What followed the last few tokens when they came before; text that ends too soon is thought to go on repeating.

    Two tokens at least must be the same (one matches too often by chance), four at most are compared.
    """

    _LENGTHS = (4, 3, 2)

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # some tokens -> where what followed them last begins
        self._known = 0  # tokens that end such a run

    def read(self, prompt_1T: torch.Tensor) -> None:
        """Remember what stands where."""
        self._know(prompt_1T[0].tolist())

    def _know(self, tokens: Sequence[int]) -> None:
        for end in range(self._known + 1, len(tokens)):  # without the end of all, which nothing follows
            for n in self._LENGTHS:
                if n <= end:
                    self._after[tuple(tokens[end - n : end])] = end
        self._known = max(self._known, len(tokens) - 1)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens, or none."""
        self._know(tokens)
        for n in self._LENGTHS:
            start = self._after.get(tuple(tokens[-n:])) if n < len(tokens) else None
            if start is not None:
                return [tokens[start + i % (len(tokens) - start)] for i in range(count)]
        return []


class Assistant:
    """What a smaller causal language model of the same vocabulary would say.

    Args:
        model: see :class:`~torch_pi2.decode.decode.Decoder`. of: that it is to help.
        max_tokens: prompt and answer together.

    Beyond the positions that it was made for (``max_position_embeddings``) it has no idea.

    Raises:
        ConfigError: another vocabulary, no head for it, or no weights. UnsupportedModelError: no decoder can be made of
            it.
    """

    def __init__(self, model: nn.Module, of: nn.Module, max_tokens: int, compiled: bool) -> None:
        vocab, found = _vocabulary(of), _vocabulary(model)
        if found != vocab or any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError(
                "assistant_model",
                expected=f"a causal language model with the vocabulary of the one that it helps, {vocab} tokens",
                found="one without weights (on meta)"
                if found == vocab
                else f"a {type(model).__name__}, which says nothing about next tokens"
                if found is None
                else f"a vocabulary of {found}",
                fix="Pass a smaller model of the same family, or use prompt_lookup, which takes none.",
            )
        places = getattr(model.config, "max_position_embeddings", None)
        self._most = min(max_tokens, max_tokens if places is None else places)
        self._decoder = Decoder(model, max_tokens=max_tokens, compiled=compiled, logits=True)
        self._read: list[int] = []  # what its decoder has

    def read(self, prompt_1T: torch.Tensor) -> None:
        """Read the prompt, if there is room for it."""
        if prompt_1T.shape[1] < self._most:
            self._decoder.prompt(prompt_1T)
            self._read = prompt_1T[0].tolist()

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens: its own greedy continuation; none where there is no room for it."""
        if len(tokens) + count > self._most:
            return []
        agreed = min(len(self._read), len(tokens) - 1)
        while self._read[:agreed] != tokens[:agreed]:
            agreed -= 1
        self._decoder.take_back(len(self._read) - agreed)
        self._read, guessed = list(tokens), list[int]()
        piece = 1 if self._decoder.compiled else VERIFIED  # not a graph for each number of tokens
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
    """Tokens that ``model`` knows and has logits for; None: it has none."""
    inputs, head = (getattr(model, f"get_{which}_embeddings", lambda: None)() for which in ("input", "output"))
    if inputs is None or head is None:
        return None
    known: int = inputs.num_embeddings
    return known if getattr(head, "out_features", known) == known else None


class Pace:
    """How many tokens to guess, by what steps and passes really take: as many as pay, or none.

    A pass with n guesses takes ``1 + n x`` plain steps (x is measured, guessing included) and gives
    ``1 + a + ... + a^n`` tokens, where a is how many of the latest guesses were right. The n with the most tokens per
    time is taken, if that is at least ``GAIN`` times as many as plain steps give. If not, guessing rests: for
    ``REST`` tokens at first, each time twice as long, and then has another try.

    Whatever that says: what guesses have cost so far beyond what they brought, and what the next ones would if all were
    wrong, must be less than ``LOSS`` of the time of plain steps and ``LOST`` steps. So an answer of 128 tokens or more
    takes at most 1.03 times what it would (1.05 where a guess costs 0.9 of a step: the first pass believes that it is
    less); not counted is this bookkeeping, some 15 us a token, which only models whose steps take less than a
    millisecond feel. Those have their weights in the processor's cache, where a pass reads nothing that it could share,
    and gain little anyway. Times are medians of the latest few; the first step, in which code may be compiled, is not
    counted.

    Args:
        counts: that may be chosen from, ascending.
        costs: by count what each guess costs, as a plan predicts it
            (:attr:`torch_pi2.types.machine_plan.HardwarePlan`): believed instead of ``_COST`` until it is measured,
            which a try does even if the plan expects no gain of
    """

    GAIN, LOSS, LOST, REST = 1.03, 0.015, 1.5, 32
    #: A plain step is measured once in so many forwards, guesses before so many are measured there are none.
    EVERY, LEAST_STEPS = 32, 3
    #: What is believed before anything is known: of ``_BELIEVED`` guesses 3 in 4 were right, each costs 0.3 of a step.
    _BELIEVED, _RIGHT, _COST, _LEAST_COSTS = 2.0, 1.5, 0.3, 3
    #: How much of what is known of earlier guesses each new one leaves; the credit in steps, at most, for good ones.
    _FADES, _MOST_SAVED = 0.95, 4.0

    def __init__(self, counts: Sequence[int], costs: Mapping[int, float] | None = None) -> None:
        self._counts, self._planned = counts, costs or {}
        self._plain_ms: deque[float] = deque(maxlen=8)
        self._costs: deque[float] = deque(maxlen=8)  # x of the latest passes
        self._steps = self._tokens = self._since_plain = 0
        self._saved = 0.0  # plain steps' time, net; negative: lost
        self._believe()
        self._rest_until, self._rest = 0, self.REST

    def _believe(self) -> None:
        self._tried, self._right = self._BELIEVED, self._RIGHT
        self._costs.clear()
        self._cost: float | None = None  # x: the median of the latest, if there are enough

    @property
    def off(self) -> bool:
        """Whether guesses rest, or are to be paid for with plain steps first."""
        return self._tokens < self._rest_until or not self._payable(self._counts[0])

    def _cost_of(self, n: int) -> float:
        return n * (self._planned.get(n, self._COST) if self._cost is None else self._cost)

    def _payable(self, n: int) -> bool:
        cost = max(self._cost_of(n), n * self._COST if self._cost is None else 0.0)  # plans may be wrong
        return self._saved - cost >= -(self.LOST + self.LOSS * self._tokens)

    def count(self, most: int) -> int:
        """How many tokens to guess now, no more than ``most``; 0: a plain step."""
        if len(self._plain_ms) < self.LEAST_STEPS or self._since_plain >= self.EVERY or self.off:
            return 0
        counts = [n for n in self._counts if n <= most and self._payable(n)]
        if not counts:
            return 0
        best = max(counts, key=self._gain)
        unknown = self._planned and self._cost is None
        if self._gain(best) >= self.GAIN or (unknown and self._gain(best, 1.0) > 1):
            return best
        if most >= self._counts[-1]:  # else it is the end of the answer that leaves no room
            self._rest_until, self._rest = self._tokens + self._rest, 2 * self._rest
            self._believe()  # for the next try
        return 0

    def _gain(self, n: int, right: float | None = None) -> float:
        """Tokens per time of passes with n guesses, over that of plain steps."""
        share = self._right / self._tried if right is None else right
        return sum(share**i for i in range(n + 1)) / (1 + self._cost_of(n))

    def plain(self, ms: float) -> None:
        """A plain step took so many milliseconds."""
        self._steps += 1
        self._tokens += 1
        self._since_plain = 0
        if self._steps > 1:
            self._plain_ms.append(ms)

    def passed(self, ms: float, guesses: int, right: int) -> None:
        """A pass with so many ``guesses``, of which so many were ``right``, took so many milliseconds with guessing."""
        self._tokens += right + 1
        self._since_plain += 1
        for was_right in [True] * right + [False] * (right < guesses):
            self._tried = self._FADES * self._tried + 1
            self._right = self._FADES * self._right + was_right
        # what takes longer than this was disturbed, and is no reason to rest for long
        took = min(ms / statistics.median(self._plain_ms), 1 + 2 * guesses)
        self._costs.append(max(0.0, took - 1) / guesses)
        if len(self._costs) >= self._LEAST_COSTS:  # one that was disturbed is no reason to stop
            self._cost = statistics.median(self._costs)
        self._saved = min(self._MOST_SAVED, self._saved + right + 1 - took)
        if self._saved > 0:
            self._rest = self.REST


def speculate(
    decoder: Decoder,
    sequence: Growing,
    prompt: Sequence[int],
    logits_V: torch.Tensor,
    choose: Callable[[torch.Tensor], int],
    source: Source,
    pace: Pace,
    limit: int,
) -> tuple[Drafts, list[float]]:
    """Let ``sequence`` grow until it ends; returns what became of guesses, and milliseconds of each forward.

    Args:
        decoder: that has read ``prompt``, after which ``logits_V`` come. choose: the token of logits ``[V]``.
        limit: of new tokens.
    """
    tokens, forward_ms, drafted, accepted, passes = list(prompt), list[float](), 0, 0, 0

    def take(logits_V: torch.Tensor) -> int:
        tokens.append(choose(logits_V))
        sequence.take(tokens[-1])
        return tokens[-1]

    take(logits_V)
    while sequence.ended is None:
        started = time.perf_counter()
        # by times and guesses that differ from process to process, where several compute the model
        (count,) = decoder.agreed([pace.count(limit - len(sequence.tokens) - 1)])
        guesses = source.propose(tokens, count) if count else []
        guesses = decoder.agreed(guesses) if guesses else []
        ids_1T = torch.tensor([[tokens[-1], *guesses]], dtype=torch.int64, device="cpu")
        logits_TV = (decoder.verify(ids_1T) if guesses else decoder.step(ids_1T)).cpu()  # a GPU has done it
        forward_ms.append((time.perf_counter() - started) * 1e3)
        if not guesses:
            pace.plain(forward_ms[-1])
            take(logits_TV[0])
            continue
        before = len(tokens)
        try:
            for logits_V, guess in zip(logits_TV, [*guesses, None], strict=True):
                if take(logits_V) != guess or sequence.ended is not None:
                    break
        finally:  # whoever is told of tokens may raise
            decoder.take_back(decoder.length - (len(tokens) - 1))
        # the last one taken is no guess that was verified, unless it ended the answer
        right = sum(a == b for a, b in zip(tokens[before:], guesses, strict=False))
        drafted, accepted, passes = drafted + len(guesses), accepted + right, passes + 1
        pace.passed(forward_ms[-1], len(guesses), right)
    return Drafts(drafted, accepted, passes, pace.off), forward_ms
