"""The low-rank predictor of Deja Vu, PowerInfer and LLM in a flash: ``b relu(a x) + bias``, int8."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torch_pi2.errors import ArtifactError
from torch_pi2.types.predictor import PredictorCard

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

    def padded(self, rank: int) -> LowRank:
        """The same predictor with ``rank`` rows, those past its own zero: experts of a module must have equal sizes."""
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

    @staticmethod
    def from_tensors(tensors: dict[str, torch.Tensor], threshold: float, card: PredictorCard | None) -> LowRank:
        """Inverse of :meth:`tensors`. Raises ArtifactError if shapes or dtypes do not fit together."""
        missing = {"a", "a_scale", "b", "b_scale", "bias"} - set(tensors)
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
