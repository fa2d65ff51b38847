"""Memory for weights: fresh from the system, given back to it, or mapped from files.

Pages of a mapped file count as memory of the process from their first use on. Letting go of them loses nothing: they
are read again where they are used again.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

HUGE_PAGE_BYTES = 2 << 20
#: glibc's numbers of the settings, and the size from which on what is freed goes back at once.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGE_BLOCK = -1, -3, 1 << 18
_libc = ctypes.CDLL(None)


def new_tensor(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory on the CPU that is not yet filled.

    If large, it is fresh from the system (what an allocator has at hand has small pages already), begins at a huge page
    and is asked to be of such: weights are streamed about an eighth faster from them, and gathered a quarter. It goes
    back to the system with the tensor.
    """
    shape = tuple(shape)
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if nbytes < HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    try:
        mapped = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes for a tensor of {list(shape)}: {error.strerror}") from None
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


#: Bytes of its neighbours that the system maps with a page.
_AROUND = 1 << 16


class MappedFile:
    """A file as memory.

    Args:
        file: descriptor, which may be closed afterwards. shared: what is written to the memory is written to the file.
    """

    def __init__(self, file: int, *, shared: bool = False) -> None:
        # no reserve: nothing is written to a private one, so that it needs no memory whatever its size
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        self._map = mmap.mmap(file, 0, flags=flags)
        self._start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> torch.Tensor:
        """The tensor at byte ``at``; the file stays mapped as long as any such tensor lives."""
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=at).view(shape)

    def let_go(self, tensor: torch.Tensor) -> None:
        """Of what it has of ``tensor``, if that is in it."""
        at = tensor.data_ptr() - self._start
        if not 0 <= at < len(self._map):
            return
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) * tensor.itemsize
        start = max(0, at - at % mmap.PAGESIZE - _AROUND)
        stop = min(len(self._map), at + last + tensor.itemsize + _AROUND)
        self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


#: Of models whose weights are in files, those.
_FILES: WeakKeyDictionary[nn.Module, list[MappedFile]] = WeakKeyDictionary()


def set_mapped(model: nn.Module, files: list[MappedFile]) -> None:
    """Say that weights of ``model`` are in ``files``."""
    _FILES[model] = files


def is_mapped(model: Any) -> bool:
    """Whether any weights of ``model`` are mapped from files."""
    return isinstance(model, nn.Module) and model in _FILES


def let_go(model: Any, tensors: Iterable[torch.Tensor | None]) -> None:
    """Of memory that ``tensors``, weights of ``model``, take here, if they are in a file."""
    for tensor in tensors if is_mapped(model) else ():
        if tensor is not None and tensor.numel():
            for file in _FILES[model]:
                file.let_go(tensor)


@contextmanager
def letting_go(model: nn.Module) -> Iterator[None]:
    """While ``model`` runs, each of its modules lets go of its weights, if they are in files, once it was called."""
    hooks: list[Any] = []

    def after(own: list[nn.Parameter]) -> Any:
        return lambda *_: let_go(model, own)

    for module in model.modules() if is_mapped(model) else ():
        if own := list(module.parameters(recurse=False)):
            hooks.append(module.register_forward_hook(after(own)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
