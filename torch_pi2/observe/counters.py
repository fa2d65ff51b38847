"""Work of the operators, counted in C++; every sparsity figure comes from these counters."""

import torch

from torch_pi2.ops import load

_NAMES = ("calls", "tokens", "neurons", "gate_rows", "up_rows", "down_rows", "dense_rows")


def read(*, reset: bool = False) -> dict[str, int]:
    """Process-wide totals since the last reset: ``calls`` of ``sparse_ffn``; ``tokens``; ``neurons``: (token, neuron)
    pairs that a dense layer would compute; ``gate_rows``, ``up_rows``, ``down_rows``: pairs whose first matrix row, up
    row and down column were used; ``dense_rows``: matrix rows that a dense layer would use.
    """
    load()
    return dict(zip(_NAMES, torch.ops.pi2.counters(reset).tolist()))


def reset() -> None:
    read(reset=True)
