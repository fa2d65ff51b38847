"""Losses of a model, and divergences from the dense model."""

from __future__ import annotations

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
from torch_pi2.profiling.data import Batch

#: Tokens whose logits are float32 at a time.
_AT_ONCE = 256

#: ``(model, batch) -> (sum of losses, number of tokens they are over)``.
LossFn = Callable[[nn.Module, Batch], tuple[float, int]]


def causal_lm_loss(model: nn.Module, batch: Batch) -> tuple[float, int]:
    """Next-token negative log likelihood in nats, padding left out. Needs ``batch.input_ids``.

    Raises:
        CalibrationError: the batch has no ids, or the model's output has no logits.
    """
    ids, logits = _ids_and_logits(model, batch)
    assert batch.mask_BT is not None
    real = batch.mask_BT[:, 1:] & batch.mask_BT[:, :-1]
    nll = F.cross_entropy(logits[:, :-1][real].float(), ids[:, 1:][real], reduction="sum")
    return float(nll), int(real.sum())


def _ids_and_logits(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    ids = batch.input_ids
    out = batch.call(model) if ids is not None else None
    logits = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
    if ids is None or not isinstance(logits, torch.Tensor) or logits.shape[:2] != ids.shape:
        raise CalibrationError(
            "loss of the model",
            expected="token ids and logits [B, T, vocabulary]",
            found="no ids" if ids is None else f"output {type(out).__name__}",
            fix="Pass loss_fn=(model, batch) -> (sum of losses, count).",
        )
    return ids, logits


@torch.no_grad()
def divergences(
    model: nn.Module, data: Sequence[Batch], contexts: Sequence[AbstractContextManager[Any]], *, progress: bool = False
) -> list[float]:
    """Kullback-Leibler divergence of next-token distributions inside each of ``contexts`` from those outside.

    In nats, mean over the real tokens of ``data``. Raises CalibrationError as :func:`causal_lm_loss`.
    """
    sums, count = [0.0] * len(contexts), 0
    with evaluating(model), letting_go(model):
        for batch in bar(data, "divergences", progress, unit="batch"):
            _, logits = _ids_and_logits(model, batch)
            assert batch.mask_BT is not None
            real_BT = batch.mask_BT
            count += int(real_BT.sum())
            for i, context in enumerate(contexts):
                with context:
                    _, found = _ids_and_logits(model, batch)
                pairs = zip(logits[real_BT].split(_AT_ONCE), found[real_BT].split(_AT_ONCE), strict=True)
                for dense_NV, found_NV in pairs:
                    logs = F.log_softmax(found_NV.float(), -1), F.log_softmax(dense_NV.float(), -1)
                    sums[i] += float(F.kl_div(*logs, reduction="sum", log_target=True))
    return [one / max(1, count) for one in sums]


def mean_loss(model: nn.Module, data: Sequence[Batch], loss_fn: LossFn, context: Any) -> tuple[float, float]:
    """Mean loss over ``data`` inside ``context``, and the share of skipped cold pairs (nan if unknown)."""
    with evaluating(model), letting_go(model), nullcontext() if context is None else context:
        parts = [loss_fn(model, batch) for batch in data]
    total, count = sum(part for part, _ in parts), sum(n for _, n in parts)
    if not count or not math.isfinite(total):
        raise NonFiniteError(
            "loss on the evaluation sequences",
            expected="a finite number over at least one token",
            found=f"{total} over {count} tokens",
            fix="Check the checkpoint and that sequences have at least two tokens.",
        )
    if not isinstance(context, PredictedMaskMode):
        return total / count, math.nan
    kept, pairs = context.pairs
    return total / count, 1 - kept / max(1, pairs)
