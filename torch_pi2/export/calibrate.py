"""Inputs of layers on calibration data, to quantise hot parts; and the loss of a model with quantised hot parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from torch_pi2.base.modules import evaluating
from torch_pi2.export.hot import hot_chunks
from torch_pi2.fitting.loss import causal_lm_loss
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import called_modules
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.profiling.data import Batch, batches
from torch_pi2.types.config import Config

#: Tokens that set the ranges of activations; and tokens on which the loss is measured.
TOKENS = 512
#: Most tokens for GPTQ, and most bytes of their inputs over all layers.
_MOST_TOKENS, _MOST_BYTES = 8192, 1 << 30
#: Rows per call of a quantised program.
_ROWS = 4096


def tokens_for_weights(layers: Sequence[SparseFFN]) -> int:
    """Tokens recorded for GPTQ, within the limits above."""
    row_bytes = 4 * sum(ffn.site.hidden for ffn in layers)
    return max(TOKENS, min(_MOST_TOKENS, _MOST_BYTES // max(1, row_bytes)))


def before_scored(first: Sequence[Batch], most: int) -> int:
    """Tokens of ``first`` to record: at most ``most``, so that :data:`TOKENS` remain for the loss."""
    return max(TOKENS, min(most, sum(map(_size, first)) - TOKENS))


def first_batches(data: Any, tokenizer: Any = None, tokens: int = TOKENS) -> list[Batch]:
    """The first batches of ``data``: ``tokens`` for :func:`inputs_of`, and :data:`TOKENS` for :func:`scored_rows`."""
    found, seen = list[Batch](), 0
    for batch in _batches(data, tokenizer):
        found.append(batch)
        seen += _size(batch)
        if seen >= tokens + TOKENS:
            break
    return found


def scored_rows(first: Sequence[Batch], tokens: int = TOKENS) -> tuple[list[Batch], bool]:
    """Rows of ids after the first ``tokens``, and True; if none, rows of those, and False. Not of other arguments."""
    rows, seen = list[tuple[bool, Batch]](), 0
    for batch in first:
        if batch.input_ids is None or batch.mask_BT is None or batch.args or batch.kwargs:
            return [], False
        for ids_1T, mask_1T in zip(batch.input_ids[:, :TOKENS].split(1), batch.mask_BT[:, :TOKENS].split(1)):
            if (mask_1T[:, 1:] & mask_1T[:, :-1]).any():  # a row of one token has nothing to score
                rows.append((seen >= tokens, Batch(ids_1T, mask_1T)))
            seen += batch.input_ids.shape[1]
    after = any(late for late, _ in rows)
    chosen = [row for late, row in rows if late == after]
    return [row for i, row in enumerate(chosen) if sum(map(_size, chosen[: i + 1])) <= TOKENS], after


def inputs_of(
    model: nn.Module, layers: Sequence[SparseFFN], data: Any, tokenizer: Any = None, tokens: int = TOKENS
) -> list[torch.Tensor]:
    """Inputs of each layer on the first tokens of ``data``: float32 ``[N, H]``, N at most ``tokens``."""

    def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return [x.reshape(1, -1, x.shape[-1])]

    called = called_modules(model)
    calls = calls_of(model, [called[ffn] for ffn in layers], input_of, data, tokenizer, tokens)
    return [torch.cat([call[0][0] for call in of_layer])[:tokens] for of_layer in calls]


def calls_of(
    model: nn.Module,
    modules: Sequence[nn.Module],
    take: Callable[[tuple[Any, ...], dict[str, Any]], Sequence[torch.Tensor]],
    data: Any,
    tokenizer: Any = None,
    tokens: int = TOKENS,
) -> list[list[list[torch.Tensor]]]:
    """By module and sequence: what ``take`` picks from a call, ``[1, T, ...]`` float32; some ``tokens`` in all."""
    calls: dict[nn.Module, list[list[torch.Tensor]]] = {module: [] for module in modules}

    def enough(module: nn.Module) -> bool:
        return sum(call[0].shape[1] for call in calls[module]) >= tokens

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken = [t.detach().float() for t in take(args, kwargs)]
        batch = max(map(len, taken))
        for i in range(batch):
            if not enough(module):
                calls[module].append([t.expand(batch, *t.shape[1:])[i : i + 1, :tokens] for t in taken])

    with ExitStack() as hooks, torch.no_grad(), evaluating(model):
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
        for batch in _batches(data, tokenizer):
            batch.call(model)
            if enough(modules[0]):
                break
    return [calls[module] for module in modules]


def _batches(data: Any, tokenizer: Any) -> Iterator[Batch]:
    config = Config()
    yield from batches(data, tokenizer=tokenizer, batch_size=config.batch_size, seq_len=config.seq_len)


def _size(batch: Batch) -> int:
    return 0 if batch.input_ids is None else batch.input_ids.numel()


def loss_of(
    model: nn.Module,
    layers: Sequence[SparseFFN],
    quantized: Sequence[nn.Module],
    chunks: Mapping[str, Sequence[int]],
    batches: Sequence[Batch],
) -> dict[str, Any]:
    """Nats per token of ``model`` on ``batches``, as it is and with hot parts of the NPU (``quantized``: per layer),
    for the methods with the fewest and the most ``chunks``, in three passes. Returns ``tokens`` scored,
    ``nats_per_token``, and ``npu``: method -> ``nats_per_token`` and its relative ``change``.
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
def hot_on_npu(layers: Sequence[SparseFFN], quantized: Sequence[nn.Module], chunks: Sequence[int]) -> Iterator[None]:
    """Within the block the first ``chunks`` of each layer are computed as the NPU does, the others as before."""
    try:
        for ffn, part, count in zip(layers, quantized, chunks, strict=True):
            vars(ffn)["whole"] = _with_part(ffn, part, count)
        yield
    finally:
        for ffn in layers:
            vars(ffn).pop("whole", None)


def _with_part(ffn: SparseFFN, part: nn.Module, count: int) -> Any:
    """``ffn.whole``, with ``part`` in place of the first ``count`` chunks in floats."""
    whole = ffn.whole

    def replaced(x: torch.Tensor) -> torch.Tensor:
        y, hot = whole(x), hot_chunks(ffn, count)
        rows = x.detach().reshape(-1, x.shape[-1]).float().split(_ROWS)
        change = torch.cat([part(row)[count - 1] - hot(row) for row in rows])
        return (y + change.reshape(y.shape)).to(y.dtype)

    return replaced


def _nats(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, int]:
    """Mean negative log likelihood of all tokens but the first of each row, and their number."""
    with torch.no_grad(), evaluating(model), sparse_only():
        total, count = map(sum, zip(*(causal_lm_loss(model, batch) for batch in batches)))
    return total / count, count
