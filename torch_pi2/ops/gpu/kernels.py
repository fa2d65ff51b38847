"""Triton kernels of a feed-forward layer with some of its neurons computed. This imports triton: import it when needed.

1. Neurons to compute are listed: per token and tile of ``TILE`` neurons, the ids of the active ones in order, and their
   number. A list has room for its whole tile, so nothing overflows, every shape is static, and where a program writes
   depends on the token alone (TwELL's packing by tile, arXiv 2603.23198).
2. ``PARTS`` programs per token each take an equal run of its listed neurons: gate and up rows times ``x``, the
   activation, times the down row. Each writes a float32 sum ``[H]``.
3. The sums are added in order, without atomics: a token's result always has the same bits, whatever other tokens there
   are.

In a mixture of experts (``EXPERTS`` above 0) each pair of a token and one of its ``SLOTS`` is treated like a token
above, with its own lists and programs. Neurons and predictors are stacked by expert, and so are cuts and thresholds
(float64 in memory). A pair's expert is read from ``experts`` on the GPU.

A neuron's rows lie together (``neuron_rows [I, R, H]``), so that a neuron is one contiguous read; indices are compacted
rather than masked, as a warp waits for its slowest thread.
"""

import triton
import triton.language as tl

#: Neurons listed together. Like the next two, it affects a result's bits.
TILE = 64
#: Most programs per token over its listed neurons.
PARTS = 256
#: Neurons that a program processes at once.
NEURONS = 8


@triton.jit
def _act(v, ACTIVATION: tl.constexpr):
    """As in ``torch_pi2.ops.activations``; NaN stays NaN."""
    if ACTIVATION == "relu":
        v = tl.where(v < 0, 0.0, v)
    elif ACTIVATION == "relu2":
        v = tl.where(v < 0, 0.0, v)
        v = v * v
    elif ACTIVATION == "silu":
        v = v * tl.sigmoid(v)
    elif ACTIVATION == "gelu":
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        v = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    else:
        tl.static_assert(ACTIVATION == "identity", "an activation that ON_A_GPU lists and that is not here")
    return v


