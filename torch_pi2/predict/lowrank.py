"""The low-rank predictor of Deja Vu, PowerInfer and LLM in a flash: ``b relu(a x) + bias``, in int4 or int8."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import Field
from torch_pi2.base.memory import new_tensor
from torch_pi2.errors import ArtifactError
from torch_pi2.formats import FORMATS, GROUP, QUANTIZED, row_bytes
from torch_pi2.ops.constants import wants_blocks
from torch_pi2.ops.linear import ROWS, to_blocks
from torch_pi2.ops.quantize import quantize
from torch_pi2.ops.rows import rounded_activations, values
from torch_pi2.predict.cold import Cold, layer_tensors
from torch_pi2.types.method import Method, PredictorCard
from torch_pi2.types.site import MOST_SIZE, FFNSite

#: Bias of neurons that were not trained (hot ones): they count as active whatever the threshold.
ALWAYS = 1e30


class LowRank:
    """Two small int8 matrices that predict which neurons fire (score >= ``threshold``, set by ``calibrate``); the
    format of older files. ``a``: ``[r, H]`` int8, ``a_scale [r]`` float32; ``b``: ``[I, r]`` int8, ``b_scale [I]``,
    ``bias [I]`` float32. ``card``: measured quality, or None before calibration.
    """

    kind = Method.LOWRANK.value
    tensor_names = ("a", "a_scale", "b", "b_scale", "bias")
    layer_tensors, per_neuron = tensor_names, ("b", "b_scale", "bias")
    weights = "int8"

    def __init__(
        self,
        a: torch.Tensor,
        a_scale: torch.Tensor,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        bias: torch.Tensor,
        threshold: float = 0.0,
        card: PredictorCard | None = None,
    ) -> None:
        self.a, self.a_scale, self.b, self.b_scale, self.bias = a, a_scale, b, b_scale, bias
        self.threshold, self.card = threshold, card

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def macs(self) -> int:
        return self.a.numel() + self.b.numel()

    def at_threshold(self, threshold: float) -> Self:
        """A copy with another threshold, and without a card."""
        new = copy.copy(self)
        new.threshold, new.card = threshold, None
        return new

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, I]`` float32 logits for inputs ``[T, H]`` of any float dtype."""
        z_Tr = torch.relu(x_TH.float() @ self.a.float().T * self.a_scale)
        return z_Tr @ self.b.float().T * self.b_scale + self.bias

    def tensors(self) -> dict[str, torch.Tensor]:
        """The stored tensors."""
        return {"a": self.a, "a_scale": self.a_scale, "b": self.b, "b_scale": self.b_scale, "bias": self.bias}

    def fields(self) -> dict[str, Any]:
        """Further JSON fields in the file."""
        return {}

    @staticmethod
    def of_cold(site: FFNSite, cold: torch.Tensor, tensors: Mapping | None, int8_activations: bool) -> Cold:
        """A layer's part of :meth:`tensors` (of either class) for its ``cold`` neurons. Raises as ``layer_tensors``."""
        a = (tensors or {}).get("a")
        if a is not None and a.dtype == torch.uint8:
            # quantised rows, whose length implies the format
            rank = len(a)
            weights = next((k for k in QUANTIZED if a.shape[1:] == (row_bytes(k, site.hidden),)), QUANTIZED[0])
            wanted = _of_rows(weights, rank, site.intermediate, site.hidden)
            found = layer_tensors(site, LowRank.kind, tensors, wanted)
            b = found["b"]
            kept = {"bias": found["bias"][cold]} if "bias" in found else {}
            filled = torch.cat((cold.new_zeros(-len(cold) % ROWS), cold))
            sizes = ((rank, site.hidden), (len(filled), rank))
            if not all(wants_blocks(weights, rows, columns, int8_activations) for rows, columns in sizes):
                return Cold("lowrank_q", {"a": a.clone(), "b": b[cold]} | kept, weights)
            kept.setdefault("bias", torch.zeros(len(cold)))
            b = b[filled]
            both = new_tensor((a.numel() + b.numel(),), torch.uint8)  # either alone is often too small for huge pages
            parts = both.split([a.numel(), b.numel()])
            for name, rows, columns, memory in zip("ab", (a, b), (site.hidden, rank), parts):
                kept[name] = memory.view(rows.shape).copy_(to_blocks(rows, weights, columns))
            return Cold("lowrank_q", kept, weights, in_blocks=True)
        wanted = _of_int8(0 if a is None else len(a), site.intermediate, site.hidden)
        found = layer_tensors(site, LowRank.kind, tensors, wanted)
        kept = {n: (t[cold] if n in LowRank.per_neuron else t.clone()).contiguous() for n, t in found.items()}
        return Cold("lowrank", kept)

    @staticmethod
    def read(tensors: dict[str, torch.Tensor], entry: Field, threshold: float, card: PredictorCard | None) -> "LowRank":
        """From the tensors and JSON fields of a file. Raises ArtifactError."""
        if "weights" not in entry.value:
            return LowRank.from_tensors(tensors, threshold, card)
        weights, hidden = entry.at("weights").text(QUANTIZED), entry.at("hidden").whole(1, MOST_SIZE)
        return LowRankRows.from_rows(tensors, weights, hidden, threshold, card)

    @staticmethod
    def from_tensors(tensors: dict[str, torch.Tensor], threshold: float, card: PredictorCard | None) -> "LowRank":
        """Inverse of :meth:`tensors`. Raises ArtifactError if shapes or dtypes do not fit together."""
        rank, neurons, hidden = _sizes(tensors)
        wanted = _of_int8(rank, neurons, hidden)
        _check_tensors(tensors, wanted, "a [r, H] and b [I, r] int8, a_scale [r], b_scale and bias [I] float32")
        a, b = tensors["a"], tensors["b"]
        return LowRank(a, tensors["a_scale"], b, tensors["b_scale"], tensors["bias"], threshold, card)


