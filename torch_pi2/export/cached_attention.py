"""``pi2::cached_attention``: new tokens into a KV cache of several lanes, and their attention over what it then has.

One operator, so that what is read is what the tokens see and no more: neither all that the cache has room for, nor a
mask as large. ``pi2::write_cache`` is its first half, for tokens whose attention is computed elsewhere. In a ``.pte``
they are kernels (csrc/bindings/executorch/cached_attention.cc); here are their references.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_pi2.ops import load
from torch_pi2.types.config import KV_FORMATS

#: What the formats of a cache are stored in.
KV_DTYPES = dict(zip(KV_FORMATS, (torch.float32, torch.float16, torch.uint8)))
#: Behind the numbers of a row in int8: its scale, a float32.
SCALE_BYTES = 4
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor rows, Tensor(a!) keys, Tensor(b!) values, "
    "float scale, int window, float softcap, Tensor? sinks=None"
)
_WRITE_ARGUMENTS = "Tensor key, Tensor value, Tensor rows, Tensor(a!) keys, Tensor(b!) values"


@functools.cache
def define() -> torch.library.Library:
    """Make the operators known to torch. A second call does nothing."""
    load()
    library = torch.library.Library("pi2", "FRAGMENT")
    for function, arguments, fake in (
        (cached_attention, _ARGUMENTS, _fake),
        (write_cache, _WRITE_ARGUMENTS, lambda key, *_: key.new_empty(len(key), dtype=torch.int64)),
    ):
        name = function.__name__
        library.define(f"{name}({arguments}) -> Tensor")
        library.define(f"{name}.out({arguments}, *, Tensor(c!) out) -> Tensor(c!)")
        library.impl(name, function, "CompositeExplicitAutograd")
        library.impl(f"{name}.out", _out_of(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"pi2::{name}", fake, lib=library)
    return library


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write ``key`` and ``value`` into the cache, then attend to it; N query heads share K key heads in equal groups.

    Args:
        query: float32 ``[B, N, T, D]``. key, value: float32 ``[B, K, T, D]``.
        rows: int64 ``[B, T]``: lane * L + position of each token; those of a sequence are of one lane.
        keys, values: the cache ``[lanes, K, L, D]`` in float32 or float16, or uint8 ``[lanes, K, L, D + 4]``: see
            :func:`packed`.
        scale: what scores are multiplied by. softcap: c tanh(scores / c) follows if it is not 0.
        window: a token sees so many positions, itself the last; 0: all before it.
        sinks: float32 ``[N]``, of each head a score that is in the softmax's sum alone (gpt-oss); None: none.

    Returns:
        float32 ``[B, T, N, D]``.
    """
    lane_B, position_BT = write_cache(key, value, rows, keys, values), rows % keys.shape[2]
    used = int(position_BT.max()) + 1  # most of a cache is room for later tokens
    group = query.shape[1] // key.shape[1]
    key_BNLD, value_BNLD = (unpacked(c[lane_B, :, :used]).repeat_interleave(group, 1) for c in (keys, values))
    slots_L, y = torch.arange(used, device=rows.device), []
    for q_BND, last_B in zip(query.unbind(2), position_BT.unbind(1), strict=True):
        seen_BL = slots_L <= last_B[:, None]
        if window:
            seen_BL = seen_BL & (slots_L > last_B[:, None] - window)
        scores_BNL = scale * (q_BND[:, :, None] @ key_BNLD.mT)[:, :, 0]
        if softcap:
            scores_BNL = softcap * torch.tanh(scores_BNL / softcap)
        scores_BNL = scores_BNL.masked_fill(~seen_BL[:, None], -torch.inf)
        if sinks is not None:
            scores_BNL = torch.cat((scores_BNL, sinks[:, None].expand(len(scores_BNL), -1, 1)), -1)
        weights_BNL = scores_BNL.softmax(-1)[..., :used]
        y.append((weights_BNL[:, :, None] @ value_BNLD.where(seen_BL[:, None, :, None], 0))[:, :, 0])
    return torch.stack(y, 1)


def write_cache(
    key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Write ``key`` and ``value`` into the cache; arguments as of :func:`cached_attention`. Returns lanes ``[B]``."""
    length = keys.shape[2]
    lane_B, position_BT = rows[:, 0] // length, rows % length
    for cache, new_BKTD in ((keys, key), (values, value)):
        cache[lane_B[:, None], :, position_BT] = packed(new_BKTD, cache.dtype).transpose(1, 2)
    return lane_B


def packed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``[..., D]`` as a cache has them.

    uint8 stands for int8: D numbers and their scale, the largest magnitude / 127, as four bytes of a float32. A row
    that has something else than numbers is zeros with a scale of NaN.
    """
    if dtype != torch.uint8:
        return x.to(dtype)
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale, inverse = scale.where(scale.isfinite(), torch.nan), (1 / scale).nan_to_num(0, 0, 0)
    whole = (x * inverse.where(scale.isfinite(), 0)).nan_to_num(0).round().to(torch.int8)
    return torch.cat((whole.view(torch.uint8), scale.contiguous().view(torch.uint8)), -1)


def unpacked(rows: torch.Tensor) -> torch.Tensor:
    """What :func:`packed` packed, in float32."""
    if rows.dtype != torch.uint8:
        return rows.float()
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-SCALE_BYTES].contiguous().view(torch.int8) * scale


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, tokens, width = query.shape
    return query.new_empty((batch, tokens, heads, width))


def _out_of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def write_out(*args: Any, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(function(*args))

    return write_out
