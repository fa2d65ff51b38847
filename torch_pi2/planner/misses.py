"""How many neurons a step reads from storage, by layer, for a cache of some size: from frequencies, or replayed.

Sizes are slots of a store, which have ``LayerShape.cluster`` neurons each; counts of neurons are in plan order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from torch_pi2.errors import ConfigError
from torch_pi2.observe.accesses import Accesses
from torch_pi2.ops import load
from torch_pi2.planner.layer_cost import expert_use, predicted_share
from torch_pi2.planner.model_shape import LayerShape, ModelShape

#: Counts by layer.
Counts = Sequence[int]


class MissCurve(Protocol):
    """What :func:`torch_pi2.planner.cost.step_cost` asks."""

    def misses(
        self, batch: int, slots: int, resident: Counts, hot: Counts, accelerator: Counts | None = None
    ) -> np.ndarray:
        """Float64 ``[layers]``: slots that a step of ``batch`` tokens reads.

        Args:
            slots: of the cache. resident: by layer, the first so many neurons (after the accelerator's) never leave it.
            hot: the first so many are wanted in every step. accelerator: of them, those that the CPU has no use for.

        Raises:
            ConfigError: more resident neurons than the cache has slots for, or a batch that the curve does not know.
        """


def resident_slots(shape: ModelShape, resident: Counts, accelerator: Counts | None = None) -> int:
    """Slots of a cache that resident neurons take."""
    return sum(last - first for first, last in _fixed(shape, resident, accelerator))


def _fixed(shape: ModelShape, resident: Counts, accelerator: Counts | None) -> list[tuple[int, int]]:
    """By layer, which slots (from, to) are resident."""
    firsts = accelerator or [0] * len(shape.layers)
    ranges = []
    for layer, count, first in zip(shape.layers, resident, firsts, strict=True):
        begin = first // layer.cluster
        ranges.append((begin, max(begin, min(layer.slots, -(-(first + count) // layer.cluster))) if count else begin))
    return ranges


def _room(shape: ModelShape, slots: int, resident: Counts, accelerator: Counts | None) -> int:
    """Slots that are left for what is not resident."""
    taken = resident_slots(shape, resident, accelerator)
    if taken > slots:
        raise ConfigError(
            "resident neurons",
            expected=f"at most the {slots} slots of the cache",
            found=f"{taken} slots",
            fix="Give the cache more bytes, or keep fewer neurons resident.",
        )
    return slots - taken


class FrequencyMisses:
    """Every neuron is wanted independently, as often as its statistics say, and the cache has those wanted most.

    The independent reference model under perfect knowledge of frequencies, which is what ``lfu`` comes to. Real tokens
    repeat what the last ones wanted: misses are fewer then, and :class:`ReplayMisses` sees it.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    def misses(
        self, batch: int, slots: int, resident: Counts, hot: Counts, accelerator: Counts | None = None
    ) -> np.ndarray:
        """See :class:`MissCurve`."""
        shape = self.shape
        room = _room(shape, min(slots, shape.slots), resident, accelerator)
        firsts = accelerator or [0] * len(shape.layers)
        fixed = _fixed(shape, resident, accelerator)
        kinds = [*zip(shape.layers, fixed, hot, firsts, strict=True)]  # experts are the same object where all are alike
        of_kind: dict[Any, np.ndarray] = {}
        for kind in kinds:
            if kind not in of_kind:
                layer, (begin, end), h, first = kind
                share_S = _wanted_slots(layer, batch, h, first)
                of_kind[kind] = np.concatenate((share_S[:begin], share_S[end:]))
        everything = np.concatenate([of_kind[kind] for kind in kinds])
        if room >= len(everything):
            return np.zeros(len(kinds))
        # The cache has what is wanted more often than `least`, and of what is wanted so often a share of each layer's.
        kept = len(everything) - room
        least = float(np.partition(everything, kept - 1)[kept - 1])
        above = int((everything > least).sum())
        equal = int((everything == least).sum())
        left = least * (1 - (room - above) / equal)
        missed = {kind: float(w[w < least].sum()) + left * float((w == least).sum()) for kind, w in of_kind.items()}
        return np.array([missed[kind] for kind in kinds])


def _wanted_slots(layer: LayerShape, batch: int, hot: int, first: int) -> np.ndarray:
    """Float64 ``[slots]``: share of steps in which any neuron of the slot is read."""
    use, tokens = expert_use(layer, batch)
    share_I = predicted_share(layer, tokens).copy()
    share_I[:hot] = 1
    share_I[:first] = 0
    if layer.cluster > 1:
        padded = np.zeros(layer.slots * layer.cluster)
        padded[: len(share_I)] = share_I
        share_I = 1 - np.prod(1 - padded.reshape(layer.slots, layer.cluster), axis=1)
    wanted: np.ndarray = use * share_I
    return wanted


class ReplayMisses:
    """What a store recorded (:class:`torch_pi2.record_accesses`), replayed with the cache that runs in stores.

    A batch of b is b equally long parts of the recording, side by side: a call wants what any of the parts does.
    The first half warms the cache up (or all but ``counted`` steps) and is not counted. Prompts are left out.

    Args:
        accesses: of a model with the layers of ``shape``, recorded while one sequence was decoded.
        policy: of the cache (``torch_pi2.ops.constants.lists().policies``).
        passes: most steps that are replayed for each question; fewer are faster, more are steadier.
        counted: of these, the last so many are; None: half.

    Raises:
        ConfigError: the recording is of other layers or has too few tokens.
    """

    def __init__(
        self,
        accesses: Accesses,
        shape: ModelShape,
        policy: str = "lfu",
        *,
        passes: int = 256,
        counted: int | None = None,
    ) -> None:
        load()
        found = [(s.key, s.neurons, s.cluster) for s in accesses.stored]
        wanted = [(y.key, y.intermediate, y.cluster) for y in shape.layers]
        if found != wanted:
            raise ConfigError(
                "recorded accesses",
                expected=f"those of {len(wanted)} layers of this model and its clusters of {shape.layers[0].cluster}",
                found=f"{len(found)} layers, clusters of {accesses.stored[0].cluster}",
                fix="Record them with this model (torch_pi2.record_accesses).",
            )
        self.shape, self.policy, self._most, self._counted = shape, policy, passes, counted
        self._passes = _decoding(accesses)
        self._merged: dict[int, list[list[tuple[int, np.ndarray]]]] = {}
        self._known: dict[object, np.ndarray] = {}
        self._check(1)

    def _check(self, batch: int) -> int:
        steps = len(self._passes) // batch
        if steps < 2:
            raise ConfigError(
                f"recorded accesses for a batch of {batch}",
                expected=f"at least {2 * batch} decoded tokens",
                found=str(len(self._passes)),
                fix="Record more tokens, or plan for smaller batches.",
            )
        return min(steps, self._most)

    def misses(
        self, batch: int, slots: int, resident: Counts, hot: Counts, accelerator: Counts | None = None
    ) -> np.ndarray:
        """See :class:`MissCurve`. Answers are kept."""
        shape, slots = self.shape, min(slots, self.shape.slots)
        _room(shape, slots, resident, accelerator)
        firsts = tuple(accelerator or [0] * len(shape.layers))
        key = (batch, slots, tuple(resident), tuple(hot), firsts)
        if key not in self._known:
            steps = self._steps(batch)
            warm = len(steps) // 2 if self._counted is None else max(0, len(steps) - self._counted)
            before, everything = (self._replay(some, slots, resident, hot, firsts) for some in (steps[:warm], steps))
            self._known[key] = (everything - before) / (len(steps) - warm)
        return self._known[key].copy()

    def _steps(self, batch: int) -> list[list[tuple[int, np.ndarray]]]:
        """By step: (layer, bits of what it wants)."""
        if batch not in self._merged:
            count, length = self._check(batch), len(self._passes) // batch
            merged = []
            for step in range(count):
                calls: dict[int, np.ndarray] = {}
                for part in range(batch):
                    for layer, bits in self._passes[part * length + step]:
                        calls[layer] = bits if layer not in calls else calls[layer] | bits
                merged.append(sorted(calls.items(), key=lambda call: call[0]))
            self._merged[batch] = merged
        return self._merged[batch]

    def _replay(
        self,
        steps: list[list[tuple[int, np.ndarray]]],
        slots: int,
        resident: Counts,
        hot: Counts,
        firsts: Counts,
    ) -> np.ndarray:
        """Slots that were not there, by layer. Neurons of the accelerator are left out of their layers."""
        layers = self.shape.layers
        about = [(max(1, y.intermediate - first), y.cluster) for y, first in zip(layers, firsts, strict=True)]
        always = [_first_bits(y.intermediate, h) for y, h in zip(layers, hot, strict=True)]
        calls, rows = [], []
        for step in steps:
            for number, bits in step:
                if firsts[number] < layers[number].intermediate:
                    calls.append(number)
                    rows.append(_without((bits | always[number]), layers[number].intermediate, firsts[number]))
        fixed = [min(n, neurons) for n, (neurons, _) in zip(resident, about, strict=True)]
        counts_L3 = torch.ops.pi2.replay(
            torch.tensor(calls, dtype=torch.int32),
            torch.zeros(len(calls), dtype=torch.uint8),
            torch.from_numpy(np.concatenate(rows)) if rows else torch.empty(0, dtype=torch.uint8),
            torch.tensor(about, dtype=torch.int64),
            self.policy,
            slots,
            0.0,
            True,
            0,
            fixed,
        )
        missed: np.ndarray = counts_L3[:, 2].double().numpy()
        return missed


def _decoding(accesses: Accesses) -> list[list[tuple[int, np.ndarray]]]:
    """Decoding passes over the layers: (layer, row of bits) of each call."""
    numbers, streamed, bits = accesses.layers.numpy(), accesses.streamed.numpy(), accesses.wanted.numpy()
    starts, sizes = [0, *accesses.ends.tolist()], accesses.row_bytes.tolist()
    passes: list[list[tuple[int, np.ndarray]]] = []
    prompts: set[int] = set()
    last = len(accesses.stored)
    for call, number in enumerate(numbers.tolist()):
        if number < last or (number == last and len(accesses.stored) == 1):
            passes.append([])
        last = number
        if streamed[call]:
            prompts.add(len(passes) - 1)
        passes[-1].append((number, bits[starts[call] : starts[call] + sizes[call]]))
    return [calls for i, calls in enumerate(passes) if i not in prompts]


def _first_bits(neurons: int, count: int) -> np.ndarray:
    """A row of bits of which the first ``count`` are set."""
    ones = np.zeros(neurons, dtype=np.uint8)
    ones[:count] = 1
    return np.packbits(ones, bitorder="little")


def _without(bits: np.ndarray, neurons: int, first: int) -> np.ndarray:
    """A row of bits without the first ``first`` neurons."""
    if first == 0:
        return bits
    if first % 8 == 0:
        return bits[first // 8 :]
    return np.packbits(np.unpackbits(bits, count=neurons, bitorder="little")[first:], bitorder="little")
