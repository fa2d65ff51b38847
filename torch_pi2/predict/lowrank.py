"""The low-rank predictor of Deja Vu, PowerInfer and LLM in a flash: ``b relu(a x) + bias``, in int8 or int4."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
import torch.nn.functional as F

from torch_pi2.base.fields import Field
from torch_pi2.errors import ArtifactError
from torch_pi2.formats import FORMATS, GROUP, QUANTIZED, row_bytes
from torch_pi2.ops.quantize import quantize
from torch_pi2.ops.rows import rounded_activations, values
from torch_pi2.types.method import Method, PredictorCard
from torch_pi2.types.site import MOST_SIZE

#: Bias of neurons that were not trained (hot ones): they count as active whatever the threshold.
ALWAYS = 1e30


def quantise_rows(m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 with one float32 scale per row: ``m ~ q * scale[:, None]``."""
    scale = m.float().abs().amax(1).clamp_min(1e-12) / 127
    return torch.round(m.float() / scale[:, None]).clamp(-127, 127).to(torch.int8), scale


class LowRank:
    """Two small int8 matrices that say which neurons will fire.

    Attributes:
        a: ``[r, H]`` int8, a_scale ``[r]`` float32; b: ``[I, r]`` int8, b_scale ``[I]``, bias ``[I]`` float32.
        threshold: a neuron is predicted active iff its score >= threshold (set by ``calibrate``).
        card: measured quality, or None before calibration.
        weights: format of the matrices.
    """

    kind = Method.LOWRANK.value
    tensor_names = ("a", "a_scale", "b", "b_scale", "bias")
    per_neuron = ("b", "b_scale", "bias")
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

    @staticmethod
    def quantised(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> LowRank:
        """From float matrices ``[r, H]``, ``[I, r]`` and ``[I]``."""
        return LowRank(*quantise_rows(a), *quantise_rows(b), bias.float().clone())

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def macs(self) -> int:
        """Multiply-adds per token."""
        return self.a.numel() + self.b.numel()

    def at_threshold(self, threshold: float) -> Self:
        """A copy that predicts what scores ``threshold`` or more."""
        new = copy.copy(self)
        new.threshold, new.card = threshold, None
        return new

    def padded(self, rank: int) -> LowRank:
        """The same predictor padded with zeros to ``rank``: all experts of a module must have equal sizes."""
        more = rank - self.rank
        a, b = F.pad(self.a, (0, 0, 0, more)), F.pad(self.b, (0, more))
        scale = F.pad(self.a_scale, (0, more), value=1.0)
        return LowRank(a, scale, b, self.b_scale, self.bias, self.threshold, self.card)

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, I]`` float32 logits for inputs ``[T, H]`` of any float dtype."""
        z_Tr = torch.relu(x_TH.float() @ self.a.float().T * self.a_scale)
        return z_Tr @ self.b.float().T * self.b_scale + self.bias

    def active(self, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, I]`` bool."""
        return self.scores(x_TH) >= self.threshold

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is stored: int8 matrices, float32 scales and biases."""
        return {"a": self.a, "a_scale": self.a_scale, "b": self.b, "b_scale": self.b_scale, "bias": self.bias}

    def fields(self) -> dict[str, Any]:
        """Further JSON fields in the file."""
        return {}

    @staticmethod
    def read(tensors: dict[str, torch.Tensor], entry: Field, threshold: float, card: PredictorCard | None) -> LowRank:
        """From the tensors and JSON fields of a file. Raises ArtifactError."""
        if "weights" not in entry.value:
            return LowRank.from_tensors(tensors, threshold, card)
        weights, hidden = entry.at("weights").text(QUANTIZED), entry.at("hidden").whole(1, MOST_SIZE)
        return LowRankRows.from_rows(tensors, weights, hidden, threshold, card)

    @staticmethod
    def from_tensors(tensors: dict[str, torch.Tensor], threshold: float, card: PredictorCard | None) -> LowRank:
        """Inverse of :meth:`tensors`. Raises ArtifactError if shapes or dtypes do not fit together."""
        missing = set(LowRank.tensor_names) - set(tensors)
        if missing:
            raise ArtifactError(
                "low-rank predictor",
                expected="tensors a, a_scale, b, b_scale, bias",
                found=f"no {', '.join(sorted(missing))}",
                fix="The file is damaged; fit the predictors again.",
            )
        a, b = tensors["a"], tensors["b"]
        shapes = {k: tuple(v.shape) for k, v in tensors.items()}
        (r, *_), (i, *_) = (*shapes["a"], 0), (*shapes["b"], 0)
        fits = a.dim() == b.dim() == 2 and shapes["b"] == (i, r) and shapes["a_scale"] == (r,)
        fits = fits and shapes["b_scale"] == shapes["bias"] == (i,) and a.dtype == b.dtype == torch.int8
        fits = fits and all(tensors[name].dtype == torch.float32 for name in ("a_scale", "b_scale", "bias"))
        if not fits:
            raise ArtifactError(
                "shapes of a low-rank predictor",
                expected="a [r, H] and b [I, r] int8, a_scale [r], b_scale and bias [I] float32",
                found=", ".join(f"{k} {list(v)}" for k, v in shapes.items()),
                fix="The file is damaged; fit the predictors again.",
            )
        return LowRank(a, tensors["a_scale"], b, tensors["b_scale"], tensors["bias"], threshold, card)


#: Formats of a fitted predictor's matrices: int4 with a scale per group of 32, int8 with a scale per row.
FITTED = ("int4", "int8")


def quantised(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, weights: str) -> LowRank:
    """The predictor of float matrices ``[r, H]``, ``[I, r]`` and ``[I]`` in one of :data:`FITTED`, threshold 0."""
    if weights == "int8":
        return LowRank.quantised(a, b, bias)
    rows = [torch.ops.pi2.quantize(m.float().contiguous(), weights) for m in (a, b)]
    return LowRankRows(rows[0], rows[1], bias.float().clone(), weights, a.shape[1])


class LowRankRows(LowRank):
    """As :class:`LowRank`, ``b relu(a x) + bias >= threshold``, at half the bytes when ``int4``.

    Attributes:
        a: uint8 ``[r, row_bytes(H)]``, b: uint8 ``[I, row_bytes(r)]``, bias: float32 ``[I]``.
        weights: ``int4`` or ``int8``. hidden: H. (``a_scale`` and ``b_scale`` are empty: rows carry their scales.)
        int8_activations: :meth:`scores` rounds its inputs to int8, as the layer will. Not stored.
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

    def padded(self, rank: int) -> LowRankRows:
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
    ) -> LowRankRows:
        """Inverse of :meth:`tensors`. Raises ArtifactError if shapes or dtypes do not fit together."""
        found = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        rank, neurons = ((*found.get(name, ((), None))[0], 0)[0] for name in ("a", "b"))
        fits = weights in QUANTIZED and found == {
            "a": ((rank, row_bytes(weights, hidden)), torch.uint8),
            "b": ((neurons, row_bytes(weights, rank)), torch.uint8),
            "bias": ((neurons,), torch.float32),
        }
        if not fits:
            raise ArtifactError(
                "shapes of a low-rank predictor in rows",
                expected=f"uint8 a [r, row_bytes({hidden})] and b [I, row_bytes(r)], float32 bias [I], of int4 or int8",
                found=f"{weights}: " + ", ".join(f"{name} {list(shape)}" for name, (shape, _) in found.items()),
                fix="The file is damaged; fit the predictors again.",
            )
        return LowRankRows(tensors["a"], tensors["b"], tensors["bias"], weights, hidden, threshold, card)
