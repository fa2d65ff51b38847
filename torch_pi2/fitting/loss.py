"""Losses of a model, and divergences from the dense model."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.memory import letting_go
from torch_pi2.base.modules import evaluating
from torch_pi2.base.progress import bar
from torch_pi2.errors import CalibrationError, NonFiniteError
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.profiling.data import Batch, numbers_of

#: Bytes of the logits of a call, and of those that are float32 at a time: 128 and 32 tokens of 262,144 words.
_CALL_BYTES, _FLOAT_BYTES = 1 << 27, 1 << 25

#: ``(model, batch) -> (sum of losses, number of tokens they are over)``.
LossFn = Callable[[nn.Module, Batch], tuple[float, int]]


def causal_lm_loss(model: nn.Module, batch: Batch) -> tuple[float, int]:
    """Next-token negative log likelihood in nats, without padding. Raises CalibrationError: no ids, or no logits."""
    total, count = 0.0, 0
    for part in _calls(model, batch):
        ids, logits = _ids_and_logits(model, part)
        assert part.mask_BT is not None
        at_N = (part.mask_BT[:, 1:] & part.mask_BT[:, :-1]).flatten().nonzero().flatten()
        at_N += at_N // max(1, ids.shape[1] - 1)  # of ids with the last token of each row
        for some in at_N.split(_tokens_at_once(logits)):
            nll = F.cross_entropy(logits.flatten(0, 1)[some].float(), ids.flatten()[some + 1], reduction="sum")
            total += float(nll)
        count += len(at_N)
    return total, count


def _tokens_at_once(logits: torch.Tensor) -> int:
    return max(1, _FLOAT_BYTES // (4 * logits.shape[-1]))


def _calls(model: nn.Module, batch: Batch) -> list[Batch]:
    """``batch`` in parts with at most ``_CALL_BYTES`` of logits, but at least a row."""
    ids, mask, words = batch.input_ids, batch.mask_BT, max(numbers_of(model, "vocab_size"), default=0)
    if ids is None or mask is None or batch.kwargs or not words * ids.numel():
        return [batch]
    rows = max(1, _CALL_BYTES // (4 * words * ids.shape[1]))
    return [Batch(*part) for part in zip(ids.split(rows), mask.split(rows), strict=True)]


def _ids_and_logits(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    ids = batch.input_ids
    out = batch.call(model) if ids is not None else None
    logits = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
    if ids is None or not isinstance(logits, torch.Tensor) or logits.shape[:2] != ids.shape:
        what, found = "loss of the model", "no ids" if ids is None else f"output {type(out).__name__}"
        fix = "Pass loss_fn=(model, batch) -> (sum of losses, count)."
        raise CalibrationError(what, expected="token ids and logits [B, T, vocabulary]", found=found, fix=fix)
    return ids, logits


@torch.no_grad()
def divergences(
    model: nn.Module, data: Sequence[Batch], contexts: Sequence[AbstractContextManager[Any]], *, progress: bool = False
) -> list[float]:
    """Kullback-Leibler divergence of next tokens inside each of ``contexts`` from those outside, in nats a token."""
    sums, count = [0.0] * len(contexts), 0
    calls = [part for batch in data for part in _calls(model, batch)]
    total = len(calls) * (1 + len(contexts))
    with evaluating(model), letting_go(model), bar(None, "divergences", progress, total=total, unit="call") as shown:
        for call in calls:
            _, logits = _ids_and_logits(model, call)
            assert call.mask_BT is not None
            real_N = call.mask_BT.flatten().nonzero().flatten()
            count += len(real_N)
            parts = real_N.split(_tokens_at_once(logits))
            dense = logits.flatten(0, 1)
            shares = [dense[part].float().softmax(-1) for part in parts] if contexts else []
            shown.update()
            for i, context in enumerate(contexts):
                with context:
                    found = _ids_and_logits(model, call)[1].flatten(0, 1)
                for part, share_NV in zip(parts, shares, strict=True):
                    dense_NV, found_NV = dense[part].float(), found[part].float()
                    # sum p (log p - log q), where p and q are softmaxes
                    less_N = found_NV.logsumexp(-1) - dense_NV.logsumexp(-1)
                    sums[i] += float((share_NV * dense_NV.sub_(found_NV)).sum(-1).add(less_N).sum(dtype=torch.float64))
                shown.update()
    return [one / max(1, count) for one in sums]


def mean_loss(
    model: nn.Module, data: Sequence[Batch], loss_fn: LossFn, context: Any, done: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """Mean loss over ``data`` in ``context``; share of skipped cold pairs, or nan. ``done``: after each batch."""
    parts = []
    with evaluating(model), letting_go(model), nullcontext() if context is None else context:
        for batch in data:
            parts.append(loss_fn(model, batch))
            done()
    total, count = sum(part for part, _ in parts), sum(n for _, n in parts)
    if not count or not math.isfinite(total):
        what, expected = "loss on the evaluation sequences", "a finite number over at least one token"
        fix = "Check the checkpoint and that sequences have at least two tokens."
        raise NonFiniteError(what, expected=expected, found=f"{total} over {count} tokens", fix=fix)
    return total / count, 1 - context.cold_share if isinstance(context, PredictedMaskMode) else math.nan
