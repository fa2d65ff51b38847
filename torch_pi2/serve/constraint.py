"""What an answer may go on with: ``Grammars`` (JSON, calls of functions; by llguidance) and ``Penalised``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from typing import Any, Protocol

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from torch_pi2.errors import ConfigError
from torch_pi2.serve.schemas import as_object, refused
from torch_pi2.serve.tools import Offer, grammar_of

#: As Python writes JSON. Where any blanks are allowed, weak models write nothing else.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Constraint(Protocol):
    """Which tokens an answer may go on with, or is to."""

    def allowed(self, scores_V: torch.Tensor) -> torch.Tensor:
        """``scores_V`` with -inf for every token that may not come, or less for one that should not."""

    def take(self, token: int) -> bool:
        """The answer goes on with ``token``; whether it is whole, and nothing may follow."""


class Penalised:
    """Less is added to the scores of tokens that have come, as OpenAI's penalties say.

    Args:
        frequency: for each time. presence: once. within: what else there is.
    """

    def __init__(self, frequency: float, presence: float, within: Constraint | None) -> None:
        self._frequency, self._presence, self._within = frequency, presence, within
        self._came = Counter[int]()

    def allowed(self, scores_V: torch.Tensor) -> torch.Tensor:
        if self._came:
            times = torch.tensor(list(self._came.values()), dtype=scores_V.dtype)
            scores_V = scores_V.clone()
            scores_V[list(self._came)] -= times * self._frequency + self._presence
        return scores_V if self._within is None else self._within.allowed(scores_V)

    def take(self, token: int) -> bool:
        self._came[token] += 1
        return self._within is not None and self._within.take(token)


class Followed:
    """A grammar of llguidance.

    Args:
        what: asks for it, as errors name it.
    """

    def __init__(self, matcher: LLMatcher, what: str) -> None:
        self._matcher, self._what = matcher, what

    def allowed(self, scores_V: torch.Tensor) -> torch.Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed_V = torch.zeros(len(scores_V), dtype=torch.bool)
        known = np.unpackbits(bits, bitorder="little")[: len(scores_V)]
        allowed_V[: len(known)] = torch.from_numpy(known).bool()
        return scores_V.masked_fill(~allowed_V, -torch.inf)

    def take(self, token: int) -> bool:
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refused(self._what, self._matcher.get_error())


class Grammars:
    """Makes constraints for the tokens of one tokenizer, which takes a second the first time.

    Args:
        tokenizer: a fast one of Hugging Face. ends: ids that end an answer. vocabulary: tokens of the model.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int], vocabulary: int) -> None:
        self._tokenizer, self._ends, self._vocabulary = tokenizer, ends, vocabulary
        self._made: Any = None

    def bytes_of(self, token: int) -> bytes:
        """Of a token, which may be a part of a character."""
        try:
            found: bytes = self._known("logprobs").decode_bytes([token])
        except ConfigError:  # slow tokenizers have no bytes
            return str(self._tokenizer.decode([token])).encode()
        return found

    def of_schema(self, schema: dict[str, Any] | bool) -> Constraint:
        """JSON that ``schema`` allows.

        Raises:
            ConfigError: no schema, one with what llguidance has not, or a tokenizer that it cannot read.
        """
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                json.dumps(as_object(schema, "response_format")), overrides=_WRITTEN
            )
        except ValueError as error:
            raise _refused("response_format", str(error)) from error
        return self._followed(grammar, "response_format")

    def of_offer(self, offer: Offer, answer: dict[str, Any] | bool | None = None) -> Constraint:
        """Calls of what is offered, and what else is allowed: ``answer``, a schema; None: any text.

        Raises:
            ConfigError: parameters with what llguidance has not, or a tokenizer that it cannot read.
        """
        return self._followed(grammar_of(offer, self._mark, _WRITTEN, answer), "tools")

    def _followed(self, grammar: str, what: str) -> Constraint:
        known = self._known(what)
        wrong = LLMatcher.validate_grammar(grammar, known)
        if wrong:
            raise _refused(what, wrong)
        return Followed(LLMatcher(known, grammar, log_level=0), what)

    def _mark(self, text: str) -> str:
        token = token_of(self._tokenizer, text)
        special = token is not None and self._known("tools").is_special_token(token)
        return f"<[{token}]>" if special else json.dumps(text)

    def _known(self, what: str) -> Any:
        if self._made is None:
            try:
                self._made = from_tokenizer(self._tokenizer, self._vocabulary, sorted(self._ends) or None)
            except ValueError as error:
                raise ConfigError(
                    what,
                    expected="a model with a fast tokenizer",
                    found=str(error),
                    fix="Ask for text, or put a tokenizer.json into the model's folder.",
                ) from error
        return self._made


def token_of(tokenizer: Any, text: str) -> int | None:
    """The one token that is ``text``, if there is one."""
    token = tokenizer.convert_tokens_to_ids(text)
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == text else None


def _refused(what: str, found: str) -> ConfigError:
    reason = found.partition("\n")[0]  # what follows is llguidance's state
    if reason.startswith("NoExtensionBias"):
        reason = "one that no text is of"
    return refused(what, reason)
