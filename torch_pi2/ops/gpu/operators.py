"""Operators on a GPU: feed-forward layers and mixtures by Triton kernels over listed neurons, and ``linear``.

The operators are opaque to ``torch.compile``, as on the CPU: with ``triton_op`` Inductor would take the weights for
written (their addresses come from a sum of loaded values), and copy them in each call.

``linear`` multiplies quantised rows with few tokens in Triton, and with many as floats. The switch is computed, not
measured, as it is for feed-forward layers (:func:`products_from`).
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.library import custom_op

from torch_pi2.errors import UnsupportedModelError, check_choice
from torch_pi2.formats import FLOAT, FORMATS, GGML, QUANTIZED
from torch_pi2.ops import ffn as reference
from torch_pi2.ops.activations import check_plain
from torch_pi2.ops.operators import FAKES, arguments_of
from torch_pi2.ops.predictors import NO_PREDICTOR
from torch_pi2.ops.quantize import dequantize
from torch_pi2.ops.rows import rounded_activations

#: Kinds of predictors with GPU kernels.
KINDS = (NO_PREDICTOR, "lowrank", "lowrank_q")
#: Tokens computed together: there are 256 rows of sums per token.
MOST_TOKENS = 64
#: Values per row that a program loads at once, for :data:`kernels.NEURONS` neurons: 8 to 16 KB in flight.
BLOCKS_OF_PART = {FLOAT: 1024, "int4": 2048, "int8": 1024}
#: The same for a tile's neurons, and values of an output per program.
BLOCK_OF_TILE, BLOCK_OF_SUM = 128, 64
#: Sums of other programs in flight at a time.
TOGETHER = 32
#: Warps per program of :func:`kernels.listed_ffn`: few enough registers that two fit on a multiprocessor.
WARPS = 8

#: Memory for dequantised weights at a time.
TEMPORARY_BYTES = 64 << 20
#: Bytes per value in dequantising: integers, floats, their products with scales, the result's dtype.
_BYTES_OF_NUMBER = 16
#: Share of dequantising's traffic that counts, since kernels have to unpack as well.
_WORTH = 0.75


class Routed(NamedTuple):
    """Experts of tokens, int64, and their routing weights in any float dtype; both contiguous."""

    index_Tk: torch.Tensor
    routing_Tk: torch.Tensor


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least ``least``."""
    return 1 << max(0, least - 1).bit_length()


def block_of_part(form: str, columns: int) -> int:
    return min(BLOCKS_OF_PART[form], max(32, power_of_two(columns)))


def kernel_rows(tensor: torch.Tensor, weights: str, columns: int) -> tuple[torch.Tensor, torch.Tensor, int, str]:
    """Kernel arguments for rows: the tensor, the same memory as scales, elements per row, format."""
    if weights in ("", FLOAT):  # "": an int8 predictor with a scale per row
        return tensor, tensor, columns, FLOAT
    return tensor, tensor.view(torch.float16), FORMATS[weights].row_bytes(columns), weights


def rounded(v: torch.Tensor) -> torch.Tensor:
    return rounded_activations(v).contiguous()


def token_slices(tokens: int) -> Iterator[slice]:
    for first in range(0, tokens, MOST_TOKENS):
        yield slice(first, min(first + MOST_TOKENS, tokens))


