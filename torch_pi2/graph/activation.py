"""Recognise an activation by what it computes, not by how it is spelled.

The elementwise region between an FFN's projections is run on probe values in float64 and compared with every
hypothesis ``act(up)``, ``act(gate) * up`` and ``act(gate) * act(up)`` for every name in ``ops.ACTIVATIONS``. So
``x * sigmoid(x)``, ``F.silu``, ``nn.SiLU`` and a hand-written copy are all ``silu``; with a clamp at 50 they are not:
probes have all magnitudes, and values around every constant that the region compares with. If no hypothesis fits,
parameters (scales, a clamp, an offset of up) are fitted to each.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from torch_pi2.base.modules import fresh_settings
from torch_pi2.graph.operations import MAGNITUDES, BranchCoverage
from torch_pi2.ops.activations import ACTIVATIONS, Shaped, exact_zeros
from torch_pi2.types.site import Formula, apply_formula

#: Maps one probe per source projection (``[..., N]`` float64) to the region's result (``[..., I]``).
Region = Callable[[Sequence[torch.Tensor]], torch.Tensor]

#: gelu and gelu_tanh differ by up to 5e-4; constants written with six digits by up to 1e-6.
_TOLERANCE = 2e-5
#: Least number of probe values of all magnitudes, and around the constants that a region compares with.
_MANY = 2048
#: Bounds of an activation's fitted parameters, so that none overflows in float32.
_SMALLEST, _LARGEST = 1e-30, 1e30
#: Most standard deviations of a cut above the mean.
_LARGEST_CUT = 100.0
#: Where to probe around a constant, relative to it.
_AROUND = (-2.0, -1.001, -1.0, -0.999, -0.5, 0.5, 0.999, 1.0, 1.0005, 1.001, 2.0)


def identify(region: Region, shapes: Sequence[tuple[int, ...]], intermediate: int) -> Formula | str:
    """The formula of ``region`` (which may modify its arguments in place); ``"linear"`` without any nonlinearity (LoRA
    and the like are no FFNs); or ``"unknown"``. ``shapes``: of each source projection; one of ``[..., I]`` (plain), one
    of ``[..., 2I]`` (fused gate and up) or two of ``[..., I]``; ``intermediate``: I.
    """
    found = _try(region, shapes, intermediate)
    if found is None:
        return "unknown"
    tried, constants = found
    for formula in _hypotheses(len(tried[0].streams)):
        if all(one.is_(formula) for one in tried):
            return "linear" if formula.activation == "identity" else formula
    if _is_multilinear(region, tried, intermediate):
        return "linear"
    numbers = _with_numbers(region, tried[0].probes, intermediate, constants)
    for formula in chain(_with_cut(region, tried[0].probes, intermediate), numbers):
        if all(one.is_(formula) for one in tried):
            return formula
    return "unknown"


def computes(region: Region, shapes: Sequence[tuple[int, ...]], intermediate: int, formula: Formula) -> bool:
    """Whether ``region`` is ``formula`` (same arguments as :func:`identify`)."""
    found = _try(region, shapes, intermediate)
    if found is None or len(found[0][0].streams) != (1 if formula.gate is None else 2):
        return False
    return all(one.is_(formula) for one in found[0])


def _hypotheses(n_streams: int) -> list[Formula]:
    if n_streams == 1:
        return [Formula(name, False, None, 0) for name in ACTIVATIONS]
    roles = [(0, 1), (1, 0)]
    return [Formula(name, on_up, gate, up) for on_up in (False, True) for gate, up in roles for name in ACTIVATIONS]


def _with_numbers(region: Region, probes: Sequence, intermediate: int, constants: Sequence[float]) -> Iterator[Formula]:
    """Formulas with activation parameters fitted at a few points; the caller checks them everywhere."""
    fused = probes[0].shape[-1] == 2 * intermediate
    constants = [c for c in constants if _SMALLEST < c < _LARGEST]
    small = min([1.0, *(c / 2 for c in constants)])

    def at(*values: float) -> float:
        """The region's result for constant streams; NaN if it is not one number."""
        filled = [torch.full_like(probe, value) for probe, value in zip(probes, values)]
        if fused:
            filled = [probes[0].clone()]
            filled[0][..., :intermediate], filled[0][..., intermediate:] = values
        out = _run(region, filled, intermediate)
        return float(out.flatten()[0]) if out is not None and bool((out == out.flatten()[0]).all()) else math.nan

    def gate(v: float, first: bool) -> float:
        def of(u: float) -> float:
            return at(v, u) if first else at(u, v)

        return (of(small) - of(0.0)) / small

    if not fused and len(probes) == 1:
        ways: list[tuple[int | None, int, Callable[[float], float], float]] = [(None, 0, at, 0.0)]
    else:
        ways = []
        for first in (True, False):
            f: Callable[[float], float] = partial(gate, first=first)
            one = f(small)
            plus = (at(small, 0.0) if first else at(0.0, small)) / one if one else math.nan
            ways.append((0 if first else 1, 1 if first else 0, f, round(plus, 9)))
    for gate_index, up_index, act, plus in ways:
        ahead, back = act(small), act(-small)
        if not all(map(math.isfinite, (ahead, back, plus))) or not ahead:
            continue
        for base in ACTIVATIONS:
            scale = _scale_in(base, small, back / ahead)
            for limit in (math.inf, *constants) if scale is not None else ():
                assert scale is not None
                out = ahead / _value(base, scale * small)
                if not _SMALLEST < abs(out) < _LARGEST or abs(plus) > _LARGEST:
                    continue
                shaped = Shaped(base, float(f"{scale:.9g}"), float(f"{out:.9g}"), limit, plus + 0.0)
                yield Formula(shaped.text, False, gate_index, up_index)


