"""How a layer's cold neurons are chosen, and the interface of predictors. A ``Method`` equals its text in files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch_pi2.base.fields import optional
from torch_pi2.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Method(StrEnum):
    DENSE = "dense"  #: every neuron is computed
    EXACT = "exact"  #: the gate is computed, and zeros are skipped
    THRESHOLD = "threshold"  #: the gate is computed, and small values are skipped as well
    LOWRANK = "lowrank"  #: a low-rank predictor says which neurons to compute at all
    SIGNBIT = "signbit"  #: a predictor of the signs of weights and inputs does
    CUSTOM = "custom"  #: a ``torch_pi2.SparseMethod`` does, in Python

    @property
    def predicted(self) -> bool:
        """Whether its layers need a predictor."""
        return self in (Method.LOWRANK, Method.SIGNBIT, Method.CUSTOM)

    @property
    def lossy(self) -> bool:
        """Whether neurons may be left out that are not zero."""
        return self.predicted or self is Method.THRESHOLD


# As plain text, which torch.compile compares with.
METHODS = tuple(method.value for method in Method)
PREDICTED = tuple(method.value for method in Method if method.predicted)
LOSSY = tuple(method.value for method in Method if method.lossy)
#: Name -> class of :func:`torch_pi2.register_method`.
registered: dict[str, type[Any]] = {}
#: Group of entry points of installed packages: ``name = "package.module:Class"``.
ENTRY_POINTS = "torch_pi2.methods"


def find_method(name: str) -> type[Any]:
    """The registered class of this name, or that of an installed package. Raises ConfigError: there is none."""
    if name not in registered:
        registered.update((point.name, point.load()) for point in entry_points(group=ENTRY_POINTS, name=name))
    if name not in registered:
        expected = ", ".join(("auto", *(method for method in Method if method is not Method.CUSTOM), *registered))
        fix = "Choose one of these, or import the module that registers it (torch_pi2.register_method)."
        raise ConfigError("method", expected=expected, found=repr(name), fix=fix)
    return registered[name]


@dataclass
class PredictorCard:
    """Measured on held-out calibration tokens, never on those used for fitting. ``recall``: share of firing (token,
    neuron) pairs predicted active; ``mass_recall``: weighted by each neuron's contribution to the output (``|h| *
    ||down column||``), or None. ``precision``: share of predicted pairs that fire. ``predicted_active``: mean share of
    neurons predicted active per token. ``bytes``: size in storage. ``cost_share``: multiply-adds of the predictor over
    those of the dense FFN. ``rank``: of a low-rank predictor, else 0.
    """

    recall: float
    precision: float
    predicted_active: float
    bytes: int
    cost_share: float
    rank: int = optional(0)
    mass_recall: float | None = optional(None)

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


class Predictor(Protocol):
    """Scores neurons of one FFN in *original* neuron order."""

    card: PredictorCard | None

    @property
    def threshold(self) -> float: ...

    def at_threshold(self, threshold: float) -> Self:
        """A copy that predicts neurons with scores of ``threshold`` or more."""

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, I]`` float32 logits; a neuron is predicted active iff its score >= ``threshold``."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors to store on disk; matrices are int8 or smaller."""