def compute(y_TH: torch.Tensor, x_TH: torch.Tensor, call: SimpleNamespace, routed: Routed | None = None) -> None:
    """Write the results of contiguous tokens ``x_TH`` (at least one, few enough for their sums to fit) into ``y_TH``.
    ``call``: arguments of :func:`torch_pi2.ops.ffn.predicted_ffn` by name; with ``routed`` (:func:`gathered_experts`)
    neurons and predictors are stacked, cuts and thresholds are tensors.
    """
    from torch_pi2.ops.gpu import kernels

    fix = "Rows of two formats are for a CPU: move it there."
    check_choice("weights on a GPU", call.weights, (FLOAT, *QUANTIZED), fix)
    check_choice("predictor on a GPU", call.kind, KINDS, "Keep the model on the CPU.")
    check_plain(call.activation)
    tokens, hidden = x_TH.shape
    intermediate, rows = call.neuron_rows.shape[-3:-1]
    slots = 1
    of_experts: dict[str, Any] = {}
    weighed: dict[str, Any] = {}
    if routed is not None:
        slots = routed.index_Tk.shape[1]
        of_experts = {"experts": routed.index_Tk, "SLOTS": slots, "EXPERTS": len(call.neuron_rows)}
        weighed = {"routing": routed.routing_Tk}
    pairs = tokens * slots
    tiles, programs = -(-intermediate // kernels.TILE), max(1, kernels.PARTS // slots)
    most_tiles = power_of_two(tiles)
    lists = x_TH.new_empty((pairs, tiles, kernels.TILE), dtype=torch.int32)
    counts = x_TH.new_empty((pairs, tiles), dtype=torch.int32)
    gates: torch.Tensor | None = None
    seen_TH = rounded(x_TH) if call.int8_activations else x_TH
    held, scales, row, form = kernel_rows(call.neuron_rows.contiguous(), call.weights, hidden)
    if call.kind == NO_PREDICTOR:
        gates = x_TH.new_empty((pairs, tiles, kernels.TILE), dtype=torch.float32)
        kernels.list_fired[(tiles, pairs)](
            seen_TH, held, scales, call.bias_gate if rows == 3 else call.bias_up, lists, gates, counts,
            call.threshold, call.n_hot, intermediate, tiles,
            H=hidden, R=rows, ROW=row, FORMAT=form, ACTIVATION=call.activation, TILE=kernels.TILE, BLOCK=BLOCK_OF_TILE,
            **of_experts,
        )  # fmt: skip
    else:
        a, a_scale, b, b_scale, bias = _low_rank(call.predictor, call.kind)
        of_a = kernel_rows(a, call.predictor_weights, hidden)
        rank = a.shape[-2]
        z_Pr = x_TH.new_empty((pairs, rank), dtype=torch.float32)
        seen = rounded(x_TH) if call.predictor_int8_activations else x_TH
        kernels.project[(-(-rank // kernels.NEURONS), pairs)](
            seen, of_a[0], of_a[1], a_scale, None, z_Pr, rank,
            H=hidden, ROW=of_a[2], FORMAT=of_a[3], RELU=True, N=kernels.NEURONS,
            BLOCK=block_of_part(of_a[3], hidden), **of_experts,
        )  # fmt: skip
        z_Pr = rounded(z_Pr) if call.predictor_int8_activations else z_Pr
        of_b = kernel_rows(b, call.predictor_weights, rank)
        kernels.list_predicted[(tiles, pairs)](
            z_Pr, of_b[0], of_b[1], b_scale, bias, lists, counts, call.cut, b.shape[-2],
            call.n_hot, intermediate, tiles,
            RANK=rank, ROW=of_b[2], FORMAT=of_b[3], TILE=kernels.TILE, BLOCK=BLOCK_OF_TILE, **of_experts,
        )  # fmt: skip
    parts = x_TH.new_empty((pairs, programs, hidden), dtype=torch.float32)
    kernels.listed_ffn[(programs, pairs)](
        seen_TH, held, scales, call.bias_gate, call.bias_up, lists, gates, counts, parts,
        call.threshold, call.n_hot, intermediate, tiles,
        H=hidden, R=rows, ROW=row, FORMAT=form, ACTIVATION=call.activation, ON_UP=call.activation_on_up,
        TILE=kernels.TILE, MOST_TILES=most_tiles, PARTS=programs, N=kernels.NEURONS,
        BLOCK=block_of_part(form, hidden), num_warps=WARPS, **of_experts,
    )  # fmt: skip
    kernels.add_parts[(-(-hidden // BLOCK_OF_SUM), tokens)](
        parts, call.bias_down, counts, y_TH, tiles,
        H=hidden, MOST_TILES=most_tiles, PARTS=programs, N=kernels.NEURONS, TOGETHER=TOGETHER, BLOCK=BLOCK_OF_SUM,
        **of_experts, **weighed,
    )  # fmt: skip


def _low_rank(predictor: list[torch.Tensor], kind: str) -> tuple[Any, ...]:
    """a, a_scale, b, b_scale, bias; None for those the predictor does not have."""
    if kind == "lowrank":
        a, a_scale, b, b_scale, *bias = predictor
        return a, a_scale, b, b_scale, bias[0] if bias else None
    a, b, *bias = predictor
    return a, None, b, None, bias[0] if bias else None


def sparse_ffn(*args: Any) -> torch.Tensor:
    """``torch.ops.pi2.sparse_ffn`` without a mask."""
    call = arguments_of(reference.sparse_ffn, args)
    none: dict[str, Any] = {"predictor": [], "kind": NO_PREDICTOR, "cut": 0.0, "predictor_weights": ""}
    vars(call).update(none, predictor_int8_activations=False)
    if call.active is not None:
        raise _not_here("active", "None: a predictor chooses neurons", "a mask")
    return _layer(call)


def predicted_ffn(*args: Any) -> torch.Tensor:
    return _layer(arguments_of(reference.predicted_ffn, args))


def _not_here(what: str, expected: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{what} on a GPU", expected=expected, found=found, fix="Keep the model on the CPU.")


def _layer(call: SimpleNamespace) -> torch.Tensor:
    """A token's result always has the same bits; sums are in float32, in another order than on the CPU."""
    if call.thresholds is not None:
        raise _not_here("thresholds", "one threshold for a layer", "one for each neuron")
    x: torch.Tensor = call.x
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return y
    y_TH, x_TH = y.view(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]).contiguous()
    for part in token_slices(len(x_TH)):
        compute(y_TH[part], x_TH[part], call)
    return y


def gathered_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    routing: torch.Tensor,
    neuron_rows: torch.Tensor,
    predictor: list[torch.Tensor],
    kind: str,
    cuts: torch.Tensor,
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    thresholds: torch.Tensor,
    weights: str,
    int8_activations: bool,
) -> torch.Tensor:
    """:func:`~torch_pi2.ops.experts.experts_ffn` with its arguments, but ``cuts`` and ``thresholds`` are float64
    tensors ``[E]`` (``cuts`` is ignored for kind ``none``).

    Each pair of a token and one of its slots is computed like a token; kernels read its expert from ``index``, so that
    nothing waits for the GPU. On the CPU it is ``experts_ffn`` of the C++ library.

    An index below 0 adds nothing, like E. A token's result always has the same bits: slots are added in order, in
    float32; within a slot sums have another order than on the CPU.
    """
    call = SimpleNamespace(**locals(), cut=cuts, threshold=thresholds, n_hot=0)
    call.bias_gate = call.bias_up = call.bias_down = None
    y = x.new_zeros(x.shape)
    for part in token_slices(len(x) if index.numel() else 0):
        routed = Routed(index[part].contiguous(), routing[part].contiguous())
        compute(y[part], x[part].contiguous(), call, routed=routed)
    return y


def _experts_on_the_cpu(*args: Any) -> torch.Tensor:
    call = arguments_of(gathered_experts, args)
    call.cuts = [] if call.kind == NO_PREDICTOR else call.cuts.tolist()
    call.thresholds = call.thresholds.tolist()
    return torch.ops.pi2.experts_ffn(*vars(call).values())


def register_gathered_experts() -> Any:
    """Register ``torch.ops.pi2.gathered_experts`` for the lifetime of the result."""
    op: Any = custom_op("pi2::gathered_experts", gathered_experts, mutates_args=())
    op.register_kernel("cpu")(_experts_on_the_cpu)
    op.register_fake(FAKES["experts_ffn"])
    return op


def products_from(stored: str, columns: int, factor_bytes: int, share: float = 1.0) -> int:
    """Number of tokens (at least 2) from which all rows are multiplied as floats, by cuBLAS.

    Kernels read ``share`` of the bytes for each token, mostly from the cache, assumed as fast as memory. A product
    reads all rows once; rows of another format are read, written as floats and read again.

    Args:
        stored: format of the rows. factor_bytes: of a written float; 0: rows are used as they are.
    """
    times = 1.0
    if factor_bytes:
        times = _WORTH * (1 + 2 * factor_bytes * columns / FORMATS[stored].row_bytes(columns))
    return max(2, int(times / max(share, 1 / 1024)) + 1)


def rows_at_once(columns: int) -> int:
    return max(1, TEMPORARY_BYTES // (_BYTES_OF_NUMBER * columns))


def linear(
    x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, weights: str, int8_activations: bool = False
) -> torch.Tensor:
    """See :func:`torch_pi2.ops.linear.linear`. A few tokens have the bits of each alone, except over ggml's blocks."""
    from torch_pi2.ops.gpu import kernels

    x_TK = rounded(x.reshape(-1, x.shape[-1])) if int8_activations else x.reshape(-1, x.shape[-1]).contiguous()
    tokens, columns = x_TK.shape
    shape = (*x.shape[:-1], len(rows))
    if weights in GGML or tokens >= products_from(weights, columns, x.dtype.itemsize):
        x_TK = x_TK.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            slices = rows.split(rows_at_once(columns))
            parts = [F.linear(x_TK, dequantize(part, weights, columns, x.dtype)) for part in slices]
            y_TN = torch.cat(parts, -1)
        return (y_TN if bias is None else (y_TN + bias).to(x.dtype)).reshape(shape)
    y = x.new_empty(shape)
    if tokens:
        held, scales, row, form = kernel_rows(rows.contiguous(), weights, columns)
        kernels.project[(-(-len(rows) // kernels.NEURONS), tokens)](
            x_TK, held, scales, None, bias, y, len(rows),
            H=columns, ROW=row, FORMAT=form, RELU=False, N=kernels.NEURONS,
            BLOCK=block_of_part(form, columns),
        )  # fmt: skip
    return y
