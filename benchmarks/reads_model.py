"""Reads of a 7B model's neurons, modelled from what a small one wants: orders, a cache, runs and gaps, and phases.

Tokens of the small model that are far apart in the text lie side by side as one of a layer that is as wide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_pi2.machine.device import Device, find_device
from torch_pi2.measure import reads as measured
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.stats import pack_bits, unpack_bits

#: Of the 7B model, and bytes of one of its neurons in int4 (6,912) in pages, of half of that, and of its gate.
NEURONS, LAYERS, SLOT, PAGE, GATE = 14336, 32, 8192, 4096, 2304
ORDERS = ("frequency", "random", "spectral", "chains")
GAPS = (0, OffloadConfig.gap_bytes, 1 << 16)
#: One read of a neuron, two of its halves; gates first, in slots or 16 together: after each other, or overlapped.
WAYS = ("one", "halves", "slot, after", "slot, overlapped", "gates, after", "gates, overlapped")
HOT_SHARE = 0.25  # of the cache, as OffloadConfig has it with lfu
_TOGETHER, _CHUNKS = 16, 16  # gates; chunks of a layer
_GATE_GB_PER_S = 10.0  # of computing gates: memory read in rows of 2.3 KB, by two threads (docs/design.md)
_TIMED = 32  # tokens of each layer whose reads are timed

#: Seconds of reads that begin at ``offsets`` and have ``sizes``, both in bytes, when all are asked for at once.
Seconds = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class Seen:
    """Tokens of a layer, bool ``[N, I]`` each: what is wanted, of what the gate fires, and all of the neuron."""

    n_hot: int
    wanted: torch.Tensor
    gate: torch.Tensor
    fired: torch.Tensor

    def placed(self, place_I: torch.Tensor | slice, last: int = 0) -> Seen:
        """The ``last`` tokens (0: all), of neurons in another order."""
        return Seen(self.n_hot, *(x[-last:, place_I] for x in (self.wanted, self.gate, self.fired)))

    def shares(self, of_NI: torch.Tensor) -> dict[str, float]:
        """Of cold neurons the share in ``of_NI``, and of these those whose gate fires, and which fire."""
        cold_NC = of_NI[:, self.n_hot :]
        fire = {name: x[:, self.n_hot :][cold_NC] for name, x in (("gate", self.gate), ("fired", self.fired))}
        return {"wanted": float(cold_NC.float().mean())} | {k: float(x.float().mean()) for k, x in fire.items()}


def ordered(name: str, wanted_NI: torch.Tensor, head: int) -> torch.Tensor:
    """Int64 ``[I]``, place -> plan position: the first ``head`` stay, others by what is wanted with what."""
    cold_NC = wanted_NI[:, head:].double()
    if name == "frequency":
        new_C = torch.arange(cold_NC.shape[1])
    elif name == "random":
        new_C = torch.randperm(cold_NC.shape[1], generator=torch.Generator().manual_seed(0))
    else:
        both_CC = cold_NC.T @ cold_NC
        one_C = both_CC.diagonal()
        either_CC = one_C[:, None] + one_C - both_CC  # tokens that want one of the two at least
        near_CC = (both_CC / either_CC.clamp_min(1)).fill_diagonal_(0)
        new_C = chains(near_CC) if name == "chains" else spectral(near_CC)
    return torch.cat([torch.arange(head), head + new_C])


def chains(near_CC: torch.Tensor) -> torch.Tensor:
    """The nearest pairs are linked first, until all are one path (as Ripple does, arXiv 2410.19274)."""
    first_P, second_P = np.triu_indices(len(near_CC), 1)
    best_P = np.argsort(-near_CC.numpy()[first_P, second_P], kind="stable")
    chain_of = {i: [i] for i in range(len(near_CC))}
    for a, b in zip(first_P[best_P].tolist(), second_P[best_P].tolist(), strict=True):
        one, other = chain_of[a], chain_of[b]
        if one is other or a not in (one[0], one[-1]) or b not in (other[0], other[-1]):
            continue
        if one[-1] != a:
            one.reverse()
        one += other if other[0] == b else other[::-1]
        chain_of |= dict.fromkeys(other, one)
    return torch.tensor(chain_of[0])


def spectral(near_CC: torch.Tensor) -> torch.Tensor:
    """By the second eigenvector of the normalised Laplacian."""
    scale_C = near_CC.sum(1).clamp_min(1e-9).rsqrt()
    _, vectors_CC = torch.linalg.eigh(scale_C[:, None] * near_CC * scale_C)
    return torch.argsort(vectors_CC[:, -2] * scale_C)


def missed(layers: Sequence[Seen], share: float) -> list[torch.Tensor]:
    """Bool ``[N / 2, I]`` of each layer: what a cache of so many of all neurons lacks, after half of the tokens."""
    tokens, neurons = layers[0].wanted.shape
    bits = torch.stack([pack_bits(layer.wanted) for layer in layers], 1).flatten()
    calls = torch.arange(len(layers), dtype=torch.int32).repeat(tokens)
    about = torch.tensor([(neurons, 1)] * len(layers))
    accesses = (calls, torch.zeros(len(calls), dtype=torch.uint8), bits, about)
    slots = round(share * neurons * len(layers))
    bits = torch.ops.pi2.replay_missed(*accesses, "lfu", slots, HOT_SHARE, True, 0)
    return [unpack_bits(rows, neurons)[tokens // 2 :] for rows in bits.view(tokens, len(layers), -1).unbind(1)]


def wide(rows_NI: torch.Tensor) -> np.ndarray:
    """Bool ``[G, 14336]``: tokens far apart, side by side; at most ``_TIMED`` of them."""
    beside = NEURONS // rows_NI.shape[1]
    groups = len(rows_NI) // beside
    wide_GW = rows_NI[: groups * beside].unflatten(0, (beside, groups)).transpose(0, 1).flatten(1)
    found: np.ndarray = wide_GW[:: -(-groups // _TIMED)].numpy()
    return found


def merged(starts: np.ndarray, nbytes: int, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and sizes of reads of ``nbytes`` at each of ``starts``, ascending: the rules of engine/read_batch.h."""
    firsts: list[int] = []
    lasts: list[int] = []
    for at in starts.tolist():
        if firsts and at - lasts[-1] <= nbytes + gap and at + nbytes - firsts[-1] <= OffloadConfig.run_bytes:
            lasts[-1] = at
        else:
            firsts.append(at)
            lasts.append(at)
    return np.array(firsts, np.int64), np.array(lasts, np.int64) - np.array(firsts, np.int64) + nbytes


