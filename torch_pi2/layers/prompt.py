"""Many tokens at once: the feed-forward layer as matrix products over slices of its neurons.

A long prompt's tokens together want nearly every neuron, and a matrix product uses a weight for all tokens at once;
the sparse operator, made for few tokens, reads it for each. What is skipped there is multiplied by zero here, so the
result is the same but for its last bits (another order of summation; bfloat16 inputs: products rounded to bfloat16).

Measured on 4096 x 14336, 2 threads, 128 tokens: bfloat16 61 ms against 240 for the exact gate, and 36 for a predicted
tenth of the neurons, which therefore stays with the sparse operator; int4 with float activations 132.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from torch_pi2.base.dtypes import DTYPES, dtype_name
from torch_pi2.formats import FLOAT, FORMATS
from torch_pi2.layers.gpu import on_gpu
from torch_pi2.layers.rows import row_of_each
from torch_pi2.ops import ACTIVATIONS, load
from torch_pi2.ops.activations import cuts, exact_zeros, on_up
from torch_pi2.ops.gpu.operators import products_from, rows_at_once

if TYPE_CHECKING:
    from torch_pi2.layers.ffn import SparseFFN

#: Tokens from which on matrix products are used, where no plan says it (``SparseFFN.dense_from``).
PROMPT_TOKENS = 32
#: Share of neurons computed, up to which a predicted layer is faster sparsely however many tokens there are; likewise.
PREDICTED_SHARE = 0.15
#: The same with int8 activations, where both ways have kernels for several tokens.
PREDICTED_SHARE_INT8 = 0.3
#: Share of the neurons of an exact gate that fire, where nobody has counted: as of models that were made sparse.
_FIRING = 0.1
#: Neurons per slice: their activations stay in the cache, and only so many weights are dequantised at a time.
_SLICE = 1024


class _CallMode(threading.local):
    """How the layers' calls in this thread are meant; what sets it is not in their arguments, which the model passes.

    Attributes:
        prompt_tokens: of the prompt that calls are chunks of; they are computed as the whole would be. 0: of none.
        sparse_only: whatever the number of tokens, layers work as in decoding.
        single_steps: tokens of a call are steps of one sequence, taken together: the bits of each alone.
    """

    prompt_tokens = 0
    sparse_only = False
    single_steps = False


call_mode = _CallMode()


@contextmanager
def _called_with(**settings: Any) -> Iterator[None]:
    before = {name: getattr(call_mode, name) for name in settings}
    vars(call_mode).update(settings)
    try:
        yield
    finally:
        vars(call_mode).update(before)


def chunks_of_prompt(tokens: int) -> AbstractContextManager[None]:
    """Within it calls are for chunks of a prompt of so many tokens, and are computed as the whole would be."""
    return _called_with(prompt_tokens=tokens)


def sparse_only() -> AbstractContextManager[None]:
    """Within it layers work as in decoding, whatever the number of tokens: for measuring loss and sparsity.

    What a predictor misses shows in no loss that was taken over prompts computed densely.
    """
    return _called_with(sparse_only=True)


def single_steps() -> AbstractContextManager[None]:
    """Within it the tokens of a call are steps of one sequence taken together: the bits of each alone.

    Layers work as :func:`sparse_only` has it, with the hot neurons of one token (with predictors others miss others).
    """
    return _called_with(single_steps=True, sparse_only=True)


def decoded_together(x: torch.Tensor, hidden: int) -> int:
    """Sequences, at most, that the tokens of ``x [..., hidden]`` belong to."""
    return 1 if call_mode.single_steps else x.numel() // hidden


def takes_prompt_path(layer: SparseFFN, x: torch.Tensor) -> bool:
    """Whether :func:`prompt_ffn` is the faster way for the tokens of ``x [..., H]``."""
    if on_gpu(x):
        return _dense_on_gpu(layer, x)
    if _stays(layer, x) or x.dtype not in DTYPES.values() or not layer.in_memory:
        return False
    if layer.int8_activations and layer.has_tiles:  # the operator's
        return False
    return _wants_all(layer) if layer.has_predictor else not layer.int8_activations


def _dense_on_gpu(layer: SparseFFN, x: torch.Tensor) -> bool:
    if torch.compiler.is_compiling():
        tokens = x.numel() // layer.site.hidden
    elif call_mode.sparse_only:
        return False
    else:
        tokens = _tokens(layer, x)
    all_of_floats = layer.n_hot == layer.site.intermediate and _as_they_are(layer)
    return all_of_floats or tokens >= dense_on_gpu_from(layer)


def _as_they_are(layer: SparseFFN) -> bool:
    """Whether a product of matrices takes the rows of ``layer`` as they are; others are converted in each call."""
    return layer.weights == FLOAT and layer.dtype == _of_factors(layer.dtype)


def dense_on_gpu_from(layer: SparseFFN) -> int:
    """Tokens of a call from which on every neuron of ``layer`` is computed, where it is on a GPU: together they would
    read more than that does, as each reads its own. For inputs of the layer's dtype."""
    site, share = layer.site, layer.expected_share
    hot = layer.by_batch[-1][1] if layer.by_batch else layer.n_hot
    if hot == site.intermediate:
        share = 1.0
    elif not layer.has_predictor:  # the first row of every neuron, and the others of those that fire
        fires = _FIRING if share == 1 and exact_zeros(site.activation) else share
        share = (1 + (site.rows_per_neuron - 1) * fires) / site.rows_per_neuron
    factor_bytes = 0 if _as_they_are(layer) else _of_factors(layer.dtype).itemsize
    stored = layer.weights if layer.weights in FORMATS else dtype_name(layer.dtype)
    return products_from(stored, site.hidden, factor_bytes, share)


