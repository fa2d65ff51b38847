"""``LossCurve``: how skipping neurons by thresholds changes a model's loss, as stored in statistics and plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_pi2.base.fields import Field

_FIX = "The file is damaged; profile again."


@dataclass(frozen=True)
class LossCurve:
    """Measured on calibration sequences that thresholds were not taken from.

    Attributes:
        score: what thresholds are compared with. max_loss: the budget. loss_change: relative increase of the loss with
            the chosen thresholds.
        points: ascending, the share of all neurons that was skipped, and the relative increase of the loss.
    """

    score: str
    max_loss: float
    loss_change: float
    points: tuple[tuple[float, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Fields of ``made_by`` in statistics."""
        points = [{"skipped": skipped, "change": change} for skipped, change in self.points]
        chosen = {"score": self.score, "max_loss": self.max_loss, "loss_change": self.loss_change}
        return chosen | {"loss_curve": points}

    @staticmethod
    def of(made_by: Mapping[str, Any], where: str) -> LossCurve | None:
        """The curve in ``made_by`` of ``where``; None: there was no budget. Raises ArtifactError: it is damaged."""
        if "loss_curve" not in made_by:
            return None
        found = Field(dict(made_by), where, _FIX)
        points = [(p.at("skipped").number(0, 1), p.at("change").number(-1)) for p in found.at("loss_curve").items(1)]
        numbers = found.at("max_loss").number(), found.at("loss_change").number(-1)
        return LossCurve(found.at("score").text(), *numbers, tuple(points))
