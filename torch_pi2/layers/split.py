"""``Split``: first neurons of a layer on a GPU, the others on the CPU, both at work at a time (PowerInfer, section 5).

The input leaves for the CPU on a stream of its own; the GPU's part is queued; then the CPU, which has waited for the
input alone, computes its neurons while the GPU computes its own; what it found goes back and is added there. Nothing
else waits for the GPU.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch


class Link(Protocol):
    """Between the CPU and a device that works by itself."""

    device: torch.device

    def leave(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """``x`` is on its way to the CPU; what is returned waits for it."""

    def queue(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """The device is to do ``work``; what is returned gives its result, or one that is still to come."""

    def enter(self, y: torch.Tensor) -> torch.Tensor:
        """A tensor of the CPU, on the device."""


class CudaLink:
    """Pinned memory and a stream for copies. Its calls come from one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
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
        # who writes here next has waited for an input that was computed from this
        return self._room("enter", y).copy_(y).to(self.device, non_blocking=True)


class Split:
    """What a layer, which stays on the CPU as a whole, computes with its first ``n_gpu`` neurons on a GPU.

    Args:
        layer: a :class:`~torch_pi2.layers.ffn.SparseFFN` that is not split. n_gpu: 0 to I.
        link: to the GPU.

    Attributes:
        hot: the part there, a SparseFFN; None: no neurons. cold: that over views of the layer's tensors; None: all
            are there.
    """

    def __init__(self, layer: Any, n_gpu: int, link: Link) -> None:
        intermediate = layer.site.intermediate
        self.n_gpu, self.link = n_gpu, link
        self.hot = _part(layer, 0, n_gpu).to(link.device) if n_gpu else None
        self.cold = _part(layer, n_gpu, intermediate) if n_gpu < intermediate else None

    @torch.compiler.disable  # a compiler sees no order between copies and what the CPU computes
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., H]``, on the GPU. Both results have ``x``'s dtype, their sum is taken in float32."""
        y: torch.Tensor
        if self.cold is None:
            assert self.hot is not None
            y = self.hot.whole(x)
            return y
        arriving = self.link.leave(x)
        hot = None if self.hot is None else self.link.queue(functools.partial(self.hot.whole, x))
        y = self.link.enter(self.cold.whole(arriving()))
        return y if hot is None else (hot().float() + y.float()).to(x.dtype)


def _part(layer: Any, first: int, last: int) -> Any:
    """A layer of the neurons ``first`` to ``last`` in plan order; the last ones have the bias of the down matrix.

    The first ones are all computed, or by their own gates: they have no predictor.
    """
    part = copy.copy(layer)
    part._original, part._elsewhere, part._names, part._parameters = (), (), {}, {}
    part._buffers = buffers = dict(layer._buffers)
    for name in ("neuron_rows", "bias_gate", "bias_up", "order"):
        if buffers[name] is not None:
            buffers[name] = buffers[name][first:last]
    part.site = replace(layer.site, intermediate=last - first)
    part.n_hot = max(0, min(layer.n_hot, last) - first)
    part._by_batch = tuple((batch, max(0, min(hot, last) - first)) for batch, hot in layer.by_batch)
    if last < layer.site.intermediate:
        buffers["bias_down"], part.predictor_in_blocks = None, False
        buffers |= {name: None for name in buffers if name.startswith("predictor_")}
    return part