def two_phases(slots: np.ndarray, fires: np.ndarray, together: int, gap: int, seconds: Seconds) -> tuple[float, float]:
    """Seconds of reading ``slots`` in two phases: one after the other, and overlapped.

    One after the other: all gates are read, then computed, then the rest of those that fire is read. Overlapped: the
    rest of each of 16 chunks is asked for behind the gates of the next one, as if its gates were there and computed by
    then; what nothing hides at the end is added: computing the last chunk's gates, and one read alone. The pages with
    gates of ``together`` neurons lie together, and behind them as many with the rest.
    """
    at = slots // together * together * SLOT + slots % together * PAGE
    gates, rest = merged(at, PAGE, gap), merged(at[fires] + together * PAGE, PAGE, gap)
    compute_s = len(slots) * GATE / _GATE_GB_PER_S / 1e9
    after = seconds(*gates) + compute_s + seconds(*rest)
    chunk = NEURONS * SLOT // _CHUNKS
    order = np.argsort(np.concatenate([gates[0] // chunk, rest[0] // chunk + 1.5]), kind="stable")
    offsets, sizes = (np.concatenate(pair)[order] for pair in zip(gates, rest, strict=True))
    alone = seconds(np.array([0]), np.array([PAGE])) if len(rest[0]) else 0.0
    return after, seconds(offsets, sizes) + compute_s / _CHUNKS + alone


def orders(
    calibration: Sequence[Seen], heldout: Sequence[Seen], share: float, timers: Mapping[str, Seconds]
) -> list[dict[str, Any]]:
    """What a token of the 7B model reads, by order and gap, with so much of all neurons in the cache."""
    points = []
    for name in ORDERS:
        heads = [max(y.n_hot, round(HOT_SHARE * share * y.wanted.shape[1])) for y in calibration]
        places = [ordered(name, y.wanted, head) for y, head in zip(calibration, heads, strict=True)]
        missing = missed([y.placed(place_I) for y, place_I in zip(heldout, places, strict=True)], share)
        slots = [np.flatnonzero(row) for missing_NI in missing for row in wide(missing_NI)]
        of_token = LAYERS / len(slots)
        for gap in GAPS:
            reads = [merged(s * SLOT, SLOT, gap) for s in slots]
            ms = {device: of_token * 1e3 * sum(seconds(*r) for r in reads) for device, seconds in timers.items()}
            count = {"reads": sum(len(o) for o, _ in reads), "bytes": sum(int(sizes.sum()) for _, sizes in reads)}
            points.append({"order": name, "gap": gap, **{k: of_token * n for k, n in count.items()}, "ms": ms})
    return points


def phases(heldout: Sequence[Seen], share: float, timers: Mapping[str, Seconds]) -> dict[str, Any]:
    """The same by way of reading, of neurons in order of frequency; of each way the gap that takes least."""
    missing = missed(heldout, share)
    halves = [y.placed(slice(None), len(m)) for y, m in zip(heldout, missing, strict=True)]
    count = sum(int(m.sum()) for m in missing)
    fire = {
        k: sum(int((getattr(y, k) & m).sum()) for y, m in zip(halves, missing, strict=True)) for k in ("gate", "fired")
    }
    rows = [pair for y, m in zip(halves, missing, strict=True) for pair in zip(wide(m), wide(y.gate), strict=True)]
    pairs = [(np.flatnonzero(row), gate[row]) for row, gate in rows]
    wanted = sum(int(y.wanted.sum()) for y in halves)
    shares = {"missed": count / wanted, **{k: n / max(1, count) for k, n in fire.items()}}
    return shares | {"ms": {device: _ways(pairs, seconds) for device, seconds in timers.items()}}


def _ways(pairs: Sequence[tuple[np.ndarray, np.ndarray]], seconds: Seconds) -> dict[str, float]:
    """Milliseconds of a token, of :data:`WAYS`; ``pairs``: what a layer's token reads, and of which the gate fires."""

    def each(gap: int) -> list[list[float]]:
        found = []
        for slots, fires in pairs:
            split = (slots[:, None] * SLOT + np.array([0, PAGE])).flatten()
            one, two = seconds(*merged(slots * SLOT, SLOT, gap)), seconds(split, np.full(len(split), PAGE))
            # what lies between two gates in slots is what is not to be read
            in_slots = two_phases(slots, fires, 1, 0, seconds)
            found.append([one, two, *in_slots, *two_phases(slots, fires, _TOGETHER, gap, seconds)])
        return found

    ms = np.array([LAYERS * 1e3 * np.mean(each(gap), axis=0) for gap in GAPS]).min(0)
    return dict(zip(WAYS, ms.tolist(), strict=True))


def narrower(calibration: Sequence[Seen], heldout: Sequence[Seen], share: float) -> dict[str, float]:
    """By neurons of a layer: reads of order ``chains`` over those by frequency, where only so many are looked at."""

    def every(layers: Sequence[Seen], step: int) -> list[Seen]:
        picked = [y.placed(slice(None, None, step)) for y in layers]
        return [Seen(y.n_hot // step, y.wanted, y.gate, y.fired) for y in picked]

    found = {}
    for step in (4, 2, 1):
        points = orders(every(calibration, step), every(heldout, step), share, {})
        reads = {p["order"]: p["reads"] for p in points if p["gap"] == 0}
        found[str(heldout[0].wanted.shape[1] // step)] = reads["chains"] / reads["frequency"]
    return found


def timers_of(devices: Sequence[str], folder: Path | None) -> dict[str, Seconds]:
    """By device: of described ones by their model, of the drive of ``folder`` by what is measured now."""
    depth, whole = OffloadConfig.io_threads, LAYERS * NEURONS * SLOT

    def modelled(device: Device) -> Seconds:
        def seconds(offsets: np.ndarray, sizes: np.ndarray) -> float:
            times = device.read_times(offsets.tolist(), sizes.tolist(), depth=depth, range_bytes=whole)
            return float(times[-1]) if len(times) else 0.0

        return seconds

    found = {device.name: modelled(device) for device in map(find_device, devices)}
    if folder is not None:
        with measured.drive(folder, 1 << 30, 30.0) as here:
            table = measured.reads(here, 60.0, lambda _: None)

        def seconds(_: np.ndarray, sizes: np.ndarray) -> float:
            under_way = max(1, min(depth, len(sizes)))
            counts = zip(*np.unique(sizes, return_counts=True), strict=True)
            us = sum(n * table.latency_us(size, table.file_bytes, under_way) for size, n in counts)
            return float(us) / under_way / 1e6

        found[f"this drive ({table.engine}{', direct' if table.direct else ''})"] = seconds
    return found
