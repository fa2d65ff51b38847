"""Feed-forward layers: ``sparse_ffn``, ``predicted_ffn``, ``stored_ffn``, and ``add_parts``, which sums chunks."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from torch_pi2.formats import FLOAT, formats_of, has_two_formats, row_bytes
from torch_pi2.ops import predictors
from torch_pi2.ops.activations import ACTIVATIONS, norm, on_up
from torch_pi2.ops.linear import IN_BLOCKS, from_blocks
from torch_pi2.ops.operators import like_x, operator
from torch_pi2.ops.rows import rounded_activations, values


@operator(like_x, out=True)
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
    """A feed-forward layer stored by neuron, with only some neurons computed.

    The first ``n_hot`` neurons are hot: always computed. A cold neuron i contributes to token t iff ``active`` is None
    or ``active[t, i - n_hot]``, *and* its gate fires: ``|act(gate)| > threshold`` (plain FFN:
    ``|act(up)| > threshold``). With ``active=None, threshold=0`` this is the exact gate: equal to the dense layer,
    since skipped neurons are zero.

    Args:
        x: ``[..., H]`` float32, bfloat16 or float16.
        neuron_rows: ``[I, R, H]``, R = 3 (gate row, up row, down column) or 2 (up row, down column); quantised uint8
            ``[I, R, row_bytes(H)]`` (:mod:`torch_pi2.ops.rows`), or ``[I, bytes]`` where down rows have another format.
            Contiguous; R = 2 also as the transpose of a contiguous ``[2, I, ...]``.
        bias_gate, bias_up: ``[I]`` or None; bias_down: ``[H]`` or None; float32, or the dtype of float rows. With
            ``rms`` in the activation, ``bias_up`` has the norm's weights (None: 1).
        active: ``[..., I - n_hot]`` bool, or None.
        activation: a name in ``ACTIVATIONS``; activation_on_up: also on up (dReLU).
        n_hot: number of hot neurons, 0..I.
        threshold: cut on the gate's magnitude (CATS, arXiv 2404.08763); 0 is lossless.
        weights: format of the neurons: ``float``, ``int4`` or ``int8``; or ``FIRST+DOWN``: gate and up rows in FIRST,
            ``int4``, ``int8`` or one of ``GGML``, down rows in DOWN, ``int4`` or ``int8``. With the suffix ``_blocks``
            the up rows of such a transpose are in blocks (:mod:`torch_pi2.ops.linear`); int8 activations and no mask.
        int8_activations: with quantised weights, gate and up read ``x`` rounded to int8 per group of 32 (lossy).
        thresholds: ``[I]`` float32, one per neuron in place of ``threshold`` (not for hot ones), or None.

    Returns:
        ``[..., H]`` in ``x``'s dtype; sums are taken in float32.
    """
    act = ACTIVATIONS[activation]
    hidden = x.shape[-1]
    x_TH = x.reshape(-1, hidden).float()
    if int8_activations:
        x_TH = rounded_activations(x_TH)
    w_IRH = numbers(neuron_rows, weights, hidden)
    intermediate, rows, _ = w_IRH.shape

    def project(row: int, bias: torch.Tensor | None) -> torch.Tensor:
        out_TI = x_TH @ w_IRH[:, row].T
        return out_TI if bias is None else out_TI + bias.float()

    if rows == 3:
        gate_TI = act(project(0, bias_gate))
        up_TI = project(1, None if norm(activation) else bias_up)
        h_TI = gate_TI * on_up(activation, activation_on_up)(up_TI)
    else:
        gate_TI = act(project(0, bias_up))
        h_TI = gate_TI
    # so that NaN fires and stays visible
    fires_TI = ~(gate_TI.abs() <= (threshold if thresholds is None else thresholds))
    if active is not None:
        fires_TI[:, n_hot:] &= active.reshape(len(x_TH), intermediate - n_hot).bool()
    fires_TI[:, :n_hot] = True
    h_TI = torch.where(fires_TI, h_TI, 0.0)
    if eps := norm(activation):
        h_TI = F.rms_norm(h_TI, (intermediate,), None if bias_up is None else bias_up.float(), eps)
    y_TH = h_TI @ w_IRH[:, rows - 1]
    if bias_down is not None:
        y_TH = y_TH + bias_down.float()
    return y_TH.to(x.dtype).reshape(x.shape)


def numbers(neuron_rows: torch.Tensor, weights: str, hidden: int) -> torch.Tensor:
    """float32 ``[I, R, H]``."""
    if weights == FLOAT:
        return neuron_rows.float()
    if weights.endswith(IN_BLOCKS):
        weights = weights.removesuffix(IN_BLOCKS)
        neuron_rows = torch.stack((from_blocks(neuron_rows[:, 0], weights, hidden), neuron_rows[:, 1]), 1)
    if not has_two_formats(weights):
        return values(neuron_rows, weights, hidden)
    first, down = formats_of(weights)
    first_IB, down_IB = neuron_rows.split([neuron_rows.shape[1] - row_bytes(down, hidden), row_bytes(down, hidden)], 1)
    first_IRH = values(first_IB.unflatten(1, (-1, row_bytes(first, hidden))), first, hidden)
    return torch.cat((first_IRH, values(down_IB, down, hidden)[:, None]), 1)


@operator(like_x, out=True)
def predicted_ffn(
    x: torch.Tensor,
    neuron_rows: torch.Tensor,
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
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """A predictor, and :func:`sparse_ffn` with its result as ``active``, in one call.

    Args:
        predictor, kind: ``lowrank`` with ``[a, a_scale, b, b_scale]`` of :func:`predict_lowrank`, ``lowrank_q`` with
            ``[a, b]`` of :func:`predict_lowrank_q`, either with a bias as last tensor if there is one; ``signbit`` with
            ``[signs]`` of :func:`predict_signbit`; ``mask`` with ``[active]``, a choice made already, contiguous bool
            ``[..., n]``. The last rows (columns of a mask) are those of the cold neurons in plan order; those before
            belong to hot ones.
        cut: threshold of a low-rank predictor, margin of a sign-bit one; a mask has none.
        predictor_weights, predictor_int8_activations: of ``lowrank_q``; others ignore them.
    """
    active = predicted(x, predictor, kind, cut, predictor_weights, predictor_int8_activations)
    active = active[..., active.shape[-1] - (neuron_rows.shape[0] - n_hot) :]
    layer = (active, activation, activation_on_up, n_hot, threshold, weights, int8_activations, thresholds)
    return sparse_ffn(x, neuron_rows, bias_gate, bias_up, bias_down, *layer)


def predicted(
    x: torch.Tensor, predictor: list, kind: str, cut: float, weights: str, int8: bool, ops: Any = predictors
) -> torch.Tensor:
    """Neurons that :func:`predicted_ffn`'s predictor selects, bool ``[..., rows]``; ``ops``: references or kernels."""
    if kind == "mask":
        mask = predictor[0]
    elif kind == "signbit":
        mask = ops.predict_signbit(x, predictor[0], x.shape[-1], cut)
    elif kind == "lowrank":
        a, a_scale, b, b_scale, *bias = predictor
        mask = ops.predict_lowrank(x, a, a_scale, b, b_scale, bias[0] if bias else None, cut)
    else:
        a, b, *bias = predictor
        mask = ops.predict_lowrank_q(x, a, b, bias[0] if bias else None, weights, int8, cut)
    return mask


