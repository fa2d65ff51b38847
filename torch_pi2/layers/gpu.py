"""Layers on a GPU, and layers divided between a GPU and the CPU (PowerInfer, sec. 5).

A divided layer has its first neurons, or some of its experts, on the GPU and the rest on the CPU; both work at the same
time. The input is copied to the CPU on its own stream and the GPU's part is queued. The CPU waits for the copy only,
computes its neurons, and its result is copied back and added on the GPU.
"""

import functools
import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.base.package import how_to_install
from torch_pi2.base.progress import log_once
from torch_pi2.base.uncompiled import uncompiled
from torch_pi2.errors import DeviceError
from torch_pi2.formats import has_two_formats
from torch_pi2.ops.activations import check_plain
from torch_pi2.types.site import FFNSite

#: The oldest compute capability that Triton supports (Volta).
LEAST_CAPABILITY = (7, 0)
#: Why these layers are not compiled.
_UNORDERED = "a layer is divided between a GPU and the CPU: a compiler sees no order between copies and computing"


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def device_of(model: nn.Module) -> torch.device:
    """The GPU of ``model``, also if it is divided, or the CPU. Raises DeviceError if it is on several devices."""
    held = [parameter for parameter in model.parameters() if not isinstance(parameter, OffloadedParameter)]
    devices = {parameter.device for parameter in held if on_gpu(parameter) or not parameter.is_meta}
    if not any(map(on_gpu, held)):
        return torch.device("cpu")
    if len(devices) > 1:
        expected, fix = "the CPU, or one GPU", "Load it without device_map, and move it with model.to(device)."
        found = ", ".join(sorted(map(str, devices)))
        raise DeviceError(f"device of {type(model).__name__}", expected=expected, found=found, fix=fix)
    return devices.pop()


def check_gpu(device: torch.device) -> None:
    """Raises DeviceError without Triton, or a GPU that it supports and that is torch's current one."""
    if importlib.util.find_spec("triton") is None:
        fix = f"{how_to_install('gpu')}, or leave the model on the CPU."
        raise DeviceError("layers on a GPU", expected="Triton", found="it is not installed", fix=fix)
    if device.type == "cuda" and not torch.cuda.is_available():
        expected, fix = "a GPU, and a torch that was built for it", "Leave the model on the CPU."
        found = f"torch {torch.__version__}, which sees none"
        raise DeviceError("layers on a GPU", expected=expected, found=found, fix=fix)
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        expected = f"torch's current GPU, cuda:{torch.cuda.current_device()}, where Triton starts kernels"
        fix = f"Call torch.cuda.set_device({device.index}) first."
        raise DeviceError(f"layers on {device}", expected=expected, found=str(device), fix=fix)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        what = f"layers on {torch.cuda.get_device_name(device)}"
        expected = "compute capability {}.{} or later".format(*LEAST_CAPABILITY)
        raise DeviceError(what, expected=expected, found=f"{major}.{minor}", fix="Leave the model on the CPU.")


def goes_to_gpu(fn: Callable[[torch.Tensor], torch.Tensor], here: torch.Tensor) -> bool:
    """Whether ``fn``, the argument of a module's ``_apply``, moves tensors from the CPU to a GPU."""
    moved = fn(torch.empty(0, dtype=torch.float32, device=here.device))
    if not on_gpu(moved) or on_gpu(here):
        return False
    check_gpu(moved.device)
    return True


def stays(what: str) -> DeviceError:
    """The error for a layer that has no GPU kernels."""
    fix = "Leave this model on the CPU."
    return DeviceError(what, expected="it on the CPU", found="a move to a GPU, for which it has no kernels", fix=fix)


def check_gpu_has_kernels(site: FFNSite, weights: str, predictor: str) -> None:
    """Raises DeviceError or UnsupportedModelError if no GPU kernel supports the neurons, predictor or activation."""
    if has_two_formats(weights):
        raise stays(f"{site.key}, whose neurons are {weights}")
    if predictor == "signbit":
        raise stays(f"{site.key}, whose predictor looks at sign bits")
    if predictor == "mask":
        raise stays(f"{site.key}, whose neurons a SparseMethod chooses")
    check_plain(site.activation)


