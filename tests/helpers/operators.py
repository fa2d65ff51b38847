"""What every operator of ours goes through: torch's ``opcheck``, and that calls leave no memory behind."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class _Mallinfo2(ctypes.Structure):
    """Bytes of glibc's malloc, ``man mallinfo``."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def opcheck(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
    """``torch.library.opcheck``; then AssertionError if a call of ``op`` leaves 16 bytes or more behind, on average."""
    kwargs = kwargs or {}
    torch.library.opcheck(op, tuple(args), dict(kwargs), **options)
    left = min(_left_behind(op, args, kwargs, calls=100) for _ in range(3))
    if left >= 16:  # threads that read may have allocated meanwhile: a leak grows with the calls
        left = _left_behind(op, args, kwargs, calls=2000)
    assert left < 16, f"{left} bytes a call"


def _left_behind(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], calls: int) -> float:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    with torch.no_grad():
        op(*args, **kwargs)
        before = mallinfo2()
        for _ in range(calls):
            op(*args, **kwargs)
        after = mallinfo2()
    return ((after.uordblks + after.hblkhd) - (before.uordblks + before.hblkhd)) / calls
