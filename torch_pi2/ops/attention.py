"""``attention``: new tokens of a step or prompt over a KV cache."""

from types import SimpleNamespace

import torch

from torch_pi2.ops.operators import operator


def _result(call: SimpleNamespace) -> torch.Tensor:
    return call.query.new_empty(call.query.transpose(1, 2).shape)


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
            K. Strided tensors are read in place if D is dense.
        mask: bool ``[B or 1, 1, T, L]``, True where a token sees; None: see causal.
        scale: factor of the scores.
        causal: without a mask, token t sees positions 0 to t; else all positions.
        sinks: float32 ``[N]``, a score per head that only counts in the softmax's sum (gpt-oss); or None.

    Returns:
        ``[B, T, N, D]`` in the dtype of query; sums are in float32. Zeros for a token that sees nothing.
    """
    groups = query.shape[1] // key.shape[1]
    key_BNLD, value_BNLD = (t.float().repeat_interleave(groups, 1) for t in (key, value))
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    scores_BNTL = scale * query.float() @ key_BNLD.mT
    if mask is not None:
        scores_BNTL = scores_BNTL.masked_fill(~mask, -torch.inf)
        value_BNLD = value_BNLD.where(mask.any(2).unsqueeze(-1), 0)  # NaN times a weight of zero is NaN
    if sinks is not None:
        sinks_BNT1 = sinks.to(scores_BNTL)[:, None, None].expand(*scores_BNTL.shape[:3], 1)
        scores_BNTL = torch.cat((scores_BNTL, sinks_BNT1), -1)
    weights_BNTL = scores_BNTL.softmax(-1)[..., : key.shape[2]]
    if mask is not None:
        weights_BNTL = weights_BNTL.where(mask.any(-1, keepdim=True), 0)
    return (weights_BNTL @ value_BNLD).transpose(1, 2).contiguous().to(query.dtype)
