"""What a prompt takes, and from how many tokens on a layer is faster with every neuron than with those wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_pi2.ops.constants import constants
from torch_pi2.planner.layer_cost import TIMES, block_ms, expert_use, layer_curve, linear_ms, sums
from torch_pi2.planner.model_shape import LayerShape, ModelShape
from torch_pi2.types.machine_plan import Bucket, PromptPlan

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

#: Numbers of tokens of which one is a layer's switch point.
_TOKENS = (*range(2, 17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 448, 512)
#: Of the time per token, what is near enough to the best chunk's.
_NEAR = 1.03


def dense_ms(layer: LayerShape, hardware: Hardware, tokens: int, *, model_bytes: float | None = None) -> float:
    """Milliseconds of a layer that computes every neuron for ``tokens`` tokens (an expert: for its share of them)."""
    use, own = expert_use(layer, tokens)
    firsts = own * layer.intermediate * (layer.rows - 1)
    took = hardware.dense_us(
        layer.kernel,
        tokens=own,
        nbytes=layer.intermediate * layer.neuron_bytes,
        macs=(firsts + float(sums(layer, own).hot_pairs_used[0])) * layer.hidden,
        calls=1 / (layer.experts * use) if layer.chosen < 1 else 1,
        model_bytes=model_bytes,
    )
    return use * took / 1e3


def sparse_ms(
    layer: LayerShape, hardware: Hardware, tokens: int, *, hot: int | None = None, model_bytes: float | None = None
) -> float:
    """Milliseconds of a layer that computes what its predictor or gate lets through, in passes of 64 tokens.

    What a pass reads is the union of what its tokens want, measured where statistics have such batches.
    """
    boundary = layer.base_hot if hot is None else hot

    def passes(size: int) -> float:
        curve = layer_curve(layer, hardware, size, boundary, model_bytes=model_bytes)
        return math.fsum(float(curve[part][0]) for part in TIMES)

    most = constants().pass_tokens
    whole, rest = divmod(tokens, most)
    return (whole * passes(most) if whole else 0.0) + (passes(rest) if rest else 0.0)


def switch_point(shape: ModelShape, hardware: Hardware, layer: int, *, hot: int | None = None) -> int:
    """From so many tokens in one call on a layer is faster with every neuron: at each number up to 512; 0: never."""
    about, at = shape.layers[layer], 0
    for tokens in reversed(_TOKENS):
        whole = dense_ms(about, hardware, tokens, model_bytes=shape.weight_bytes)
        if whole > sparse_ms(about, hardware, tokens, hot=hot, model_bytes=shape.weight_bytes):
            break
        at = tokens
    return at


def prompt_cost(
    shape: ModelShape,
    hardware: Hardware,
    *,
    tokens: int,
    dense: Sequence[bool],
    hot: Sequence[int] | None = None,
    in_memory: bool = True,
    chunk_tokens: int | None = None,
) -> float:
    """Milliseconds of a prompt of one sequence.

    Linear layers of all tokens of a piece at once; attention, of each token over those before it, at the speed at which
    a single one reads keys and values; of FFNs :func:`dense_ms` or :func:`sparse_ms`; ``glue``. Over a store each piece
    of ``chunk_tokens`` (None: what one reading serves) reads every layer once (``hardware.stream_us``, as if nothing
    were in the cache) while the one before is computed: the longer of both counts, and the first read in full.

    Args:
        dense: by layer, whether every neuron is computed. hot: by layer, those that no predictor is asked about where
            not every neuron is (None: ``base_hot``).
    """
    piece = chunk_tokens or constants().prompt_tokens
    pieces = [tokens] if in_memory else [piece] * (tokens // piece) + [tokens % piece]
    hot = [layer.base_hot for layer in shape.layers] if hot is None else hot
    computing, done, nbytes = [], 0, shape.weight_bytes
    for size in filter(None, pieces):
        for layer, whole, first in zip(shape.layers, dense, hot, strict=True):
            if whole:
                ffn = dense_ms(layer, hardware, size, model_bytes=nbytes)
            else:
                ffn = sparse_ms(layer, hardware, size, hot=first, model_bytes=nbytes)
            # Of each token over those before it; prompts are not compiled.
            kv = size * (done + (size + 1) / 2) * layer.kv_bytes
            around = block_ms(shape, layer, hardware, tokens=size, sequences=1, kv_bytes=kv, compiled=False)
            computing.append(ffn + math.fsum(around.values()))
        done += size
    head = linear_ms(hardware, shape.head_kernel, 1, shape.head_bytes, model_bytes=shape.weight_bytes)
    if in_memory:
        return math.fsum(computing) + head
    reading = [hardware.stream_us(layer.slots * layer.file_slot_bytes) / 1e3 for layer in shape.layers]
    reading *= len(computing) // len(reading)
    following = [ms * hardware.read_while_computing for ms in reading[1:]] + [0.0]
    return reading[0] + math.fsum(map(max, computing, following)) + head


def best_chunk(
    shape: ModelShape, hardware: Hardware, dense: Sequence[bool], *, hot: Sequence[int] | None = None
) -> int:
    """Tokens of a piece of a long prompt over a store: the fewest, of 64 to 512, with 97 % of the best speed.

    Fewer tokens need less memory for activations; with enough of them reading hides behind computing.

    Args:
        dense, hot: as :func:`prompt_cost` takes them.
    """
    least, most = constants().pass_tokens, constants().prompt_tokens
    sizes = (least, 2 * least, 4 * least, most)
    how: dict[str, Any] = {"tokens": most, "dense": dense, "hot": hot, "in_memory": False}
    took = {size: prompt_cost(shape, hardware, chunk_tokens=size, **how) for size in sizes}
    return next(size for size in sizes if took[size] <= _NEAR * min(took.values()))


def prompt_plan(shape: ModelShape, hardware: Hardware, last: Bucket, stored: bool) -> PromptPlan:
    """From how many tokens on each layer is dense, and how much of a long prompt is computed per reading of a layer.

    Args:
        last: the bucket of the largest batch, whose hot neurons prompts have, too. A layer is dense from more tokens on
            than its batch, if at all: a decoding step is no prompt.
    """
    found = [switch_point(shape, hardware, i, hot=hot) for i, hot in enumerate(last.hot)]
    dense_from = tuple(max(at, last.batch + 1) if at else 0 for at in found)
    most = constants().prompt_tokens
    dense = [0 < at <= most for at in dense_from]
    return PromptPlan(dense_from, best_chunk(shape, hardware, dense, hot=last.hot) if stored else most)
