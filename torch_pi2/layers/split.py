"""``Split``: first neurons of a layer on a GPU, the others on the CPU, both at work at a time (PowerInfer, section 5).

The input leaves for the CPU on a stream of its own; the GPU's part is queued; then the CPU, which has waited for the
input alone, computes its neurons while the GPU computes its own; what it found goes back and is added there. Nothing
else waits for the GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from torch_pi2.errors import ConfigError


class Link(Protocol):
    """Between the CPU and a device that works by itself."""

    device: torch.device
    #: Held from when an input leaves until its result is on its way back.
    turn: AbstractContextManager[Any]

    def leave(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """``x`` is on its way to the CPU; what is returned waits for it."""

    def queue(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """The device is to do ``work``; what is returned gives its result, or one that is still to come."""

    def enter(self, y: torch.Tensor) -> torch.Tensor:
        """A tensor of the CPU, on the device."""


class CudaLink:
    """Pinned memory and a stream for copies. A copied model uses the same."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.turn = threading.Lock()
        self._entered: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(device)
        self._pinned: dict[str, torch.Tensor] = {}

    def _room(self, what: str, like: torch.Tensor) -> torch.Tensor:
        held = self._pinned.get(what)
        if held is None or held.dtype != like.dtype or held.numel() < like.numel():
            with torch.inference_mode(False):  # or calls outside of it could not write there
                held = torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)
            self._pinned[what] = held
        return held[: like.numel()].view(like.shape)

    def leave(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        x = x.contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            there = self._room("leave", x)
            there.copy_(x, non_blocking=True)
            arrived = self._stream.record_event()
        x.record_stream(self._stream)

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return there

        return wait

    def queue(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        y = work()  # kernels are queued by themselves
        return lambda: y

    def enter(self, y: torch.Tensor) -> torch.Tensor:
        if self._entered is not None:  # of one sequence it is over: the input was computed from it
            self._entered.synchronize()
        entered = self._room("enter", y).copy_(y).to(self.device, non_blocking=True)
        self._entered = torch.cuda.current_stream(self.device).record_event()
        return entered

    def __deepcopy__(self, _memo: Any) -> CudaLink:
        return self

    def __reduce__(self) -> Any:
        raise ConfigError(
            "pickling a model",
            expected="one on the CPU",
            found=f"neurons on {self.device}, which mean nothing to another process",
            fix="Call model.to('cpu') first.",
        )


class Split:
    """What a layer, which stays on the CPU as a whole, computes with its first ``n_gpu`` neurons on a GPU.

    Args:
        layer: a :class:`~torch_pi2.layers.ffn.SparseFFN` that is not split. n_gpu: 0 to I; a multiple of
            ``CHUNK`` (or I) over a store, whose results then have the same bits for any.
        link: to the GPU. neuron_rows: those of the first neurons, of a layer over a store.

    Attributes:
        hot: the part there, a SparseFFN; None: no neurons. cold: that of the others, which share the layer's tensors;
            None: all are there.
    """

    #: Neurons of a store's layer of which a GPU has whole numbers.
    CHUNK = 64

    def __init__(self, layer: Any, n_gpu: int, link: Link, neuron_rows: torch.Tensor | None = None) -> None:
        intermediate = layer.site.intermediate
        self.n_gpu, self.link = n_gpu, link
        self.hot = layer.part(0, n_gpu, neuron_rows).to(link.device) if n_gpu else None
        self.cold = layer.part(n_gpu, intermediate) if n_gpu < intermediate else None
        self._followed: tuple[Any, ...] = ()

    @torch.compiler.disable  # a compiler sees no order between copies and what the CPU computes
    def __call__(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """What ``layer`` makes of ``x``, ``[..., H]``, on the GPU: both results have ``x``'s dtype, their sum is taken
        in float32. Calls of several threads take turns.
        """
        self._follow(layer)
        y: torch.Tensor
        if self.cold is None:
            assert self.hot is not None
            y = self.hot.whole(x)
            return y
        with self.link.turn:
            arriving = self.link.leave(x)
            hot = None if self.hot is None else self.link.queue(functools.partial(self.hot.whole, x))
            y = self.link.enter(self.cold.whole(arriving()))
            return y if hot is None else (hot().float() + y.float()).to(x.dtype)

    def _follow(self, layer: Any) -> None:
        """What a plan has said of the layer since the last call is for its parts, too."""
        if self._followed != (layer.by_batch, layer.dense_from):
            self._followed = layer.by_batch, layer.dense_from
            for part in (self.hot, self.cold):
                if part is not None:
                    part.follow_whole(layer)
