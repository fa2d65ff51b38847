"""``predict_lowrank``, ``predict_lowrank_q`` and ``predict_signbit``: which cold neurons will fire."""

from types import SimpleNamespace

import torch

from torch_pi2.ops.linear import IN_BLOCKS, from_blocks
from torch_pi2.ops.operators import operator
from torch_pi2.ops.rows import rounded_activations, values

#: Kind of a layer without a predictor.
NO_PREDICTOR = "none"


def _mask(x: torch.Tensor, cold: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], cold), dtype=torch.bool)


@operator(lambda call: _mask(call.x, call.b.shape[0]))
def predict_lowrank(
    x: torch.Tensor,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_bias: torch.Tensor | None,
    threshold: float,
) -> torch.Tensor:
    """Low-rank activation predictor ``b relu(a x) + bias >= threshold`` (PowerInfer, LLM in a flash).

    Args:
        x: ``[..., H]``; a: ``[r, H]`` int8 with ``a_scale [r]`` float32; b: ``[C, r]`` int8 with
            ``b_scale [C]`` float32; b_bias: ``[C]`` float32 or None.
        threshold: on the logit.

    Returns:
        bool ``[..., C]``: which cold neurons are predicted to fire (a NaN score counts as firing).
    """
    hidden = a.shape[1]
    z_Tr = torch.relu(x.reshape(-1, hidden).float() @ a.float().T * a_scale)
    s_TC = z_Tr @ b.float().T * b_scale
    if b_bias is not None:
        s_TC = s_TC + b_bias
    return (~(s_TC < threshold)).reshape(*x.shape[:-1], b.shape[0])


def _rows(call: SimpleNamespace) -> torch.Tensor:
    shifted = call.weights.endswith(IN_BLOCKS) and call.b_bias is not None
    return _mask(call.x, (call.b_bias if shifted else call.b).shape[0])


@operator(_rows)
def predict_lowrank_q(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    b_bias: torch.Tensor | None,
    weights: str,
    int8_activations: bool,
    threshold: float,
) -> torch.Tensor:
    """:func:`predict_lowrank` over rows quantised in groups.

    Args:
        x: ``[..., H]``; a: uint8 ``[r, row_bytes(H)]``; b: uint8 ``[C, row_bytes(r)]``; b_bias: float32
            ``[C]`` or None.
        weights: format of ``a`` and ``b``, ``int4`` or ``int8``; ``int4_blocks``, ``int8_blocks``: both in blocks of
            16 rows (:mod:`torch_pi2.ops.linear`; int8 activations only), where b may have rows before those with a
            bias.
        int8_activations: ``x`` and ``relu(a x)`` are rounded to int8 per group of 32.
        threshold: on the logit.
    """

    if weights.endswith(IN_BLOCKS):
        weights = weights.removesuffix(IN_BLOCKS)
        a, b = from_blocks(a, weights, x.shape[-1]), from_blocks(b, weights, len(a))
        b = b if b_bias is None else b[len(b) - len(b_bias) :]

    def seen(v: torch.Tensor) -> torch.Tensor:
        return rounded_activations(v) if int8_activations else v

    z_Tr = torch.relu(seen(x.float()) @ values(a, weights, x.shape[-1]).T)
    s_TC = seen(z_Tr) @ values(b, weights, a.shape[0]).T
    return ~((s_TC if b_bias is None else s_TC + b_bias) < threshold)


@operator(lambda call: _mask(call.x, call.signs.shape[0]))
def predict_signbit(x: torch.Tensor, signs: torch.Tensor, columns: int, margin: float) -> torch.Tensor:
    """Sign-bit predictor (SparseInfer, arXiv 2411.12692): the sign of a dot product from the signs of its terms.

    Of the H terms of a gate row times ``x``, those with differing signs count as negative, others as positive; a neuron
    is predicted active iff ``agreeing >= margin * differing``. The paper skips a neuron if
    ``alpha * agreeing < differing``, so ``margin = 1 / alpha``. A NaN in a token makes all its neurons active.

    Args:
        x: ``[..., H]``; signs: uint8 ``[C, ceil(H / 64) * 8]``, bit k % 8 of byte k // 8 is 1 where weight k < 0.
        columns: H; margin: 0 predicts everything active.

    Returns:
        bool ``[..., C]``.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=signs.device)
    bits_CH = (signs[..., None] >> shifts & 1).flatten(-2)[:, :columns].float()
    bits_TH = (x < 0).float()
    differing = bits_TH @ (1 - bits_CH).T + (1 - bits_TH) @ bits_CH.T
    active = (columns - differing).double() >= margin * differing.double()
    return active | x.isnan().any(-1, keepdim=True)
