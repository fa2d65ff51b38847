"""Speculative decoding: tokens are drafted cheaply, and one pass over the weights verifies them.

Drafts do not change the text: the model's own token is taken at each position, the most likely or one that is drawn
(Leviathan et al., arXiv 2211.17192). They come from the text so far (prompt lookup, as in transformers and vLLM) or a
smaller model. :class:`Pace` measures while decoding whether they pay.
"""

import copy
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from torch_pi2.base.fields import argument
from torch_pi2.base.progress import log
from torch_pi2.decode.chunked_prefill import most_positions
from torch_pi2.decode.decoder import VERIFIED, Decoder
from torch_pi2.decode.hf_generate import attach, decoder_for, pool_of
from torch_pi2.decode.sequence import GeneratedSequence, pick
from torch_pi2.errors import ConfigError
from torch_pi2.layers.linear import QuantLinear

#: Maximum tokens drafted at a time: they are verified together with the one before them.
MOST_DRAFTED = VERIFIED - 1
#: Default numbers of tokens that a model drafts and that are looked up: a pass with two more takes as long as a step.
_DRAFTED, _LOOKED_UP = 3, 2
#: An assistant drafts among the first ids of a larger vocabulary alone, since a head of 150,000 words is a third of
#: what a small model reads: tokenizers number frequent tokens first (FR-Spec, arXiv 2502.14856, counts them). A prompt
#: with more other tokens than a chat template's and one in ``_RARE`` gets the whole head.
_FREQUENT, _RARE, _TEMPLATE = 49152, 20, 3
#: Sizes of vocabularies that may differ within a family, as padding does (llama.cpp has the same limit).
_PADDING = 128
#: By model, what was measured of its steps and of one way of drafting for it, for the next answers.
_paces = weakref.WeakKeyDictionary[nn.Module, dict[Any, "Pace"]]()
#: Models of :func:`_of_frequent_tokens` by the model that they were made of.
_frequent = weakref.WeakKeyDictionary[nn.Module, Any]()


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
    """Drafts the next tokens. ``took_longer``: whether the latest draft took longer than others will."""

    @property
    def took_longer(self) -> bool: ...

    def begin(self, prompt: Sequence[int]) -> None:
        """Another sequence begins, with ``prompt``."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens after ``tokens`` (prompt and answer, which only grow between calls), or none."""

    def release(self) -> None:
        """Drafting is over."""


class PromptLookup:
    """Drafts the tokens that followed the last two to four tokens earlier in the text; at its end, repeats them."""

    _LENGTHS, took_longer = (4, 3, 2), False

    def __init__(self) -> None:
        self._positions: dict[tuple[int, ...], int] = {}  # tokens -> the position after their last occurrence
        self._indexed = 0  # tokens that have been indexed

    def begin(self, prompt: Sequence[int]) -> None:
        self._positions, self._indexed = {}, 0
        self._index(prompt)

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

    def release(self) -> None:
        """It holds nothing."""