@triton.jit
def _dots(rows, scales, start_N, live_N, x, H: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """float32 ``[N]``: rows, each at element ``start_N`` of ``rows``, times ``x [H]``; 0 where not ``live_N``.

    FORMAT: ``float`` (any dtype that converts, int8 too), ``int4`` or ``int8`` (groups of 32; ``scales`` is the same
    memory as float16).
    """
    if FORMAT == "float":
        sum_NB = tl.zeros([start_N.shape[0], BLOCK], dtype=tl.float32)
        for first in tl.range(0, H, BLOCK):
            h_B = first + tl.arange(0, BLOCK)
            x_B = tl.load(x + h_B, mask=h_B < H, other=0.0).to(tl.float32)
            inside_NB = live_N[:, None] & (h_B < H)[None, :]
            w_NB = tl.load(rows + start_N[:, None] + h_B[None, :], mask=inside_NB, other=0.0).to(tl.float32)
            sum_NB += w_NB * x_B[None, :]
        return tl.sum(sum_NB, 1)
    else:
        GROUPS: tl.constexpr = (H + 31) // 32
        BYTES: tl.constexpr = 16 if FORMAT == "int4" else 32
        sum_NG = tl.zeros([start_N.shape[0], BLOCK // 32], dtype=tl.float32)
        for first in tl.range(0, GROUPS, BLOCK // 32):
            g_G = first + tl.arange(0, BLOCK // 32)
            k_K = tl.arange(0, BYTES)
            h_GK = g_G[:, None] * 32 + k_K[None, :]
            inside_NG = live_N[:, None] & (g_G < GROUPS)[None, :]
            byte_GK = g_G[:, None] * BYTES + k_K[None, :]
            w_NGK = tl.load(rows + start_N[:, None, None] + byte_GK[None, :, :], mask=inside_NG[:, :, None], other=0)
            scale_NG = tl.load(
                scales + (start_N // 2)[:, None] + (GROUPS * BYTES // 2 + g_G)[None, :], mask=inside_NG, other=0.0
            ).to(tl.float32)
            x_GK = tl.load(x + h_GK, mask=h_GK < H, other=0.0).to(tl.float32)
            if FORMAT == "int4":
                high_GK = tl.load(x + h_GK + 16, mask=h_GK + 16 < H, other=0.0).to(tl.float32)
                low_NGK = (w_NGK & 15).to(tl.float32) - 8.0
                part_NG = tl.sum(low_NGK * x_GK[None, :, :], 2)
                part_NG += tl.sum(((w_NGK >> 4).to(tl.float32) - 8.0) * high_GK[None, :, :], 2)
            else:
                part_NG = tl.sum(w_NGK.to(tl.int8, bitcast=True).to(tl.float32) * x_GK[None, :, :], 2)
            sum_NG += part_NG * scale_NG
        return tl.sum(sum_NG, 1)


@triton.jit
def _of_pair(pair, experts, rows, SLOTS: tl.constexpr, EXPERTS: tl.constexpr):
    """A pair's token, its expert, and its number of ``rows``: 0 without an expert."""
    if EXPERTS == 0:
        return pair, 0, rows
    else:
        expert = tl.load(experts + pair)
        known = (expert >= 0) & (expert < EXPERTS)
        return pair // SLOTS, tl.where(known, expert, 0), tl.where(known, rows, 0)


@triton.jit
def _own(number, expert, EXPERTS: tl.constexpr):
    """A number shared by all, or the expert's."""
    if EXPERTS == 0:
        return number
    else:
        return tl.load(number + expert).to(tl.float32)


@triton.jit
def _listed(list_N, counts, i_N, active_N, tile):
    """Write the ids of a tile's active neurons and their number; returns the place of each."""
    place_N = tl.cumsum(active_N.to(tl.int32), 0) - 1
    tl.store(list_N + place_N, i_N, mask=active_N)
    tl.store(counts + tile, tl.sum(active_N.to(tl.int32), 0))
    return place_N


@triton.jit
def list_fired(
    x, rows, scales, bias, lists, gates, counts, threshold, N_HOT, INTERMEDIATE, TILES,
    H: tl.constexpr, R: tl.constexpr, ROW: tl.constexpr, FORMAT: tl.constexpr, ACTIVATION: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
    experts=None, SLOTS: tl.constexpr = 1, EXPERTS: tl.constexpr = 0,
):  # fmt: skip
    """The exact gate: list the neurons whose row 0 fires, with their activations in ``gates``."""
    tile, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, expert, neurons = _of_pair(pair, experts, INTERMEDIATE, SLOTS, EXPERTS)
    i_N = tile * TILE + tl.arange(0, TILE)
    live_N = i_N < neurons
    start_N = (expert * INTERMEDIATE + i_N).to(tl.int64) * (R * ROW)
    gate_N = _dots(rows, scales, start_N, live_N, x + token * H, H, FORMAT, BLOCK)
    if bias is not None:
        gate_N += tl.load(bias + i_N, mask=live_N, other=0.0).to(tl.float32)
    gate_N = _act(gate_N, ACTIVATION)
    # negated, so that NaN fires
    fires_N = live_N & ((i_N < N_HOT) | ~(tl.abs(gate_N) <= _own(threshold, expert, EXPERTS)))
    to = (pair * TILES + tile) * TILE
    place_N = _listed(lists + to, counts + pair * TILES, i_N, fires_N, tile)
    tl.store(gates + to + place_N, gate_N, mask=fires_N)


@triton.jit
def project(
    x, rows, scales, row_scale, bias, y, ROWS,
    H: tl.constexpr, ROW: tl.constexpr, FORMAT: tl.constexpr, RELU: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    experts=None, SLOTS: tl.constexpr = 1, EXPERTS: tl.constexpr = 0,
):  # fmt: skip
    """``y [T, ROWS]``: ``x`` times each row, plus bias; with RELU, followed by relu."""
    pair = tl.program_id(1).to(tl.int64)
    token, expert, there = _of_pair(pair, experts, ROWS, SLOTS, EXPERTS)
    r_N = tl.program_id(0) * N + tl.arange(0, N)
    live_N = r_N < there
    row_N = expert * ROWS + r_N
    y_N = _dots(rows, scales, row_N.to(tl.int64) * ROW, live_N, x + token * H, H, FORMAT, BLOCK)
    if row_scale is not None:
        y_N *= tl.load(row_scale + row_N, mask=live_N, other=0.0)
    if bias is not None:
        y_N += tl.load(bias + row_N, mask=live_N, other=0.0).to(tl.float32)
    if RELU:
        y_N = tl.where(y_N < 0, 0.0, y_N)
    tl.store(y + pair * ROWS + r_N, y_N.to(y.dtype.element_ty), mask=r_N < ROWS)


@triton.jit
def list_predicted(
    z, b, scales, b_scale, bias, lists, counts, cut, cold, N_HOT, INTERMEDIATE, TILES,
    RANK: tl.constexpr, ROW: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    experts=None, SLOTS: tl.constexpr = 1, EXPERTS: tl.constexpr = 0,
):  # fmt: skip
    """List hot neurons, and those whose logit ``b z + bias`` is not below ``cut``. ``b`` has ``cold`` rows, of which
    the last ``INTERMEDIATE - N_HOT`` belong to cold neurons. No mask goes through memory.
    """
    tile, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, expert, neurons = _of_pair(pair, experts, INTERMEDIATE, SLOTS, EXPERTS)
    i_N = tile * TILE + tl.arange(0, TILE)
    is_cold_N = (i_N >= N_HOT) & (i_N < neurons)
    row_N = expert * cold + tl.where(is_cold_N, i_N + (cold - INTERMEDIATE), 0)
    logit_N = _dots(b, scales, row_N.to(tl.int64) * ROW, is_cold_N, z + pair * RANK, RANK, FORMAT, BLOCK)
    if b_scale is not None:
        logit_N *= tl.load(b_scale + row_N, mask=is_cold_N, other=0.0)
    if bias is not None:
        logit_N += tl.load(bias + row_N, mask=is_cold_N, other=0.0)
    active_N = (i_N < N_HOT) | (is_cold_N & ~(logit_N < _own(cut, expert, EXPERTS)))  # NaN is active
    _listed(lists + (pair * TILES + tile) * TILE, counts + pair * TILES, i_N, active_N, tile)


@triton.jit
def _share(total, PARTS: tl.constexpr, N: tl.constexpr):
    """Listed neurons per program, of ``total``: whole blocks of N, as equal as possible."""
    return tl.cdiv(tl.cdiv(total, PARTS), N) * N


@triton.jit
def listed_ffn(
    x, rows, scales, bias_gate, bias_up, lists, gates, counts, parts, threshold, N_HOT, INTERMEDIATE, TILES,
    H: tl.constexpr, R: tl.constexpr, ROW: tl.constexpr, FORMAT: tl.constexpr, ACTIVATION: tl.constexpr,
    ON_UP: tl.constexpr, TILE: tl.constexpr, MOST_TILES: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr,
    experts=None, SLOTS: tl.constexpr = 1, EXPERTS: tl.constexpr = 0,
):  # fmt: skip
    """``parts [T, PARTS, H]``, those in use: sums over runs of listed neurons.

    ``gates``: activations of row 0, if known. A listed cold neuron whose gate does not fire adds nothing, and its down
    row is not read.
    """
    part, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, expert, _ = _of_pair(pair, experts, INTERMEDIATE, SLOTS, EXPERTS)
    threshold = _own(threshold, expert, EXPERTS)
    tile_C = tl.arange(0, MOST_TILES)
    count_C = tl.load(counts + pair * TILES + tile_C, mask=tile_C < TILES, other=0)
    end_C = tl.cumsum(count_C, 0)
    total = tl.sum(count_C, 0)
    share = _share(total, PARTS, N)
    first = part * share
    last = tl.minimum(first + share, total)
    sum_row = parts + (pair * PARTS + part) * H
    for done in tl.range(first, last, N):
        n_N = done + tl.arange(0, N)
        live_N = n_N < last
        before_NC = end_C[None, :] <= n_N[:, None]
        tile_N = tl.sum(before_NC.to(tl.int32), 1)
        at_N = n_N - tl.sum(tl.where(before_NC, count_C[None, :], 0), 1)
        slot_N = (pair * TILES + tile_N) * TILE + at_N
        i_N = tl.load(lists + slot_N, mask=live_N, other=0)
        start_N = (expert * INTERMEDIATE + i_N).to(tl.int64) * (R * ROW)
        if gates is not None:
            gate_N = tl.load(gates + slot_N, mask=live_N, other=0.0)
        else:
            gate_N = _dots(rows, scales, start_N, live_N, x + token * H, H, FORMAT, BLOCK)
            if R == 3:
                if bias_gate is not None:
                    gate_N += tl.load(bias_gate + i_N, mask=live_N, other=0.0).to(tl.float32)
            else:
                if bias_up is not None:
                    gate_N += tl.load(bias_up + i_N, mask=live_N, other=0.0).to(tl.float32)
            gate_N = _act(gate_N, ACTIVATION)
        live_N = live_N & ((i_N < N_HOT) | ~(tl.abs(gate_N) <= threshold))
        h_N = gate_N
        if R == 3:
            up_N = _dots(rows, scales, start_N + ROW, live_N, x + token * H, H, FORMAT, BLOCK)
            if bias_up is not None:
                up_N += tl.load(bias_up + i_N, mask=live_N, other=0.0).to(tl.float32)
            if ON_UP:
                up_N = _act(up_N, ACTIVATION)
            h_N = h_N * up_N
        h_N = tl.where(live_N, h_N, 0.0)
        down_N = start_N + (R - 1) * ROW
        is_first = done == first
        if FORMAT == "float":
            for column in tl.range(0, H, BLOCK):
                h_B = column + tl.arange(0, BLOCK)
                inside_NB = live_N[:, None] & (h_B < H)[None, :]
                w_NB = tl.load(rows + down_N[:, None] + h_B[None, :], mask=inside_NB, other=0.0).to(tl.float32)
                _add(sum_row, h_B, tl.sum(h_N[:, None] * w_NB, 0), is_first, H)
        else:
            GROUPS: tl.constexpr = (H + 31) // 32
            BYTES: tl.constexpr = 16 if FORMAT == "int4" else 32
            for group in tl.range(0, GROUPS, BLOCK // 32):
                g_G = group + tl.arange(0, BLOCK // 32)
                k_K = tl.arange(0, BYTES)
                inside_NG = live_N[:, None] & (g_G < GROUPS)[None, :]
                byte_GK = g_G[:, None] * BYTES + k_K[None, :]
                w_NGK = tl.load(rows + down_N[:, None, None] + byte_GK[None, :, :], mask=inside_NG[:, :, None], other=0)
                scale_NG = tl.load(
                    scales + (down_N // 2)[:, None] + (GROUPS * BYTES // 2 + g_G)[None, :], mask=inside_NG, other=0.0
                ).to(tl.float32)
                h_NG = h_N[:, None] * scale_NG
                column_GK = g_G[:, None] * 32 + k_K[None, :]
                if FORMAT == "int4":
                    low_NGK = (w_NGK & 15).to(tl.float32) - 8.0
                    high_NGK = (w_NGK >> 4).to(tl.float32) - 8.0
                    _add(sum_row, column_GK, tl.sum(h_NG[:, :, None] * low_NGK, 0), is_first, H)
                    _add(sum_row, column_GK + 16, tl.sum(h_NG[:, :, None] * high_NGK, 0), is_first, H)
                else:
                    w_NGK = w_NGK.to(tl.int8, bitcast=True).to(tl.float32)
                    _add(sum_row, column_GK, tl.sum(h_NG[:, :, None] * w_NGK, 0), is_first, H)


@triton.jit
def _add(sum_row, column, value, is_first, H: tl.constexpr):
    """Add to this program's sum of these columns; no other program writes there."""
    if not is_first:
        tl.debug_barrier()  # another thread of the program may have written it
        value += tl.load(sum_row + column, mask=column < H, other=0.0)
        tl.debug_barrier()
    tl.store(sum_row + column, value, mask=column < H)


@triton.jit
def _added(
    parts, counts, pair, h_B, TILES,
    H: tl.constexpr, MOST_TILES: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """float32: sum over the used parts of a pair, for these columns.

    ``TOGETHER`` parts are in flight at a time: part p is added to sum p % TOGETHER, in order, and those sums are added
    at the end. The order depends only on how many neurons are listed.
    """
    tile_C = tl.arange(0, MOST_TILES)
    total = tl.sum(tl.load(counts + pair * TILES + tile_C, mask=tile_C < TILES, other=0), 0)
    used = tl.cdiv(total, tl.maximum(_share(total, PARTS, N), 1))
    sum_PB = tl.zeros([TOGETHER, h_B.shape[0]], dtype=tl.float32)
    for first in tl.range(0, used, TOGETHER):
        part_P = first + tl.arange(0, TOGETHER)
        inside_PB = (part_P < used)[:, None] & (h_B < H)[None, :]
        sum_PB += tl.load(parts + (pair * PARTS + part_P)[:, None] * H + h_B[None, :], mask=inside_PB, other=0.0)
    return tl.sum(sum_PB, 0)


@triton.jit
def add_parts(
    parts, bias, counts, y, TILES,
    H: tl.constexpr, MOST_TILES: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
    experts=None, routing=None, SLOTS: tl.constexpr = 1, EXPERTS: tl.constexpr = 0,
):  # fmt: skip
    """``y [T, H]``: the used parts plus the down bias, rounded once. With experts, a token's slots in order, each times
    its ``routing``; a slot without an expert adds nothing, whatever its weight.
    """
    token = tl.program_id(1).to(tl.int64)
    h_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EXPERTS == 0:
        sum_B = _added(parts, counts, token, h_B, TILES, H, MOST_TILES, PARTS, N, TOGETHER)
    else:
        sum_B = tl.zeros([BLOCK], dtype=tl.float32)
        for slot in tl.range(0, SLOTS):
            pair = token * SLOTS + slot
            expert = tl.load(experts + pair)
            weight = tl.load(routing + pair).to(tl.float32)
            one_B = _added(parts, counts, pair, h_B, TILES, H, MOST_TILES, PARTS, N, TOGETHER)
            sum_B += tl.where((expert >= 0) & (expert < EXPERTS), weight * one_B, 0.0)
    if bias is not None:
        sum_B += tl.load(bias + h_B, mask=h_B < H, other=0.0).to(tl.float32)
    tl.store(y + token * H + h_B, sum_B.to(y.dtype.element_ty), mask=h_B < H)
