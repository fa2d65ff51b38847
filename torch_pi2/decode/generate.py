"""``torch_pi2.generate``: several continuations of one prompt, decoded together while they last.

Best-of-N and ``num_return_sequences`` are what makes a phone decode in batches (PowerInfer-2, arXiv 2406.06282, section
7.2.3): the prompt is read once, each step reads the weights once for all sequences, and as they end the batch becomes
smaller, its keys and values with it, and the plan follows (:func:`torch_pi2.follow`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import torch
from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.base.fields import argument, shown
from torch_pi2.decode.adapt import Engine, engine_of
from torch_pi2.decode.decode import Decoder, check_vocabulary
from torch_pi2.decode.growing import Growing, grow
from torch_pi2.decode.kept import decoder_for
from torch_pi2.decode.loop import kept_of
from torch_pi2.decode.speculate import MOST_DRAFTED, Assistant, Drafts, Pace, PromptLookup, speculate
from torch_pi2.errors import ConfigError, ShapeError
from torch_pi2.ops.dtypes import dtype_name
from torch_pi2.store.tokenizer import tokenizer_of

_log = logging.getLogger("torch_pi2")

#: Logits are divided by it: by less they would not be finite.
LEAST_TEMPERATURE = 1e-6

#: Tokens that an assistant guesses, if nobody says how many.
_DRAFTED = 4

#: What a generation configuration may ask for that :func:`generate` does not do, and the values that mean nothing.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "num_beams": (None, 1),
}


@dataclass(frozen=True)
class Generated:
    """What :func:`generate` returns.

    Attributes:
        sequences: new tokens of each sequence, its end token included.
        batches: for each step, how many sequences it was for. step_ms: how long it took, in milliseconds.
        prompt_ms: reading the prompt, by an assistant too.
        drafts: what became of guesses at next tokens; None: none were asked for.
        prompt, tokenizer: that :attr:`text` goes on from, and is decoded with; None: it was asked with ids.
    """

    sequences: list[list[int]]
    batches: list[int]
    step_ms: list[float]
    prompt_ms: float
    drafts: Drafts | None = None
    prompt: list[int] = field(default_factory=list, repr=False)
    tokenizer: Any = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """What follows the prompt in the first sequence. Raises ConfigError: :func:`generate` was asked with ids."""
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        """:attr:`text` of each sequence."""
        if self.tokenizer is None:
            raise ConfigError(
                "text of what was generated",
                expected="a tokenizer",
                found="none: generate was asked with token ids",
                fix="Ask it with text, pass tokenizer=..., or decode sequences yourself.",
            )
        return [_continuation(self.tokenizer, self.prompt, tokens) for tokens in self.sequences]

    @property
    def steps(self) -> int:
        """Forwards after the prompt's."""
        return len(self.batches)


