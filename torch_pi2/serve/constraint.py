"""Constraints on the next token: ``Grammars`` (JSON schemas and tool calls, with llguidance) and ``Penalties``.
llguidance fails on some numbers and depths of schemas: :func:`as_object` refuses or bounds these.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from torch_pi2.errors import ConfigError
from torch_pi2.serve.tools import ToolCallFormat, ToolSet

#: JSON as Python writes it. If any whitespace is allowed, weak models write nothing else.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

#: Maximum integer on which every JSON parser agrees (RFC 8259, section 6).
MOST_INTEGER = (1 << 53) - 1
#: Maximum number of different ``$ref``, which llguidance follows recursively.
MOST_REFERENCES = 500
#: Keywords whose values are schemas by name, plain values, and bounds of numbers.
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"enum", "const"}
_LEAST, _MOST = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}


class Penalties:
    """OpenAI's frequency and presence penalties, on top of the constraint ``within``."""

    def __init__(self, frequency: float, presence: float, within: "Constraint | None") -> None:
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


class Grammar:
    """A grammar of llguidance: forbidden tokens get the score -inf; :meth:`take` says whether the answer is complete.
    ``what``: the request's field, for messages.
    """

    def __init__(self, matcher: LLMatcher, what: str) -> None:
        self._matcher, self._what = matcher, what

    def allowed(self, scores_V: torch.Tensor) -> torch.Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed_V = torch.zeros(len(scores_V), dtype=torch.bool)
        known = np.unpackbits(bits, bitorder="little")[: len(scores_V)]
        allowed_V[: len(known)] = torch.from_numpy(known).bool()
        if not allowed_V.any():
            raise _refused(self._what, "one that only goes on with tokens that the model has not")
        return scores_V.masked_fill(~allowed_V, -torch.inf)

    def take(self, token: int) -> bool:
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refused(self._what, self._matcher.get_error())


#: What changes the scores of tokens.
Constraint = Penalties | Grammar


class Grammars:
    """Makes constraints for a fast tokenizer; ``ends``: ids that end an answer; ``vocabulary``: the model's."""

    def __init__(self, tokenizer: Any, ends: Collection[int], vocabulary: int) -> None:
        self._tokenizer, self._ends, self._vocabulary = tokenizer, ends, vocabulary
        self._ll_tokenizer: Any = None

    def bytes_of(self, token: int) -> bytes:
        """UTF-8 of a token, perhaps part of a character."""
        try:
            found: bytes = self._known("logprobs").decode_bytes([token])
        except ConfigError:  # slow tokenizers have no bytes
            one, two = (str(self._tokenizer.decode([token] * times)) for times in (1, 2))
            return two[len(one) :].encode()  # with the space that only later words have
        return found

    def of_schema(self, schema: dict[str, Any] | bool) -> Constraint:
        """JSON of ``schema``. Raises ConfigError: llguidance does not support the schema or the tokenizer."""
        try:
            text = json.dumps(as_object(schema, "response_format"))
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=_JSON_STYLE)
        except ValueError as error:
            raise _refused("response_format", str(error)) from error
        return self._constraint(grammar, "response_format")

    def of_tools(self, tools: ToolSet, answer: dict[str, Any] | bool | None = None) -> Constraint:
        """Calls of ``tools``, or an answer with the schema ``answer`` (None: any text)."""
        return self._constraint(_tool_grammar(tools, self._mark, answer), "tools")

    def _constraint(self, grammar: str, what: str) -> Constraint:
        known = self._known(what)
        wrong = LLMatcher.validate_grammar(grammar, known)
        if wrong:
            raise _refused(what, wrong)
        return Grammar(LLMatcher(known, grammar, log_level=0), what)

    def _mark(self, text: str) -> str:
        token = token_of(self._tokenizer, text)
        special = token is not None and self._known("tools").is_special_token(token)
        return f"<[{token}]>" if special else json.dumps(text)

    def _known(self, what: str) -> Any:
        if self._ll_tokenizer is None:
            try:
                known = max(self._tokenizer.get_vocab().values(), default=0) + 1  # more than the model's, or fewer
                size, ends = max(self._vocabulary, known), sorted(self._ends) or None
                self._ll_tokenizer = from_tokenizer(self._tokenizer, size, ends)
            except ValueError as error:
                fix = "Ask for text, or put a tokenizer.json into the model's folder."
                raise ConfigError(what, expected="a model with a fast tokenizer", found=str(error), fix=fix) from error
        return self._ll_tokenizer


def token_of(tokenizer: Any, text: str) -> int | None:
    """The token whose text is ``text``, if there is one."""
    token = tokenizer.convert_tokens_to_ids(text)
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == text else None


