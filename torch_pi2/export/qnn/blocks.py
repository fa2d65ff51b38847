"""4-bit weights with a scale for each group of inputs: QNN's block-wise expansion.

A group's scale is a whole multiple, 1 to 16, of a sixteenth of the largest in its row: 8 stored bits for each group,
and a float for each row. ExecuTorch's observer takes any float, and its encoder rounds that to a multiple after the
weights were divided by it, so that the NPU computed with other weights than PyTorch (3e-2 of the output). Here scales
are multiples before any weight is divided.
"""

from __future__ import annotations

from typing import Any

import torch

#: Weights of a group, along the input.
SIZES = (16, 32, 64)

#: Largest value of a symmetric 4-bit weight, as the compiler's quantiser uses it: -7 to 7.
_MOST = 7
_STEPS = 16

#: Multiples below the one that clips nothing that are tried, too: coarser clipping, finer steps.
_FEWER = 3


def block_scales(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Scales ``[out, in / size]`` of ``weight`` ``[out, in]``: of the multiples, those with the least squared error."""
    groups = weight.reshape(len(weight), -1, size)
    most = groups.abs().amax(2)
    step = most.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * _STEPS * _MOST) / (_STEPS * _MOST)
    whole = (most / _MOST / step).ceil().clamp(1, _STEPS)
    best, least = whole, torch.full_like(most, torch.inf)
    for fewer in range(_FEWER + 1):
        multiple = (whole - fewer).clamp_min(1)
        scale = (multiple * step)[..., None]
        error = ((groups / scale).round().clamp(-_MOST, _MOST) * scale - groups).square().sum(2)
        best, least = torch.where(error < least, multiple, best), torch.minimum(error, least)
    # the encoder finds the step from the largest scale of a row
    return best.scatter(1, most.argmax(1, keepdim=True), float(_STEPS)) * step


def use_block_scales(prepared: torch.fx.GraphModule) -> None:
    """Give the observers of block-wise weights in ``prepared`` (calibrated) the scales of :func:`block_scales`."""
    from executorch.backends.qualcomm.quantizer.observers.per_block_param_observer import PerBlockParamObserver

    for node in prepared.graph.nodes:
        observer: Any = prepared.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(observer, PerBlockParamObserver):
            most = block_scales(_attribute(prepared, node.args[0].target), observer.block_size[1]) * _MOST
            observer.max_val.copy_(most.reshape(observer.max_val.shape))
            observer.min_val.copy_(-observer.max_val)


def _attribute(module: torch.nn.Module, name: str) -> torch.Tensor:
    owner, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(owner), last)
    return found
