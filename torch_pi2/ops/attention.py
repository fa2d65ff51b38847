"""``attention``: new tokens of a step or prompt over a KV cache; ``write_kv``: appending to a quantised one."""

from types import SimpleNamespace

import torch

from torch_pi2.formats import FORMATS, KV
from torch_pi2.ops.operators import operator
from torch_pi2.ops.quantize import quantize
from torch_pi2.ops.rows import values

#: Quantised keys and values, and the dtype of their rows.
KV_DTYPES = dict(zip(KV, (torch.int8, torch.uint8), strict=True))
#: An int8 row ends with its scale, a float32.
SCALE_BYTES = 4


def _result(call: SimpleNamespace) -> torch.Tensor:
    return call.query.new_empty(call.query.transpose(1, 2).shape)


def kv_row_bytes(kv: str, width: int) -> int:
    """Bytes of a quantised row of keys or values."""
    return width + SCALE_BYTES if kv == "int8" else FORMATS[kv].row_bytes(width)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """``x [..., D]`` in float32, in the basis of Walsh and Hadamard; the same again is its inverse.

    Runs of as many numbers as the largest power of two that divides D are multiplied by its orthonormal symmetric
    matrix. Products of two rotated vectors are those of the vectors, and what is large in one number is spread over
    all, which few bits hold better (QuaRot, arXiv 2404.00456).
    """
    size = x.shape[-1] & -x.shape[-1]
    y, half = x.float(), 1
    while half < size:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).reshape(x.shape)
        half *= 2
    return y * size**-0.5


def packed(x: torch.Tensor, kv: str) -> torch.Tensor:
    """Rows ``[..., D]`` of finite numbers or not in a format of :data:`KV_DTYPES`, as they are (not rotated).

    int8: D values, then their float32 scale, the largest magnitude / 127. int4: as :func:`torch_pi2.ops.quantize`. Rows
    with NaN or infinity (int4: or more than 524,032) become zeros with NaN scales.
    """
    if kv == "int4":
        flat = x.float().flatten(0, -2)
        finite = (flat.abs() <= 8 * 65504).all(-1, keepdim=True)  # what has a float16 scale
        rows, scales = quantize(flat.where(finite, 0), kv), kv_row_bytes(kv, x.shape[-1]) // 9
        rows[:, -scales:] = torch.where(finite, rows[:, -scales:].view(torch.float16), torch.nan).view(torch.uint8)
        return rows.view(*x.shape[:-1], -1)
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale, inverse = scale.where(scale.isfinite(), torch.nan), (1 / scale).nan_to_num(0, 0, 0)
    whole = (x * inverse.where(scale.isfinite(), 0)).nan_to_num(0).round().to(torch.int8)
    return torch.cat((whole, scale.contiguous().view(torch.int8)), -1)


def unpacked(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Inverse of :func:`packed`, in float32; by the dtype of ``rows``, floats are themselves."""
    if rows.dtype == torch.int8:
        return rows[..., :-SCALE_BYTES] * rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    if rows.dtype == torch.uint8:
        return values(rows.flatten(0, -2), "int4", width).float().view(*rows.shape[:-1], width)
    return rows.float()


@operator(lambda call: None)
def write_kv(x: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> None:
    """Write keys or values of new tokens into a quantised cache, rotated (:func:`rotated`) and packed.

    Args:
        x: ``[B, K, T, D]`` float32, bfloat16 or float16.
        rows: the cache ``[B, K, L, bytes of a row]``, int8 or uint8 for int4 (:func:`packed`), which is changed.
        at: int64 ``[B, T]``, the position of each token.
    """
    new = packed(rotated(x), "int8" if rows.dtype == torch.int8 else "int4")
    rows[torch.arange(len(x))[:, None], :, at] = new.transpose(1, 2)


@operator(_result)
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of T tokens over the positions they see; N query heads share K key heads in equal groups.

    A token's bits depend only on its query and on the positions it sees, not on other tokens and sequences, on masked
    positions (which may be anything, NaN too), or on the number of threads. The end of the cache that no token sees is
    not read. Softmax is computed online, block by block (arXiv 1805.02867), for a tile of queries at a time (arXiv
    2205.14135); for few tokens the length is split between threads (arXiv 2311.01282).

    Args:
        query: ``[B, N, T, D]`` float32, bfloat16 or float16; key, value: ``[B, K, L, D]`` of its dtype, N a multiple of
            K. Strided tensors are read in place if D is dense. int8 or uint8: as :func:`write_kv` writes them.
        mask: bool ``[B or 1, 1, T, L]``, True where a token sees; None: see causal.
        scale: factor of the scores.
        causal: without a mask, token t sees positions 0 to t; else all positions.
        sinks: float32 ``[N]``, a score per head that only counts in the softmax's sum (gpt-oss); or None.

    Returns:
        ``[B, T, N, D]`` in the dtype of query; sums are in float32. Zeros for a token that sees nothing.
    """
    groups, quantized = query.shape[1] // key.shape[1], key.dtype in KV_DTYPES.values()
    key_BNLD, value_BNLD = (unpacked(t, query.shape[-1]).repeat_interleave(groups, 1) for t in (key, value))
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    scores_BNTL = scale * (rotated(query) if quantized else query.float()) @ key_BNLD.mT
    if mask is not None:
        scores_BNTL = scores_BNTL.masked_fill(~mask, -torch.inf)
        value_BNLD = value_BNLD.where(mask.any(2).unsqueeze(-1), 0)  # NaN times a weight of zero is NaN
    if sinks is not None:
        sinks_BNT1 = sinks.to(scores_BNTL)[:, None, None].expand(*scores_BNTL.shape[:3], 1)
        scores_BNTL = torch.cat((scores_BNTL, sinks_BNT1), -1)
    weights_BNTL = scores_BNTL.softmax(-1)[..., : key.shape[2]]
    if mask is not None:
        weights_BNTL = weights_BNTL.where(mask.any(-1, keepdim=True), 0)
    y_BNTD = weights_BNTL @ value_BNLD
    return (rotated(y_BNTD) if quantized else y_BNTD).transpose(1, 2).contiguous().to(query.dtype)