def _stored(call: SimpleNamespace) -> torch.Tensor:
    if not call.parts:
        return like_x(call)
    x: torch.Tensor = call.x
    return x.new_empty((call.parts, x.numel() // x.shape[-1], x.shape[-1]), dtype=torch.float32)


@operator(_stored)
def stored_ffn(
    x: torch.Tensor,
    reader: Any,
    layer: int,
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
    int8_activations: bool = False,
    first: int = 0,
    thresholds: torch.Tensor | None = None,
    parts: int = 0,
) -> torch.Tensor:
    """The feed-forward layer whose neurons are those of ``layer`` in a store: ``x [..., H]`` -> ``[..., H]``.

    The result, whatever is cached, is that of ``predicted_ffn`` (``kind`` ``none``: ``sparse_ffn``).

    Args:
        reader: a ``torch_pi2.store.storefile.StoreReader``; the operator takes the number of an open store.
        predictor, kind: also ``gate`` with ``[rows]``, the first rows of all neurons, ``[I, H]`` or quantised: the same
            bits as ``none``, and of fewer than ``constants().gemm_tokens`` tokens only neurons that fire are read.
        first: number of first neurons in plan order that are computed elsewhere; not a multiple of 64 changes bits.
        parts: 0: the result. Else the number of the layer's chunks: their sums are returned, float32 ``[parts, T, H]``,
            without the down bias, for fewer tokens than ``constants().gemm_tokens``. Chunks of a shard's layer
            (:mod:`torch_pi2.types.shard`) have the size of the whole layer's.
        The others: see :func:`torch_pi2.ops.predicted_ffn`.
    """
    neuron_rows = reader.as_computed(reader.read_layer(layer))[first:]
    gate, up, own = (None if values is None else values[first:] for values in (bias_gate, bias_up, thresholds))
    hot, neurons = max(0, n_hot - first), len(neuron_rows)
    weights = reader.operand_of(reader.keys[layer])
    active = None
    if kind not in ("none", "gate"):
        marks = predicted(x, predictor, kind, cut, predictor_weights, predictor_int8_activations)
        active = marks[..., marks.shape[-1] - (neurons - hot) :]
    how = (activation, activation_on_up)
    if not parts:
        settings = (*how, hot, threshold, weights, int8_activations, own)
        return sparse_ffn(x, neuron_rows, gate, up, bias_down, active, *settings)
    size, sums = reader.entries[layer].chunk or torch.ops.pi2.chunk_neurons(neurons), []
    for at in range(0, neurons, size):
        end = min(at + size, neurons)
        here = [None if values is None else values[at:end] for values in (gate, up, own)]
        cold = None if active is None else active[..., max(0, at - hot) : max(0, end - hot)]
        settings = (*how, min(max(hot - at, 0), end - at), threshold, weights, int8_activations, here[2])
        part = sparse_ffn(x.float(), neuron_rows[at:end], here[0], here[1], None, cold, *settings)
        sums.append(part.view(-1, x.shape[-1]))
    return torch.stack(sums)


@operator(lambda call: call.like.new_empty(call.like.shape))
def add_parts(parts: torch.Tensor, order: list[int], bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The sum of ``parts[i]``, float32 ``[P, T, H]``, for i in ``order``, one by one from zero, and of ``bias``
    (``[H]`` or None): the bits are those of a layer that sums its own chunks. ``like``: ``[..., H]`` of T tokens: gives
    shape and dtype.
    """
    y = torch.zeros_like(parts[0])
    for part in order:
        y = y + parts[part]
    if bias is not None:
        y = y + bias.float()
    return y.to(like.dtype).view(like.shape)
