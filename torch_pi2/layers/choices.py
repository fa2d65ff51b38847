"""Methods that choose once for a sequence: from its prompt, for the tokens that follow (``SparseMethod.scope``)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torch_pi2.base.progress import log_once
from torch_pi2.layers.prompt import call_mode, prompt_ffn

if TYPE_CHECKING:
    from torch_pi2.layers.ffn import SparseFFN


class Choices:
    """What prompts have chosen, for some rows of a decoder's memory. ``reading``: the call is a part of their prompts.

    ``memory``: has ``of(kind, number, shape, like)``, a tensor ``[rows, *shape]`` that is the same in every call.
    """

    def __init__(self, memory: Any, layers: dict[str, int], rows: slice, reading: bool) -> None:
        self.memory, self.layers, self.rows, self.reading = memory, layers, rows, reading

    def of(self, layer: "SparseFFN") -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of scores, float32 ``[rows, I]``, and chosen neurons in plan order, bool ``[rows, I]``."""
        number, shape = self.layers[layer.site.key], (layer.site.intermediate,)
        kinds = ("scores", torch.float32), ("chosen", torch.bool)
        found = (self.memory.of(kind, number, shape, torch.empty(0, dtype=dtype)) for kind, dtype in kinds)
        scores_BI, chosen_BI = (tensor[self.rows] for tensor in found)
        return scores_BI, chosen_BI


@contextmanager
def choosing(choices: Choices | None) -> Iterator[None]:
    """Layers keep what their methods choose in ``choices``."""
    before, call_mode.choices = call_mode.choices, choices
    try:
        yield
    finally:
        call_mode.choices = before


def by_prompt(layer: "SparseFFN", x: torch.Tensor) -> torch.Tensor:
    """``layer(x)`` with a method of scope ``prompt``, for ``x [B, T, H]`` of B sequences."""
    choices: Choices | None = call_mode.choices
    x_BTH = x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1])
    if choices is not None:
        scores_BI, chosen_BI = choices.of(layer)
        if choices.reading:
            return _read(layer, x_BTH, scores_BI, chosen_BI).view(x.shape)
        return _chosen(layer, x_BTH, chosen_BI).view(x.shape)
    if not call_mode.sparse_only:
        log_once(f"{layer.custom.name} chooses by prompt: only Decoder, generate, serve and eval follow its choice")
        return prompt_ffn(layer, x)
    prompt_BPH, rest_BRH = x_BTH.split([-(-x_BTH.shape[1] // 2), x_BTH.shape[1] // 2], 1)
    made_BI = x.new_zeros((len(x_BTH), layer.site.intermediate), dtype=torch.float32)
    chosen_BI = torch.zeros_like(made_BI, dtype=torch.bool)
    y_BPH = _read(layer, prompt_BPH, made_BI, chosen_BI)
    return torch.cat((y_BPH, _chosen(layer, rest_BRH, chosen_BI)), 1).view(x.shape)


def _read(layer: "SparseFFN", x_BTH: torch.Tensor, scores_BI: torch.Tensor, chosen_BI: torch.Tensor) -> torch.Tensor:
    products: list[torch.Tensor] = []
    y_BTH = prompt_ffn(layer, x_BTH.contiguous(), products)
    h_BTI = torch.cat(products, 1)[:, layer.inverse].view(*x_BTH.shape[:2], -1)
    for b, x_TH in enumerate(x_BTH):
        scores_BI[b] += layer.custom.prompt_scores(x_TH, h_BTI[b])
        chosen_BI[b] = layer.custom.chosen(scores_BI[b])[layer.order]
    return y_BTH


def _chosen(layer: "SparseFFN", x_BTH: torch.Tensor, chosen_BI: torch.Tensor) -> torch.Tensor:
    """A sequence that has read nothing computes every neuron."""
    mask_BI = chosen_BI | ~chosen_BI.any(1, keepdim=True)
    active_BTI = mask_BI[:, None].expand(*x_BTH.shape[:2], -1).contiguous()
    return torch.ops.pi2.sparse_ffn(
        x_BTH.contiguous(), *layer.tensors(), active_BTI, *layer.settings(0, layer.threshold)
    )