def _sizes(tensors: Mapping[str, torch.Tensor]) -> tuple[int, int, int]:
    """Rank, neurons and columns that ``a`` and ``b`` have, 0 where they have none."""
    (rank, hidden, *_), (neurons, *_) = ((*tensors.get(n, torch.empty(0)).shape, 0, 0) for n in "ab")
    return rank, neurons, hidden


#: Tensor name -> shape and dtype.
_Table = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _of_int8(rank: int, neurons: int, hidden: int) -> _Table:
    """The tensors of an int8 predictor."""
    scales = {"a_scale": ((rank,), torch.float32), "b_scale": ((neurons,), torch.float32)}
    matrices = {"a": ((rank, hidden), torch.int8), "b": ((neurons, rank), torch.int8)}
    return {**matrices, **scales, "bias": ((neurons,), torch.float32)}


def _of_rows(weights: str, rank: int, neurons: int, hidden: int) -> _Table:
    """The tensors of a predictor in quantised rows."""
    a, b = (rank, row_bytes(weights, hidden)), (neurons, row_bytes(weights, rank))
    return {"a": (a, torch.uint8), "b": (b, torch.uint8), "bias": ((neurons,), torch.float32)}


def _check_tensors(tensors: Mapping[str, torch.Tensor], wanted: _Table, expected: str) -> None:
    """Raises ArtifactError unless ``tensors`` are of the ``wanted`` shapes and dtypes, ``expected`` in words."""
    if {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} != wanted:
        found = ", ".join(f"{name} {dtype_name(t.dtype)} {list(t.shape)}" for name, t in tensors.items()) or "none"
        fix = "The file is damaged; fit the predictors again."
        raise ArtifactError("shapes of a low-rank predictor", expected=expected, found=found, fix=fix)


class LowRankRows(LowRank):
    """As :class:`LowRank`, in rows ``int4`` or ``int8`` with a scale per group of 32: ``a`` uint8 ``[r,
    row_bytes(H)]``, ``b`` uint8 ``[I, row_bytes(r)]``, ``bias`` float32 ``[I]``; ``a_scale`` and ``b_scale`` are empty.
    Fits make int4, at half the bytes of int8. ``hidden``: H. ``int8_activations``: :meth:`scores` rounds its inputs to
    int8, as the layer will; not stored.
    """

    int8_activations = False

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor,
        weights: str,
        hidden: int,
        threshold: float = 0.0,
        card: PredictorCard | None = None,
    ) -> None:
        super().__init__(a, torch.empty(0), b, torch.empty(0), bias, threshold, card)
        self.weights, self.hidden = weights, hidden

    @property
    def macs(self) -> int:
        return self.rank * (self.hidden + len(self.b))

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        seen = rounded_activations if self.int8_activations else torch.Tensor.float
        z_Tr = torch.relu(seen(x_TH.float()) @ values(self.a, self.weights, self.hidden).T)
        return seen(z_Tr) @ values(self.b, self.weights, self.rank).T + self.bias

    @staticmethod
    def fitted(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> "LowRankRows":
        """Quantise float matrices ``[r, H]``, ``[I, r]`` and bias ``[I]`` to int4; threshold 0."""
        rows = [torch.ops.pi2.quantize(m.float().contiguous(), "int4") for m in (a, b)]
        return LowRankRows(rows[0], rows[1], bias.float().clone(), "int4", a.shape[1])

    def padded(self, rank: int) -> "LowRankRows":
        """The same predictor padded with zeros to ``rank``: all experts of a module must have equal sizes."""
        a = torch.cat((self.a, quantize(torch.zeros(rank - self.rank, self.hidden), self.weights)))
        one = row_bytes(self.weights, 1)
        now, more = self.b.shape[1] // one, (row_bytes(self.weights, rank) - self.b.shape[1]) // one
        none = quantize(torch.zeros(len(self.b), more * GROUP), self.weights)
        size = FORMATS[self.weights].group_bytes  # a row has the integers of all groups before their scales
        halves = zip(*(t.split((n * size, n * (one - size)), 1) for t, n in ((self.b, now), (none, more))))
        b = torch.cat([part for half in halves for part in half], 1)
        longer = LowRankRows(a, b, self.bias, self.weights, self.hidden, self.threshold, self.card)
        longer.int8_activations = self.int8_activations
        return longer

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"a": self.a, "b": self.b, "bias": self.bias}

    def fields(self) -> dict[str, Any]:
        return {"weights": self.weights, "hidden": self.hidden}

    @staticmethod
    def from_rows(
        tensors: dict[str, torch.Tensor], weights: str, hidden: int, threshold: float, card: PredictorCard | None
    ) -> "LowRankRows":
        """Inverse of :meth:`tensors`. Raises ArtifactError if shapes or dtypes do not fit together."""
        rank, neurons, _ = _sizes(tensors)
        wanted = _of_rows(weights, rank, neurons, hidden)
        expected = f"uint8 a [r, row_bytes({hidden})] and b [I, row_bytes(r)], float32 bias [I], of int4 or int8"
        _check_tensors(tensors, wanted, expected)
        return LowRankRows(tensors["a"], tensors["b"], tensors["bias"], weights, hidden, threshold, card)
