"""Chat templates, tokenisation of prompts, and sampling of the next token."""

import json
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torch_pi2.base.fields import argument, check_fields, limited
from torch_pi2.base.files import atomic_write
from torch_pi2.base.package import how_to_install
from torch_pi2.base.progress import log
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.errors import ArtifactError, ConfigError, LibraryMissingError

CHAT_FILE = "chat.json"
FORMAT = "torch_pi2.chat"
VERSION = 3  # in 2 there were no earlier answers

#: Limits of a template: lines executed, and characters written.
MOST_STEPS = 1_000_000
MOST_TEXT = 1 << 24

#: White space around a marked message, some of it outside ASCII.
_START, _END = "\u3000\x1c \n", "\n \x1f\u00a0"
#: Messages that verify a description, besides those made from the template's constants.
_MESSAGES = (
    *("", " ", "\n", "\u3000", "\x1f", "a", "A", "7", " a", "a ", "a  b", "a\n\n\nb", "a\r\nb", "a\tb", "\n\na\n\n"),
    *("<a> & \"b\" 'c'", "a\\nb", "**a** _b_", "# a\n- b\n```\nc\n```", "{{ a }}", "{% a %}", "{# a #}", "{a} %s"),
    *("日本語。é ß ﬁ İ 🙂 \u200bx", "True", "none", "[]", "{}", "12345678901234567890", "ALL UPPER", "all lower"),
    *("/no_think", "a /think", "<think>a</think>b", "</think>", "<tool_call>", "<tool_response>a</tool_response>"),
    *("<|im_start|>a<|im_end|>", "[INST] a [/INST]", "<<SYS>>a<</SYS>>", "<s>a</s>", "<start_of_turn>user", "<image>"),
    *("user: a\nassistant:", "long text " * 2000, "x" * 20000, "https://a.b/c?d=e&f"),
)
#: Roles of described chats: a question, its system message, and an answer with the next question.
_USER, _SYSTEM, _TURN = ("user",), ("system",), ("assistant", "user")

#: Texts around messages, and which messages are stripped.
_Description = tuple[list[str], list[bool]]


