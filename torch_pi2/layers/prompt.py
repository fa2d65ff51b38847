"""The prompt path: a feed-forward layer on many tokens as matrix products over slices of its neurons.

The tokens of a long prompt together need nearly every neuron. A matrix product reads a weight once for all tokens; the
sparse operator, made for few tokens, reads it for each. Neurons that the operator skips are multiplied by zero here, so
results differ only in the last bits (order of summation; bfloat16 inputs: products rounded to bfloat16).
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from torch_pi2.base.dtypes import DTYPES, dtype_name
from torch_pi2.formats import FLOAT, FORMATS
from torch_pi2.layers.gpu import on_gpu
from torch_pi2.layers.rows import DenseForm, row_of_each
from torch_pi2.ops import ACTIVATIONS, load
from torch_pi2.ops.activations import cuts, exact_zeros, norm, on_up
from torch_pi2.ops.gpu.operators import products_from, rows_at_once

#: Number of tokens from which matrix products are used, unless ``SparseFFN.dense_from`` is set.
PROMPT_TOKENS = 32
#: Up to this share of computed neurons, a predicted layer is faster sparse for any number of tokens; likewise.
PREDICTED_SHARE = 0.15
#: The same with int8 activations, where both paths have kernels for several tokens.
PREDICTED_SHARE_INT8 = 0.3
#: Assumed share of firing neurons with an exact gate, if there are no statistics: typical of sparsified models.
_FIRING = 0.1
#: Neurons per slice: bounds dequantised weights, and keeps activations in the cache.
_SLICE = 1024


class _CallMode(threading.local):
    """How layers are called in this thread, which the model cannot pass on. ``prompt_tokens`` 0: no prompt."""

    prompt_tokens = 0
    sparse_only = False
    single_steps = False
    #: Where methods keep what a prompt has chosen (:class:`torch_pi2.layers.choices.Choices`), or None.
    choices: Any = None
    #: Sequences of a call outside of a decoder; 0: not known.
    sequences = 0


call_mode = _CallMode()


@contextmanager
def called_with(**settings: Any) -> Iterator[None]:
    """Context of calls with other values in :data:`call_mode`."""
    before = {name: getattr(call_mode, name) for name in settings}
    vars(call_mode).update(settings)
    try:
        yield
    finally:
        vars(call_mode).update(before)


def chunks_of_prompt(tokens: int) -> AbstractContextManager[None]:
    """Context in which calls are chunks of a prompt of ``tokens`` tokens, computed as the whole would be."""
    return called_with(prompt_tokens=tokens)


def sparse_only() -> AbstractContextManager[None]:
    """Context in which layers work as in decoding for any number of tokens, to measure what a predictor misses."""
    return called_with(sparse_only=True)


def of_sequences(count: int) -> AbstractContextManager[None]:
    """Context of a call of ``count`` sequences of equal length, for layers whose inputs do not show it."""
    return called_with(sequences=count)


def single_steps() -> AbstractContextManager[None]:
    """Context in which tokens of a call are steps of one sequence, each with the bits of a call of its own."""
    return called_with(single_steps=True, sparse_only=True)


def takes_prompt_path(layer: DenseForm, x: torch.Tensor) -> bool:
    """Whether :func:`prompt_ffn` is the faster path for ``x [..., H]``."""
    if on_gpu(x):
        if torch.compiler.is_compiling():
            tokens = x.numel() // layer.site.hidden
        elif call_mode.sparse_only:
            return False
        else:
            tokens = _tokens(layer, x)
        all_of_floats = layer.n_hot == layer.site.intermediate and _as_they_are(layer)
        return all_of_floats or tokens >= dense_on_gpu_from(layer)
    if _stays(layer, x) or x.dtype not in DTYPES.values() or not layer.in_memory:
        return False
    if layer.int8_activations and layer.has_tiles:  # the operator has its own prompt path
        return False
    return _wants_all(layer) if layer.has_predictor else not layer.int8_activations


def _as_they_are(layer: DenseForm) -> bool:
    """Whether matrix products use the rows of ``layer`` unconverted."""
    return layer.weights == FLOAT and layer.dtype == _of_factors(layer.dtype)


def dense_on_gpu_from(layer: DenseForm) -> int:
    """Tokens from which a ``layer`` on a GPU computes all: each token's own neurons would be more to read."""
    site, share = layer.site, layer.expected_share
    hot = layer.by_batch[-1][1] if layer.by_batch else layer.n_hot
    if hot == site.intermediate:
        share = 1.0
    elif not layer.has_predictor:  # the first row of every neuron, the others only of those that fire
        fires = _FIRING if share == 1 and exact_zeros(site.activation) else share
        share = (1 + (site.rows_per_neuron - 1) * fires) / site.rows_per_neuron
    factor_bytes = 0 if _as_they_are(layer) else _of_factors(layer.dtype).itemsize
    stored = layer.weights if layer.weights in FORMATS else dtype_name(layer.dtype)
    return products_from(stored, site.hidden, factor_bytes, share)


def skips_predictor(layer: DenseForm, x: torch.Tensor) -> bool:
    """Whether ``x [..., H]`` is a prompt of which the operator computes every gate and up (int8: by tiles).

    If few neurons are predicted, following the predictor is faster. Only AVX-512 VNNI has tiles so far.
    """
    if _stays(layer, x):
        return False
    if layer.in_memory and not (layer.int8_activations and layer.has_tiles):
        return False
    return _wants_all(layer)


