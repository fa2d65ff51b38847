"""Outlier neurons of a chunk: those whose 4-bit weights spoil the output most."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Largest value of a symmetric 4-bit weight, as the compiler's quantiser uses it: -7 to 7.
_MOST = 7


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [out, in] to 4 bits and back, with a scale per row."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / _MOST
    return (weight / scale).round().clamp(-_MOST, _MOST) * scale


def four_bit_damage(
    intermediate: Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor],
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """What 4-bit weights of each neuron add to the output's squared error, summed over calibration inputs: ``[N]``.

    Neuron i adds ``a_i d_i`` to the output, with 4 bits ``b_i e_i``; its damage is ``sum |a_i d_i - b_i e_i|^2``: the
    error of its weights, weighed with how strongly it fires.

    Args:
        intermediate: gate and up weights ``[N, H]`` -> a ``[T, N]`` on the calibration inputs.
        gate, up: ``[N, H]``; gate None in plain layers. down: ``[H, N]``.
    """
    a = intermediate(gate, up).double()
    b = intermediate(None if gate is None else rounded(gate), rounded(up)).double()
    d, e = down.double(), rounded(down).double()
    squares = a.square().sum(0) * d.square().sum(0) + b.square().sum(0) * e.square().sum(0)
    return squares - 2 * (a * b).sum(0) * (d * e).sum(0)


def split(damage: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the ``count`` neurons with most ``damage`` and of the others, each ascending."""
    order = damage.argsort(descending=True, stable=True)
    return order[:count].sort().values, order[count:].sort().values
