"""Inputs of layers on calibration data, on which hot parts are quantised; and rows on which their loss is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torch_pi2.base.evaluating import evaluating
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import called_modules
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
