"""``recurrence`` and ``conv_step``: one token of layers with recurrent states."""

import torch
import torch.nn.functional as F

from torch_pi2.ops.operators import like_x, operator


@operator(lambda call: call.v.new_empty(call.v.shape))
def recurrence(
    state: torch.Tensor,
    decay: torch.Tensor,
    v: torch.Tensor,
    k: torch.Tensor,
    r: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """One token of linear attention: ``S <- S diag(decay) + (S a) b' + v k'``, then ``y = S r``, of each head. So do
    Mamba-2 (arXiv 2405.21060, without a and b), the gated delta rule (arXiv 2412.06464) and RWKV-7 (arXiv 2503.14456).

    Args:
        state: ``S``, contiguous ``[B, heads, P, N]``, which is changed; transposed: ``[B, heads, N, P]``.
        decay: ``[B, heads, N]``, or ``[B, heads, 1]`` for all columns.
        v: ``[B, heads, P]``; k, r: ``[B, groups, N]``, shared by groups of heads that follow each other.
        a, b: ``[B, heads, N]``, or both None.

    Returns:
        ``y``, ``[B, heads, P]``. All are float32. The bits do not depend on other sequences or the number of threads.
    """
    s, shared = (state.mT if transposed else state), state.shape[1] // k.shape[1]
    k, r = (t.repeat_interleave(shared, 1) for t in (k, r))
    after = s * decay[:, :, None] + v[..., None] * k[:, :, None]
    if a is not None and b is not None:
        after = after + (s @ a[..., None]) * b[:, :, None]
    s.copy_(after)
    return (after @ r[..., None]).squeeze(-1)


@operator(like_x)
def conv_step(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    """One token of a causal convolution of each channel (Mamba's, arXiv 2312.00752, section 3.4).

    Args:
        x: ``[B, channels]`` float32, bfloat16 or float16, as all are; state: contiguous ``[B, channels, length]``, the
            tokens before, which ``x`` is appended to; weight: ``[channels, taps]``, taps at most length + 1.
        bias: ``[channels]`` or None. silu: apply SiLU.

    Returns:
        ``[B, channels]``; sums are in float32.
    """
    seen = torch.cat((state, x[..., None]), -1)
    state.copy_(seen[..., 1:])
    y = (seen[..., -weight.shape[1] :].float() * weight.float()).sum(-1)
    y = y if bias is None else y + bias.float()
    return (F.silu(y) if silu else y).to(x.dtype)
