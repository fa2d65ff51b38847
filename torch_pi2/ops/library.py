"""Loads the C++ operators (``libpi2_torch.so``), and registers fake kernels and Autograd kernels that refuse gradients.

Operators, all under ``torch.ops.pi2``: those of ``operators.REFERENCES``, each with a readable reference of its name in
this folder; ``gathered_experts`` (:mod:`torch_pi2.ops.gpu`); and without a reference those of

* neuron stores by number, ``store_*`` (:mod:`torch_pi2.layers.offloaded`); recorded accesses, ``store_record`` and
  ``store_recorded`` (:mod:`torch_pi2.observe.accesses`), and caches over them, ``replay*``;
* simulated devices, ``device_times`` (:mod:`torch_pi2.machine.device`); traces, ``trace_*``
  (:mod:`torch_pi2.observe.trace`); counts of firing neurons, ``firing_*`` (:mod:`torch_pi2.observe.watch`);
* ``crc32c(rows) -> int64 [n]``: of each row of uint8 ``[n, bytes]``.
* ``plain_read(neuron_rows, index?) -> int``: reads memory and does nothing with it (benchmark roofline).
* ``advise_huge_pages(tensor) -> bool``: asks for huge pages for memory that is not yet written.
* ``give_back(tensor) -> int``: returns the whole pages inside a contiguous tensor to the system (they read as zeros
  afterwards) and their bytes; 0 if the memory is shared or of a file.
* ``timings(reset) -> int64 [n, 5]``: kind (0 linear, 1 predictor, 2 ffn), rows, columns, calls, nanoseconds of wall
  clock, since the last reset; at most 256 sizes, further ones together as kind 3.
* ``constants() -> str``, ``lists() -> str``, ``chunk_neurons(neurons) -> int`` (:mod:`torch_pi2.ops.constants`);
  ``counters(reset) -> int64 [7]``, ``kernel_tables() -> str``, ``select_kernels(isa) -> bool``.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_pi2.base.library import load_library
from torch_pi2.errors import ConfigError, GradientError, LibraryMissingError
from torch_pi2.ops import attention, experts, linear, states  # noqa: F401 (they list their operators)
from torch_pi2.ops.gpu import operators as gpu
from torch_pi2.ops.operators import FAKES
from torch_pi2.ops.quantize import dequantize

_lock = threading.Lock()
_fragment: torch.library.Library | None = None
_gathered_experts: Any = None


#: Operator -> its CUDA kernel.
_KERNELS: tuple[Callable[..., torch.Tensor], ...] = (gpu.sparse_ffn, gpu.predicted_ffn, gpu.linear, dequantize)
_ON_A_GPU = {kernel.__name__: kernel for kernel in _KERNELS}


def load() -> None:
    """Make ``torch.ops.pi2`` usable; later calls do nothing."""
    global _fragment, _gathered_experts
    if _fragment is not None:
        return
    with _lock:
        if _fragment is not None:
            return
        path = load_library()
        _check_instruction_set()
        try:
            _fragment, _gathered_experts = _register_python_parts(), gpu.register_gathered_experts()
        except AttributeError as error:  # an older library without a newer operator
            fix = "Build it again: 'make install' in a checkout."
            expected = "a library of this version of the code"
            raise LibraryMissingError(f"loading {path}", expected=expected, found=str(error), fix=fix) from error


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Context in which operators bypass every torch mode: a finalizer may run while a tracer is active."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _check_instruction_set() -> None:
    """A misspelt PI2_CPU_CAPABILITY must not silently test the wrong kernels."""
    wanted = os.environ.get("PI2_CPU_CAPABILITY")
    available, _, selected = torch.ops.pi2.kernel_tables().partition(":")
    if wanted and wanted != selected:
        fix = "Unset it for the best kernels."
        expected = f"one of {available} (what this CPU can run)"
        raise ConfigError("PI2_CPU_CAPABILITY", expected=expected, found=wanted, fix=fix)


def _register_python_parts() -> torch.library.Library:
    fragment = torch.library.Library("pi2", "FRAGMENT")
    for name, fake in (FAKES | {"crc32c": lambda rows: rows.new_empty(rows.shape[0], dtype=torch.int64)}).items():
        fragment.impl(name, _refusing_gradients(name), "Autograd", with_keyset=True)
        torch.library.register_fake(f"pi2::{name}", fake, lib=fragment)
    for name, kernel in _ON_A_GPU.items():
        fragment.impl(name, kernel, "CUDA")
    return fragment


def _refusing_gradients(name: str) -> Any:
    """An Autograd kernel that raises if a gradient is needed, and otherwise redispatches."""
    packet_name, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.pi2, packet_name), overload or "default")
    after_autograd = torch._C._after_autograd_keyset

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for position, value in enumerate(args):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise GradientError(
                        f"torch.ops.pi2.{packet_name}",
                        expected="no gradients (it is an inference operator)",
                        found=f"argument {position} requires grad while grad mode is on",
                        fix="Run under torch.no_grad() or inference_mode(); to train, torch_pi2.restore(model) first "
                        "(quantised weights: load the float checkpoint).",
                    )
        return op.redispatch(keyset & after_autograd, *args, **kwargs)

    return kernel
