"""A decoding step over flash, simulated for a model of any sizes on any described machine: nothing is run or loaded.

Times are those of the planner's cost model (:func:`torch_pi2.planner.cost.step_cost`) with a hardware profile's rates;
what the cache lacks comes of tokens drawn by the law of :mod:`torch_pi2.store.firing`, replayed with the cache that
runs in stores. ``python -m benchmarks study --part validate`` puts it beside the real engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.subject import FIRING
from torch_pi2.formats import row_bytes
from torch_pi2.machine.hardware import Hardware, Kernel, Line, Rates
from torch_pi2.machine.reads import Reads
from torch_pi2.observe.accesses import Accesses, StoredLayer
from torch_pi2.ops import load
from torch_pi2.planner.cost import Cost, step_cost
from torch_pi2.planner.layer_cost import predicted_share
from torch_pi2.planner.misses import ReplayMisses
from torch_pi2.planner.model_shape import Heads, LayerShape, ModelShape
from torch_pi2.store.firing import LOCALITY, TOPIC_IDS, GateMaker, TokenStream, direction, power_law
from torch_pi2.store.shapes import SHAPES
from torch_pi2.store.writer import largest_cluster
from torch_pi2.types.config import Config

#: Tokens of all sequences that a cache is warmed up by, and as many that are counted; and steps, at least.
TOKENS, STEPS = 256, 32
#: Of the cache, what never leaves it: as a store does without a plan (``OffloadConfig.hot_share``, ``lfu``).
RESIDENT_SHARE = 0.25
#: Of token ids; what matters of it is how many topics there are.
_VOCABULARY = 32000
#: Of the low-rank predictors of synthetic models.
RANK = 512
#: Blocks that are replayed for all: layers are alike. At least two, so that a step's beginning can be told.
_BLOCKS = 2


@dataclass(frozen=True)
class Predictor:
    """Low-rank, of every layer. ``name``: of ``torch_pi2.machine.hardware.PREDICTORS``. ``nbytes``: of its weights.

    ``wanted``: mean share of the neurons that are not always hot that it lets through.
    """

    name: str
    rank: int
    nbytes: int
    recall: float
    wanted: float


@cache
def own_predictor(hidden: int, neurons: int, active: float, n_hot: int) -> Predictor:
    """Of a synthetic model's layer, which is made and measured for it (seconds)."""
    load()
    gates = GateMaker(*_law(hidden, neurons, active), rank=RANK)
    for start in range(0, neurons, 2048):
        gates.rows(start, min(start + 2048, neurons))
    card = gates.predictor(n_hot).card
    assert card is not None
    return Predictor("lowrank/int4/int8", card.rank, card.bytes, card.recall, card.predicted_active)


def _law(hidden: int, neurons: int, active: float) -> tuple[torch.Tensor, torch.Tensor, str, torch.Generator]:
    generator = torch.Generator().manual_seed(0)
    return direction(hidden, generator), power_law(neurons, active), "int4", generator