def skips_predictor(layer: SparseFFN, x: torch.Tensor) -> bool:
    """Whether ``x [..., H]`` is a prompt of which the operator computes every gate and up (int8 activations: by tiles).

    Where a predictor leaves few neurons it is faster to follow it: 128 tokens, 4096 x 14336, int4, 2 threads (Zen 5): a
    tenth predicted and firing 37 ms by tiles, 16 and 3 for the predictor without; three tenths 77, 39 and 3. Tiles
    exist for AVX-512 VNNI so far.
    """
    if _stays(layer, x):
        return False
    if layer.in_memory and not (layer.int8_activations and layer.has_tiles):
        return False
    return _wants_all(layer)


def _wants_all(layer: SparseFFN) -> bool:
    """Whether a predicted layer is to compute every neuron of a prompt; one whose plan says from when on does."""
    most = PREDICTED_SHARE_INT8 if layer.int8_activations and layer.has_tiles else PREDICTED_SHARE
    return layer.dense_from is not None or layer.expected_share > most


def has_tiles() -> bool:
    """Whether the kernels in use have tiles for prompts with int8 activations."""
    load()
    return str(torch.ops.pi2.kernel_tables()).endswith("vnni")


def _stays(layer: SparseFFN, x: torch.Tensor) -> bool:
    """Few tokens, :func:`sparse_only`, or a graph being captured, whose number of tokens may be any.

    As many tokens as there are sequences in the largest of a plan's buckets are no prompt: the buckets say how many
    neurons are hot, and a step keeps its bits whether it is compiled or not.
    """
    if torch.compiler.is_compiling() or call_mode.sparse_only:
        return True
    least = prompt_from(layer)
    return least == 0 or _tokens(layer, x) < least


def _tokens(layer: SparseFFN, x: torch.Tensor) -> int:
    """Of a call, or of the prompt that it reads a chunk of."""
    return max(x.numel() // layer.site.hidden, call_mode.prompt_tokens)


def prompt_from(layer: SparseFFN) -> int:
    """Tokens from which on a call is a prompt to ``layer``; 0: never."""
    least = PROMPT_TOKENS if layer.dense_from is None else layer.dense_from
    return max(least, layer.by_batch[-1][0] + 1) if least and layer.by_batch else least


def _of_factors(dtype: torch.dtype) -> torch.dtype:
    """Of the factors of products of inputs of ``dtype``."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def prompt_ffn(layer: SparseFFN, x: torch.Tensor) -> torch.Tensor:
    """Every neuron of ``layer`` on ``x [..., H]``; the result has ``x``'s dtype.

    Everything is in float32, as in the sparse operator, but for the products of bfloat16 inputs, whose results PyTorch
    rounds to bfloat16 (float32's range, so that nothing overflows; float16's would). Under autocast, too: the operator
    does not know it either. Method ``threshold`` drops the neurons whose gate is below its cut, as the operator does.
    """
    with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):
        return _prompt_ffn(layer, x)


def _prompt_ffn(layer: SparseFFN, x: torch.Tensor) -> torch.Tensor:
    site, kind = layer.site, layer.weights
    dtype = _of_factors(x.dtype)
    x_TH = x.reshape(-1, site.hidden).to(dtype)
    act, factor = ACTIVATIONS[site.activation], on_up(site.activation, site.activation_on_up)
    y_TH = x_TH.new_zeros(x_TH.shape, dtype=torch.float32)
    step = _SLICE
    if on_gpu(x):
        step = site.intermediate if layer.neuron_rows.dtype == dtype else rows_at_once(site.hidden)
    parts = [slice(start, min(start + step, site.intermediate)) for start in range(0, site.intermediate, step)]
    up_row = site.rows_per_neuron - 2

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
            up_TS = project(part, up_row, layer.bias_up)
            h_TS = h_TS * factor(up_TS)
        if layer.threshold > 0:
            neuron_S = torch.arange(part.start, part.stop, dtype=torch.int64, device=x.device)
            threshold = layer.threshold if layer.thresholds is None else layer.thresholds[part]
            dropped_TS = (gate_TS.abs() <= threshold) & (neuron_S >= layer.n_hot)
            h_TS = torch.where(dropped_TS, torch.zeros_like(h_TS), h_TS)
        y_TH += h_TS.to(dtype) @ row_of_each(neuron_rows, up_row + 1, kind, site.hidden, dtype)
    if layer.bias_down is not None:
        y_TH += layer.bias_down
    return y_TH.to(x.dtype).reshape(x.shape)