def check_together(key: str, x: torch.Tensor, rows: torch.Tensor) -> None:
    """Raises DeviceError unless input and neurons are on one device. Neurons on ``meta`` are not checked."""
    if x.device != rows.device and not rows.is_meta:
        fix = "Move the model and its inputs to one device."
        expected = f"{rows.device}, where its neurons are"
        raise DeviceError(f"input of {key}", expected=expected, found=str(x.device), fix=fix)


class TransferBuffer:
    """Pinned memory and a copy stream to a GPU, for all copies of a model; ``turn``: held while a call uses them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.turn = threading.Lock()
        self._entered: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(device)
        self._pinned: dict[str, torch.Tensor] = {}

    def _pinned_like(self, what: str, like: torch.Tensor) -> torch.Tensor:
        held = self._pinned.get(what)
        if held is None or held.dtype != like.dtype or held.numel() < like.numel():
            with torch.inference_mode(False):  # an inference tensor could not be written to outside of inference mode
                held = torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)
            self._pinned[what] = held
        return held[: like.numel()].view(like.shape)

    def leave(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying ``x`` to the CPU; the function returned waits for the copy."""
        x = x.contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            there = self._pinned_like("leave", x)
            there.copy_(x, non_blocking=True)
            arrived = self._stream.record_event()
        x.record_stream(self._stream)

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return there

        return wait

    def queue(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Start ``work`` on the GPU; the function returned gives its result, which may be pending."""
        y = work()  # kernels are queued by themselves
        return lambda: y

    def enter(self, y: torch.Tensor) -> torch.Tensor:
        """Copy ``y`` from the CPU to the GPU."""
        if self._entered is not None:  # done already within one sequence: the input was computed from it
            self._entered.synchronize()
        entered = self._pinned_like("enter", y).copy_(y).to(self.device, non_blocking=True)
        self._entered = torch.cuda.current_stream(self.device).record_event()
        return entered

    def __deepcopy__(self, _memo: Any) -> "TransferBuffer":
        return self


class HybridFFN:
    """A layer with its first ``n_gpu`` neurons on a GPU (``hot``, or None); the CPU keeps the whole layer, and computes
    the others (``cold``, sharing its tensors, or None).

    Args:
        layer: a :class:`~torch_pi2.layers.ffn.SparseFFN` that is not split. n_gpu: 0 to I. Over a store it must be a
            multiple of ``CHUNK``, or I; results then have the same bits for any value. link: to the GPU. neuron_rows:
            the first neurons, of a layer over a store.
    """

    #: Granularity of ``n_gpu`` over a store.
    CHUNK = 64

    def __init__(self, layer: Any, n_gpu: int, link: TransferBuffer, neuron_rows: torch.Tensor | None = None) -> None:
        intermediate = layer.site.intermediate
        self.n_gpu, self.link = n_gpu, link
        self.hot = layer.part(0, n_gpu, neuron_rows).to(link.device) if n_gpu else None
        self.cold = layer.part(n_gpu, intermediate) if n_gpu < intermediate else None
        self._followed: tuple[Any, ...] = ()

    @uncompiled(reason=_UNORDERED)
    def __call__(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """``layer(x)`` on the GPU; the parts' results are added in float32. Threads take turns."""
        self._follow(layer)
        if self.cold is None:
            assert self.hot is not None
            return self.hot.whole(x)
        with self.link.turn:
            arriving = self.link.leave(x)
            hot = None if self.hot is None else self.link.queue(functools.partial(self.hot.whole, x))
            y = self.link.enter(self.cold.whole(arriving()))
            return y if hot is None else (hot().float() + y.float()).to(x.dtype)

    def refresh(self, layer: Any) -> None:
        """Copy changed weights of ``layer``, which is in memory, to the GPU."""
        if self.hot is not None:
            for name in ("neuron_rows", "bias_gate", "bias_up", "bias_down"):
                there = self.hot._buffers[name]
                if there is not None:
                    there.copy_(layer._buffers[name][: len(there)])

    def _follow(self, layer: Any) -> None:
        """Pass the layer's plan settings and mode on to its parts."""
        if self._followed != (layer.by_batch, layer.dense_from, layer.training):
            self._followed = layer.by_batch, layer.dense_from, layer.training
            for part in filter(None, (self.hot, self.cold)):
                part.follow_whole(layer)


class HybridExperts:
    """Experts of which those ``there`` are on a GPU with their predictors (``hot``, or None); the CPU keeps all.

    Args:
        layer: a :class:`~torch_pi2.layers.experts.SparseExperts` that is not split. link: to the GPU. neuron_rows: of
            those experts, ``[experts there, ...]``, over a store.
    """

    def __init__(
        self, layer: Any, there: Sequence[int], link: TransferBuffer, neuron_rows: torch.Tensor | None = None
    ) -> None:
        self.there, self.link = tuple(there), link
        self.experts = experts = len(layer.sites)
        self.hot = layer.part(self.there, link.device, neuron_rows) if there else None
        place_E1 = torch.full((experts + 1,), len(there), dtype=torch.int64)  # the index of no expert
        place_E1[list(there)] = torch.arange(len(there))
        self._place_E1 = place_E1.to(link.device)
        self._cold_E1 = torch.arange(experts + 1)
        self._cold_E1[list(there)] = experts

    @uncompiled(reason=_UNORDERED)
    def __call__(self, layer: Any, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        """``layer(x, index, routing)`` on the GPU; the parts' results are added in float32. Threads take turns."""
        if len(self.there) == self.experts:
            return self._on_gpu(x, index, routing)
        sent = (index, routing.float(), x)
        with self.link.turn:
            # for one copy; element sizes must not increase from one tensor to the next
            arriving = self.link.leave(torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in sent]))
            work = functools.partial(self._on_gpu, x, index, routing)
            hot = None if self.hot is None else self.link.queue(work)
            parts = arriving().split([tensor.nbytes for tensor in sent])
            index_Tk, routing_Tk, x_TH = (p.view(one.dtype).view(one.shape) for p, one in zip(parts, sent, strict=True))
            y = self.link.enter(layer.compute(x_TH, self._cold(index_Tk), routing_Tk))
            return y if hot is None else (hot().float() + y.float()).to(x.dtype)

    def refresh(self, layer: Any) -> None:
        """See :meth:`HybridFFN.refresh`."""
        for place, expert in enumerate(self.there):
            assert self.hot is not None
            self.hot.neuron_rows[place].copy_(layer.neuron_rows[expert])

    def _on_gpu(self, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        assert self.hot is not None
        return self.hot.compute(x, self._place_E1[index.clamp(-1, self.experts)], routing)

    def _cold(self, index_Tk: torch.Tensor) -> torch.Tensor:
        """Indices with experts on the GPU as no expert; invalid ones stay, for the operator to refuse."""
        known_Tk = index_Tk.clamp(-1, self.experts)
        return torch.where(known_Tk == index_Tk, self._cold_E1[known_Tk], index_Tk)


def stays_as_it_is(layer: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether ``fn``, the argument of ``layer._apply``, only moves a split layer to the GPU of its part. Any other
    change ends the split, and a dtype conversion logs a warning. Raises DeviceError or UnsupportedModelError: a GPU
    without kernels for it.
    """
    if layer.split is not None:
        there = torch.empty(0, dtype=layer.dtype, device=layer.split.link.device)
        made = fn(there)
        if (made.device, made.dtype) == (there.device, there.dtype):
            return True
        if made.device == there.device:
            log_once(
                f"a conversion to {dtype_name(made.dtype)} ends the division of layers between a GPU and the CPU: call "
                "model.to('cpu'), convert the model, and divide it again"
            )
        layer.end_split()
    if goes_to_gpu(fn, layer.order):
        layer.check_gpu_has_kernels()
        if not layer.in_memory:
            raise stays(f"{layer.site.key}, whose neurons are in a store")
        layer.leave_blocks()
    return False