@checked
def generate(
    model: nn.Module,
    input_ids: torch.Tensor | str,
    *,
    tokenizer: Any = None,
    num_return_sequences: int = 1,
    max_new_tokens: int = 64,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | list[int] | None = None,
    seed: int = 0,
    compiled: bool = False,
    streamer: Callable[[int, int], object] | None = None,
    engine: Engine | None = None,
    decoder: Decoder | None = None,
    prompt_lookup: int = 0,
    assistant_model: nn.Module | None = None,
    draft_tokens: int | None = None,
) -> Generated:
    """Continue one prompt ``num_return_sequences`` times.

    Without sampling all sequences are the same: that of ``model.generate``. With it, each draws from a generator of its
    own, so that sequence i is what ``seed + i`` gives alone, but for what the last bits of PyTorch's matrix products do
    not have in common for different batches.

    One greedy sequence can be decoded speculatively: with ``prompt_lookup`` or ``assistant_model`` next tokens are
    guessed, and one pass over the weights verifies several. The text is the model's own whatever the guesses: bit by
    bit that of plain decoding where linears, feed-forward layers and head are ours (``weights="int4"`` or ``"int8"``;
    see :meth:`~torch_pi2.decode.decode.Decoder.verify`). PyTorch's float products of several tokens have other last
    bits than those of one: there it is the greedy text of the same model, but at a near tie the other token may win.
    Guessing that does not pay rests (:class:`~torch_pi2.decode.speculate.Pace`), so that answers of 128 tokens or more
    take at most 1.03 times as long.

    Over a store nothing is guessed unless it is asked for here, and seldom pays: each token wants neurons of its own,
    so that wrong guesses are reads in vain (docs/SPECULATION.md; of the extra bytes of a speculated run 97 % were those
    of the widened pass, BigMoeOnEdge 0.20, which lost 18 to 29 % on a phone). Measured times decide there, too; what a
    plan predicts (:func:`torch_pi2.follow`) is believed until there are some.

    Args:
        model: see :class:`~torch_pi2.decode.decode.Decoder`; dense or optimised.
        input_ids: int64 ``[1, T]``; or text, which makes ``text`` of the result readable.
        tokenizer: for text (default: that of the folder which the model was loaded from).
        max_new_tokens: of each sequence, at most.
        do_sample: draw tokens from softmax(logits / ``temperature``), of which the ``top_k`` most likely are left (0:
            all), and of these the fewest that have a share of ``top_p`` together.
        eos_token_id: ends a sequence (default: the model's; an empty list: nothing does).
        compiled: run steps through ``torch.compile``, one graph for each number of sequences: worth it for long
            answers, or with ``decoder``. Guesses: one graph more, for passes of as many as asked for (not
            compiled: of as many as pay).
        streamer: called with (sequence, token) for each new token.
        engine: to be told how many sequences there are (default: that of :func:`torch_pi2.follow`, if any).
        decoder: to be used (and used again, with what it has compiled): one of this model, with ``logits``, room for
            so many sequences and tokens.
        prompt_lookup: guess up to so many tokens, 1 to 7, from what followed the last few where they stood before.
        assistant_model: a smaller causal language model of the same vocabulary, which guesses ``draft_tokens``, 1 to 7
            (default: 4). It has keys and values of its own.

    Raises:
        ConfigError: a setting makes no sense, or text without a tokenizer. ShapeError: not one prompt.
        UnsupportedModelError: see :class:`~torch_pi2.decode.decode.Decoder`.
        ArtifactError: from a model over a store that cannot be read.
    """
    if isinstance(input_ids, str):
        tokenizer = tokenizer_of(model, tokenizer, "generate(text)")
        input_ids = _ids_of(tokenizer, input_ids)
    _check(input_ids, num_return_sequences, max_new_tokens)
    said: dict[str, Any] = {} if tokenizer is None else {"prompt": input_ids[0].tolist(), "tokenizer": tokenizer}
    guesses = _guesses(prompt_lookup, assistant_model, draft_tokens, num_return_sequences, do_sample)
    sampling = Sampling(temperature, top_k, top_p) if do_sample else None
    tokens = input_ids.shape[1]
    ends = end_tokens(model, eos_token_id)
    _say_what_is_not_done(model)
    _say_what_makes_no_sense(model, tokens + max_new_tokens, do_sample or (temperature, top_k, top_p) == (1.0, 0, 1.0))
    kept = None if compiled or decoder is not None else kept_of(model)
    if decoder is not None:
        _check_decoder(decoder, model, num_return_sequences, tokens + max(1, max_new_tokens - 1))
    elif kept is not None:
        decoder = kept.borrow(model, tokens + max_new_tokens, num_return_sequences)
    else:
        decoder = decoder_for(model, tokens + max_new_tokens, num_return_sequences, compiled, engine)
    check_vocabulary(model, input_ids)  # of a model that has ids, which a decoder sees to
    sequences = [Growing(i, seed, max_new_tokens, ends, streamer) for i in range(num_return_sequences)]
    if guesses:
        if engine is not None:
            engine.batch(1)
        made = _speculated(decoder, sequences[0], input_ids, assistant_model, guesses, max_new_tokens)
    else:
        made = _continued(decoder, sequences, input_ids, sampling, max_new_tokens, engine)
    if kept is not None:
        kept.give_back(decoder)
    return replace(made, **said)


