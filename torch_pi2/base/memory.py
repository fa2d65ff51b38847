"""Memory for weights, and freed memory back to the system."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch

HUGE_PAGE_BYTES = 2 << 20
#: glibc's numbers of the settings, and the size from which on what is freed goes back at once.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGE_BLOCK = -1, -3, 1 << 18
_libc = ctypes.CDLL(None)


def new_tensor(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory on the CPU that is not yet filled.

    If large, it is fresh from the system (what an allocator has at hand has small pages already), begins at a huge page
    and is asked to be of such: weights are streamed about an eighth faster from them, and gathered a quarter. It goes
    back to the system with the tensor.

    Raises:
        MemoryError: there is not so much.
    """
    shape = tuple(shape)
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if nbytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(shape, dtype=dtype)
    try:
        mapped = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes for a tensor of {list(shape)}: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system has none
            mapped.madvise(mmap.MADV_HUGEPAGE)
    at = -torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=at).view(shape)


def give_back_freed_memory() -> None:
    """From now on large blocks are given back when they are freed, and what is free now at once.

    glibc would learn from the first prompt to keep blocks of up to 32 MB for the next: twice a prompt's activations.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        _libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BLOCK)
    trim()


def trim() -> None:
    """Give back whole pages that are free: smaller blocks (keys and values that grow, activations) leave many."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
