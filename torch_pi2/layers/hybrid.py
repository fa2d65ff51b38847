"""``HybridFFN``: first neurons of a layer on a GPU, the others on the CPU, both at work at a time (PowerInfer, sec. 5).

The input leaves for the CPU on a stream of its own; the GPU's part is queued; then the CPU, which has waited for the
input alone, computes its neurons while the GPU computes its own; what it found goes back and is added there. Nothing
else waits for the GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.progress import log_once
from torch_pi2.errors import ConfigError, DtypeError, ShapeError

#: Why no compiler looks into a divided layer.
_UNORDERED = "a layer is divided between a GPU and the CPU: a compiler sees no order between copies and computing"


class TransferBuffer(Protocol):
    """Between the CPU and a device that works by itself."""

    device: torch.device

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """Held from when an input leaves until its result is on its way back."""

    def leave(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """``x`` is on its way to the CPU; what is returned waits for it."""

    def queue(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """The device is to do ``work``; what is returned gives its result, or one that is still to come."""

    def enter(self, y: torch.Tensor) -> torch.Tensor:
        """A tensor of the CPU, on the device."""


class CudaTransferBuffer:
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

    def __deepcopy__(self, _memo: Any) -> CudaTransferBuffer:
        return self

    def __reduce__(self) -> Any:
        raise ConfigError(
            "pickling a model",
            expected="one on the CPU",
            found=f"neurons on {self.device}, which mean nothing to another process",
            fix="Call model.to('cpu') first.",
        )


class HybridFFN:
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

    def __init__(self, layer: Any, n_gpu: int, link: TransferBuffer, neuron_rows: torch.Tensor | None = None) -> None:
        intermediate = layer.site.intermediate
        self.n_gpu, self.link = n_gpu, link
        self.hot = layer.part(0, n_gpu, neuron_rows).to(link.device) if n_gpu else None
        self.cold = layer.part(n_gpu, intermediate) if n_gpu < intermediate else None
        self._followed: tuple[Any, ...] = ()

    @torch.compiler.disable(reason=_UNORDERED)
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

    def refresh(self, layer: Any) -> None:
        """The GPU has the weights of ``layer`` from now on, which is in memory and has others than before."""
        if self.hot is not None:
            for name in ("neuron_rows", "bias_gate", "bias_up", "bias_down"):
                there = self.hot._buffers[name]
                if there is not None:
                    there.copy_(layer._buffers[name][: len(there)])

    def _follow(self, layer: Any) -> None:
        """What a plan has said of the layer since the last call, and its mode, are for its parts, too."""
        if self._followed != (layer.by_batch, layer.dense_from, layer.training):
            self._followed = layer.by_batch, layer.dense_from, layer.training
            for part in (self.hot, self.cold):
                if part is not None:
                    part.follow_whole(layer)


class HybridExperts:
    """What a mixture of experts, which stays on the CPU as a whole, computes with some of its neurons on a GPU.

    These are all of some experts, which ask their predictors there, so that what is computed of each is as without; or
    the first neurons of every expert, which follow their own gates.

    Args:
        layer: a :class:`~torch_pi2.layers.experts.SparseExperts` that is not split. n_gpu: ``[E]``, neurons there of
            each expert: none or all of them, or of every expert the same number, a multiple of ``HybridFFN.CHUNK``.
        link: to the GPU. neuron_rows: theirs, ``[experts there, neurons there, ...]``, of a layer over a store.

    Attributes:
        n_gpu: as given. hot: a SparseExperts of what is there; None: there is nothing.

    Raises:
        ShapeError: ``n_gpu`` is for another number of experts, or says something else.
    """

    def __init__(
        self, layer: Any, n_gpu: Sequence[int], link: TransferBuffer, neuron_rows: torch.Tensor | None = None
    ) -> None:
        experts, neurons = len(layer.sites), layer.site.intermediate
        self.n_gpu, self.link = tuple(n_gpu), link
        counts = {*self.n_gpu}
        whole = counts <= {0, neurons}
        same = len(counts) == 1 and counts <= {*range(0, neurons, HybridFFN.CHUNK)}
        if len(self.n_gpu) != experts or not (whole or same):
            raise ShapeError(
                f"neurons of experts of {layer.site.key} on a GPU",
                expected=f"{experts} numbers, one for each expert: 0 or {neurons}, or all the same multiple of "
                f"{HybridFFN.CHUNK} below",
                found=f"{len(self.n_gpu)}: {', '.join(map(str, self.n_gpu[:8]))}{', ...' * (len(self.n_gpu) > 8)}",
                fix="Give a GPU whole experts, or the first neurons of all of them.",
            )
        #: Neurons of every expert that the CPU leaves out; 0: its experts are whole.
        self.first = 0 if whole else self.n_gpu[0]
        there = [expert for expert, count in enumerate(self.n_gpu) if count]
        self.hot = layer.part(there, link.device, self.first, neuron_rows) if there else None
        place_E1 = torch.full((experts + 1,), len(there), dtype=torch.int64)  # where no expert is
        place_E1[there] = torch.arange(len(there))
        self._place_E1 = place_E1.to(link.device)
        self._all_there = counts == {neurons}
        cold = [experts if count == neurons else expert for expert, count in enumerate(self.n_gpu)]
        self._cold_E1 = torch.tensor([*cold, experts])

    @torch.compiler.disable(reason=_UNORDERED)
    def __call__(self, layer: Any, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        """What ``layer`` makes of ``x [T, H]`` on the GPU, whose experts and their weights are ``[T, k]``: both results
        have ``x``'s dtype, their sum is taken in float32. Calls of several threads take turns.
        """
        y: torch.Tensor
        if self._all_there:
            y = self._on_gpu(x, index, routing)
            return y
        if index.dtype != torch.int64:
            raise DtypeError(
                f"index of {layer.site.key}",
                expected="int64",
                found=dtype_name(index.dtype),
                fix="Use .long().",
            )
        sent = (index, routing.float(), x)
        with self.link.turn:
            arriving = self.link.leave(_as_bytes(*sent))
            work = functools.partial(self._on_gpu, x, index, routing)
            hot = None if self.hot is None else self.link.queue(work)
            index_Tk, routing_Tk, x_TH = _from_bytes(arriving(), *sent)
            y = self.link.enter(layer.compute(x_TH, self._cold(index_Tk), routing_Tk, self.first))
            return y if hot is None else (hot().float() + y.float()).to(x.dtype)

    def refresh(self, layer: Any) -> None:
        """See :meth:`HybridFFN.refresh`."""
        if self.hot is not None:
            for place, expert in enumerate(expert for expert, count in enumerate(self.n_gpu) if count):
                self.hot.neuron_rows[place].copy_(layer.neuron_rows[expert, : self.n_gpu[expert]])

    def _on_gpu(self, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        assert self.hot is not None
        y: torch.Tensor = self.hot.compute(x, self._place_E1[index.clamp(-1, len(self.n_gpu))], routing)
        return y

    def _cold(self, index_Tk: torch.Tensor) -> torch.Tensor:
        """Experts that the CPU computes; what is no expert stays for its operator to refuse, but -1 is none."""
        known_Tk = index_Tk.clamp(-1, len(self.n_gpu))
        return torch.where(known_Tk == index_Tk, self._cold_E1[known_Tk], index_Tk)


def only_moves(
    split: HybridFFN | HybridExperts, fn: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> bool:
    """Whether ``fn``, which the ``_apply`` of a layer of ``dtype`` was given, moves to the GPU of ``split`` and does
    nothing else; if it converts what is there, a warning: the layer is on the CPU as a whole from then on.
    """
    there = torch.empty(0, dtype=dtype, device=split.link.device)
    made = fn(there)
    if made.device == there.device and made.dtype != dtype:
        log_once(
            f"a conversion to {dtype_name(made.dtype)} ends the division of layers between a GPU and the CPU: call "
            "model.to('cpu'), convert the model, and divide it again"
        )
    return (made.device, made.dtype) == (there.device, dtype)


def _as_bytes(*tensors: torch.Tensor) -> torch.Tensor:
    """One tensor, to be copied at once, of several whose numbers get no longer from one to the next."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def _from_bytes(held: torch.Tensor, *like: torch.Tensor) -> list[torch.Tensor]:
    """Views of ``held``, which was made by :func:`_as_bytes` of such tensors."""
    parts = held.split([tensor.nbytes for tensor in like])
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
