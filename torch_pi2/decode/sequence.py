"""Sequences while they are generated, by a model or a bundle: sampling, end tokens, stop strings, text."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar

import torch

from torch_pi2.base.fields import argument
from torch_pi2.errors import ConfigError, NonFiniteError

#: Logits are divided by the temperature; a smaller one would make them infinite.
LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, see :func:`torch_pi2.generate`. Raises ConfigError: a value is out of range."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (LEAST_TEMPERATURE <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            least = f"a temperature of {LEAST_TEMPERATURE:g} or more, top_k of 0 or more"
            found = f"{self.temperature:g}, {self.top_k} and {self.top_p:g}"
            fix = "Correct it; greedy: temperature 0 or do_sample=False."
            raise ConfigError("sampling", expected=f"{least}, top_p above 0 and at most 1", found=found, fix=fix)


def not_finite() -> NonFiniteError:
    fix = "float16 ends at 65504: load the model in bfloat16 or float32 (dtype=...); else its weights are damaged."
    return NonFiniteError("logits", expected="finite numbers", found="NaN or infinity", fix=fix)


def pick(logits_V: torch.Tensor, sampling: Sampling | None, generator: torch.Generator | None = None) -> int:
    """The next token: drawn with ``sampling``, or the most likely one if that is None. Raises NonFiniteError."""
    if sampling is None:
        logits_V = logits_V.float()
        token = int(logits_V.numpy(force=True).argmax())  # of NaN, if there is one; a tenth of the time of torch's
        if not math.isfinite(logits_V[token]):
            raise not_finite()
        return token
    scores_V, order_V = (logits_V.float() / sampling.temperature).sort(descending=True, stable=True)
    if not math.isfinite(scores_V[0]):
        raise not_finite()
    if sampling.top_k:
        scores_V = scores_V[: sampling.top_k]
    share_V = scores_V.softmax(-1)
    if sampling.top_p < 1:
        kept_V = share_V.cumsum(-1) - share_V < sampling.top_p
        kept_V[0] = True  # despite rounding
        share_V = share_V[kept_V]
    return int(order_V[torch.multinomial(share_V, 1, generator=generator)])


def end_tokens(model: Any, given: int | list[int] | None, tokenizer: Any = None) -> set[int]:
    """Tokens that end a sequence: those ``given``, or the model's and those of ``tokenizer`` and its chat template."""
    if given is not None:
        return _ids(given)
    configs = (getattr(model, name, None) for name in ("generation_config", "config"))
    own, other = (_ids(getattr(config, "eos_token_id", None)) for config in configs)
    ends, added = own or other, added_tokens(tokenizer)
    # a configuration that names none has its class's, which may be a word of this tokenizer
    return ends | (other & set(added)) | _ids(getattr(tokenizer, "eos_token_id", None)) | _closing(tokenizer, added)


def _ids(tokens: Any) -> set[int]:
    tokens = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
    several = [] if tokens is None else [tokens] if isinstance(tokens, int) else tokens
    return {argument(token, "generate(eos_token_id)").whole() for token in several}


def _closing(tokenizer: Any, added: Mapping[int, Any]) -> set[int]:
    """The added token that the chat template writes after an answer."""
    if not getattr(tokenizer, "chat_template", None):
        return set()
    answer = "Mark7"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    try:
        after = tokenizer.apply_chat_template(chat, tokenize=False).partition(answer)[2].lstrip()
    except Exception:  # a template raises whatever its author chose
        return set()
    ends = {str(one): token for token, one in added.items() if after.startswith(str(one))}
    return {ends[max(ends, key=len)]} if ends else set()


def added_tokens(tokenizer: Any) -> dict[int, Any]:
    return getattr(tokenizer, "added_tokens_decoder", {})


def hidden_tokens(tokenizer: Any, ends: Collection[int] = ()) -> set[int]:
    """Tokens that texts leave out: special ones, and ``ends``."""
    return {token for token, added in added_tokens(tokenizer).items() if added.special} | set(ends)


