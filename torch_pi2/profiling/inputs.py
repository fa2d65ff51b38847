"""Inputs of layers on calibration text: their mean squares, and a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_pi2.profiling.data import Batch
from torch_pi2.profiling.recorder import Firing, record
from torch_pi2.types.site import FFNSite

#: Tokens sampled per layer to measure its output error (7B: 2 MB each), and per expert, of which there are many.
SAMPLE_TOKENS, EXPERT_TOKENS = 256, 32


class InputStats:
    """Inputs of one layer.

    Attributes:
        tokens: number of inputs. sample_TK: the first ``keep`` of them, in the model's dtype.
    """

    def __init__(self, keep: int = SAMPLE_TOKENS) -> None:
        self.tokens, self._keep = 0, keep
        self._squares_K: torch.Tensor | None = None
        self._kept: list[torch.Tensor] = []

    def add(self, x_TK: torch.Tensor) -> None:
        squares_K = x_TK.float().square().sum(0, dtype=torch.float64)
        self._squares_K = squares_K if self._squares_K is None else self._squares_K + squares_K
        wanted = self._keep - min(self.tokens, self._keep)
        if wanted and len(x_TK):
            self._kept.append(x_TK[:wanted].detach().clone())
        self.tokens += len(x_TK)

    @property
    def importance(self) -> torch.Tensor | None:
        """``[K]`` float32: the mean square of each column; None if nothing was seen.

        The output error of a weight is proportional to its input, so the squared error of a column has this weight.
        Columns that were always zero still count a little: other text may use them.
        """
        if self._squares_K is None or not self.tokens:
            return None
        mean_K = self._squares_K / self.tokens
        return (mean_K + 1e-3 * mean_K.mean()).float()

    @property
    def sample_TK(self) -> torch.Tensor | None:
        return torch.cat(self._kept) if self._kept else None


def gather_inputs(
    model: nn.Module,
    data: Sequence[Batch],
    sites: Sequence[FFNSite],
    linears: Mapping[str, nn.Linear],
    *,
    progress: bool = False,
) -> dict[str, InputStats]:
    """Run the dense ``model`` over ``data``: key of each site or name of each linear layer -> its inputs.

    Padding is left out. A linear layer that does not run has no entry.

    Raises:
        CalibrationError, UnsupportedModelError, NonFiniteError: see :func:`torch_pi2.profiling.recorder.record`.
    """
    found: dict[str, InputStats] = {}
    current: list[Batch] = []

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            x = (args[0] if args else kwargs["input"]).detach()
            mask_BT = current[-1].mask_BT
            rows_TK = x.reshape(-1, x.shape[-1])
            if mask_BT is not None and mask_BT.numel() == len(rows_TK):
                rows_TK = rows_TK[mask_BT.flatten()]
            found.setdefault(name, InputStats()).add(rows_TK)

        return hook

    def firing(f: Firing) -> None:
        keep = SAMPLE_TOKENS if f.site.experts is None else EXPERT_TOKENS
        found.setdefault(f.site.key, InputStats(keep)).add(f.x_TH[f.real_T])

    def stream() -> Iterator[Batch]:
        for batch in data:
            current[:] = [batch]
            yield batch

    hooks = [linear.register_forward_pre_hook(watch(name), with_kwargs=True) for name, linear in linears.items()]
    try:
        record(model, stream(), sites, firing, progress=progress, label="inputs")
    finally:
        for hook in hooks:
            hook.remove()
    return found
