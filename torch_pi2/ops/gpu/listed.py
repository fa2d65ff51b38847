"""Feed-forward layers and mixtures of them by the kernels that list neurons first: what both operators launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torch_pi2.errors import check_choice
from torch_pi2.formats import FLOAT, FORMATS, QUANTIZED
from torch_pi2.ops import rows as quantized
from torch_pi2.ops.activations import check_plain
from torch_pi2.ops.predict_signbit import most_differing

#: What no predictor is called.
NO_PREDICTOR = "none"
#: Tokens that are computed together: sums have 256 rows a token.
MOST_TOKENS = 64
#: Numbers of rows that a program takes at once, of :data:`kernels.NEURONS` neurons: some 8 to 16 KB on their way.
BLOCKS_OF_PART = {FLOAT: 1024, "int4": 2048, "int8": 1024}
#: The same of a tile's neurons, and numbers of an output.
BLOCK_OF_TILE, BLOCK_OF_SUM = 128, 64
#: Words of 32 signs of a tile's neurons, and sums of other programs, that are on their way at a time.
BLOCK_OF_SIGNS, TOGETHER = 32, 32
#: Warps of a program of :func:`kernels.listed_ffn`: as few registers a thread as let two of them share a processor.
WARPS = 8


class Routed(NamedTuple):
    """Which experts tokens go to, int64, and how these are weighed, in any float dtype; both contiguous."""

    index_Tk: torch.Tensor
    routing_Tk: torch.Tensor


def power_of_two(least: int) -> int:
    """The least one that is no less."""
    return 1 << max(0, least - 1).bit_length()


def block_of_part(form: str, columns: int) -> int:
    return min(BLOCKS_OF_PART[form], max(32, power_of_two(columns)))


def kernel_rows(tensor: torch.Tensor, weights: str, columns: int) -> tuple[torch.Tensor, torch.Tensor, int, str]:
    """What kernels take of rows: the numbers, the same memory as scales, elements of a row, format."""
    if weights in ("", FLOAT):  # a layer has no name for the format of a predictor in int8 steps
        return tensor, tensor, columns, FLOAT
    return tensor, tensor.view(torch.float16), FORMATS[weights].row_bytes(columns), weights


def rounded(v: torch.Tensor) -> torch.Tensor:
    return quantized.rounded_activations(v).contiguous()


def parts_of(tokens: int) -> Iterator[slice]:
    """Tokens that are computed together."""
    for first in range(0, tokens, MOST_TOKENS):
        yield slice(first, min(first + MOST_TOKENS, tokens))


def compute(
    y_TH: torch.Tensor,
    x_TH: torch.Tensor,
    neuron_rows: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_down: torch.Tensor | None,
    active_TC: torch.Tensor | None,
    predictor: list[torch.Tensor],
    kind: str,
    cut: Any,
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    n_hot: int,
    threshold: Any,
    weights: str,
    int8_activations: bool,
    routed: Routed | None = None,
) -> None:
    """Into ``y_TH`` the results of contiguous tokens ``x_TH`` (one at least), of which all sums have room.

    The others as :func:`torch_pi2.ops.gpu.gathered_ffn.launch` has them; with ``routed`` as
    :func:`torch_pi2.ops.gpu.gathered_experts.launch`: neurons and predictors stacked, cuts and thresholds in memory.
    """
    from torch_pi2.ops.gpu import kernels

    check_choice("weights on a GPU", weights, (FLOAT, *QUANTIZED), "Rows of two formats are for a CPU: move it there.")
    check_plain(activation)
    tokens, hidden = x_TH.shape
    intermediate, rows = neuron_rows.shape[-3:-1]
    slots = 1
    of_experts: dict[str, Any] = {}
    weighed: dict[str, Any] = {}
    if routed is not None:
        slots = routed.index_Tk.shape[1]
        of_experts = {"experts": routed.index_Tk, "SLOTS": slots, "EXPERTS": len(neuron_rows)}
        weighed = {"routing": routed.routing_Tk}
    pairs = tokens * slots
    tiles, programs = -(-intermediate // kernels.TILE), max(1, kernels.PARTS // slots)
    most_tiles = power_of_two(tiles)
    lists = x_TH.new_empty((pairs, tiles, kernels.TILE), dtype=torch.int32)
    counts = x_TH.new_empty((pairs, tiles), dtype=torch.int32)
    gates: torch.Tensor | None = None
    seen_TH = rounded(x_TH) if int8_activations else x_TH
    held, scales, row, form = kernel_rows(neuron_rows, weights, hidden)
    if kind == "signbit":
        signs = predictor[0].view(torch.int32)
        most = most_differing(hidden, cut) if routed is None else cut
        kernels.list_signed[(tiles, pairs)](
            x_TH, signs, lists, counts, most, signs.shape[-2], n_hot, intermediate, tiles,
            H=hidden, WORDS=signs.shape[-1], TILE=kernels.TILE, BLOCK=BLOCK_OF_SIGNS, **of_experts,
        )  # fmt: skip
    elif active_TC is not None:
        mask_TC = active_TC.contiguous().view(torch.uint8)
        kernels.list_masked[(tiles, pairs)](
            mask_TC, lists, counts, mask_TC.shape[1], n_hot, intermediate, tiles, TILE=kernels.TILE
        )
    elif kind == NO_PREDICTOR:
        gates = x_TH.new_empty((pairs, tiles, kernels.TILE), dtype=torch.float32)
        kernels.list_fired[(tiles, pairs)](
            seen_TH, held, scales, bias_gate if rows == 3 else bias_up, lists, gates, counts,
            threshold, n_hot, intermediate, tiles,
            H=hidden, R=rows, ROW=row, FORMAT=form, ACTIVATION=activation, TILE=kernels.TILE, BLOCK=BLOCK_OF_TILE,
            **of_experts,
        )  # fmt: skip
    else:
        a, a_scale, b, b_scale, bias = _low_rank(predictor, kind)
        of_a = kernel_rows(a, predictor_weights, hidden)
        rank = a.shape[-2]
        z_Pr = x_TH.new_empty((pairs, rank), dtype=torch.float32)
        seen = rounded(x_TH) if predictor_int8_activations else x_TH
        kernels.project[(-(-rank // kernels.NEURONS), pairs)](
            seen, of_a[0], of_a[1], a_scale, None, z_Pr, rank,
            H=hidden, ROW=of_a[2], FORMAT=of_a[3], RELU=True, N=kernels.NEURONS,
            BLOCK=block_of_part(of_a[3], hidden), **of_experts,
        )  # fmt: skip
        z_Pr = rounded(z_Pr) if predictor_int8_activations else z_Pr
        of_b = kernel_rows(b, predictor_weights, rank)
        kernels.list_predicted[(tiles, pairs)](
            z_Pr, of_b[0], of_b[1], b_scale, bias, lists, counts, cut, b.shape[-2], n_hot, intermediate, tiles,
            RANK=rank, ROW=of_b[2], FORMAT=of_b[3], TILE=kernels.TILE, BLOCK=BLOCK_OF_TILE, **of_experts,
        )  # fmt: skip
    parts = x_TH.new_empty((pairs, programs, hidden), dtype=torch.float32)
    kernels.listed_ffn[(programs, pairs)](
        seen_TH, held, scales, bias_gate, bias_up, lists, gates, counts, parts, threshold, n_hot, intermediate, tiles,
        H=hidden, R=rows, ROW=row, FORMAT=form, ACTIVATION=activation, ON_UP=activation_on_up,
        TILE=kernels.TILE, MOST_TILES=most_tiles, PARTS=programs, N=kernels.NEURONS,
        BLOCK=block_of_part(form, hidden), num_warps=WARPS, **of_experts,
    )  # fmt: skip
    kernels.add_parts[(-(-hidden // BLOCK_OF_SUM), tokens)](
        parts, bias_down, counts, y_TH, tiles,
        H=hidden, MOST_TILES=most_tiles, PARTS=programs, N=kernels.NEURONS, TOGETHER=TOGETHER, BLOCK=BLOCK_OF_SUM,
        **of_experts, **weighed,
    )  # fmt: skip


def _low_rank(predictor: list[torch.Tensor], kind: str) -> tuple[Any, ...]:
    """a, a_scale, b, b_scale, bias: what there is of them."""
    if kind == "lowrank":
        a, a_scale, b, b_scale, *bias = predictor
        return a, a_scale, b, b_scale, bias[0] if bias else None
    a, b, *bias = predictor
    return a, None, b, None, bias[0] if bias else None
