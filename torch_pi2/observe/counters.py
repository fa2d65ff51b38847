"""Work the operators have done, counted in C++: what every sparsity figure is made from."""

from __future__ import annotations

import torch

from torch_pi2.ops import load

_NAMES = ("calls", "tokens", "neurons", "gate_rows", "up_rows", "down_rows", "dense_rows")


def read(*, reset: bool = False) -> dict[str, int]:
    """Totals since the last reset, process-wide.

    ``calls`` of ``sparse_ffn``, ``tokens`` through it, ``neurons`` (token, neuron) pairs that a dense layer would have
    computed, and of these the pairs whose first matrix row, up row and down column were really used; ``dense_rows``:
    matrix rows that a dense layer would have used.
    """
    load()
    return dict(zip(_NAMES, torch.ops.pi2.counters(reset).tolist()))


def reset() -> None:
    """Set all counters to zero."""
    read(reset=True)
