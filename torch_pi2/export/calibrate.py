"""What layers see on calibration data: the inputs on which hot parts are quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torch_pi2.base.evaluating import evaluating
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.profiling.data import batches
from torch_pi2.spec.config import Config

#: Tokens of which a layer's inputs are kept.
TOKENS = 512


def inputs_of(model: nn.Module, layers: Sequence[SparseFFN], data: Any, tokenizer: Any = None) -> list[torch.Tensor]:
    """Inputs of each layer, float32 ``[N, H]``, N at most :data:`TOKENS`, on the first tokens of ``data``.

    Raises:
        CalibrationError: ``data`` is empty or of a wrong form.
    """
    config, seen = Config(), 0
    kept: dict[int, list[torch.Tensor]] = {id(ffn): [] for ffn in layers}

    def keep(ffn: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        kept[id(ffn)].append(x.detach().reshape(-1, x.shape[-1])[:TOKENS].float())

    hooks = [ffn.register_forward_pre_hook(keep, with_kwargs=True) for ffn in layers]
    try:
        with torch.no_grad(), evaluating(model):
            for batch in batches(data, tokenizer=tokenizer, batch_size=config.batch_size, seq_len=config.seq_len):
                batch.call(model)
                seen += sum(len(x) for x in kept[id(layers[0])][-1:])
                if seen >= TOKENS:
                    break
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(kept[id(ffn)])[:TOKENS] for ffn in layers]
