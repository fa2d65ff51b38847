"""``LayerSamples`` and ``LinearSamples``: what methods of sparsity are fitted to."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.types.site import FFNSite, FFNWeights, intermediate


@dataclass(frozen=True)
class LayerSamples:
    """What :meth:`torch_pi2.SparseMethod.fit` is given: a layer, and calibration tokens that reach it.

    Attributes:
        site: its key, number, sizes and activation (:class:`torch_pi2.types.site.FFNSite`).
        weights: float32 ``gate`` ``[I, H]`` (None in a layer without one), ``up`` ``[I, H]``, ``down`` ``[H, I]``,
            ``bias_gate``, ``bias_up`` ``[I]`` and ``bias_down`` ``[H]`` or None.
        x_TH: the layer's inputs, float32.
        fired_TI: which neurons fire, bool: those that are not exactly zero; with smooth activations those above the
            magnitude of ``Config.sparsity``.
    """

    site: FFNSite
    weights: FFNWeights
    x_TH: torch.Tensor
    fired_TI: torch.Tensor

    def gate_TI(self) -> torch.Tensor:
        """``act(gate)`` of each token, float32 ``[T, I]``; ``act(up)`` in a layer without a gate."""
        return ACTIVATIONS[self.site.activation](intermediate(self.site, self.weights, self.x_TH)[0])

    def h_TI(self) -> torch.Tensor:
        """What ``down`` is multiplied by, float32 ``[T, I]``."""
        return intermediate(self.site, self.weights, self.x_TH)[1]

    def y_TH(self) -> torch.Tensor:
        """The dense layer's output without its bias, float32."""
        return self.h_TI() @ self.weights.down.T


T = TypeVar("T")


class WhenLookedUp(Mapping[str, T]):
    """``make(key)`` for each of ``keys``, anew each time: all together may not fit in memory."""

    def __init__(self, keys: Iterable[str], make: Callable[[str], T]) -> None:
        self._keys, self._make = list(keys), make

    def __getitem__(self, key: str) -> T:
        if key not in self._keys:
            raise KeyError(key)
        return self._make(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(frozen=True)
class LinearSamples:
    """What :meth:`torch_pi2.InputMethod.fit` is given. ``key``: the name of a linear layer; its ``weight_NK``, and its
    inputs on calibration tokens, ``x_TK``, float32.
    """

    key: str
    weight_NK: torch.Tensor
    x_TK: torch.Tensor
