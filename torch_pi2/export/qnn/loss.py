"""The loss of a model whose hot parts are computed as by the NPU: by their quantised programs in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_pi2.base.evaluating import evaluating
from torch_pi2.export.hot import hot_chunks
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.profiling.data import Batch

#: Rows that a quantised program takes at once.
_ROWS = 4096


def loss_of(
    model: nn.Module,
    layers: Sequence[SparseFFN],
    quantized: Sequence[nn.Module | None],
    chunks: Mapping[str, Sequence[int]],
    batches: Sequence[Batch],
) -> dict[str, Any]:
    """Nats per token of ``model`` on ``batches``, and with hot parts for the NPU.

    Of the methods in ``chunks`` two are measured: those with the fewest and with the most chunks. Three passes over
    ``batches``, and one layer's floats at a time.

    Args:
        layers: of ``model``. quantized: of each, as :class:`~torch_pi2.export.qnn.lower.Lowered` has it. chunks: method
            -> of each layer, as many are the NPU's.

    Returns:
        ``tokens`` that were scored, ``nats_per_token`` of ``model`` as it is, and ``npu``: method ->
        ``nats_per_token`` and ``change``, its loss relative to that.
    """
    by_size = sorted(chunks, key=lambda name: sum(chunks[name]))
    float_nats, tokens = _nats(model, batches)
    npu = {}
    for name in dict.fromkeys((by_size[0], by_size[-1])):
        with hot_on_npu(layers, quantized, chunks[name]):
            nats, _ = _nats(model, batches)
        npu[name] = {"nats_per_token": nats, "change": nats / float_nats - 1}
    return {"tokens": tokens, "nats_per_token": float_nats, "npu": npu}


@contextmanager
def hot_on_npu(
    layers: Sequence[SparseFFN], quantized: Sequence[nn.Module | None], chunks: Sequence[int]
) -> Iterator[None]:
    """Within the block the first ``chunks`` of each layer are computed as by the NPU, the other neurons as before."""
    changed = []
    try:
        for ffn, part, count in zip(layers, quantized, chunks, strict=True):
            if part is not None and count:
                vars(ffn)["whole"] = _with_part(ffn, part, count)
                changed.append(ffn)
        yield
    finally:
        for ffn in changed:
            del vars(ffn)["whole"]


def _with_part(ffn: SparseFFN, part: nn.Module, count: int) -> Any:
    """``ffn.whole`` with the output of ``part`` for the first ``count`` chunks, instead of theirs in floats."""
    whole = ffn.whole

    def replaced(x: torch.Tensor) -> torch.Tensor:
        y, hot = whole(x), hot_chunks(ffn, count)
        rows = x.detach().reshape(-1, x.shape[-1]).float().split(_ROWS)
        change = torch.cat([part(row)[count - 1] - hot(row) for row in rows])
        return (y + change.reshape(y.shape)).to(y.dtype)

    return replaced


def _nats(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, int]:
    """Mean negative log likelihood of every token but the first of each row, and how many these are."""
    total, count = 0.0, 0
    with torch.no_grad(), evaluating(model), sparse_only():
        for batch in batches:
            found = batch.call(model)
            logits_BTV = getattr(found, "logits", found)
            assert batch.input_ids is not None
            assert batch.mask_BT is not None
            for logits_TV, ids_T, mask_T in zip(logits_BTV, batch.input_ids, batch.mask_BT):
                scored = mask_T[1:] & mask_T[:-1]
                nats = nn.functional.cross_entropy(logits_TV[:-1][scored].float(), ids_T[1:][scored], reduction="sum")
                total, count = total + nats.item(), count + int(scored.sum())
    return total / count, count