def shape_of(
    sizes: Mapping[str, Any],
    *,
    active: float,
    n_hot: int,
    predictor: Predictor | None,
    compiled: bool = True,
    kv_dtype: str = "bfloat16",
) -> ModelShape:
    """Sizes as of ``SHAPES`` in 4 bits, blocks of 32 with a scale, int8 activations, as stores of ours have them.

    Args:
        active: share of neurons that fire; 1: all, as SwiGLU's do, and slots are then clusters as ``pack`` makes them.
        n_hot: neurons of a layer that are computed for every token.
    """
    hidden, blocks = sizes["hidden_size"], sizes["num_hidden_layers"]
    inner = sizes["moe_intermediate_size" if "moe_intermediate_size" in sizes else "intermediate_size"]
    head = sizes.get("head_dim", hidden // sizes["num_attention_heads"])
    q, kv = head * sizes["num_attention_heads"], head * sizes["num_key_value_heads"]
    experts = sizes.get("num_local_experts", sizes.get("num_experts", 1))
    row, out_row = row_bytes("int4", hidden), row_bytes("int4", q)
    frequencies = np.ones(inner) if active == 1 else power_law(inner, active).numpy()
    layer = LayerShape(
        key="",
        hidden=hidden,
        intermediate=inner,
        rows=3,
        neuron_bytes=3 * row,
        slot_bytes=0,
        kernel="int4/int8",
        method="exact" if predictor is None else "lowrank",
        predictor=None if predictor is None else predictor.name,
        rank=0 if predictor is None else predictor.rank,
        predictor_bytes=0 if predictor is None else predictor.nbytes,
        recall=1.0 if predictor is None else predictor.recall,
        predicted_active=1.0 if predictor is None else predictor.wanted,
        chosen=sizes["num_experts_per_tok"] / experts if experts > 1 else 1.0,
        attention_bytes=0,
        attention_kernel="int4/int8",
        kv_bytes=0,
        base_hot=n_hot,
        cluster=1,
        frequencies=((1, frequencies),),
        exact_zeros=active < 1,
        experts=experts,
        block=False,
    ).with_cluster(1 if predictor is not None else largest_cluster(3 * row))
    attention = (q + 2 * kv) * row + hidden * out_row
    heads = Heads(sizes["num_key_value_heads"], (q + 2 * kv) * row, q)
    block = {"attention_bytes": attention, "attention_calls": 2, "kv_bytes": 2 * 2 * kv, "heads": heads, "block": True}
    # the same objects: what is worked out of one holds for all
    layers = [replace(layer, **block), *[layer] * (experts - 1)] * blocks
    head_bytes = sizes["vocab_size"] * row
    fixed = blocks * attention + head_bytes + 2 * hidden * sizes["vocab_size"]
    return ModelShape(tuple(layers), head_bytes, "int4/int8", fixed, hidden, compiled, kv_dtype)


def deepseek_v3(*, compiled: bool = True) -> ModelShape:
    """DeepSeek-V3 (arXiv 2412.19437, 4.2), 671 billion parameters, in the formats of :func:`shape_of`.

    All neurons fire. Each token has 8 of 256 experts and one more that all tokens have; three blocks have a
    feed-forward layer without experts. Of a token attention keeps one vector for all heads (576 numbers), so that it
    cannot be divided by heads.
    """
    latent, queries, heads, head, rotary = 512, 1536, 128, 128, 64
    sizes = {
        "hidden_size": 7168, "moe_intermediate_size": 2048, "num_hidden_layers": 58, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": head, "vocab_size": 129280, "num_experts": 256,
        "num_experts_per_tok": 8,
    }  # fmt: skip
    made = shape_of(sizes, active=1, n_hot=0, predictor=None, compiled=compiled)
    hidden, expert = made.hidden, made.layers[1]
    matrices = (  # rows and columns
        (queries, hidden), (heads * (head + rotary), queries), (latent + rotary, hidden),
        (2 * heads * head, latent), (hidden, heads * head),
    )  # fmt: skip
    attention = sum(rows * row_bytes("int4", columns) for rows, columns in matrices)
    block: dict[str, Any] = {
        "attention_bytes": attention, "attention_calls": len(matrices), "kv_bytes": 2 * (latent + rotary),
        "heads": None, "block": True,
    }  # fmt: skip
    alone: dict[str, Any] = {"experts": 1, "chosen": 1.0}
    wide = 18432
    dense = replace(expert, **alone, **block, intermediate=wide, frequencies=((1, np.ones(wide)),))
    layers = [dense] * 3 + [replace(expert, **block), *[expert] * 255, replace(expert, **alone)] * 58
    away = sum(layer.attention_bytes for layer in made.layers) - 61 * attention
    return replace(made, layers=tuple(layers), fixed_bytes=made.fixed_bytes - away)


#: Shapes that ``torch_pi2.synthetic`` has no model class for.
OTHERS = {"deepseek-v3": deepseek_v3}


@cache
def synthetic_shape(name: str, *, compiled: bool = True) -> ModelShape:
    """As ``torch_pi2.synthetic`` makes a model for the benchmarks, and ``pack`` its store; or one of ``OTHERS``."""
    if name in OTHERS:
        return OTHERS[name](compiled=compiled)
    firing = _firing(name)
    sizes, active = SHAPES[name], firing["active"]
    if firing["predictor"] is None:
        return shape_of(sizes, active=active, n_hot=0, predictor=None, compiled=compiled)
    hidden, neurons = sizes["hidden_size"], sizes["intermediate_size"]
    hot = int((power_law(neurons, active) >= Config().hot_frequency).sum()) if "num_local_experts" not in sizes else 0
    own = own_predictor(hidden, neurons, active, hot)
    return shape_of(sizes, active=active, n_hot=hot, predictor=own, compiled=compiled)


def locality_of(name: str) -> float:
    """Of tokens, as :func:`synthetic_shape` fires."""
    share: float = _firing(name)["locality"]
    return share


def _firing(name: str) -> dict[str, Any]:
    return {"active": 0.1, "predictor": "lowrank", "locality": LOCALITY} | FIRING.get(name, {})


class StreamMisses:
    """What a cache lacks of tokens of one topic after another: a ``MissCurve`` (:mod:`torch_pi2.planner.misses`).

    A neuron is wanted as often as its predictor lets it through, and tokens of a topic share the part ``locality`` of
    what makes it so (:mod:`torch_pi2.store.firing`); experts have the highest scores of a router, which share as much.
    ``_BLOCKS`` blocks are replayed, with as large a part of the cache, and stand for all: layers have to be alike.

    Args:
        ids_BT: int64, of the sequences that are decoded together. counted: their last so many steps; what is before
            warms the cache up.
    """

    def __init__(self, shape: ModelShape, locality: float, ids_BT: torch.Tensor, *, counted: int) -> None:
        self.shape, self._layers = shape, shape.layers[: _BLOCKS * shape.layers[0].experts]
        few = replace(shape, layers=self._layers)
        accesses = _accesses(self._layers, ids_BT.flatten(), locality)
        self._replays = ReplayMisses(accesses, few, passes=ids_BT.shape[1], counted=counted)

    def misses(
        self, batch: int, slots: int, resident: Sequence[int], hot: Sequence[int], accelerator: Any = None
    ) -> np.ndarray:
        """See :class:`~torch_pi2.planner.misses.MissCurve`."""
        n, every = len(self._layers), len(self.shape.layers)
        few = math.ceil(slots * n / every)
        found = self._replays.misses(
            batch, few, resident[:n], hot[:n], None if accelerator is None else accelerator[:n]
        )
        return np.full(every, found.mean())

    def wanted(self, batch: int) -> float:
        """Slots that a step wants in all."""
        none = [0] * len(self.shape.layers)
        return float(self.misses(batch, 0, none, [layer.base_hot for layer in self.shape.layers]).sum())


@cache
def drawn_misses(name: str, shape: ModelShape, batch: int) -> StreamMisses:
    """Of ``batch`` sequences that each stay with a topic for a while; ``name``: of ``SHAPES``."""
    generator, steps = torch.Generator().manual_seed(0), max(STEPS, TOKENS // batch)
    streams = [TokenStream(_VOCABULARY, topics=True, generator=generator) for _ in range(batch)]
    return StreamMisses(shape, locality_of(name), torch.stack([s.draw(2 * steps) for s in streams]), counted=steps)


def _accesses(layers: Sequence[LayerShape], ids_T: torch.Tensor, locality: float) -> Accesses:
    """What tokens want of ``layers``, each a call; of experts, of those that are chosen."""
    load()
    generator, tokens = torch.Generator().manual_seed(0), len(ids_T)
    own, own_T = ids_T.unique(return_inverse=True)
    topics, topic_T = (ids_T // TOPIC_IDS).unique(return_inverse=True)

    def noise(width: int) -> torch.Tensor:
        """``[T, width]``, of unit variance."""
        shared, each = (torch.randn((len(kinds), width), generator=generator) for kinds in (topics, own))
        return math.sqrt(locality) * shared[topic_T] + math.sqrt(1 - locality) * each[own_T]

    rows_LT: list[list[np.ndarray | None]] = []
    for first in range(0, len(layers), layers[0].experts):
        block = layers[first : first + layers[0].experts]
        chosen = round(block[0].chosen * len(block))
        has_TE = torch.ones((tokens, len(block)), dtype=torch.bool)
        if chosen < len(block):
            has_TE = torch.zeros_like(has_TE).scatter_(1, noise(len(block)).topk(chosen).indices, True)
        for has_T, layer in zip(has_TE.unbind(1), block, strict=True):
            share_I = torch.from_numpy(predicted_share(layer))
            beta_I = torch.special.ndtri(share_I).float()
            wanted = (
                np.ones((tokens, layer.intermediate), bool)
                if layer.predictor is None
                else (noise(layer.intermediate) > -beta_I).numpy()
            )
            bits_TB = np.packbits(wanted, axis=1, bitorder="little")
            rows_LT.append([bits if has else None for bits, has in zip(bits_TB, has_T.tolist(), strict=True)])
    calls = [
        (number, row) for t in range(tokens) for number, rows in enumerate(rows_LT) if (row := rows[t]) is not None
    ]
    return Accesses(
        tuple(StoredLayer(y.key, y.intermediate, y.cluster, y.slot_bytes) for y in layers),
        "",
        layers[0].slot_bytes,
        {},
        torch.tensor([number for number, _ in calls], dtype=torch.int32),
        torch.zeros(len(calls), dtype=torch.uint8),
        torch.from_numpy(np.concatenate([row for _, row in calls])),
    )


def decode(
    shape: ModelShape,
    hardware: Hardware,
    misses: StreamMisses,
    *,
    batch: int,
    share: float,
    context: int,
    offload: Mapping[str, Any] | None = None,
    whole: bool = False,
) -> Cost:
    """A step of ``batch`` sequences with ``share`` of the neurons in a cache, as a store runs without a plan.

    ``whole``: every neuron is computed, whether it is wanted or not.
    """
    slots = int(share * shape.slots)
    stays = int(RESIDENT_SHARE * slots / len(shape.layers)) * shape.layers[0].cluster
    return step_cost(
        shape,
        hardware,
        batch=batch,
        hot=[layer.intermediate if whole else layer.base_hot for layer in shape.layers],
        resident=[min(stays, layer.intermediate) for layer in shape.layers],
        cache_bytes=slots * shape.place_bytes,
        misses=misses,
        context=context,
        offload=offload,
    )


def with_memory(hardware: Hardware, gb_per_s: float) -> Hardware:
    """``hardware`` with memory that is read in order at ``gb_per_s``, and gathered as many times as fast as before.

    Its cores are taken to keep up, its caches to hold nothing; what is bound by multiplications stays as it is.
    """
    slower = max(row.gb_per_s for row in hardware.memory if not row.row_bytes) / gb_per_s

    def scaled(lines: Sequence[Line]) -> tuple[Line, ...]:
        names = ("us_per_hot_mb", "us_per_cold_mb", "us_per_gate_mb")
        return tuple(replace(line, **{name: slower * getattr(line, name) for name in names}) for line in lines)

    rates = hardware.rates
    kernels = {
        name: Kernel(*(scaled(lines) for lines in (kernel.sparse, kernel.dense, kernel.linear)))
        for name, kernel in rates.kernels.items()
    }
    predictors, attention = (
        {name: scaled(lines) for name, lines in part.items()} for part in (rates.predictors, rates.attention)
    )
    memory = tuple(replace(row, gb_per_s=row.gb_per_s / slower) for row in hardware.memory)
    return replace(hardware, memory=memory, rates=Rates(kernels, predictors, attention), cached=None, accelerator=None)


def with_reads(hardware: Hardware, reads: Reads, faster: float = 1.0) -> Hardware:
    """``hardware`` with a drive, or one ``faster`` times as fast."""
    rows = [replace(row, reads_per_s=faster * row.reads_per_s) for row in reads.engines[reads.engine]]
    stream = faster * reads.stream_gb_per_s
    return replace(hardware, reads=replace(reads, stream_gb_per_s=stream, engines={reads.engine: tuple(rows)}))