def _refused(what: str, found: str) -> ConfigError:
    reason = found.partition("\n")[0]  # llguidance's state follows
    return refused(what, "one that no text satisfies" if reason.startswith("NoExtensionBias") else reason)


def refused(what: str, found: str) -> ConfigError:
    return ConfigError(what, expected="a JSON schema that can be followed", found=found, fix="Correct the schema.")


def _tool_grammar(tools: ToolSet, mark: Callable[[str], str], answer: dict[str, Any] | bool | None) -> str:
    """Grammar in llguidance's variant of Lark: calls, or another answer unless a call is required. ``mark``: writes a
    mark such as ``<tool_call>`` in the grammar. ``answer``: schema of other answers; None: any text.
    """
    form = tools.form
    objects, rules = [], []
    for number, function in enumerate(tools.functions):
        schema = function.schema_wanted if tools.required or function.strict else {"type": "object"}
        begin = f'{{"name": "{function.name}", "{form.arguments}": '
        objects.append(f'{_literal(begin)} arguments_{number} "}}"')
        # each schema on its own, because its "#" references begin at its root
        rules.append(f"arguments_{number}: %json {_json(as_object(schema, 'tools'))}")
    more = f"({_literal(form.between)} object)*" if form.between is not None and tools.several else ""
    end = mark(form.end) if form.end else ""
    rules += [
        f"object: {' | '.join(objects)}",
        f"body: {_literal(form.opens)} object {more} {_literal(form.closes)} {end}",
        f"call: {'' if form.bare else mark(form.begin)} body",
    ]
    again = tools.several and form.several and form.between is None
    calls = 'call ("\\n" call)*' if again else "call"
    if tools.required:
        start = calls
    elif answer is not None:
        start = f"{calls} | answer"
        rules.append(f"answer: %json {_json(as_object(answer, 'response_format'))}")
    else:
        start, more_rules = _after_text(form, mark(form.begin), again)
        rules += more_rules
    return "\n".join([f"start: {start}", *rules]) + "\n"


def _after_text(form: ToolCallFormat, begin: str, again: bool) -> tuple[str, list[str]]:
    """Start and further rules of a grammar of any text with calls in it."""
    if form.bare:
        return 'call | "" | /[^{](.|\\n)*/', []
    rules = ["TEXT: /(.|\\n)*/"]
    if begin.startswith("<"):  # a special token, which no text contains
        rules.append(f"later: TEXT {begin} body")
    else:
        rules += [f"head[lazy]: TEXT {begin}", "later: head body"]
    return "later* TEXT" if again else "later | TEXT", rules


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _json(schema: dict[str, Any]) -> str:
    return json.dumps(schema | {"x-guidance": _JSON_STYLE})


def as_object(schema: dict[str, Any] | bool, what: str) -> dict[str, Any]:
    """``schema`` as an object, bounds within safe integers; ``what``: its field. Raises ConfigError: unenforceable."""
    if not isinstance(schema, dict):
        return {} if schema else {"not": {}}
    references = set[str]()
    try:
        bounded: dict[str, Any] = _bounded(schema, references)
    except _Refused as error:
        raise refused(what, str(error)) from error
    except RecursionError as error:
        raise refused(what, "schemas that are too deep in each other") from error
    if len(references) > MOST_REFERENCES:
        raise refused(what, f"{len(references)} different $ref, of which at most {MOST_REFERENCES} are followed")
    return bounded


class _Refused(Exception):
    pass


def _bounded(schema: Any, references: set[str]) -> Any:
    if isinstance(schema, list):
        return [_bounded(part, references) for part in schema]
    if not isinstance(schema, dict):
        return schema
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
        raise _Refused(f"minProperties {least} beyond what is required, which a name that comes twice would count for")
    if isinstance(schema.get("$ref"), str):
        references.add(schema["$ref"])
    return {key: _bounded_keyword(key, value, references) for key, value in schema.items()}


def _bounded_keyword(key: str, value: Any, references: set[str]) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: _bounded(part, references) for name, part in value.items()}
    if key in _VALUES:
        _check_integers(value)
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if key in _LEAST:
            if value > MOST_INTEGER:
                raise _Refused(f"{key} {value:g}, above 2^53 - 1")
            return max(value, -MOST_INTEGER)
        if key in _MOST:
            if value < -MOST_INTEGER:
                raise _Refused(f"{key} {value:g}, below -(2^53 - 1)")
            return min(value, MOST_INTEGER)
    return _bounded(value, references)


def _check_integers(value: Any) -> None:
    parts = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    for part in parts:
        _check_integers(part)
    if isinstance(value, int) and abs(value) > MOST_INTEGER:
        raise _Refused(f"the value {value:g}, beyond 2^53 - 1, which would be rounded")