def _continued(
    decoder: Decoder,
    sequences: list[Growing],
    input_ids: torch.Tensor,
    sampling: Sampling | None,
    limit: int,
    engine: Engine | None,
) -> Generated:
    """``sequences``, a token of each a step."""
    started = time.perf_counter()
    logits_BV = decoder.prompt(input_ids).cpu()
    prompt_ms = (time.perf_counter() - started) * 1e3
    live, step_ms, batches = sequences, list[float](), list[int]()
    if len(sequences) > 1 and limit > 1:
        decoder.fork(len(sequences))

    def step(going: list[Growing]) -> Iterable[tuple[Growing, torch.Tensor]]:
        nonlocal live
        if len(going) < len(live):
            live = [live[row] for row in decoder.keep([row for row, s in enumerate(live) if s.ended is None])]
        if engine is not None:
            engine.batch(len(live))
        started = time.perf_counter()
        ids_B1 = torch.tensor([[sequence.tokens[-1]] for sequence in live], dtype=torch.int64, device="cpu")
        logits_BV = decoder.step(ids_B1).cpu()  # so that a GPU has done it
        step_ms.append((time.perf_counter() - started) * 1e3)
        batches.append(len(live))
        return zip(live, logits_BV, strict=True)

    grow(sequences, repeat(logits_BV[0]), step, lambda grown, logits_V: pick(logits_V, sampling, grown.random))
    return Generated([sequence.tokens for sequence in sequences], batches, step_ms, prompt_ms)


def _ids_of(tokenizer: Any, text: str) -> torch.Tensor:
    """``[1, T]`` of a prompt. Raises ConfigError: there is not a token in it."""
    ids = list(tokenizer(text)["input_ids"])
    if not ids:
        raise ConfigError("generate(text)", expected="at least one token", found=shown(text), fix="Pass some text.")
    return torch.tensor([ids], dtype=torch.int64, device="cpu")


def _continuation(tokenizer: Any, prompt: list[int], tokens: list[int]) -> str:
    """Text of ``tokens``, with the space that some tokenizers show only behind other words."""
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + tokens))
    found = (
        whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(tokens, skip_special_tokens=True)
    )
    return str(found)


def _speculated(
    decoder: Decoder,
    sequence: Growing,
    input_ids: torch.Tensor,
    assistant_model: nn.Module | None,
    guesses: int,
    limit: int,
) -> Generated:
    """``sequence`` with up to so many ``guesses`` at a time."""
    counts = [guesses] if decoder.compiled else range(1, guesses + 1)
    source: PromptLookup | Assistant = PromptLookup()
    if assistant_model is not None:
        source = Assistant(assistant_model, decoder.model, input_ids.shape[1] + limit, decoder.compiled)
    started = time.perf_counter()
    logits_V = decoder.prompt(input_ids)[0].cpu()
    source.read(input_ids)
    prompt_ms = (time.perf_counter() - started) * 1e3
    engine = engine_of(decoder.model)
    pace = Pace(counts, None if engine is None else engine.plan.guess_costs())
    if guesses < limit - 1:  # else the answer has no room for a pass
        decoder.compile_passes(guesses + 1)
    drafts, step_ms = speculate(
        decoder, sequence, input_ids[0].tolist(), logits_V, lambda row_V: pick(row_V, None), source, pace, limit
    )
    return Generated([sequence.tokens], [1] * len(step_ms), step_ms, prompt_ms, drafts)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, see :func:`generate`. Raises ConfigError: it makes no sense."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (LEAST_TEMPERATURE <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ConfigError(
                "sampling",
                expected=f"a temperature of {LEAST_TEMPERATURE:g} or more, top_k of 0 or more, top_p above 0 and at "
                "most 1",
                found=f"{self.temperature:g}, {self.top_k} and {self.top_p:g}",
                fix="Correct it, or leave do_sample out.",
            )


