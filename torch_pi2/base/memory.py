"""Memory for weights."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch

HUGE_PAGE_BYTES = 2 << 20


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
