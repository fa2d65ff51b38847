"""What the process has freed goes back to the system (glibc; elsewhere nothing is done)."""

from __future__ import annotations

import ctypes

#: glibc's numbers of the settings, and the size from which on what is freed goes back at once.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGE_BLOCK = -1, -3, 1 << 18
_libc = ctypes.CDLL(None)


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