def pick(logits_V: torch.Tensor, sampling: Sampling | None, generator: torch.Generator | None = None) -> int:
    """A token: the most likely one, or drawn as ``sampling`` says."""
    if sampling is None:
        return int(logits_V.float().argmax())
    scores_V, order_V = (logits_V.float() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        scores_V = scores_V[: sampling.top_k]
    share_V = scores_V.softmax(-1)
    if sampling.top_p < 1:
        left_V = share_V.cumsum(-1) - share_V < sampling.top_p
        left_V[0] = True  # whatever rounding says
        share_V = share_V[left_V]
    return int(order_V[torch.multinomial(share_V, 1, generator=generator)])


def end_tokens(model: nn.Module, given: int | list[int] | None) -> set[int]:
    if given is None:
        for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
            given = getattr(config, "eos_token_id", None) if given is None else given
    ends = [] if given is None else [given] if isinstance(given, int) else given
    return {argument(token, "generate(eos_token_id)").whole() for token in ends}


def not_done(model: nn.Module) -> list[str]:
    """What the model's generation configuration asks for, and :func:`generate` does not do: names of its settings."""
    config = getattr(model, "generation_config", None)
    return [name for name, none in _NOT_DONE.items() if getattr(config, name, None) not in none]


def _say_what_is_not_done(model: nn.Module) -> None:
    if asked := not_done(model):
        _log.warning("generate: the model's generation configuration has %s, which is not applied", ", ".join(asked))


def _say_what_makes_no_sense(model: nn.Module, tokens: int, sampled: bool) -> None:
    made_for = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(made_for, int) and tokens > made_for:
        _log.warning("generate: %d tokens with the prompt, where the model was made for %d", tokens, made_for)
    if not sampled:
        _log.warning("generate: temperature, top_k and top_p change nothing without do_sample=True")


def _check(input_ids: torch.Tensor, sequences: int, max_new_tokens: int) -> None:
    for name, value in (("num_return_sequences", sequences), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ConfigError(name, expected="1 or more", found=str(value), fix="Choose a larger number.")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1 or input_ids.dtype != torch.int64:
        raise ShapeError(
            "input_ids",
            expected="one prompt, int64 [1, tokens]",
            found=f"{dtype_name(input_ids.dtype)} {list(input_ids.shape)}",
            fix="Call it once for each prompt; model.generate takes several.",
        )


def _guesses(
    prompt_lookup: int, assistant_model: nn.Module | None, draft_tokens: int | None, sequences: int, do_sample: bool
) -> int:
    """How many tokens are guessed at a time, at most; 0: none are. Raises ConfigError."""
    lookup, assisted = prompt_lookup != 0, assistant_model is not None
    if (lookup and assisted) or (draft_tokens is not None and not assisted):
        raise ConfigError(
            "prompt_lookup, assistant_model, draft_tokens",
            expected="prompt_lookup, or assistant_model with or without draft_tokens",
            found="prompt_lookup and assistant_model" if lookup and assisted else "draft_tokens without a model",
            fix="Choose where guesses come from.",
        )
    guesses = prompt_lookup if lookup else 0 if not assisted else _DRAFTED if draft_tokens is None else draft_tokens
    if (lookup or assisted) and not 1 <= guesses <= MOST_DRAFTED:
        raise ConfigError(
            "prompt_lookup" if lookup else "draft_tokens",
            expected=f"1 to {MOST_DRAFTED}",
            found=str(guesses),
            fix="More are not verified in one pass; 3 to 5 are usual.",
        )
    if guesses and (do_sample or sequences > 1):
        raise ConfigError(
            "prompt_lookup" if lookup else "assistant_model",
            expected="one greedy sequence",
            found="do_sample=True" if do_sample else f"num_return_sequences={sequences}",
            fix="Leave one of them out: what is drawn, and several sequences, are decoded step by step.",
        )
    return guesses


def _check_decoder(decoder: Decoder, model: nn.Module, sequences: int, tokens: int) -> None:
    good = decoder.model is model and decoder.logits and decoder.rows >= sequences and decoder.max_tokens >= tokens
    if not good:
        of = "this" if decoder.model is model else "another"
        raise ConfigError(
            "decoder",
            expected=f"one of this model with logits, for {sequences} sequences and {tokens} tokens",
            found=f"one of {of} model with{'' if decoder.logits else 'out'} logits, for {decoder.rows} sequences and "
            f"{decoder.max_tokens} tokens",
            fix="Make another, or leave it out.",
        )
