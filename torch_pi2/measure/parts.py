"""Cases of predictors and of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from torch_pi2.formats import FLOAT
from torch_pi2.measure.fit import Case, Ready, Size
from torch_pi2.measure.weights import Weights
from torch_pi2.ops.dtypes import DTYPES

#: Key heads, and query heads of each: those of Mistral-7B and of Llama-3.2-1B.
_HEADS, _QUERIES = 8, 4
_WIDTHS = (64, 128)
#: Tokens of keys and values in one call, at most.
_MOST_TOKENS = 8192
#: Of predictors' matrices: filling a buffer anew for each size takes longer than the calls.
_BYTES = 128 << 20


def predictor_cases(
    weights: Weights,
    names: Sequence[str],
    layers: Sequence[tuple[int, int]],
    ranks: Sequence[int],
    batches: Sequence[int],
) -> Iterator[list[Case]]:
    """By predictor and layer; ``weights`` have what the cases given last need."""
    for name in names:
        kind, _, rest = name.partition("/")
        rows, _, activations = rest.partition("/")
        for hidden, intermediate in layers:
            cases: list[Case] = []
            # One rank at a time would be slower to fill; matrices of several stay side by side.
            for i, rank in enumerate(ranks if kind == "lowrank" else (0,)):
                part = Weights(buffer=weights.raw.chunk(len(ranks))[i])
                made = _predictor(part, rows, activations == "int8", hidden, intermediate, rank)
                for batch in batches:
                    x_TH = torch.randn((batch, hidden), generator=torch.Generator().manual_seed(batch))
                    cases.append(_case(name, batch, x_TH.to(torch.bfloat16), made))
            yield cases


#: Bytes of weights, and what makes a call.
_Predictor = tuple[int, Callable[[torch.Tensor], Callable[[], object]]]


def _case(name: str, batch: int, x_TH: torch.Tensor, predictor: _Predictor) -> Case:
    nbytes, call = predictor
    return Case(name, batch, Size(hot=nbytes), lambda: call(x_TH))  # as many bytes as multiplications: one of the two


def _predictor(weights: Weights, rows: str, int8: bool, hidden: int, intermediate: int, rank: int) -> _Predictor:
    a, b = weights.halves(_BYTES)
    if rank == 0:
        b.fill("bytes", -(-hidden // 64) * 8)
        count = min(intermediate, b.count)
        signbit = torch.ops.pi2.predict_signbit
        return count * b.row_bytes, lambda x: partial(signbit, x, b.rows(count), hidden, 1.0)
    stored = "bytes" if rows == FLOAT else rows
    a.fill(stored, hidden)
    b.fill(stored, rank)
    count, rank = min(intermediate, b.count), min(rank, a.count)
    nbytes = rank * a.row_bytes + count * b.row_bytes
    if rows != FLOAT:
        op = torch.ops.pi2.predict_lowrank_q
        return nbytes, lambda x: partial(op, x, a.rows(rank), b.rows(count), None, rows, int8, 0.0)
    scale_r, scale_C = torch.full((rank,), 1e-3), torch.full((count,), 1e-3)

    def ready(x_TH: torch.Tensor) -> Callable[[], object]:
        a_rH, b_Cr = a.rows(rank).view(torch.int8), b.rows(count).view(torch.int8)
        return partial(torch.ops.pi2.predict_lowrank, x_TH, a_rH, scale_r, b_Cr, scale_C, None, 0.0)

    return nbytes, ready


def attention_cases(
    weights: Weights, names: Sequence[str], lengths: Sequence[int], batches: Sequence[int]
) -> Iterator[list[Case]]:
    """By dtype. As :func:`torch_pi2.decode.attention.packed_sdpa` over a static cache: one new token, a mask added."""
    for name in names:
        dtype = DTYPES[name]
        weights.fill(name, 1024)
        cases = []
        for batch in batches:
            for width in _WIDTHS:
                for length in lengths:
                    numbers = batch * _HEADS * length * width
                    if 4 * numbers * dtype.itemsize <= weights.raw.nbytes and batch * length <= _MOST_TOKENS:
                        size = Size(hot=2 * numbers * dtype.itemsize)
                        cases.append(Case(name, batch, size, _sdpa(weights, dtype, batch, width, length)))
        yield cases


def _sdpa(weights: Weights, dtype: torch.dtype, batch: int, width: int, length: int) -> Ready:
    query = torch.randn((batch, _HEADS, _QUERIES, width), generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = torch.zeros((batch, 1, 1, length), dtype=dtype)
    shape = (2, batch, _HEADS, length, width)
    numbers = 2 * batch * _HEADS * length * width

    def ready() -> Callable[[], object]:
        key, value = weights.numbers(numbers).view(shape)
        return partial(F.scaled_dot_product_attention, query, key, value, attn_mask=mask)

    return ready