def _with_cut(region: Region, probes: Sequence[torch.Tensor], intermediate: int) -> Iterator[Formula]:
    """Formulas with ``sigmas``, fitted with one gate that stands out; the caller checks them everywhere."""
    high, n = 1000.0, intermediate
    fused = probes[0].shape[-1] == 2 * n
    plain = not fused and len(probes) == 1
    for gate, up in [(None, 0)] if plain else [(0, 1), (1, 0)]:
        filled = [torch.ones_like(probe) for probe in probes]
        gate_index = gate or 0
        stream = filled[0][..., gate_index * n :][..., :n] if fused else filled[gate_index]
        stream.fill_(0.0)

        def at(height: float, filled: Sequence[torch.Tensor] = filled, stream: torch.Tensor = stream) -> float:
            """The result for one gate of ``height``, all others 0."""
            stream[..., 0] = height
            out = _run(region, filled, n)
            return math.nan if out is None else float(out[0, 0])

        found = at(high) if n > 1 else math.nan
        for base in ACTIVATIONS if 0 < found < math.inf else ():
            share = found ** (0.5 if base == "relu2" else 1.0) / high  # the others are the identity for large values
            sigmas = (1 - 1 / n - share) * n / math.sqrt(n - 1)
            small = [10 ** (k / 4) for k in range(-12, 7)]  # where the bases differ
            fits = all(abs(at(v / share) - _value(base, v)) <= _TOLERANCE * _value(base, v) for v in small)
            if fits and base != "identity" and abs(sigmas) < _LARGEST_CUT:
                yield Formula(Shaped(base, sigmas=float(f"{sigmas:.9g}")).text, False, gate, up)


def _value(base: str, v: float) -> float:
    return float(ACTIVATIONS[base](torch.tensor(v, dtype=torch.float64)))


def _scale_in(base: str, v: float, ratio: float) -> float | None:
    """The scale ``s`` with ``act(-s v) / act(s v) = ratio``; 1 if any does, None if none does."""
    if base == "identity" or exact_zeros(base):
        return 1.0 if ratio == 0 and base != "identity" else None
    if not -1 < ratio < 0:
        return None
    low, high = 1e-4 / v, 40.0 / v
    for _ in range(200):  # the ratio rises from -1 to 0
        middle = (low + high) / 2
        if _value(base, -middle * v) / _value(base, middle * v) < ratio:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class _Tried:
    """Probes of a region, their streams ``[T, I]``, and the region's result."""

    probes: list[torch.Tensor]
    streams: list[torch.Tensor]
    found: torch.Tensor

    def is_(self, formula: Formula) -> bool:
        return _close(self.found, apply_formula(formula, self.streams), self.streams)


