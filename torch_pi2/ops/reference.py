"""What the operators compute, in a few lines anyone can read. Kernels are tested against these."""

from __future__ import annotations

import torch

from torch_pi2.ops import rows as quantized
from torch_pi2.ops.activations import ACTIVATIONS


def sparse_ffn(
    x: torch.Tensor,
    bundles: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_down: torch.Tensor | None,
    active: torch.Tensor | None,
    activation: str,
    activation_on_up: bool,
    n_hot: int,
    threshold: float,
    weights: str = "float",
    int8_activations: bool = False,
) -> torch.Tensor:
    """A feed-forward layer over neuron bundles, of which only some are computed.

    The first ``n_hot`` neurons are hot: always computed. A cold neuron i contributes to token t iff
    ``active`` is None or ``active[t, i - n_hot]``, *and* its gate fires: ``|act(gate)| > threshold`` (for a
    plain FFN ``|act(up)| > threshold``). With ``active=None, threshold=0`` this is the exact gate: equal to
    the dense layer, since what is skipped is multiplied by zero.

    Args:
        x: ``[..., H]`` float32, bfloat16 or float16.
        bundles: ``[I, R, H]``, R = 3 (gate row, up row, down column) or 2 (up row, down column); quantised uint8
            ``[I, R, row_bytes(H)]`` (:mod:`torch_pi2.ops.rows`).
        bias_gate, bias_up: ``[I]`` or None; bias_down: ``[H]`` or None; dtype of ``bundles``, or float32 if quantised.
        active: ``[..., I - n_hot]`` bool, or None.
        activation: a name in ``ACTIVATIONS``; activation_on_up: also on up (dReLU).
        n_hot: number of hot neurons, 0..I.
        threshold: cut on the gate's magnitude (CATS, arXiv 2404.08763); 0 is lossless.
        weights: how bundles are stored: ``float``, ``int4`` or ``int8``.
        int8_activations: with quantised weights, gate and up see ``x`` rounded to int8 per group of 32 (lossy).

    Returns:
        ``[..., H]`` in ``x``'s dtype; sums are taken in float32.
    """
    act = ACTIVATIONS[activation]
    intermediate, rows, _ = bundles.shape
    hidden = x.shape[-1]
    x_TH = x.reshape(-1, hidden).float()
    if int8_activations:
        x_TH = quantized.rounded_activations(x_TH)
    w_IRH = bundles.float() if weights == "float" else quantized.values(bundles, weights, hidden)

    def project(row: int, bias: torch.Tensor | None) -> torch.Tensor:
        out_TI = x_TH @ w_IRH[:, row].T
        return out_TI if bias is None else out_TI + bias.float()

    if rows == 3:
        gate_TI = act(project(0, bias_gate))
        up_TI = project(1, bias_up)
        h_TI = gate_TI * (act(up_TI) if activation_on_up else up_TI)
    else:
        gate_TI = act(project(0, bias_up))
        h_TI = gate_TI
    fires_TI = ~(gate_TI.abs() <= threshold)  # so that NaN fires and stays visible
    if active is not None:
        fires_TI[:, n_hot:] &= active.reshape(-1, intermediate - n_hot).bool()
    fires_TI[:, :n_hot] = True
    y_TH = torch.where(fires_TI, h_TI, 0.0) @ w_IRH[:, rows - 1]
    if bias_down is not None:
        y_TH = y_TH + bias_down.float()
    return y_TH.to(x.dtype).reshape(x.shape)


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
        weights: format of ``a`` and ``b``, ``int4`` or ``int8``.
        int8_activations: ``x`` and ``relu(a x)`` are seen rounded to int8 per group of 32.
        threshold: on the logit.
    """

    def seen(v: torch.Tensor) -> torch.Tensor:
        return quantized.rounded_activations(v) if int8_activations else v

    z_Tr = torch.relu(seen(x.float()) @ quantized.values(a, weights, x.shape[-1]).T)
    s_TC = seen(z_Tr) @ quantized.values(b, weights, a.shape[0]).T
    return ~((s_TC if b_bias is None else s_TC + b_bias) < threshold)


def predict_signbit(x: torch.Tensor, signs: torch.Tensor, columns: int, margin: float) -> torch.Tensor:
    """Sign-bit predictor (SparseInfer, arXiv 2411.12692): the sign of a sum from the signs of its products.

    Of the H products of a gate row with ``x``, those whose signs differ are taken to be negative, the others to be
    positive; a neuron is predicted active iff ``agreeing >= margin * differing``. The paper's rule (skip where
    ``alpha * agreeing < differing``) with ``margin = 1 / alpha``. A NaN in a token makes all its neurons active.

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


def predicted_ffn(
    x: torch.Tensor,
    bundles: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_down: torch.Tensor | None,
    predictor: list[torch.Tensor],
    kind: str,
    cut: float,
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    n_hot: int,
    threshold: float,
    weights: str = "float",
    int8_activations: bool = False,
) -> torch.Tensor:
    """A prediction and :func:`sparse_ffn` with it as ``active``, in one call.

    Args:
        predictor, kind: ``lowrank`` with ``[a, a_scale, b, b_scale]`` of :func:`predict_lowrank`, ``lowrank_q`` with
            ``[a, b]`` of :func:`predict_lowrank_q`, either with a bias as last tensor if there is one; ``signbit`` with
            ``[signs]`` of :func:`predict_signbit`.
        cut: threshold of a low-rank predictor, margin of a sign-bit one.
        predictor_weights, predictor_int8_activations: of ``lowrank_q``; others ignore them.
    """
    if kind == "signbit":
        active = predict_signbit(x, predictor[0], x.shape[-1], cut)
    elif kind == "lowrank":
        a, a_scale, b, b_scale, *bias = predictor
        active = predict_lowrank(x, a, a_scale, b, b_scale, bias[0] if bias else None, cut)
    else:
        a, b, *bias = predictor
        active = predict_lowrank_q(
            x, a, b, bias[0] if bias else None, predictor_weights, predictor_int8_activations, cut
        )
    layer = (active, activation, activation_on_up, n_hot, threshold, weights, int8_activations)
    return sparse_ffn(x, bundles, bias_gate, bias_up, bias_down, *layer)
