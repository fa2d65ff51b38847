"""``Grammars`` and ``Constraint``: answers that are JSON, or JSON of a schema, token by token, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from torch_pi2.errors import ConfigError

#: As Python writes JSON. Where any blanks are allowed, weak models write nothing else.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Constraint:
    """Which tokens an answer may go on with."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self, scores_V: torch.Tensor) -> torch.Tensor:
        """``scores_V`` with -inf for every other token."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed_V = torch.zeros(len(scores_V), dtype=torch.bool)
        known = np.unpackbits(bits, bitorder="little")[: len(scores_V)]
        allowed_V[: len(known)] = torch.from_numpy(known).bool()
        return scores_V.masked_fill(~allowed_V, -torch.inf)

    def take(self, token: int) -> bool:
        """The answer goes on with ``token``; whether it is whole, and nothing may follow."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())


class Grammars:
    """Makes constraints for the tokens of one tokenizer, which takes a second the first time.

    Args:
        tokenizer: a fast one of Hugging Face. ends: ids that end an answer. vocabulary: tokens of the model.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int], vocabulary: int) -> None:
        self._tokenizer, self._ends, self._vocabulary = tokenizer, ends, vocabulary
        self._known: Any = None

    def of_schema(self, schema: dict[str, Any] | bool) -> Constraint:
        """JSON that ``schema`` allows.

        Raises:
            ConfigError: no schema, one with what llguidance has not, or a tokenizer that it cannot read.
        """
        if self._known is None:
            try:
                self._known = from_tokenizer(self._tokenizer, self._vocabulary, sorted(self._ends) or None)
            except ValueError as error:
                raise ConfigError(
                    "response_format",
                    expected="a model with a fast tokenizer",
                    found=str(error),
                    fix="Ask for text, or put a tokenizer.json into the model's folder.",
                ) from error
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_WRITTEN)
            wrong = LLMatcher.validate_grammar(grammar, self._known)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise ConfigError(
                "response_format", expected="a JSON schema that can be followed", found=wrong, fix="Correct the schema."
            )
        return Constraint(LLMatcher(self._known, grammar))
