"""``sparse_ffn``: a feed-forward layer of which some neurons are computed."""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.errors import ShapeError, check_choice
from torch_pi2.formats import FLOAT, GGML, QUANTIZED, row_bytes
from torch_pi2.ops import rows as quantized
from torch_pi2.ops.activations import ACTIVATIONS, on_up
from torch_pi2.ops.call import arguments_of, check_hidden


def sparse_ffn(
    x: torch.Tensor,
    neuron_rows: torch.Tensor,
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
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """A feed-forward layer over neurons' rows, of which only some are computed.

    The first ``n_hot`` neurons are hot: always computed. A cold neuron i contributes to token t iff
    ``active`` is None or ``active[t, i - n_hot]``, *and* its gate fires: ``|act(gate)| > threshold`` (for a
    plain FFN ``|act(up)| > threshold``). With ``active=None, threshold=0`` this is the exact gate: equal to
    the dense layer, since what is skipped is multiplied by zero.

    Args:
        x: ``[..., H]`` float32, bfloat16 or float16.
        neuron_rows: ``[I, R, H]``, R = 3 (gate row, up row, down column) or 2 (up row, down column); quantised uint8
            ``[I, R, row_bytes(H)]`` (:mod:`torch_pi2.ops.rows`), or ``[I, bytes]`` where down rows have another format.
        bias_gate, bias_up: ``[I]`` or None; bias_down: ``[H]`` or None; float32, or the dtype of float rows.
        active: ``[..., I - n_hot]`` bool, or None.
        activation: a name in ``ACTIVATIONS``; activation_on_up: also on up (dReLU).
        n_hot: number of hot neurons, 0..I.
        threshold: cut on the gate's magnitude (CATS, arXiv 2404.08763); 0 is lossless.
        weights: how neurons are stored: ``float``, ``int4`` or ``int8``; or ``FIRST+DOWN``: gate and up rows in FIRST,
            ``int4``, ``int8`` or one of ``GGML``, down rows in DOWN, ``int4`` or ``int8``.
        int8_activations: with quantised weights, gate and up see ``x`` rounded to int8 per group of 32 (lossy).
        thresholds: ``[I]`` float32, one for each neuron in the place of ``threshold`` (hot ones know none), or None.

    Returns:
        ``[..., H]`` in ``x``'s dtype; sums are taken in float32.
    """
    act = ACTIVATIONS[activation]
    hidden = x.shape[-1]
    x_TH = x.reshape(-1, hidden).float()
    if int8_activations:
        x_TH = quantized.rounded_activations(x_TH)
    w_IRH = numbers(neuron_rows, weights, hidden)
    intermediate, rows, _ = w_IRH.shape

    def project(row: int, bias: torch.Tensor | None) -> torch.Tensor:
        out_TI = x_TH @ w_IRH[:, row].T
        return out_TI if bias is None else out_TI + bias.float()

    if rows == 3:
        gate_TI = act(project(0, bias_gate))
        up_TI = project(1, bias_up)
        h_TI = gate_TI * on_up(activation, activation_on_up)(up_TI)
    else:
        gate_TI = act(project(0, bias_up))
        h_TI = gate_TI
    fires_TI = ~(
        gate_TI.abs() <= (threshold if thresholds is None else thresholds)
    )  # so that NaN fires and stays visible
    if active is not None:
        fires_TI[:, n_hot:] &= active.reshape(len(x_TH), intermediate - n_hot).bool()
    fires_TI[:, :n_hot] = True
    y_TH = torch.where(fires_TI, h_TI, 0.0) @ w_IRH[:, rows - 1]
    if bias_down is not None:
        y_TH = y_TH + bias_down.float()
    return y_TH.to(x.dtype).reshape(x.shape)


def numbers(neuron_rows: torch.Tensor, weights: str, hidden: int) -> torch.Tensor:
    """float32 ``[I, R, H]``."""
    if weights == FLOAT:
        return neuron_rows.float()
    first, plus, down = weights.partition("+")
    if not plus:
        return quantized.values(neuron_rows, weights, hidden)
    first_IB, down_IB = neuron_rows.split([neuron_rows.shape[1] - row_bytes(down, hidden), row_bytes(down, hidden)], 1)
    first_IRH = quantized.values(first_IB.unflatten(1, (-1, row_bytes(first, hidden))), first, hidden)
    return torch.cat((first_IRH, quantized.values(down_IB, down, hidden)[:, None]), 1)


def fake(*args: Any) -> torch.Tensor:
    call = arguments_of(sparse_ffn, args)
    return ffn_output(call.x, call.neuron_rows, call.weights)


def ffn_output(x: torch.Tensor, neuron_rows: torch.Tensor, weights: str) -> torch.Tensor:
    """What a feed-forward operator returns for ``x``, after the checks that need no data."""
    first, plus, down = weights.partition("+")
    if plus:
        check_choice("weights", first, (*QUANTIZED, *GGML), "Name the format of gate and up rows before the +.")
        check_choice("weights", down, QUANTIZED, "Name the format of down rows behind the +.")
        sizes = [r * row_bytes(first, x.shape[-1]) + row_bytes(down, x.shape[-1]) for r in (2, 1)]
        if neuron_rows.dim() != 2 or neuron_rows.shape[1] not in sizes:
            raise ShapeError(
                "neuron_rows",
                expected=f"[neurons, {sizes[0]} (gate, up, down) or {sizes[1]} (up, down)] in {weights}",
                found=str(tuple(neuron_rows.shape)),
                fix="Put the bytes of a neuron's rows one behind the other.",
            )
        return x.new_empty(x.shape)
    if neuron_rows.dim() != 3 or neuron_rows.shape[1] not in (2, 3):
        raise ShapeError(
            "neuron_rows",
            expected="[neurons, 3 or 2, hidden]",
            found=str(tuple(neuron_rows.shape)),
            fix="Build them with torch_pi2.layers.ffn.",
        )
    if weights in QUANTIZED:
        wanted = row_bytes(weights, x.shape[-1])
        if neuron_rows.shape[2] != wanted:
            raise ShapeError(
                "neuron_rows",
                expected=f"rows of {wanted} bytes (hidden size {x.shape[-1]} of x in {weights})",
                found=str(neuron_rows.shape[2]),
                fix="Pass hidden states of this model and the weights it was quantised to.",
            )
    else:
        check_hidden(x, neuron_rows.shape[2])
    return x.new_empty(x.shape)