class GeneratedSequence:
    """A sequence being generated: its ``tokens`` so far, ``ended`` ("eos", "length", or None until then).

    Args:
        seed: ``seed + number`` seeds its generator ``random``. limit: maximum number of tokens. ends: tokens that end
            it. streamer: called with (number, token) for each token.
    """

    def __init__(
        self, number: int, seed: int, limit: int, ends: Collection[int], streamer: Callable | None = None
    ) -> None:
        self.number, self.random = number, torch.Generator().manual_seed(seed + number)
        self.tokens: list[int] = []
        self.ended: str | None = None
        self._limit, self._ends, self._streamer = limit, ends, streamer

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self._limit - len(self.tokens)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.ended = "eos" if token in self._ends else "length" if len(self.tokens) == self._limit else None
        if self._streamer is not None:
            self._streamer(self.number, token)


_Kind = TypeVar("_Kind", bound=GeneratedSequence)


def decode_loop(
    sequences: Sequence[_Kind],
    first: Iterable[torch.Tensor],
    step: Callable[[list[_Kind]], Iterable[tuple[_Kind, torch.Tensor]]],
    choose: Callable[[_Kind, torch.Tensor], int],
) -> None:
    """Continue ``sequences`` until each has ended. ``first``: logits ``[V]`` after each prompt. ``step``: sequences
    that continue -> pairs of a sequence and its next logits, in the order in which tokens are chosen by ``choose``.
    """
    live = list(zip(sequences, first))
    while live:
        for sequence, logits_V in live:
            sequence.append(choose(sequence, logits_V))
        going = [sequence for sequence, _ in live if sequence.ended is None]
        live = list(step(going)) if going else []


def partial_match(text: str, marks: Sequence[str]) -> int:
    """Number of characters at the end of ``text`` that may begin one of ``marks``."""
    ends = (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n]))
    return max(ends, default=0)


class StopStrings:
    """Cuts streamed text before the first complete stop string, as ``export/runner/stops.cc`` does. ``reached``: one
    has come, and later text is dropped.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._held, self.reached = tuple(strings), "", False
        self._shown: list[bool] = []  # letters of the held-back text

    def add(self, piece: str, shown: bool = True) -> str:
        """The part of the held-back text plus ``piece`` in which no stop string can begin. Text that is not ``shown``
        can be a part of a stop string, but is left out.
        """
        if self.reached:
            return ""
        text = self._held + piece
        self._shown += [shown] * len(piece)
        found = [(at + len(stop), at) for stop in self._strings if (at := text.find(stop)) >= 0]
        if found:
            self.reached, self._held = True, ""
            return self._visible(text[: min(found)[1]])
        certain = len(text) - partial_match(text, self._strings)
        self._held = text[certain:]
        return self._visible(text[:certain])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return self._visible(held)

    def _visible(self, text: str) -> str:
        shown, self._shown = self._shown[: len(text)], self._shown[len(text) :]
        return "".join(compress(text, shown))


class TextStream:
    """Decodes tokens as they come, up to the first of ``stops``; holds back parts of a character, and text that may
    begin a stop string. ``hidden``: ids that are left out of the text, though stop strings see them; None: the
    tokenizer's special ones. ``before``: ids before the text, on which its first space or character may depend.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), hidden: Collection | None = None, before: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._stops = tokenizer, StopStrings(stops)
        self._hidden = hidden_tokens(tokenizer) if hidden is None else hidden
        self._ids = list(before)
        self._from = 0  # the ids from here to ``_to`` are those whose text was returned last
        ends = range(len(before), max(len(before) - 4, 0), -1)  # the last ids may be bytes of a character
        self._to = next((n for n in ends if not self._decode(before[:n]).endswith("\ufffd")), len(before))

    @property
    def stopped(self) -> bool:
        return self._stops.reached

    def add(self, token: int) -> str:
        """The text that ``token`` completes."""
        if self.stopped:
            return ""
        self._ids.append(token)
        # a token's text depends on the tokens before it (spaces); an incomplete character decodes to U+FFFD
        text = self._new()
        if text and not text.endswith("\ufffd"):  # without text, decoders would strip the next space as the first
            self._from, self._to = self._to, len(self._ids)
            text = self._stops.add(text)
        else:
            text = ""
        if token in self._hidden:
            text += self._stops.add(self._tokenizer.convert_ids_to_tokens(token), shown=False)
        return text

    def end(self) -> str:
        """The text that was held back, after the last token."""
        if self.stopped:
            return ""
        text = self._new()
        self._from = self._to = len(self._ids)
        return self._stops.add(text) + self._stops.flush()

    def _new(self) -> str:
        known, whole = self._decode(self._ids[self._from : self._to]), self._decode(self._ids[self._from :])
        return whole[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        ids = [token for token in ids if token not in self._hidden]
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
