"""The sign-bit predictor of SparseInfer (arXiv 2411.12692): no training, one bit per gate weight."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import Field
from torch_pi2.errors import ArtifactError
from torch_pi2.predict.cold import Cold, layer_tensors
from torch_pi2.types.method import Method, PredictorCard
from torch_pi2.types.site import FFNSite


def sign_bytes(hidden: int) -> int:
    """Bytes of a row of signs: whole words of 64 bits."""
    return -(-hidden // 64) * 8


def pack_signs(w: torch.Tensor) -> torch.Tensor:
    """``[I, H]`` -> uint8 ``[I, ceil(H / 64) * 8]``: bit k % 8 of byte k // 8 is 1 where weight k is below zero."""
    bits = torch.nn.functional.pad((w < 0).to(torch.uint8), (0, -w.shape[-1] % 64)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


class SignBit:
    """Predicts which neurons fire from the signs of the gate's weights and of the input.

    A product counts as positive if the signs of its factors agree. A neuron is predicted active iff
    ``agreeing >= margin * differing``: the paper's rule with ``margin = 1 / alpha``. A smaller margin misses fewer
    neurons. The paper has one conservative ``alpha`` for early layers; here each layer's margin is calibrated.

    Attributes:
        signs: uint8 ``[I, ceil(H / 64) * 8]`` (:func:`pack_signs`), original neuron order; hidden: H.
        margin: 0 or more; set by :func:`torch_pi2.fitting.train.calibrate`.
        threshold: the same on :meth:`scores`.
        card: measured quality, or None before calibration.
    """

    kind = Method.SIGNBIT.value
    tensor_names = ("signs", "hidden", "margin")
    layer_tensors = per_neuron = ("signs",)
    rank = 0

    def __init__(
        self, signs: torch.Tensor, hidden: int, margin: float = 1.0, card: PredictorCard | None = None
    ) -> None:
        self.signs, self.hidden, self.margin, self.card = signs, hidden, margin, card

    @staticmethod
    def from_weights(gate: torch.Tensor) -> "SignBit":
        """From the gate of a gated FFN, or the up matrix of a plain one, ``[I, H]``; margin 1."""
        return SignBit(pack_signs(gate.detach()), gate.shape[1])

    @property
    def threshold(self) -> float:
        """``agreeing >= margin * (H - agreeing)`` as a threshold on ``agreeing``, slightly below a whole number."""
        return self.margin / (1 + self.margin) * self.hidden - 1e-3

    def at_threshold(self, threshold: float) -> "SignBit":
        """A copy that predicts neurons with ``threshold`` or more agreeing products."""
        needed = min(self.hidden, math.ceil(threshold))
        # Half a place below the count that must still pass, so that rounding cannot exclude it.
        return SignBit(self.signs, self.hidden, max(0.0, (needed - 0.5) / (self.hidden - needed + 0.5)))

    @property
    def macs(self) -> int:
        """Multiply-adds with the same memory traffic in 16-bit weights: a sixteenth of the gate's."""
        return self.hidden * len(self.signs) // 16

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, I]`` float32: number of products whose signs agree."""
        shifts = torch.arange(8, dtype=torch.uint8, device=self.signs.device)
        bits_IH = (self.signs[..., None] >> shifts & 1).flatten(-2)[:, : self.hidden].float()
        signs_IH, signs_TH = 1 - 2 * bits_IH, 1 - 2 * (x_TH < 0).float()
        return (signs_TH @ signs_IH.T + self.hidden) / 2

    def tensors(self) -> dict[str, torch.Tensor]:
        """The stored tensors: signs, H (bits past it are padding) and margin."""
        margin = torch.tensor([self.margin], dtype=torch.float64)
        return {"signs": self.signs, "hidden": torch.tensor([self.hidden]), "margin": margin}

    def fields(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def of_cold(site: FFNSite, cold: torch.Tensor, tensors: Mapping | None, int8_activations: bool) -> Cold:
        """A layer's part of :meth:`tensors` for its ``cold`` neurons (int64); raises as ``layer_tensors``."""
        signs = (site.intermediate, sign_bytes(site.hidden))
        wanted = {"signs": (signs, torch.uint8), "hidden": ((1,), torch.int64), "margin": ((1,), torch.float64)}
        found = layer_tensors(site, SignBit.kind, tensors, wanted)
        return Cold("signbit", {"signs": found["signs"][cold].contiguous()}, cut=float(found["margin"]))

    @staticmethod
    def read(tensors: Mapping, entry: Field, threshold: float, card: PredictorCard | None) -> "SignBit":
        """Inverse of :meth:`tensors`, where the threshold is. Raises ArtifactError if they do not fit together."""
        signs, hidden, margin = (tensors.get(name, torch.empty(0)) for name in SignBit.tensor_names)
        numbers = hidden.numel() == margin.numel() == 1 and not hidden.is_floating_point()
        if not numbers or signs.dtype != torch.uint8 or signs.shape[1:] != (sign_bytes(int(hidden)),):
            found = ", ".join(f"{name} {dtype_name(t.dtype)} {list(t.shape)}" for name, t in tensors.items())
            raise _damaged("uint8 signs [neurons, bytes of hidden], whole hidden [1] and margin [1]", found or "none")
        if not (float(margin) >= 0 and math.isfinite(float(margin))):
            raise _damaged("a finite margin, 0 or more", str(float(margin)))
        return SignBit(signs, int(hidden), float(margin), card)


def _damaged(expected: str, found: str) -> ArtifactError:
    fix = "The file is damaged; calibrate the predictors again."
    return ArtifactError("sign-bit predictor", expected=expected, found=found, fix=fix)