def describe_template(tokenizer: Any) -> dict[str, Any] | None:
    """The text that the template writes around messages, up to the answer.

    It is rendered now: a date in it is that of the export.

    Returns:
        ``user``: two texts around a question. ``system_user``: three around a system message and a question, or None.
        ``assistant``: two, before an earlier answer and before the next question, or None. ``strips``: role -> whether
        :meth:`str.strip` applies to its messages. None without a template. Parts are None, too, if the template rejects
        the role or does more with messages than strip them; without ``user`` the result is None.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    probes = [*_MESSAGES, *_of_constants(tokenizer.get_chat_template())]
    user, both, turns = (_described(tokenizer, roles, probes) for roles in (_USER, _SYSTEM + _USER, _USER + _TURN))
    if user is None:
        return None
    if both is not None and both[1][1] != user[1][0]:
        both = None
    if turns is not None and not _repeats(tokenizer, user, both, turns):
        turns = None
    strips = {"system": both is not None and both[1][0], "user": user[1][0]}
    strips |= {"assistant": turns is not None and turns[1][1]}
    found = {"user": user[0], "system_user": both and both[0], "assistant": turns and turns[0][1:3]}
    return found | {"strips": strips}


def _of_constants(template: str) -> Iterator[str]:
    """Messages that a template may treat specially: with its strings, and longer than its numbers."""
    from jinja2 import Environment, TemplateError

    try:
        tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind in ("string", "integer")]
    except TemplateError:
        return
    for value in dict.fromkeys(literal_eval(text) for _, text in tokens):
        if isinstance(value, str) and value:
            yield from (value, f"{value} a", f"a {value}", f"a {value} b")
        elif isinstance(value, int) and 100 < value <= 1 << 21:
            yield "x" * (value + 1)


def _described(tokenizer: Any, roles: Sequence[str], probes: Sequence[str]) -> _Description | None:
    """The texts around messages of ``roles``; None: the template does more with messages than strip them."""
    found = _split(tokenizer, roles)
    if found is None:
        return None
    texts, strips = found
    for which in range(len(roles)):
        for probe in probes:
            contents = [probe if i == which else "a" for i in range(len(roles))]
            inner = [content.strip() if cut else content for content, cut in zip(contents, strips, strict=True)]
            expected = texts[0] + "".join(a + b for a, b in zip(inner, texts[1:], strict=True))
            if _rendered(tokenizer, roles, contents) != expected:
                return None
    return found


def _split(tokenizer: Any, roles: Sequence[str]) -> _Description | None:
    """A candidate for :func:`_described`, from marked messages."""
    contents = [f"{_START}Mark7 {role} é日<b>{_END}" for role in roles]
    text = _rendered(tokenizer, roles, contents)
    texts: list[str] = []
    strips: list[bool] = []
    for content in contents:
        if text is None:
            return None
        strips.append(content not in text)
        before, mark, text = text.partition(content.strip() if strips[-1] else content)
        if not mark or (strips[-1] and (before.endswith(_START) or text.startswith(_END))):
            return None
        texts.append(before)
    return None if text is None or any("Mark7" in part for part in (*texts, text)) else ([*texts, text], strips)


def _rendered(tokenizer: Any, roles: Sequence[str], contents: Sequence[str]) -> str | None:
    """The rendered chat; None: the template raises, as for unsupported roles."""
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    try:
        return _text_of(tokenizer, messages)
    except ConfigError:
        raise
    except Exception:
        return None


def _text_of(tokenizer: Any, messages: Any) -> str:
    """The rendered chat. Raises ConfigError: it exceeds a limit."""
    with _bounded():
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


@contextmanager
def _bounded() -> Iterator[None]:
    """Limits templates rendered in the block: Jinja's sandbox bounds a ``range``, but not nested loops."""
    steps = text = 0

    def count(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal steps, text
        steps += 1
        text += len(value) if event == "return" and isinstance(value, str) else 0
        if steps > MOST_STEPS or text > MOST_TEXT:
            argument(text, "chat template", "Correct tokenizer.chat_template, or shorten the chat.").wrong(
                f"one that ends within {MOST_STEPS} lines and {MOST_TEXT} characters", "more"
            )
        return count if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(count)  # of this thread
    try:
        yield
    finally:
        sys.settrace(before)


def _repeats(tokenizer: Any, user: _Description, both: _Description | None, turns: _Description) -> bool:
    """Whether every answer with its next question is written like the first one in ``turns``, in any context."""
    between, strips = turns[0][1:3], turns[1][1:]
    for before, start in ((_USER, user), (_SYSTEM + _USER, both)):
        for count in (1, 2):
            if start is not None:
                (*first, last), cut = start
                expected = [*first, *between * count, last], [*cut, *strips * count]
                if _split(tokenizer, [*before, *_TURN * count]) != expected:
                    return False
    return True


def write_chat(tokenizer: Any, folder: Path) -> bool:
    """Write ``folder``/chat.json; False and no file if :func:`describe_template` returns None."""
    description = describe_template(tokenizer)
    if description is None:
        if getattr(tokenizer, "chat_template", None) is not None:
            log.warning(
                "%s is left out: what the chat template writes depends on the messages in other ways than stripping "
                "them. The C++ runner has no --chat with this bundle; torch-pi2 run has.",
                CHAT_FILE,
            )
        return False
    atomic_write(folder / CHAT_FILE, json.dumps({"format": FORMAT, "version": VERSION, **description}, indent=1) + "\n")
    return True


def load_tokenizer(folder: Path) -> Any:
    """A bundle's tokenizer, without running its folder's code. Raises LibraryMissingError, ArtifactError: damage."""
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        fix = f"{how_to_install('hf')}, or pass token ids."
        raise LibraryMissingError("transformers", expected="it, for text", found=str(error), fix=fix) from error
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # irrelevant warnings about unknown model types
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many types for damaged files
        expected = "tokenizer.json and tokenizer_config.json, as the model's folder has them"
        found = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "Export again with tokenizer=..., or pass token ids."
        raise ArtifactError(f"tokenizer of {folder}", expected=expected, found=found, fix=fix) from error
    finally:
        logging.set_verbosity(verbosity)


def encode(
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | torch.Tensor, tokenizer: Callable[[], Any], vocab: int
) -> list[int]:
    """Token ids of text, a chat or ids (``[T]``, ``[1, T]``). Raises ConfigError: none, too high, or no template."""
    if isinstance(prompt, str):
        ids = list(tokenizer()(prompt)["input_ids"])
    elif isinstance(prompt, torch.Tensor):
        ids = prompt.flatten().tolist() if prompt.dim() == 1 or prompt.shape[0] == 1 else []
    elif isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        argument(prompt, "prompt").wrong("text, messages, or tokens of one sequence")
    elif prompt and isinstance(prompt[0], Mapping):
        ids = list(tokenizer()(chat_text(tokenizer(), prompt), add_special_tokens=False)["input_ids"])
    else:
        ids = list(prompt)
    wrong = next((t for t in ids if type(t) is not int or not 0 <= t < vocab), None)
    if not ids or wrong is not None:
        argument(prompt, "prompt", "Pass at least one token, and the tokenizer of this model.").wrong(
            f"text, messages, or tokens of one sequence below {vocab}", f"the token {wrong!r}" if ids else "no tokens"
        )
    return ids


def chat_text(tokenizer: Any, messages: Any) -> str:
    """``messages`` in the tokenizer's chat template, up to the answer. Raises ConfigError."""
    if getattr(tokenizer, "chat_template", None) is None:
        fix = "Pass the prompt as text, or export with a tokenizer that has one."
        argument(tokenizer, "chat", fix).wrong("a tokenizer with a chat template", "none in tokenizer_config.json")
    try:
        return _text_of(tokenizer, messages)
    except ConfigError:
        raise
    except Exception as error:  # templates raise any type
        expected, fix = "messages that the tokenizer's template takes: a role and a content each", "Correct them."
        raise ConfigError("chat", expected=expected, found=str(error) or type(error).__name__, fix=fix) from error


GENERATION_FILE = "generation_config.json"
#: Field -> its name in that file. Without temperature: answers are greedy by default.
_NAMES = {name: name for name in ("top_k", "top_p", "min_p", "repetition_penalty")} | {"stop": "stop_strings"}


@dataclass(frozen=True)
class SamplingSettings:
    """The settings of ``export/runner/sampler.h``. None: the model's default, or no effect.

    Args:
        temperature: 0: greedy, with only the repetition penalty.
        top_k, top_p, min_p: sample from the k most probable tokens (0: all), from the smallest set with this total
            probability, from tokens with at least this share of the highest probability.
        repetition_penalty: divides positive logits of earlier tokens and multiplies negative ones (Keskar et al.,
            arXiv 1909.05858, section 4.1, as in transformers).
        stop: string or strings before which an answer ends.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = limited(0, 1e300, default=0.0)
    top_k: int | None = limited(0, default=None)
    top_p: float | None = limited(0, 1, above=True, default=None)
    min_p: float | None = limited(0, 1, default=None)
    repetition_penalty: float | None = limited(0.01, 100, default=None)
    stop: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        check_fields(self, "{}")
        if self.stop is not None and not all(isinstance(text, str) and text for text in self.stop):
            argument(self.stop, "stop").wrong("a list of texts, none of them empty")

    def with_defaults(self, other: "SamplingSettings") -> "SamplingSettings":
        """Fill settings that are None from ``other``."""
        unset = {f.name: getattr(other, f.name) for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **unset)

    def choose(self, logits_V: torch.Tensor, before: Sequence[int], random: torch.Generator) -> int:
        """The next token after ``before``: sampled, or the most probable one (ties: the first)."""
        if (penalty := self.repetition_penalty) is not None and penalty != 1:
            logits_V, tokens = logits_V.clone(), torch.tensor(sorted(set(before)), dtype=torch.int64)
            logits = logits_V[tokens]
            logits_V[tokens] = torch.where(logits < 0, logits * penalty, logits / penalty)
        if self.temperature == 0:
            return int(torch.argmax(logits_V))
        # finite or -inf: never NaN
        shares_V = torch.softmax((logits_V.double() - logits_V.max()) / self.temperature, -1)
        sorted_V, order_V = shares_V.sort(descending=True, stable=True)
        if self.top_k:
            sorted_V[self.top_k :] = 0
        if self.top_p is not None and self.top_p < 1:
            sorted_V = sorted_V.where(sorted_V.cumsum(-1) - sorted_V < self.top_p * sorted_V.sum(), 0)
        if self.min_p:
            sorted_V = sorted_V.where(sorted_V >= self.min_p * sorted_V[0], 0)
        shares_V = torch.zeros_like(shares_V).scatter_(-1, order_V, sorted_V)
        return int(torch.multinomial(shares_V, 1, generator=random))


def defaults_of(folder: Path) -> SamplingSettings:
    """Settings of a bundle's generation_config.json. Raises ArtifactError: one is out of range."""
    path = folder / GENERATION_FILE
    if not path.is_file():
        return SamplingSettings()
    config = parse(read_bytes(path), path, unique=False)
    try:
        return SamplingSettings(**{ours: config.get(theirs) for ours, theirs in _NAMES.items()})
    except ConfigError as error:
        expected, fix = error.expected, "Export the bundle again."
        raise ArtifactError(f"{path}, {_NAMES[error.what]}", expected=expected, found=error.found, fix=fix) from error