class Assistant:
    """Drafts with a smaller causal language model of the same vocabulary, up to its ``max_position_embeddings``, for
    the model ``of``. It reads a prompt when it is first asked for drafts. Raises ConfigError: another vocabulary, no
    head or weights. UnsupportedModelError: no Decoder.
    """

    def __init__(self, model: nn.Module, of: nn.Module, max_tokens: int, compiled: bool) -> None:
        vocab, found = _vocabulary(of), _vocabulary(model)
        alike = vocab is not None and found is not None and abs(vocab - found) <= _PADDING
        if not alike or any(parameter.is_meta for parameter in model.parameters()):
            expected = f"a causal language model with the vocabulary of {type(of).__name__}, {vocab} tokens"
            has = "one without weights (on meta)" if alike else f"{type(model).__name__} with {found} tokens"
            has = f"a {type(model).__name__}, which says nothing about next tokens" if found is None else has
            fix = "Pass a smaller model of the same family, or use prompt_lookup, which takes none."
            raise ConfigError("assistant_model", expected=expected, found=has, fix=fix)
        places = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        self._most = min(max_tokens, max_tokens if places is None else places, most_positions(model))
        self._vocabularies: tuple[int, int] = vocab, found  # type: ignore[assignment]
        self._compiled, self._models = compiled, (model, _of_frequent_tokens(model))
        self._decoder = self._new_decoder(frequent=True)
        self._decoder.check_parts("assistant_model")

    def _new_decoder(self, frequent: bool) -> Decoder:
        self._read, self._frequent, self.took_longer = list[int](), frequent, False  # tokens in its KV cache
        model = self._models[frequent]
        pool = None if self._compiled else pool_of(model)
        return decoder_for(model, self._most, 1, self._compiled) if pool is None else pool.acquire(model, self._most, 1)

    def release(self) -> None:
        """The next assistant with this model may have the decoder, with its recorded steps."""
        if not self._compiled and (pool := pool_of(self._decoder.model)) is not None:
            pool.release(self._decoder)

    def begin(self, prompt: Sequence[int]) -> None:
        rare = len({token for token in prompt if token >= _FREQUENT})
        frequent = rare <= _TEMPLATE + len(prompt) / _RARE
        if frequent != self._frequent and self._models[0] is not self._models[1]:
            self.release()
            self._decoder = self._new_decoder(frequent)
        if len(prompt) >= self._most:
            found = f"a prompt of {len(prompt)} tokens is not drafted for"
            log.warning("the draft model %s has %d positions: %s", type(self._models[0]).__name__, self._most, found)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """The greedy continuation; none if there is no room for it."""
        if len(tokens) + count > self._most:
            return []
        self._decoder.took_longer = False
        guessed, logits_V = list[int](), self._after(tokens)
        while (token := pick(logits_V, None)) < self._vocabularies[0]:
            guessed.append(token)
            if len(guessed) == count:
                break
            logits_V = self._fed([token])
        self.took_longer |= self._decoder.took_longer
        return guessed

    def _after(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after ``tokens``, of which those that are not in the KV cache are read."""
        cached = self._decoder.length if self._read else 0  # one more than was noted, if that was interrupted
        known = min(len(self._read), cached, len(tokens) - 1)
        if self._read[:known] != tokens[:known]:
            known = next(i for i in range(known) if tokens[i] != self._read[i])
        new, self._read = tokens[known:], list(tokens[:known])
        self.took_longer = not known or len(new) > VERIFIED
        if self.took_longer:
            whole, self._read = [*self._read, *new], []
            logits_V = self._decoder.prompt(self._ids(whole), known=known)[0]
            self._read = whole
            return logits_V
        self._decoder.rollback(cached - known)
        piece = 1 if self._decoder.compiled else 2  # each length is recorded, or compiled
        for start in range(0, len(new), piece):
            logits_V = self._fed(new[start : start + piece])
        return logits_V

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        """Tokens that only the other model has are another one here."""
        known = [token if token < self._vocabularies[1] else 0 for token in tokens]
        return torch.tensor([known], dtype=torch.int64, device="cpu")

    def _fed(self, tokens: Sequence[int]) -> torch.Tensor:
        ids_1T = self._ids(tokens)
        logits_V = (self._decoder.step if len(tokens) == 1 else self._decoder.verify)(ids_1T)[-1]
        self._read += tokens
        return logits_V


def _of_frequent_tokens(model: Any) -> Any:
    """``model`` with the first ``_FREQUENT`` rows of its head, on the same memory; itself if it has no more."""
    head = model.get_output_embeddings()
    name = next((name for name, child in model.named_children() if child is head), None)
    if name is None or not isinstance(head, QuantLinear) or head.out_features <= _FREQUENT or head._forward_hooks:
        return model
    known = _frequent.get(model)
    if known is not None and known._modules.keys() == model._modules.keys():
        rows, dtype = (getattr(known._modules[name], part) for part in ("rows", "dtype"))
        same = all(known._modules[other] is child for other, child in model._modules.items() if other != name)
        if same and rows.data_ptr() == head.rows.data_ptr() and dtype == head.dtype:
            return known
    bias = None if head.bias is None else head.bias[:_FREQUENT]
    how = (head.in_features, head.weights, head.int8_activations, "the head of the draft model")
    few = QuantLinear(head.rows[:_FREQUENT], bias, *how)
    few.dtype, few.blocks = head.dtype, head.blocks
    made = copy.copy(model)
    object.__setattr__(made, "_modules", {**model._modules, name: few})
    attach(made)
    _frequent[model] = made
    return made


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
    tokens at first and twice as long each time, at most ``LONGEST``.

    The net cost of drafts so far, plus that of the next ones if all were wrong, must stay below ``LOST`` steps plus
    ``LOSS`` of the time of plain steps. So an answer of 128 tokens or more takes at most 1.03 times as long (1.05 if a
    draft costs 0.9 of a step, as the first pass assumes less), not counting some 15 us of bookkeeping per token, and
    what it takes once to record passes, as steps are. Times are medians of the latest few; the first step, which may
    compile code, is not counted.

    Args:
        counts: numbers of tokens to choose from, ascending.
    """

    GAIN, LOSS, LOST, REST, LONGEST = 1.03, 0.015, 1.5, 32, 512
    #: A plain step is measured once in ``EVERY`` forwards. Nothing is drafted before ``LEAST_STEPS`` are measured.
    EVERY, LEAST_STEPS = 32, 3
    #: Assumed at first: 3 in 4 of ``_BELIEVED`` drafted tokens were right, and each costs 0.3 of a step.
    _BELIEVED, _RIGHT, _COST, _LEAST_COSTS = 2.0, 1.5, 0.3, 3
    #: Decay of earlier drafts with each new one; maximum credit for good drafts, in steps.
    _FADES, _MOST_SAVED = 0.95, 4.0

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts
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
        return self._tokens < self._rest_until or not self._payable(self.counts[0])

    def _cost_of(self, n: int) -> float:
        return n * (self._COST if self._cost is None else self._cost)

    def _payable(self, n: int) -> bool:
        return self._saved - self._cost_of(n) >= -(self.LOST + self.LOSS * self._tokens)

    def count(self, most: int) -> int:
        """Number of tokens to draft now, at most ``most``; 0: take a plain step."""
        if len(self._plain_ms) < self.LEAST_STEPS or self._since_plain >= self.EVERY or self.off:
            return 0
        counts = [n for n in self.counts if n <= most and self._payable(n)]
        if not counts:
            return 0
        best = max(counts, key=self._gain)
        if self._gain(best) >= self.GAIN:
            return best
        if most >= self.counts[-1]:  # else the end of the answer limits it
            self._rest_until, self._rest = self._tokens + self._rest, min(2 * self._rest, self.LONGEST)
            self._believe()  # for the next try
        return 0

    def _gain(self, n: int) -> float:
        """Expected speedup of passes with n drafted tokens over plain steps."""
        share = self._right / self._tried
        return sum(share**i for i in range(n + 1)) / (1 + self._cost_of(n))

    def skip(self, tokens: int) -> None:
        """Count ``tokens`` of a forward that took longer than others will."""
        self._tokens += tokens

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


class Speculator:
    """Decodes the only sequence of a Decoder with drafts of ``source``, as many as ``pace`` allows, and counts them.
    What was measured serves the next sequences, too.
    """

    def __init__(self, source: Source, pace: Pace) -> None:
        self.source, self.pace, self._failed = source, pace, False
        self._drafted = self._accepted = self._passes = 0

    @property
    def drafts(self) -> Drafts:
        """Since the beginning."""
        return Drafts(self._drafted, self._accepted, self._passes, self.pace.off)

    def _proposed(self, tokens: Sequence[int], count: int) -> list[int]:
        try:
            return self.source.propose(tokens, count)
        except Exception as error:  # the answer needs no drafts
            self._failed = True
            log.warning("the draft model failed, and drafts no more: %s", error)
            return []

    def forward(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        sequence: GeneratedSequence,
        take: Callable[[torch.Tensor], object],
    ) -> float:
        """A step, or a pass that verifies drafts, after ``prompt`` and ``sequence``; its milliseconds. ``take``
        appends the token that it chooses from such logits ``[V]`` to ``sequence``; it is called once or more.
        """
        started, tokens, decoder.took_longer = time.perf_counter(), [*prompt, *sequence.tokens], False
        # times and drafts differ from process to process, if several compute the model
        room = min(sequence.left, decoder.room_to_verify) - 1
        (count,) = decoder.agreed([self.pace.count(room) if room > 0 else 0])
        guesses = self._proposed(tokens, count) if count and not self._failed else []
        guesses = decoder.agreed(guesses) if guesses else []
        ids_1T = torch.tensor([[tokens[-1], *guesses]], dtype=torch.int64, device="cpu")
        logits_TV = (decoder.verify(ids_1T) if guesses else decoder.step(ids_1T)).cpu()  # waits for a GPU
        ms = (time.perf_counter() - started) * 1e3
        if not guesses:
            if decoder.took_longer:
                self.pace.skip(1)
            else:
                self.pace.plain(ms)
            take(logits_TV[0])
            return ms
        before = len(sequence.tokens)
        try:
            for logits_V, guess in zip(logits_TV, [*guesses, None], strict=True):
                take(logits_V)
                if sequence.ended is not None or sequence.tokens[-1] != guess:
                    break
        finally:  # a streamer may raise
            taken = sequence.tokens[before:]
            decoder.rollback(len(guesses) - max(0, len(taken) - 1))
        # the last token is the model's own, unless a draft ended the answer
        right = sum(a == b for a, b in zip(taken, guesses, strict=False))
        self._drafted, self._accepted = self._drafted + len(guesses), self._accepted + right
        self._passes += 1
        if decoder.took_longer or self.source.took_longer:
            self.pace.skip(len(taken))
        else:
            self.pace.passed(ms, len(guesses), right)
        return ms


def speculator(
    decoder: Decoder,
    max_tokens: int,
    prompt_lookup: int | None = None,
    assistant_model: nn.Module | None = None,
    draft_tokens: int | None = None,
) -> Speculator | None:
    """Speculative decoding as the arguments of :func:`torch_pi2.generate` ask for it, of sequences of ``max_tokens``;
    None: they do not, or by default where passes may have other bits. Raises ConfigError: a setting is invalid.
    UnsupportedModelError: see :class:`Decoder`.
    """
    assisted = assistant_model is not None
    if prompt_lookup is None:
        prompt_lookup = _LOOKED_UP if not assisted and decoder.passes_are_steps() else 0
    lookup = prompt_lookup != 0
    if (lookup and assisted) or (draft_tokens is not None and not assisted):
        expected, fix = "prompt_lookup, or assistant_model with or without draft_tokens", "Choose one source of drafts."
        found = "prompt_lookup and assistant_model" if lookup and assisted else "draft_tokens without a model"
        raise ConfigError("prompt_lookup, assistant_model, draft_tokens", expected=expected, found=found, fix=fix)
    if not (lookup or assisted):
        return None
    drafted = prompt_lookup if lookup else _DRAFTED if draft_tokens is None else draft_tokens
    if not 1 <= drafted <= MOST_DRAFTED:
        fix = "More are not verified in one pass; 3 to 5 are usual."
        argument(drafted, "prompt_lookup" if lookup else "draft_tokens", fix).wrong(f"1 to {MOST_DRAFTED}")
    decoder.check_parts("prompt_lookup" if lookup else "assistant_model")
    source: Source = PromptLookup()
    if assistant_model is not None:
        source = Assistant(assistant_model, decoder.model, max_tokens, decoder.compiled)
    # one number: passes of each length are recorded, which takes as long as some steps, or compiled
    known, what = _paces.setdefault(decoder.model, {}), (Pace, id(assistant_model), drafted, decoder.compiled)
    return Speculator(source, known.setdefault(what, Pace([drafted])))
