"""``gathered_ffn``: a feed-forward layer on a GPU, of which listed neurons are computed, as Triton kernels.

An opaque operator to ``torch.compile``: of a ``triton_op`` Inductor takes the weights for written to (an address that
comes from a sum of what was read), and copies them in each call. On the CPU it is ``sparse_ffn`` or ``predicted_ffn``
of the C++ library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op

from torch_pi2.formats import FLOAT, FORMATS
from torch_pi2.ops import rows as quantized
from torch_pi2.ops.predict_signbit import predict_signbit
from torch_pi2.ops.sparse_ffn import ffn_output

#: What no predictor is called.
NO_PREDICTOR = "none"
#: Tokens that are computed together.
MOST_TOKENS = 64
#: Numbers of rows that a program takes at once, of :data:`kernels.NEURONS` neurons: some 8 to 16 KB on their way.
BLOCKS_OF_PART = {FLOAT: 1024, "int4": 2048, "int8": 1024}
#: The same of a tile's neurons, and numbers of an output.
BLOCK_OF_TILE, BLOCK_OF_SUM = 128, 256
#: Warps of a program of :func:`kernels.listed_ffn`: as few registers a thread as let two of them share a processor.
WARPS = 8


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def block_of_part(form: str, columns: int) -> int:
    return min(BLOCKS_OF_PART[form], max(32, _power_of_two(columns)))


def kernel_rows(tensor: torch.Tensor, weights: str, columns: int) -> tuple[torch.Tensor, torch.Tensor, int, str]:
    """What kernels take of rows: the numbers, the same memory as scales, elements of a row, format."""
    if weights in ("", FLOAT):  # a layer has no name for the format of a predictor in int8 steps
        return tensor, tensor, columns, FLOAT
    return tensor, tensor.view(torch.float16), FORMATS[weights].row_bytes(columns), weights


def launch(
    x: torch.Tensor,
    neuron_rows: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_down: torch.Tensor | None,
    active: torch.Tensor | None,
    predictor: list[torch.Tensor],
    kind: str,
    cut: float,
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    n_hot: int,
    threshold: float,
    weights: str,
    int8_activations: bool,
) -> torch.Tensor:
    """:func:`~torch_pi2.ops.sparse_ffn.sparse_ffn` with ``active``, or
    :func:`~torch_pi2.ops.predicted_ffn.predicted_ffn` where ``kind`` is not ``none``; arguments as there.

    A token's result has the same bits each time and in any company; sums are taken in float32, in another order than on
    the CPU.
    """
    from torch_pi2.ops.gpu import kernels

    hidden, (intermediate, rows) = x.shape[-1], neuron_rows.shape[:2]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x_TH = x.reshape(-1, hidden).contiguous()
    tokens = len(x_TH)
    if tokens == 0:
        return y
    if tokens > MOST_TOKENS:  # sums have 256 rows a token
        for first in range(0, tokens, MOST_TOKENS):
            part = slice(first, first + MOST_TOKENS)
            mask = None if active is None else active.reshape(tokens, -1)[part]
            y.view(tokens, hidden)[part] = launch(
                x_TH[part], neuron_rows, bias_gate, bias_up, bias_down, mask, predictor, kind, cut, predictor_weights,
                predictor_int8_activations, activation, activation_on_up, n_hot, threshold, weights, int8_activations,
            )  # fmt: skip
        return y
    tiles = -(-intermediate // kernels.TILE)
    most_tiles = _power_of_two(tiles)
    lists = x.new_empty((tokens, tiles, kernels.TILE), dtype=torch.int32)
    counts = x.new_empty((tokens, tiles), dtype=torch.int32)
    gates: torch.Tensor | None = None
    seen_TH = rounded(x_TH) if int8_activations else x_TH
    held, scales, row, form = kernel_rows(neuron_rows, weights, hidden)
    if kind == "signbit":
        with torch.autocast(x.device.type, enabled=False):
            active = predict_signbit(x_TH, predictor[0], hidden, cut)
    if active is not None:
        mask_TC = active.reshape(tokens, -1).contiguous().view(torch.uint8)
        kernels.list_masked[(tiles, tokens)](
            mask_TC, lists, counts, mask_TC.shape[1], n_hot, intermediate, tiles, TILE=kernels.TILE
        )
    elif kind == NO_PREDICTOR:
        gates = x.new_empty((tokens, tiles, kernels.TILE), dtype=torch.float32)
        kernels.list_fired[(tiles, tokens)](
            seen_TH, held, scales, bias_gate if rows == 3 else bias_up, lists, gates, counts,
            threshold, n_hot, intermediate, tiles,
            H=hidden, R=rows, ROW=row, FORMAT=form, ACTIVATION=activation, TILE=kernels.TILE, BLOCK=BLOCK_OF_TILE,
        )  # fmt: skip
    else:
        a, a_scale, b, b_scale, bias = _low_rank(predictor, kind)
        of_a = kernel_rows(a, predictor_weights, hidden)
        rank = len(a)
        z_Tr = x.new_empty((tokens, rank), dtype=torch.float32)
        seen = rounded(x_TH) if predictor_int8_activations else x_TH
        kernels.project[(-(-rank // kernels.NEURONS), tokens)](
            seen, of_a[0], of_a[1], a_scale, None, z_Tr, rank,
            H=hidden, ROW=of_a[2], FORMAT=of_a[3], RELU=True, N=kernels.NEURONS,
            BLOCK=block_of_part(of_a[3], hidden),
        )  # fmt: skip
        z_Tr = rounded(z_Tr) if predictor_int8_activations else z_Tr
        of_b = kernel_rows(b, predictor_weights, rank)
        kernels.list_predicted[(tiles, tokens)](
            z_Tr, of_b[0], of_b[1], b_scale, bias, lists, counts, cut, len(b), n_hot, intermediate, tiles,
            RANK=rank, ROW=of_b[2], FORMAT=of_b[3], TILE=kernels.TILE, BLOCK=BLOCK_OF_TILE,
        )  # fmt: skip
    parts = x.new_empty((tokens, kernels.PARTS, hidden), dtype=torch.float32)
    kernels.listed_ffn[(kernels.PARTS, tokens)](
        seen_TH, held, scales, bias_gate, bias_up, lists, gates, counts, parts, threshold, n_hot, tiles,
        H=hidden, R=rows, ROW=row, FORMAT=form, ACTIVATION=activation, ON_UP=activation_on_up,
        TILE=kernels.TILE, MOST_TILES=most_tiles, PARTS=kernels.PARTS, N=kernels.NEURONS,
        BLOCK=block_of_part(form, hidden), num_warps=WARPS,
    )  # fmt: skip
    kernels.add_parts[(-(-hidden // BLOCK_OF_SUM), tokens)](
        parts, bias_down, counts, y, tiles,
        H=hidden, MOST_TILES=most_tiles, PARTS=kernels.PARTS, N=kernels.NEURONS, BLOCK=BLOCK_OF_SUM,
    )  # fmt: skip
    return y


def rounded(v: torch.Tensor) -> torch.Tensor:
    return quantized.rounded_activations(v).contiguous()


def _low_rank(predictor: list[torch.Tensor], kind: str) -> tuple[Any, ...]:
    """a, a_scale, b, b_scale, bias: what there is of them."""
    if kind == "lowrank":
        a, a_scale, b, b_scale, *bias = predictor
        return a, a_scale, b, b_scale, bias[0] if bias else None
    a, b, *bias = predictor
    return a, None, b, None, bias[0] if bias else None


def _on_the_cpu(
    x: torch.Tensor,
    neuron_rows: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_down: torch.Tensor | None,
    active: torch.Tensor | None,
    predictor: list[torch.Tensor],
    kind: str,
    cut: float,
    predictor_weights: str,
    predictor_int8_activations: bool,
    *settings: Any,
) -> torch.Tensor:
    y: torch.Tensor
    tensors = (x, neuron_rows, bias_gate, bias_up, bias_down)
    if kind == NO_PREDICTOR:
        y = torch.ops.pi2.sparse_ffn(*tensors, active, *settings)
    else:
        of_predictor = (predictor, kind, cut, predictor_weights, predictor_int8_activations)
        y = torch.ops.pi2.predicted_ffn(*tensors, *of_predictor, *settings)
    return y


def _fake(x: torch.Tensor, neuron_rows: torch.Tensor, *others: Any) -> torch.Tensor:
    return ffn_output(x, neuron_rows, others[-2])


def register() -> Any:
    """``torch.ops.pi2.gathered_ffn``, as long as what is returned is kept."""
    op: Any = custom_op("pi2::gathered_ffn", launch, mutates_args=())
    op.register_kernel("cpu")(_on_the_cpu)
    op.register_fake(_fake)
    return op
