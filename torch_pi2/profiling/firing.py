"""``Firing``: what recorders show to a sink, one call of one FFN at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.profiling.data import Batch
from torch_pi2.types.site import FFNSite


@dataclass
class Firing:
    """One call of one FFN.

    Attributes:
        site: which.
        x_TH: its input, model dtype.
        score_TI: float32, ``|act(gate)|`` if only the gate is activated, else ``|h|``.
        real_T: bool, False for padding.
        grid: ``(B, T)`` of the rows, row-major, or None if unknown. Of an expert, whose rows are the tokens that the
            router gave it: None.
        borrowed: the router gave the rows to other experts of the block.
        part: number of the batch.
    """

    site: FFNSite
    x_TH: torch.Tensor
    score_TI: torch.Tensor
    real_T: torch.Tensor
    grid: tuple[int, int] | None
    borrowed: bool = False
    part: int = 0


Sink = Callable[[Firing], None]


def real_tokens(key: str, batch: Batch | None, rows: int) -> tuple[torch.Tensor, tuple[int, int] | None]:
    """Of ``rows`` rows that the module ``key`` sees: which are no padding, bool ``[rows]``, and their grid.

    Raises:
        UnsupportedModelError: they are not the batch's tokens, and some of those are padding.
    """
    mask_BT = None if batch is None else batch.mask_BT
    if mask_BT is None or mask_BT.numel() != rows:
        if mask_BT is not None and not bool(mask_BT.all()):
            raise UnsupportedModelError(
                f"rows seen by {key}",
                expected=f"{mask_BT.numel()}, one per token of the batch (padding included)",
                found=str(rows),
                fix="Calibrate with sequences of one length, so that there is no padding to tell apart.",
            )
        return torch.ones(rows, dtype=torch.bool), None
    return mask_BT.flatten(), (mask_BT.shape[0], mask_BT.shape[1])
