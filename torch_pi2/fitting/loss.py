"""The loss that predictors must hardly change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.evaluating import evaluating
from torch_pi2.base.mapped import letting_go
from torch_pi2.base.ranks import Ranks
from torch_pi2.errors import CalibrationError, NonFiniteError
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.profiling.data import Batch

#: ``(model, batch) -> (sum of losses, number of tokens they are over)``.
LossFn = Callable[[nn.Module, Batch], tuple[float, int]]


def causal_lm_loss(model: nn.Module, batch: Batch) -> tuple[float, int]:
    """Next-token negative log likelihood in nats, padding left out. Needs ``batch.input_ids``.

    Raises:
        CalibrationError: the batch has no ids, or the model's output has no logits.
    """
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
    assert batch.mask_BT is not None
    real = batch.mask_BT[:, 1:] & batch.mask_BT[:, :-1]
    nll = F.cross_entropy(logits[:, :-1][real].float(), ids[:, 1:][real], reduction="sum")
    return float(nll), int(real.sum())


def mean_loss(
    model: nn.Module, data: Sequence[Batch], loss_fn: LossFn, context: Any, ranks: Ranks | None = None
) -> tuple[float, float]:
    """Mean loss over ``data`` inside ``context``, and the share of cold pairs skipped (nan if unknown).

    Args:
        ranks: processes that share the batches; None: this one takes all.
    """
    ranks = ranks or Ranks()

    def loss_of(batch: Batch) -> tuple[float, int]:
        with nullcontext() if context is None else context:
            return loss_fn(model, batch)

    with evaluating(model), letting_go(model):
        parts = ranks.map(loss_of, data)
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
    kept, pairs = (sum(counts) for counts in zip(*ranks.map(lambda _: context.pairs, range(ranks.size))))
    return total / count, 1 - kept / max(1, pairs)
