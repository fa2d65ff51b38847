"""How a layer's cold neurons are chosen. Files and arguments have the text: a ``Method`` equals it."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    DENSE = "dense"  #: every neuron is computed
    EXACT = "exact"  #: the gate is computed, and zeros are skipped
    THRESHOLD = "threshold"  #: the gate is computed, and small values are skipped as well
    LOWRANK = "lowrank"  #: a low-rank predictor says which neurons to compute at all
    SIGNBIT = "signbit"  #: a predictor of the signs of weights and inputs does

    @property
    def predicted(self) -> bool:
        """Its layers need a predictor."""
        return self in (Method.LOWRANK, Method.SIGNBIT)

    @property
    def lossy(self) -> bool:
        """Neurons are left out that may not be zero."""
        return self.predicted or self is Method.THRESHOLD


# As plain text, which torch.compile compares with.
METHODS = tuple(method.value for method in Method)
PREDICTED = tuple(method.value for method in Method if method.predicted)
LOSSY = tuple(method.value for method in Method if method.lossy)
