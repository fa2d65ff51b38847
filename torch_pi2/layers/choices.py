"""Methods that choose once for a sequence: from its prompt, for the tokens that follow (``SparseMethod.scope``)."""

from typing import Any

import torch

from torch_pi2.base.progress import log_once
from torch_pi2.errors import ConfigError
from torch_pi2.layers.prompt import call_mode, prompt_ffn
from torch_pi2.layers.rows import DenseForm


class Choices:
    """What prompts have chosen, for some rows of a decoder's memory. ``reading``: the call is a part of their prompts.

    ``memory``: has ``of(kind, number, shape, like)``, a tensor ``[rows, *shape]`` that is the same in every call.
    """

    def __init__(self, memory: Any, layers: dict[str, int], rows: slice, reading: bool) -> None:
        self.memory, self.layers, self.rows, self.reading = memory, layers, rows, reading

    def of(self, layer: DenseForm) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of scores, float32 ``[rows, I]``, and neurons that are left out, bool ``[rows, I]`` in plan order: none
        of a sequence that has read nothing.
        """
        number, shape = self.layers[layer.site.key], (layer.site.intermediate,)
        kinds = ("scores", torch.float32), ("left out", torch.bool)
        found = (self.memory.of(kind, number, shape, torch.empty(0, dtype=dtype)) for kind, dtype in kinds)
        scores_BI, left_BI = (tensor[self.rows] for tensor in found)
        return scores_BI, left_BI


def by_prompt(layer: DenseForm, x: torch.Tensor) -> torch.Tensor:
    """``layer(x)`` with a method of scope ``prompt``, for ``x [B, T, H]`` of B sequences."""
    choices: Choices | None = call_mode.choices
    if choices is not None:
        scores_BI, left_BI = choices.of(layer)
        x_BTH = _by_sequence(layer, x, len(left_BI))
        if choices.reading:
            return _read(layer, x_BTH, scores_BI, left_BI).view(x.shape)
        return _chosen(layer, x_BTH, left_BI).view(x.shape)
    if not call_mode.sparse_only:
        log_once(f"{layer.custom.name} chooses by prompt: only Decoder, generate, serve and eval follow its choice")
        return prompt_ffn(layer, x)
    x_BTH = _by_sequence(layer, x, call_mode.sequences)
    prompt_BPH, rest_BRH = x_BTH.split([-(-x_BTH.shape[1] // 2), x_BTH.shape[1] // 2], 1)
    made_BI = x.new_zeros((len(x_BTH), layer.site.intermediate), dtype=torch.float32)
    left_BI = torch.zeros_like(made_BI, dtype=torch.bool)
    y_BPH = _read(layer, prompt_BPH, made_BI, left_BI)
    return torch.cat((y_BPH, _chosen(layer, rest_BRH, left_BI)), 1).view(x.shape)


def _by_sequence(layer: DenseForm, x: torch.Tensor, count: int) -> torch.Tensor:
    """``[B, T, H]``, also where the model's code joins sequences and tokens. Raises ConfigError: B is not known."""
    if x.dim() == 3:
        return x
    if count == 0 or x.dim() != 2 or len(x) % count:
        what, fix = f"scope 'prompt' of {layer.site.key}", "Use Decoder, torch_pi2.generate or torch-pi2 eval."
        expected = "inputs [sequences, tokens, H], or to know how many sequences there are"
        raise ConfigError(what, expected=expected, found=str(list(x.shape)), fix=fix)
    return x.view(count, -1, x.shape[-1])


def _read(layer: DenseForm, x_BTH: torch.Tensor, scores_BI: torch.Tensor, left_BI: torch.Tensor) -> torch.Tensor:
    products: list[torch.Tensor] = []
    y_BTH = prompt_ffn(layer, x_BTH.contiguous(), products)
    h_BTI = torch.cat(products, 1)[:, layer.inverse].view(*x_BTH.shape[:2], -1)
    for b, x_TH in enumerate(x_BTH):
        scores_BI[b] += layer.custom.prompt_scores(x_TH, h_BTI[b])
        left_BI[b] = ~layer.custom.chosen(scores_BI[b])[layer.order]
    return y_BTH


def _chosen(layer: DenseForm, x_BTH: torch.Tensor, left_BI: torch.Tensor) -> torch.Tensor:
    active_BTI = (~left_BI)[:, None].expand(*x_BTH.shape[:2], -1).contiguous()
    settings = layer.settings(0, layer.threshold)
    return torch.ops.pi2.sparse_ffn(x_BTH.contiguous(), *layer.tensors(), active_BTI, *settings)
