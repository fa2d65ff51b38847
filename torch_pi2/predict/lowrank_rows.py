"""The low-rank predictor with its matrices in quantised rows (int4 or int8, a scale per group of 32)."""

from __future__ import annotations

import torch

from torch_pi2.errors import ArtifactError
from torch_pi2.formats import FORMATS, GROUP, QUANTIZED, row_bytes
from torch_pi2.ops.quantize import quantize
from torch_pi2.ops.rows import rounded_activations, values
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.types.predictor import PredictorCard

#: What matrices of a fitted predictor may be in: int8 with a scale for each row, int4 with one for each group of 32.
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
        int8_activations: :meth:`scores` are those of a layer that rounds its inputs to int8. Not stored: layers know.
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
