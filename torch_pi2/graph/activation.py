"""Recognise an activation by what it computes, not by how it is spelled.

The elementwise region between an FFN's projections is run on probe values in float64 and compared with every
hypothesis ``act(up)``, ``act(gate) * up`` and ``act(gate) * act(up)`` for every name in ``ops.ACTIVATIONS``. So
``x * sigmoid(x)``, ``F.silu``, ``nn.SiLU`` and a hand-written copy are all ``silu``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torch_pi2.ops.activations import ACTIVATIONS

#: Maps one probe per source projection (``[..., N]`` float64) to the region's result (``[..., I]``).
Region = Callable[[Sequence[torch.Tensor]], torch.Tensor]

#: gelu and gelu_tanh differ by up to 5e-4; constants written with six digits by up to 1e-6.
_TOLERANCE = 2e-5


@dataclass(frozen=True)
class Formula:
    """What a region computes from its one or two streams.

    Attributes:
        activation: a name in ``ops.ACTIVATIONS``.
        on_up: activation on both streams (dReLU).
        gate: index of the gate stream, None for a plain FFN; up: index of the other.
    """

    activation: str
    on_up: bool
    gate: int | None
    up: int


def identify(region: Region, shapes: Sequence[tuple[int, ...]], intermediate: int) -> Formula | str:
    """Name the formula of ``region``.

    Args:
        region: the function to recognise; may modify its arguments in place.
        shapes: shape of each source projection; one of ``[..., I]`` (plain), one of ``[..., 2I]`` (fused gate
            and up) or two of ``[..., I]``.
        intermediate: I.

    Returns:
        The formula, ``"linear"`` for regions without any nonlinearity (LoRA and the like are no FFNs), or
        ``"unknown"``.
    """
    probes = [_probe(shape, seed) for seed, shape in enumerate(shapes)]
    streams = _streams(probes, intermediate)
    if streams is None:
        return "unknown"
    found = _run(region, probes, intermediate)
    if found is None:
        return "unknown"
    flat = [stream.reshape(-1, intermediate) for stream in streams]
    for formula in _hypotheses(len(flat)):
        if _close(found, apply_formula(formula, flat)):
            return "linear" if formula.activation == "identity" else formula
    return "linear" if _is_multilinear(region, probes, intermediate) else "unknown"


def computes(region: Region, shapes: Sequence[tuple[int, ...]], intermediate: int, formula: Formula) -> bool:
    """Whether ``region`` is ``formula`` (same arguments as :func:`identify`)."""
    probes = [_probe(shape, seed) for seed, shape in enumerate(shapes)]
    streams = _streams(probes, intermediate)
    found = _run(region, probes, intermediate)
    if streams is None or found is None or len(streams) != (1 if formula.gate is None else 2):
        return False
    return _close(found, apply_formula(formula, [stream.reshape(-1, intermediate) for stream in streams]))


def apply_formula(formula: Formula, streams: Sequence[torch.Tensor]) -> torch.Tensor:
    """``h`` from the streams, each ``[T, I]``."""
    act = ACTIVATIONS[formula.activation]
    up = streams[formula.up]
    if formula.gate is None:
        return act(up)
    return act(streams[formula.gate]) * (act(up) if formula.on_up else up)


def _hypotheses(n_streams: int) -> list[Formula]:
    if n_streams == 1:
        return [Formula(name, False, None, 0) for name in ACTIVATIONS]
    roles = [(0, 1), (1, 0)]
    return [Formula(name, on_up, gate, up) for on_up in (False, True) for gate, up in roles for name in ACTIVATIONS]


def _streams(probes: Sequence[torch.Tensor], intermediate: int) -> list[torch.Tensor] | None:
    widths = [probe.shape[-1] for probe in probes]
    if widths == [2 * intermediate]:
        return [probes[0][..., :intermediate].clone(), probes[0][..., intermediate:].clone()]
    if widths in ([intermediate], [intermediate, intermediate]):
        return [probe.clone() for probe in probes]
    return None


def _probe(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Values in -8..8 with zeros and large ones among them, different for every element and seed."""
    generator = torch.Generator().manual_seed(9176 + seed)
    values = (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5) * 16
    flat = values.view(-1)
    flat[:: 17 + seed] = 0.0
    flat[5 :: 23 + seed] *= 4
    return values


def _run(region: Region, probes: Sequence[torch.Tensor], intermediate: int) -> torch.Tensor | None:
    """The region's result as ``[T, I]`` float64; None if it fails on probes or has another shape."""
    tokens = probes[0].numel() // probes[0].shape[-1]
    try:
        with torch.no_grad():
            out = region([probe.clone() for probe in probes])
    except Exception:  # anything at all: the region is then simply not one that we know
        return None
    if not isinstance(out, torch.Tensor) or out.dim() == 0 or out.shape[-1] != intermediate:
        return None
    return out.reshape(-1, intermediate).double() if out.numel() == tokens * intermediate else None


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((found - wanted).abs() <= _TOLERANCE * (1 + wanted.abs())).all())


def _is_multilinear(region: Region, probes: Sequence[torch.Tensor], intermediate: int) -> bool:
    """Affine in each stream with the others fixed: sums, scalings and products of streams."""
    columns = (
        [(0, slice(0, intermediate)), (0, slice(intermediate, None))]
        if probes[0].shape[-1] == 2 * intermediate
        else [(i, slice(None)) for i in range(len(probes))]
    )

    def at(index: int, part: slice, values: torch.Tensor) -> torch.Tensor | None:
        changed = [probe.clone() for probe in probes]
        changed[index][..., part] = values
        return _run(region, changed, intermediate)

    for index, part in columns:
        first = probes[index][..., part]
        second = _probe(tuple(first.shape), 5 + index)
        results = [at(index, part, v) for v in (first, second, first + second, torch.zeros_like(first))]
        if any(r is None for r in results):
            return False
        one, two, both, none = (r for r in results if r is not None)
        if not _close(one + two, both + none):
            return False
    return True
