"""Time spent in our operators by part of a model, from the core's clock."""

from collections.abc import Iterable, Sequence

import torch

#: Kinds in ``torch.ops.pi2.timings``: linear layers over quantised rows, predictors, FFNs and experts.
LINEAR, PREDICTOR, FFN = 0, 1, 2


def read(*, reset: bool = True) -> list[list[int]]:
    """Rows of (kind, rows, columns, calls, nanoseconds) of all threads since the last reset."""
    return torch.ops.pi2.timings(reset).tolist()


def milliseconds(timings: Iterable[Sequence[int]], kind: int) -> float:
    return sum(row[4] for row in timings if row[0] == kind) / 1e6
