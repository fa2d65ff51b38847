"""Language-model loss in bits per byte, which compares across tokenizers."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.modules import evaluating
from torch_pi2.base.progress import bar
from torch_pi2.decode.kv_cache import cache_name, cache_of
from torch_pi2.errors import CalibrationError, ConfigError, NonFiniteError
from torch_pi2.layers.prompt import of_sequences, sparse_only
from torch_pi2.profiling.data import cut, opening_of, without_opening
from torch_pi2.rewrite.state import leaves_out
from torch_pi2.store.trust import tokenizer_of


@dataclass(frozen=True)
class LossReport:
    """Loss of a model on a text, over ``tokens`` scored ones: mean negative log likelihood in nats; the same in bits
    over the UTF-8 ``bytes`` of exactly those tokens; and ``perplexity``, ``exp(nats_per_token)``.
    """

    nats_per_token: float
    bits_per_byte: float
    perplexity: float
    tokens: int
    bytes: int

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def logits_of(model: nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """``[B, T, V]``; a model that leaves out neurons that are not in memory gets one token at a time."""
    if leaves_out(model):
        return torch.cat([by_token(model, ids_T) for ids_T in ids_BT])
    config = getattr(model, "config", None)
    with of_sequences(len(ids_BT)):
        if config is not None and hasattr(config, "use_cache"):
            output = model(input_ids=ids_BT, use_cache=False)
        else:
            output = model(ids_BT)
    if isinstance(output, tuple):
        output = output[0]
    logits = getattr(output, "logits", output)
    assert isinstance(logits, torch.Tensor)
    return logits


def by_token(model: nn.Module, ids_T: torch.Tensor) -> torch.Tensor:
    """``[1, T, V]`` logits of tokens fed one by one."""
    logits: list[torch.Tensor] = []
    past: dict[str, Any] = {}
    for id_ in ids_T:
        output = model(input_ids=id_.view(1, 1), use_cache=True, **past)
        past = {cache_name(model): cache_of(output)}
        logits.append(output.logits)
    return torch.cat(logits, 1)


def summed_nats(model: nn.Module, batches: Iterable[torch.Tensor], context: int = 1) -> tuple[float, int]:
    """Sum of losses of the tokens of each row after the first ``context``, in rows without padding, and their number.
    Raises NonFiniteError: it is NaN or infinite.
    """
    total, count = 0.0, 0
    # sparse as in decoding, so that the loss shows skipped neurons
    with evaluating(model), sparse_only():
        for ids_BT in batches:
            logits_BTV = logits_of(model, ids_BT[:, :-1])
            # row by row: a batch of float32 logits over a large vocabulary would be gigabytes
            for logits_TV, target_T in zip(logits_BTV[:, context - 1 :], ids_BT[:, context:]):
                total += F.cross_entropy(logits_TV.float(), target_T.long(), reduction="sum").item()
                count += target_T.numel()
    if not math.isfinite(total):
        fix = "Check the checkpoint, and whether its dtype can hold the activations (try float32)."
        raise NonFiniteError("loss", expected="a finite number", found=str(total), fix=fix)
    return total, count


@dataclass(frozen=True)
class _Scored:
    """``ids[first:]`` are scored; ``text_bytes`` is their length; ``opening`` (BOS) starts every window."""

    ids: torch.Tensor
    opening: list[int]
    first: int
    text_bytes: int

    @property
    def context(self) -> int:
        """Tokens of a window before the scored ones."""
        return len(self.opening) or 1


def _encode(tokenizer: Any, text: str, max_tokens: int | None) -> _Scored:
    """Token ids of ``text``. Scoring starts and ends between characters, which byte-level tokens may split."""
    opening = opening_of(tokenizer)
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ids = list(encoded["input_ids"])
    spans = encoded["offset_mapping"] if fast else []

    def splits_character(at: int) -> bool:
        return 0 < at < len(spans) and bool(spans[at - 1][1] > spans[at][0])

    first = len(ids) - len(without_opening(torch.tensor(ids), opening)) if opening else 1
    while splits_character(first):
        first += 1
    stop = len(ids) if max_tokens is None else min(len(ids), first + max_tokens)
    while stop > first and splits_character(stop):
        stop -= 1
    if stop <= first:
        found = f"{len(text)} characters, {len(ids)} tokens"
        fix = "Pass a longer text."
        raise CalibrationError("text to evaluate", expected="at least two tokens", found=found, fix=fix)
    if fast:
        # from the end of the previous token, so that dropped spaces count
        start_char = spans[first - 1][1] if first else 0
        text_bytes = len(text[start_char : spans[stop - 1][1]].encode())
    else:
        text_bytes = len(tokenizer.decode(ids[first:stop], clean_up_tokenization_spaces=False).encode())
    return _Scored(torch.tensor(ids[:stop]), opening, first, text_bytes)


def _windows(scored: _Scored, window: int, batch_size: int) -> list[torch.Tensor]:
    """Rows of ``window`` scored tokens after context: BOS if the tokenizer adds it, else the previous token."""
    if scored.opening:
        rows = cut(scored.ids[scored.first :], window, scored.opening)
    else:
        starts = range(scored.first, len(scored.ids), window)
        rows = [scored.ids[start - 1 : start + window] for start in starts]
    # a short last window goes alone, as padding would need a mask
    full = [row for row in rows if len(row) == window + scored.context]
    batches = [torch.stack(full[i : i + batch_size]) for i in range(0, len(full), batch_size)]
    return batches + [row[None] for row in rows[len(full) :]]


def bits_per_byte(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    window: int = 512,
    batch_size: int = 8,
    max_tokens: int | None = None,
    progress: bool = False,
) -> LossReport:
    """Loss of ``model`` on ``text``, in disjoint windows.

    Every token but the first is scored once. If the tokenizer adds a BOS token, it precedes every window, and the first
    token is scored too. Context never exceeds ``window`` tokens. A model with ``OffloadConfig.lossy`` gets one token at
    a time, at the speed of decoding.

    Args:
        model: a causal language model, whose training mode is kept.
        tokenizer: a Hugging Face tokenizer (None: that of the folder that the model was loaded from).
        window: scored tokens per row. batch_size: rows per forward pass.
        max_tokens: score at most this many tokens (up to three fewer, to end between characters).
        progress: show a bar on standard error, if that is a terminal.

    Raises:
        CalibrationError: the text is shorter than two tokens.
        ConfigError: ``window``, ``batch_size`` or ``max_tokens`` below 1, or no tokenizer is known.
        NonFiniteError: the loss is NaN or infinite.
    """
    for name, value in (("window", window), ("batch_size", batch_size), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise ConfigError(name, expected="a positive number", found=str(value), fix=f"Pass {name}=512 or so.")
    tokenizer = tokenizer_of(model, tokenizer, "bits_per_byte(text)")
    scored = _encode(tokenizer, text, max_tokens)
    batches = _windows(scored, window, batch_size)
    total, count = summed_nats(model, bar(batches, "evaluating", progress, unit="batch"), scored.context)
    nats = total / count
    bits, perplexity, size = total / math.log(2) / scored.text_bytes, math.exp(min(nats, 700.0)), scored.text_bytes
    return LossReport(nats_per_token=nats, bits_per_byte=bits, perplexity=perplexity, tokens=count, bytes=size)


def paired_loss(
    models: Sequence[nn.Module], tokenizer: Any, text: str, *, max_tokens: int, until: Callable[[], bool]
) -> tuple[list[float], int]:
    """Nats per token of each model on windows of ``text``, in turn until ``until()``; and the scored tokens."""
    totals, tokens = [0.0] * len(models), 0
    scored = _encode(tokenizer, text, max_tokens)
    for ids_1T in _windows(scored, 256, 1):
        for i, model in enumerate(models):
            nats, count = summed_nats(model, [ids_1T], scored.context)
            totals[i] += nats
        tokens += count
        if until():
            break
    return [total / tokens for total in totals], tokens
