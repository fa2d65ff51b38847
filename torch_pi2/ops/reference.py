"""What the operators compute, in a few lines anyone can read. Kernels are tested against these."""

from __future__ import annotations

import torch

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
) -> torch.Tensor:
    """A feed-forward layer over neuron bundles, of which only some are computed.

    The first ``n_hot`` neurons are hot: always computed. A cold neuron i contributes to token t iff
    ``active`` is None or ``active[t, i - n_hot]``, *and* its gate fires: ``|act(gate)| > threshold`` (for a
    plain FFN ``|act(up)| > threshold``). With ``active=None, threshold=0`` this is the exact gate: equal to
    the dense layer, since what is skipped is multiplied by zero.

    Args:
        x: ``[..., H]`` float32, bfloat16 or float16.
        bundles: ``[I, R, H]``, R = 3 (gate row, up row, down column) or 2 (up row, down column).
        bias_gate, bias_up: ``[I]`` or None; bias_down: ``[H]`` or None; dtype of ``bundles``.
        active: ``[..., I - n_hot]`` bool, or None.
        activation: a name in ``ACTIVATIONS``; activation_on_up: also on up (dReLU).
        n_hot: number of hot neurons, 0..I.
        threshold: cut on the gate's magnitude (CATS, arXiv 2404.08763); 0 is lossless.

    Returns:
        ``[..., H]`` in ``x``'s dtype; sums are taken in float32.
    """
    act = ACTIVATIONS[activation]
    intermediate, rows, hidden = bundles.shape
    x_TH = x.reshape(-1, hidden).float()
    w_IRH = bundles.float()

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