def _try(region: Region, shapes: Sequence[tuple], intermediate: int) -> tuple[list[_Tried], list[float]] | None:
    """The region's results on probes that reach all its branches, and its constants; None if that fails."""
    elements = torch.Size(shapes[0]).numel() if shapes else 0
    if not elements:
        return None
    rounds = min(16, -(-_MANY // elements))
    tried: list[_Tried] = []
    coverage = BranchCoverage()

    def add(probes: list[torch.Tensor]) -> bool:
        streams = _streams(probes, intermediate)
        with coverage:
            found = _run(region, probes, intermediate)
        if streams is not None and found is not None:
            tried.append(_Tried(probes, [stream.reshape(-1, intermediate) for stream in streams], found))
        return streams is not None and found is not None

    with fresh_settings(), torch.random.fork_rng(devices=[]):
        for spread in (False, *[True] * rounds):
            number = len(tried)
            if not add([_spread(shape, number, i) if spread else _probe(shape, i) for i, shape in enumerate(shapes)]):
                return None
        constants = sorted(coverage.constants)
        for _ in range(rounds if constants else 0):
            if not add([_around(constants, shape, len(tried), i) for i, shape in enumerate(shapes)]):
                return None
    return None if coverage.missed() else (tried, constants)


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


def _generator(*seeds: int) -> torch.Generator:
    return torch.Generator().manual_seed(9176 + sum(seed * 1000**i for i, seed in enumerate(seeds)))


def _spread(shape: tuple[int, ...], number: int, stream: int) -> torch.Tensor:
    generator = _generator(stream, number)
    least, most = math.log10(MAGNITUDES[0]), math.log10(MAGNITUDES[-1])
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64) * (most - least) + least
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return signs * 10**exponents


def _around(constants: Sequence[float], shape: tuple[int, ...], number: int, stream: int) -> torch.Tensor:
    """Values on all sides of ``constants``, with some of all magnitudes among them."""
    generator = _generator(stream, number)
    near = torch.tensor([c * a for c in constants for a in _AROUND], dtype=torch.float64)
    chosen = near[torch.randint(0, len(near), shape, generator=generator)]
    other = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.2
    return torch.where(other, _spread(shape, number, stream), chosen)


def _run(region: Region, probes: Sequence[torch.Tensor], intermediate: int) -> torch.Tensor | None:
    """The region's result as ``[T, I]`` float64; None if it fails on probes or has another shape."""
    tokens = probes[0].numel() // probes[0].shape[-1]
    try:
        with torch.no_grad():
            out = region([probe.clone() for probe in probes])
    except Exception:  # any error: the region is not a known formula
        return None
    if not isinstance(out, torch.Tensor) or out.dim() == 0 or out.shape[-1] != intermediate:
        return None
    return out.reshape(-1, intermediate).double() if out.numel() == tokens * intermediate else None


def _close(found: torch.Tensor, wanted: torch.Tensor, streams: Sequence[torch.Tensor] = ()) -> bool:
    """Relative to each value; near zeros of the formula, to the streams, as long as these are small."""
    floor = torch.ones_like(wanted)
    for stream in streams:
        floor = floor * stream.abs()
    return bool(((found - wanted).abs() <= _TOLERANCE * (floor.clamp(max=1) + wanted.abs()) + 1e-12).all())


def _is_multilinear(region: Region, tried: Sequence[_Tried], intermediate: int) -> bool:
    """Affine in each stream with the others fixed: sums, scalings and products of streams."""
    probes, other = tried[0].probes, tried[1].probes
    columns = [(i, slice(None)) for i in range(len(probes))]
    if probes[0].shape[-1] == 2 * intermediate:
        columns = [(0, slice(0, intermediate)), (0, slice(intermediate, None))]

    def at(index: int, part: slice, values: torch.Tensor) -> torch.Tensor | None:
        changed = [probe.clone() for probe in probes]
        changed[index][..., part] = values
        return _run(region, changed, intermediate)

    for index, part in columns:
        first, second = probes[index][..., part], other[index][..., part]
        results = [at(index, part, v) for v in (first, second, first + second, torch.zeros_like(first))]
        if any(r is None for r in results):
            return False
        one, two, both, none = (r for r in results if r is not None)
        if not _close(one + two, both + none):
            return False
    return True
