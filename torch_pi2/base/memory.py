"""Memory for weights: allocated from the system, returned to it, or mapped from files. Pages of a mapped file count as
the process' memory from their first use; released ones are read again on their next use.
"""

import ctypes
import errno
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

HUGE_PAGE_BYTES = 2 << 20
#: glibc's options M_TRIM_THRESHOLD and M_MMAP_THRESHOLD: how much freed memory it keeps, in blocks of which size.
_KEPT = {-1: 64 << 20, -3: 32 << 20}
_libc = ctypes.CDLL(None)


def new_tensor(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory on the CPU.

    Large blocks are mapped from the system, aligned and advised for huge pages: streaming weights is about an eighth
    faster, gathering them a quarter. They are unmapped with the tensor.
    """
    shape = tuple(shape)
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    try:
        if nbytes < HUGE_PAGE_BYTES:
            return torch.empty(shape, dtype=dtype)
        mapped = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, RuntimeError):  # RuntimeError: of PyTorch's allocator
        raise MemoryError(f"{nbytes} bytes for a tensor of {list(shape)}: {os.strerror(errno.ENOMEM)}") from None
    with suppress(OSError):  # not supported
        mapped.madvise(mmap.MADV_HUGEPAGE)
    at = -torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=at).view(shape)


def untouched_zeros(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU that take no memory until they are written: ``torch.zeros`` writes them. Raises OSError."""
    shape = tuple(shape)
    count = math.prod(shape)
    mapped = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=dtype, count=count).view(shape) if count else torch.empty(shape, dtype=dtype)


def give_back_freed_memory() -> None:
    """Return free memory now, and large blocks once freed; glibc would keep up to 32 MB each after a prompt."""
    _KEPT.update(dict.fromkeys(_KEPT, 1 << 18))
    keep_freed_memory()
    trim()


def keep_freed_memory() -> None:
    """Reuse large blocks, unless they are given back: a prompt's layers would get new pages, a fifth of its time."""
    for option, size in _KEPT.items() if hasattr(_libc, "mallopt") else ():
        _libc.mallopt(option, size)


def trim() -> None:
    """Return whole free pages, which smaller blocks (a growing KV cache, activations) leave behind."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


#: Bytes around a page that the system maps with it.
_AROUND = 1 << 16


class MappedFile:
    """A file mapped into memory; ``file``: its descriptor, which may be closed; ``shared``: writes go to the file."""

    def __init__(self, file: int, *, shared: bool = False) -> None:
        # NORESERVE: a private mapping is never written to, and so needs no memory
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        self._map = mmap.mmap(file, 0, flags=flags)
        self._start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, at: int) -> torch.Tensor:
        """The tensor at byte ``at``; the file stays mapped as long as any such tensor lives."""
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=at).view(shape)

    def use_huge_pages(self, wanted: bool = True, at: int = 0, nbytes: int | None = None) -> None:
        """Let the system map these bytes in pages of 2 MiB (``wanted``), if it has such of files (Linux 6.16, ext4)."""
        first = at - at % mmap.PAGESIZE
        size = len(self._map) - first if nbytes is None else at + nbytes - first
        with suppress(OSError):  # not supported
            self._map.madvise(mmap.MADV_HUGEPAGE if wanted else mmap.MADV_NOHUGEPAGE, first, size)

    def let_go(self, tensor: torch.Tensor) -> None:
        """Release the pages of ``tensor``, if it is in this file."""
        at = tensor.data_ptr() - self._start
        if not 0 <= at < len(self._map):
            return
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) * tensor.itemsize
        start = max(0, at - at % mmap.PAGESIZE - _AROUND)
        stop = min(len(self._map), at + last + tensor.itemsize + _AROUND)
        self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


def leave_cache(path: Path) -> None:
    """Let the system forget what it has cached of a file, so that the next use reads it in the pages that it maps."""
    with open(path, "rb") as file, suppress(AttributeError, OSError):  # not supported
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


#: Model -> the files with its weights.
_FILES: WeakKeyDictionary[nn.Module, list[MappedFile]] = WeakKeyDictionary()


def set_mapped(model: nn.Module, files: list[MappedFile]) -> None:
    """Record that weights of ``model`` are in ``files``."""
    _FILES[model] = files


def is_mapped(model: Any) -> bool:
    """Whether any weights of ``model`` are mapped from files."""
    return isinstance(model, nn.Module) and model in _FILES


def let_go(model: Any, tensors: Iterable[torch.Tensor | None]) -> None:
    """Release the pages of ``tensors``, weights of ``model``, that are in a file."""
    for tensor in tensors if is_mapped(model) else ():
        if tensor is not None and tensor.numel():
            for file in _FILES[model]:
                file.let_go(tensor)


@contextmanager
def letting_go(model: nn.Module) -> Iterator[None]:
    """While ``model`` runs, each of its modules releases the pages of its mapped weights after its call."""
    with ExitStack() as hooks:
        for module in model.modules() if is_mapped(model) else ():
            if own := list(module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_hook(lambda *_, own=own: let_go(model, own)))
        yield
