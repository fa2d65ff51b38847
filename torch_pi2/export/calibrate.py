"""Inputs of layers on calibration data, on which hot parts are quantised; and rows on which their loss is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_pi2.base.evaluating import evaluating
from torch_pi2.export.hot import hot_chunks
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import called_modules
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.profiling.data import Batch, batches
from torch_pi2.types.config import Config

#: Tokens whose inputs set the ranges of activations; and tokens on which the loss is measured.
TOKENS = 512
#: Most tokens on which GPTQ chooses weights; and bytes that their inputs may take in all layers.
_MOST_TOKENS, _MOST_BYTES = 8192, 1 << 30


def tokens_for_weights(layers: Sequence[SparseFFN]) -> int:
    """Tokens whose inputs are recorded for GPTQ: as many as memory allows."""
    row_bytes = 4 * sum(ffn.site.hidden for ffn in layers)
    return max(TOKENS, min(_MOST_TOKENS, _MOST_BYTES // max(1, row_bytes)))


def before_scored(first: Sequence[Batch], most: int) -> int:
    """Tokens of ``first`` whose inputs are recorded: at most ``most``, and :data:`TOKENS` remain for the loss."""
    there = sum(0 if batch.input_ids is None else batch.input_ids.numel() for batch in first)
    return max(TOKENS, min(most, there - TOKENS))


def first_batches(data: Any, tokenizer: Any = None, tokens: int = TOKENS) -> list[Batch]:
    """The first batches of ``data``: ``tokens`` for :func:`inputs_of`, and :data:`TOKENS` for :func:`scored_rows`.

    Raises:
        CalibrationError: ``data`` is empty or of a wrong form.
    """
    config, found, seen = Config(), list[Batch](), 0
    for batch in batches(data, tokenizer=tokenizer, batch_size=config.batch_size, seq_len=config.seq_len):
        found.append(batch)
        seen += 1 if batch.input_ids is None else batch.input_ids.numel()
        if seen >= tokens + TOKENS:
            break
    return found


def scored_rows(first: Sequence[Batch], tokens: int = TOKENS) -> tuple[list[Batch], bool]:
    """Rows of ids after the first ``tokens``, at most :data:`TOKENS` tokens, and True.

    If there are none, rows of the first ``tokens``, and False. Batches that are no ids, or have further arguments, give
    no rows.
    """
    after, within, seen = list[Batch](), list[Batch](), 0
    budget = {id(after): TOKENS, id(within): TOKENS}
    for batch in first:
        ids, mask = batch.input_ids, batch.mask_BT
        if ids is None or mask is None or batch.args or batch.kwargs:
            return [], False
        starts = seen + ids.shape[1] * torch.arange(len(ids))
        seen += ids.numel()
        ids, mask = ids[:, :TOKENS], mask[:, :TOKENS]
        scored = (mask[:, 1:] & mask[:, :-1]).any(1)  # of a token alone nothing is
        for these, chosen in ((starts >= tokens, after), (starts < tokens, within)):
            rows = (these & scored).nonzero()[: budget[id(chosen)] // ids.shape[1], 0]
            if len(rows):
                chosen.append(Batch(ids[rows], mask[rows]))
                budget[id(chosen)] -= ids[rows].numel()
    return (after, True) if after else (within, False)


def inputs_of(
    model: nn.Module, layers: Sequence[SparseFFN], data: Any, tokenizer: Any = None, tokens: int = TOKENS
) -> list[torch.Tensor]:
    """Inputs of each layer, float32 ``[N, H]``, N at most ``tokens``, on the first tokens of ``data``.

    Raises:
        CalibrationError: ``data`` is empty or of a wrong form.
    """
    called = called_modules(model)
    modules = [called[ffn] for ffn in layers]
    inputs: dict[nn.Module, list[torch.Tensor]] = {module: [] for module in modules}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        inputs[module].append(x.detach().reshape(-1, x.shape[-1])[:tokens].float())

    _watch(model, modules, keep, data, tokenizer, lambda: sum(map(len, inputs[modules[0]])) >= tokens)
    return [torch.cat(inputs[module])[:tokens] for module in modules]


def calls_of(
    model: nn.Module,
    modules: Sequence[nn.Module],
    take: Callable[[tuple[Any, ...], dict[str, Any]], Sequence[torch.Tensor]],
    data: Any,
    tokenizer: Any = None,
) -> list[list[list[torch.Tensor]]]:
    """For each module and each of the first sequences of ``data``: the tensors that ``take`` picks from a call, each
    ``[1, T, ...]`` float32; some :data:`TOKENS` tokens in all.

    Raises:
        CalibrationError: ``data`` is empty or of a wrong form.
    """
    calls: dict[int, list[list[torch.Tensor]]] = {id(module): [] for module in modules}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken = [t.detach().float() for t in take(args, kwargs)]
        batch = max(map(len, taken))
        for i in range(batch):
            if _tokens(calls[id(module)]) < TOKENS:
                calls[id(module)].append([t.expand(batch, *t.shape[1:])[i : i + 1, :TOKENS] for t in taken])

    _watch(model, modules, keep, data, tokenizer, lambda: _tokens(calls[id(modules[0])]) >= TOKENS)
    return [calls[id(module)] for module in modules]


def _tokens(calls: Sequence[Sequence[torch.Tensor]]) -> int:
    return sum(call[0].shape[1] for call in calls)


def _watch(
    model: nn.Module,
    modules: Sequence[nn.Module],
    keep: Callable[..., None],
    data: Any,
    tokenizer: Any,
    enough: Callable[[], bool],
) -> None:
    config = Config()
    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad(), evaluating(model):
            for batch in batches(data, tokenizer=tokenizer, batch_size=config.batch_size, seq_len=config.seq_len):
                batch.call(model)
                if enough():
                    break
    finally:
        for hook in hooks:
            hook.remove()


# --- loss of a model with its hot parts on an NPU ---------------------------------------------------------------------


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