def _wants_all(layer: DenseForm) -> bool:
    """Whether a predicted layer computes every neuron of a prompt; it does if ``dense_from`` is set."""
    most = PREDICTED_SHARE_INT8 if layer.int8_activations and layer.has_tiles else PREDICTED_SHARE
    return layer.dense_from is not None or layer.expected_share > most


def has_tiles() -> bool:
    """Whether the selected kernels have tiles for prompts with int8 activations."""
    load()
    return str(torch.ops.pi2.kernel_tables()).endswith("vnni")


def _stays(layer: DenseForm, x: torch.Tensor) -> bool:
    """Whether ``x`` is no prompt: few tokens, :func:`sparse_only`, or a graph being captured for any number of tokens.

    Up to the largest bucket of a plan (``by_batch``), tokens are sequences: a step keeps its bits, compiled or not.
    """
    if torch.compiler.is_compiling() or call_mode.sparse_only:
        return True
    least = prompt_from(layer)
    return least == 0 or _tokens(layer, x) < least


def _tokens(layer: DenseForm, x: torch.Tensor) -> int:
    """Tokens of the call, or of the whole prompt that it is a chunk of."""
    return max(x.numel() // layer.site.hidden, call_mode.prompt_tokens)


def prompt_from(layer: DenseForm) -> int:
    """Number of tokens from which a call is a prompt to ``layer``; 0: never."""
    least = PROMPT_TOKENS if layer.dense_from is None else layer.dense_from
    return max(least, layer.by_batch[-1][0] + 1) if least and layer.by_batch else least


def _of_factors(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which inputs of ``dtype`` are multiplied."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def prompt_ffn(layer: DenseForm, x: torch.Tensor, products: list[torch.Tensor] | None = None) -> torch.Tensor:
    """``layer(x)`` for ``x [..., H]`` with every neuron computed; the result has ``x``'s dtype. ``products``: gets the
    input of down, float32 ``[T, slice of neurons]`` in plan order.

    Everything is in float32, as in the sparse operator, except products of bfloat16 inputs, which PyTorch rounds to
    bfloat16. (float16 products could overflow.) Autocast is ignored, as by the operator. Method ``threshold`` drops
    neurons whose gate is below the cut.
    """
    with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):
        return _prompt_ffn(layer, x, products)


def _prompt_ffn(layer: DenseForm, x: torch.Tensor, products: list[torch.Tensor] | None) -> torch.Tensor:
    site, kind = layer.site, layer.weights
    dtype = _of_factors(x.dtype)
    x_TH = x.reshape(-1, site.hidden).to(dtype)
    act, factor = ACTIVATIONS[site.activation], on_up(site.activation, site.activation_on_up)
    y_TH = x_TH.new_zeros(x_TH.shape, dtype=torch.float32)
    step = _SLICE
    if on_gpu(x):
        step = site.intermediate if layer.neuron_rows.dtype == dtype else rows_at_once(site.hidden)
    parts = [slice(start, min(start + step, site.intermediate)) for start in range(0, site.intermediate, step)]
    up_row, eps, squares_T1 = site.rows_per_neuron - 2, norm(site.activation), x_TH.new_zeros(len(x_TH), 1).float()

    def project(part: slice, row: int, bias: torch.Tensor | None) -> torch.Tensor:
        w_SH = row_of_each(layer.neuron_rows[part], row, kind, site.hidden, dtype)
        y_TS = F.linear(x_TH, w_SH).float()
        return y_TS if bias is None else y_TS + bias[part]

    def gate(part: slice) -> torch.Tensor:
        return project(part, 0, layer.bias_gate if site.gated else layer.bias_up)

    whole_TI = act(torch.cat([gate(part) for part in parts], -1)) if cuts(site.activation) else None
    for part in parts:
        neuron_rows = layer.neuron_rows[part]
        h_TS = act(gate(part)) if whole_TI is None else whole_TI[:, part]
        gate_TS = h_TS
        if site.gated:
            up_TS = project(part, up_row, None if eps else layer.bias_up)
            h_TS = h_TS * factor(up_TS)
        if layer.threshold > 0:
            neuron_S = torch.arange(part.start, part.stop, dtype=torch.int64, device=x.device)
            threshold = layer.threshold if layer.thresholds is None else layer.thresholds[part]
            dropped_TS = (gate_TS.abs() <= threshold) & (neuron_S >= layer.n_hot)
            h_TS = torch.where(dropped_TS, torch.zeros_like(h_TS), h_TS)
        if eps:
            squares_T1 += h_TS.square().sum(-1, keepdim=True)
            h_TS = h_TS if layer.bias_up is None else h_TS * layer.bias_up[part]
        if products is not None:
            products.append(h_TS)
        y_TH += h_TS.to(dtype) @ row_of_each(neuron_rows, up_row + 1, kind, site.hidden, dtype)
    if eps:
        y_TH *= torch.rsqrt(squares_T1 / site.intermediate + eps)
    if (bias_H := layer.bias_out(layer.threshold > 0)) is not None:
        y_TH += bias_H
    return y_TH.to(x.dtype).reshape(x.shape)
