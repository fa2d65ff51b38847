"""The time of one feed-forward layer as a function of how many of its neurons are hot: the formula, for all at once.

Sums over neurons are cumulative and kept in the :class:`~torch_pi2.planner.model_shape.LayerShape`, so that each
further number of hot neurons costs a few calls of the hardware's curves. ``step_cost`` uses the same function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from torch_pi2.errors import ConfigError
from torch_pi2.formats import QUANTIZED
from torch_pi2.ops.gpu.linear import products_from
from torch_pi2.planner.model_shape import LayerShape, ModelShape, numbers
from torch_pi2.types.method import Method

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

#: Columns of :func:`layer_curve` that are milliseconds of a step and add up to the layer.
TIMES = ("predictor", "hot", "cold", "merge")
#: Of a number of products of matrices on a GPU.
_FACTOR_BYTES = 2


class Sums(NamedTuple):
    """Of one layer and number of tokens, float64 ``[I + 1]`` each: entry h is a sum over the neurons from h on.

    Attributes:
        predicted: neurons that the predictor lets through for at least one token (all of them without one).
        computed: neurons of which more than the gate is read: without a predictor, those that fire.
        used: neurons whose down row is read.
        pairs_predicted, pairs_computed, pairs_used: the same in (token, neuron) pairs.
        hot_pairs_used: pairs whose down row is used where neurons are computed densely.
    """

    predicted: np.ndarray
    computed: np.ndarray
    used: np.ndarray
    pairs_predicted: np.ndarray
    pairs_computed: np.ndarray
    pairs_used: np.ndarray
    hot_pairs_used: np.ndarray


def predicted_share(layer: LayerShape, tokens: float = 1) -> np.ndarray:
    """Float64 ``[I]``: how often the predictor lets a neuron through for at least one of ``tokens`` tokens.

    For one token ``recall f + q (1 - f)``, with one q for all neurons such that the mean over those from ``base_hot``
    on is ``predicted_active`` of its card. For several, with k tokens for which the neuron fires, the share that is let
    through for none is ``(1 - recall) ** k * (1 - q) ** (tokens - k)``; k is 0 or, where it fires for any, its mean
    then. 1 without a predictor. Kept in the layer.
    """
    found: np.ndarray = layer.kept(("predicted", tokens), lambda: _predicted_share(layer, tokens))
    return found


def _predicted_share(layer: LayerShape, tokens: float) -> np.ndarray:
    if layer.predictor is None:
        return np.ones(layer.intermediate)
    one_I, f_I, recall = layer.frequency(1), layer.frequency(tokens), layer.recall
    cold_I = one_I[layer.base_hot :]
    quiet = float((1 - cold_I).sum())
    wrong = (layer.predicted_active * len(cold_I) - recall * float(cold_I.sum())) / quiet if quiet > 0 else 0.0
    q = min(1.0, max(0.0, wrong))
    fires_I = np.clip(tokens * one_I / np.maximum(f_I, 1e-300), 1, tokens)
    with np.errstate(divide="ignore"):
        missed_I = np.power(1 - recall, fires_I) * np.power(1 - q, tokens - fires_I)
    share: np.ndarray = 1 - (1 - f_I) * (1 - q) ** tokens - f_I * missed_I
    return share


def sums(layer: LayerShape, tokens: float) -> Sums:
    """See :class:`Sums`; kept in the layer."""
    found: Sums = layer.kept(("sums", tokens), lambda: _sums(layer, tokens))
    return found


def _sums(layer: LayerShape, tokens: float) -> Sums:
    one_I, f_I = layer.frequency(1), layer.frequency(tokens)
    every_I = np.ones(layer.intermediate)
    if layer.predictor is not None:
        predicted_I, predicted_1 = predicted_share(layer, tokens), predicted_share(layer, 1)
        # Down rows: of what is computed, those that fire; all where nothing is exactly zero.
        used_I, used_1 = (layer.recall * f_I, layer.recall * one_I) if layer.exact_zeros else (predicted_I, predicted_1)
        columns = [predicted_I, predicted_I, used_I, predicted_1, predicted_1, used_1]
    else:
        # Without exact zeros every gate is used, but for those below a threshold.
        skips = layer.exact_zeros or layer.method == Method.THRESHOLD
        fire_I, fire_1 = (f_I, one_I) if skips else (every_I, every_I)
        columns = [every_I, fire_I, fire_I, every_I, fire_1, fire_1]
    columns.append(one_I if layer.exact_zeros else every_I)
    from_h = [np.append(np.cumsum(column_I[::-1])[::-1], 0.0) for column_I in columns]
    return Sums(*from_h[:3], *(tokens * pairs for pairs in from_h[3:]))


def expert_use(layer: LayerShape, batch: float) -> tuple[float, float]:
    """Share of steps in which an expert has any of ``batch`` tokens, and how many it has then (1 and all: no expert).

    Routing of the tokens is taken as independent: ``1 - (1 - chosen) ** batch``.
    """
    share = 1 - (1 - layer.chosen) ** batch
    return share, batch * layer.chosen / share


def layer_curve(
    layer: LayerShape,
    hardware: Hardware,
    batch: int,
    hots: ArrayLike,
    *,
    accelerator: ArrayLike = 0,
    model_bytes: float | None = None,
) -> dict[str, np.ndarray]:
    """Milliseconds of a layer in one step of ``batch`` tokens, for each number of hot neurons in ``hots``.

    With h hot neurons, of which an accelerator has the first a, rows of w bytes and H numbers:

    * ``predictor``: ``hardware.predict_us`` of the rows of neurons from h on: the share ``(rank H + (I - h) rank) /
      (rank H + I rank)`` of a low-rank predictor's bytes, ``(I - h) / I`` of one of signs, and a multiply-add for each
      number and token. 0 without one, and with h = I.
    * ``hot`` and ``cold`` on the CPU: one call ``hardware.layer_us``. In runs: the neurons of a to h. Gathered: neurons
      of the neurons from h on that the predictor lets through for any token; without a predictor the gate rows of all
      and the rest of those that fire. Multiply-adds: H for each (token, row) pair, of down rows those that fire. Its
      time is divided by bytes. With h = I and a = 0: ``hardware.dense_us``.
    * With an accelerator both sides work at once, and what ends last counts: ``max(accelerator.ffn_us, predictor +
      CPU)``, and not before the bytes of both have come at ``accelerator.shared_gb_per_s``. What the CPU's part does
      not hide of it is in ``hot``; then ``merge``, ``accelerator.merge_us`` a token.
    * One that has the rest of the model in memory of its own (``accelerator.holds_rest``) reads at its own speed
      whatever the CPU reads; ``merge`` is one ``merge_us`` wherever a < I, with a = 0 too. From so many tokens on
      (:func:`~torch_pi2.ops.gpu.linear.products_from`) quantised neurons become 16 bits there in each call, written and
      read: 32 bits more of each number.

    All is multiplied by the share of steps in which an expert has tokens (:func:`expert_use`); experts share a call.
    Source: papers.md 11.1 (PowerInfer-2, arXiv 2406.06282, section 5, as worked out there); rates from
    :class:`~torch_pi2.machine.hardware.Hardware`.

    Args:
        accelerator: of the hot neurons, those that an accelerator computes; a number, or one for each of ``hots``.
        model_bytes: what is read between two uses of a weight; None: more than the caches hold.

    Returns:
        ``TIMES``; ``wanted``: neurons read per step, beyond the accelerator's; ``cold_wanted``: of them those beyond h;
        ``cpu_bytes``: what the CPU reads of memory. Each float64, of the shape of ``hots``.

    Raises:
        ConfigError: hot neurons below ``base_hot`` or beyond I, more on the accelerator than hot, or no accelerator.
    """
    hot_N, first_N = (np.atleast_1d(a) for a in np.broadcast_arrays(np.asarray(hots), np.asarray(accelerator)))
    _check(layer, hardware, hot_N, first_N)
    use, tokens = expert_use(layer, batch)
    how: dict[str, Any] = {"calls": 1 / (layer.experts * use) if layer.chosen < 1 else 1.0, "model_bytes": model_bytes}
    work = _Work.of(layer, tokens, hot_N, first_N)
    everything_N = (hot_N == layer.intermediate) & (first_N == 0)

    def cpu_us(hot: float, cold: float, gate: float, macs: float, everything: bool) -> float:
        if everything:
            return hardware.dense_us(layer.kernel, tokens=tokens, nbytes=hot, macs=macs, **how)
        if macs == 0:
            return 0.0
        return hardware.layer_us(
            layer.kernel, batch=tokens, hot_bytes=hot, cold_bytes=cold, gate_bytes=gate, macs=macs, **how
        )

    def predictor_us(cold: float, nbytes: float, macs: float) -> float:
        if cold == 0 or layer.predictor is None:
            return 0.0
        return hardware.predict_us(layer.predictor, batch=tokens, nbytes=nbytes, macs=macs, **how)

    cpu_N = each(cpu_us, work.hot_bytes, work.cold_bytes, work.gate_bytes, work.macs, everything_N)
    predictor_N = each(predictor_us, layer.intermediate - hot_N, work.predictor_bytes, work.predictor_macs)
    ffn_bytes_N = work.hot_bytes + work.cold_bytes + work.gate_bytes
    hot_us_N = cpu_N * work.hot_bytes / np.maximum(ffn_bytes_N, 1)
    cold_us_N = cpu_N - hot_us_N
    merge_N = np.zeros(len(hot_N))
    theirs = hardware.accelerator
    if theirs is not None and (first_N.any() or theirs.holds_rest):
        bits = 8 * layer.neuron_bytes / (layer.rows * layer.hidden)
        if (
            theirs.holds_rest
            and layer.weights in QUANTIZED
            and tokens >= products_from(layer.weights, layer.hidden, _FACTOR_BYTES)
        ):
            bits += 2 * 8 * _FACTOR_BYTES

        def their_us(neurons: int) -> float:
            return theirs.ffn_us(
                batch=max(1, round(tokens)), neurons=neurons, hidden=layer.hidden, rows=layer.rows, weight_bits=bits
            )

        theirs_N = each(their_us, first_N)
        if theirs.holds_rest:
            merge_N = np.where(first_N < layer.intermediate, theirs.merge_us, 0.0)
        else:
            bytes_N = ffn_bytes_N + work.predictor_bytes + first_N * float(layer.neuron_bytes)
            theirs_N = np.maximum(theirs_N, bytes_N / (theirs.shared_gb_per_s * 1e3))
            merge_N = np.where(first_N > 0, theirs.merge_us * tokens, 0.0)
        hot_us_N = hot_us_N + np.where(first_N > 0, np.maximum(theirs_N - predictor_N - cpu_N, 0), 0)
    ms, wanted_N = use / 1e3, sums(layer, tokens).predicted[hot_N]
    return {
        "predictor": predictor_N * ms,
        "hot": hot_us_N * ms,
        "cold": cold_us_N * ms,
        "merge": merge_N * ms,
        "wanted": use * (hot_N - first_N + wanted_N),
        "cold_wanted": use * wanted_N,
        "cpu_bytes": use * (ffn_bytes_N + work.predictor_bytes),
    }


def without_rest(hardware: Hardware) -> Hardware:
    """``hardware`` for a model of which nothing is on an accelerator that would have all but neurons, too."""
    theirs = hardware.accelerator
    return replace(hardware, accelerator=None) if theirs is not None and theirs.holds_rest else hardware


class _Work(NamedTuple):
    """What the CPU reads and multiplies in one call, by number of hot neurons, float64 ``[N]`` each."""

    hot_bytes: np.ndarray
    cold_bytes: np.ndarray
    gate_bytes: np.ndarray
    macs: np.ndarray
    predictor_bytes: np.ndarray
    predictor_macs: np.ndarray

    @staticmethod
    def of(layer: LayerShape, tokens: float, hot_N: np.ndarray, first_N: np.ndarray) -> _Work:
        """See :func:`layer_curve`."""
        of_h, size, row = sums(layer, tokens), layer.intermediate, layer.first_row_bytes
        ours_N, cold_N = hot_N - first_N, (size - hot_N).astype(float)
        firsts = layer.rows - 1  # gate and up; up of a plain layer
        pairs_N = tokens * ours_N * firsts + of_h.hot_pairs_used[first_N] - of_h.hot_pairs_used[hot_N]
        if layer.predictor is not None:
            cold_bytes_N, gate_bytes_N = of_h.predicted[hot_N] * layer.neuron_bytes, np.zeros(len(hot_N))
            pairs_N = pairs_N + firsts * of_h.pairs_predicted[hot_N] + of_h.pairs_used[hot_N]
        else:
            cold_bytes_N, gate_bytes_N = of_h.computed[hot_N] * (layer.neuron_bytes - row), cold_N * row
            rest_N = (firsts - 1) * of_h.pairs_computed[hot_N] + of_h.pairs_used[hot_N]
            pairs_N = pairs_N + of_h.pairs_predicted[hot_N] + rest_N
        numbers_N = np.zeros(len(hot_N))  # of the predictor
        share_N = numbers_N
        if layer.predictor is not None:
            numbers_N = layer.rank * (layer.hidden + cold_N) if layer.rank else layer.hidden * cold_N
            numbers_N = np.where(cold_N > 0, numbers_N, 0.0)
            share_N = numbers_N / (layer.rank * (layer.hidden + size) if layer.rank else layer.hidden * size)
        return _Work(
            ours_N * float(layer.neuron_bytes),
            cold_bytes_N,
            gate_bytes_N,
            pairs_N * layer.hidden,
            layer.predictor_bytes * share_N,
            tokens * numbers_N,
        )


def linear_ms(
    hardware: Hardware, kernel: str, tokens: float, nbytes: int, *, calls: int = 1, model_bytes: float | None = None
) -> float:
    """Milliseconds of linear layers of ``nbytes`` bytes in all, a multiply-add for each number and token."""
    if nbytes == 0:
        return 0.0
    macs = tokens * numbers(kernel, nbytes)
    took = hardware.linear_us(kernel, tokens=tokens, nbytes=nbytes, macs=macs, calls=calls, model_bytes=model_bytes)
    return took / 1e3


def block_ms(
    shape: ModelShape,
    layer: LayerShape,
    hardware: Hardware,
    *,
    tokens: int,
    sequences: int,
    kv_bytes: float,
    compiled: bool,
) -> dict[str, float]:
    """Attention and what is around it, where a layer begins a block; ``kv_bytes``: that attention reads."""
    if not layer.block:
        return {}
    nbytes = shape.weight_bytes
    linears = linear_ms(
        hardware,
        layer.attention_kernel,
        tokens,
        layer.attention_bytes,
        calls=layer.attention_calls,
        model_bytes=nbytes,
    )
    sdpa = hardware.attention_us(batch=sequences, kv_bytes=kv_bytes, dtype=shape.kv_dtype, model_bytes=nbytes)
    glue = hardware.glue_us(batch=tokens, hidden=layer.hidden, compiled=compiled, model_bytes=nbytes)
    return {"attention": linears, "sdpa": sdpa / 1e3, "glue": glue / 1e3}


def each(function: Callable[..., float], *columns: np.ndarray) -> np.ndarray:
    """``function`` of the rows of ``columns``: hardware's curves take one number at a time."""
    return np.array([function(*row) for row in zip(*(column.tolist() for column in columns), strict=True)], float)


def _check(layer: LayerShape, hardware: Hardware, hot_N: np.ndarray, first_N: np.ndarray) -> None:
    if hot_N.size and not (layer.base_hot <= hot_N.min() and hot_N.max() <= layer.intermediate):
        raise ConfigError(
            f"hot neurons of {layer.key}",
            expected=f"{layer.base_hot} to {layer.intermediate}",
            found=f"{hot_N.min()} to {hot_N.max()}" if hot_N.size > 1 else str(hot_N.min()),
            fix="The plan's n_hot is the least: there is no predictor for those before.",
        )
    if (first_N < 0).any() or (first_N > hot_N).any():
        raise ConfigError(
            f"neurons of {layer.key} on an accelerator",
            expected="0 to the number of hot ones",
            found=str(int(first_N.max())),
            fix="An accelerator computes hot neurons only.",
        )
    if first_N.any() and hardware.accelerator is None:
        raise ConfigError(
            f"neurons of {layer.key} on an accelerator",
            expected=f"none, as {hardware.name} has no accelerator",
            found=str(int(first_N.max())),
            fix="Plan for a machine with one, or leave the accelerator out.",
        )
