"""A phone by the planner's cost model, beside PowerInfer-2's own figures: simulated tokens a second, and times by part.

Nothing here was measured by us. The machine is a preset of published figures (docs/HARDWARE.md), and models have the
sizes of those of the paper (arXiv 2406.06282v3). Prompts on the NPU, which plans leave to the CPU, are :func:`prompt`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.tables import Result, Table, at
from torch_pi2.decode.budget import place_bytes
from torch_pi2.formats import row_bytes
from torch_pi2.machine.find import find_hardware
from torch_pi2.machine.hardware import Hardware
from torch_pi2.planner.cost import Cost, block_ms, expected_misses, expert_use, linear_ms, prompt_ffn_ms
from torch_pi2.planner.for_machine import solve
from torch_pi2.planner.model_shape import LayerShape, ModelShape, numbers
from torch_pi2.planner.request import Request
from torch_pi2.store.firing import power_law
from torch_pi2.store.shapes import SHAPES
from torch_pi2.types.offload import OffloadConfig

#: Of the paper: prompts of at most 64 tokens and answers of 1,024, half of which are there on average.
CONTEXT = 64 + 512
#: Of its prompts; and of a piece of ours, ``prefill_128``.
PROMPT, PIECE = 512, 128
#: TurboSparse-Mixtral's predictors take 2.6 GB (section 7.2.3): some 550 for each of 256 experts in int8.
RANK = 512
RECALL, FALSE_ALARMS = 0.95, 1.1  # assumed


@dataclass(frozen=True)
class Model:
    """``shape``: of ``SHAPES``. ``active``: share of neurons that fire. ``hits``: of the paper, with half in memory."""

    name: str
    shape: str
    active: float
    hits: float


#: Active: TurboSparse, arXiv 2406.05955. Hits: Figure 14 and Table 5 of the paper.
SMALL = Model("7B", "mistral-7b", 0.10, 0.95)
LARGE = Model("47B", "mixtral-8x7b", 0.15, 0.965)


@dataclass(frozen=True)
class Decoding:
    """A row. ``memory``: share of the neurons in memory, or bytes of everything. ``paper``: tokens a second, and where.

    ``npu``: whether it may have hot neurons. The planner gives it none of experts.
    """

    model: Model
    memory: float
    npu: bool
    paper: float
    source: str


DECODING = (
    Decoding(SMALL, 1.0, True, 20.0, "Fig. 12"),
    Decoding(SMALL, 0.5, True, 11.07, "Fig. 14"),
    Decoding(SMALL, 0.5, False, 9.60, "Fig. 14"),
    Decoding(LARGE, 0.5, False, 9.96, "Fig. 7"),
    Decoding(LARGE, 7e9, False, 2.13, "Fig. 10"),
    Decoding(LARGE, 19e9, False, 11.68, "Fig. 10"),
)


@dataclass(frozen=True)
class Prompting:
    """A row. ``memory``: share of the neurons. ``npu``: computes ``all``, ``ffn`` or nothing. ``piece``: tokens."""

    model: Model
    memory: float
    npu: str
    piece: int
    paper: float | None
    source: str


PROMPTS = (
    Prompting(SMALL, 1.0, "all", PROMPT, 721.0, "Fig. 12"),
    Prompting(SMALL, 1.0, "all", PIECE, None, ""),
    Prompting(SMALL, 1.0, "ffn", PIECE, None, ""),
    Prompting(SMALL, 1.0, "", PROMPT, 8.0, "Fig. 12, llama.cpp"),
    Prompting(SMALL, 0.5, "all", PROMPT, 404.6, "Fig. 8"),
    Prompting(SMALL, 0.5, "all", PIECE, None, ""),
    Prompting(SMALL, 0.5, "ffn", PIECE, None, ""),
    Prompting(LARGE, 0.5, "all", PROMPT, None, ""),
)
#: Of all neurons' bytes, what the NPU may have.
_NPU_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4)


def miss_share(shape: ModelShape, hits: float) -> float:
    """Of the misses that frequencies predict, those that happen where tokens want what the last ones wanted.

    As many as make the paper's hits where half of the neurons fit in memory.
    """
    none = [0] * len(shape.layers)
    wanted, missed = (expected_misses(shape, 1, slots, none, none, none).sum() for slots in (0, shape.slots // 2))
    return float(min(1.0, (1 - hits) * wanted / missed))


@cache
def shape_of(model: Model) -> ModelShape:
    """The paper's model in 4 bits, blocks of 32 with a scale, int8 activations, without hot neurons."""
    sizes = SHAPES[model.shape]
    hidden, inner, blocks = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    experts = sizes.get("num_local_experts", 1)
    head = hidden // sizes["num_attention_heads"]
    q, kv = head * sizes["num_attention_heads"], head * sizes["num_key_value_heads"]
    row, out_row = row_bytes("int4", hidden), row_bytes("int4", q)
    layer = LayerShape(
        key="",
        hidden=hidden,
        intermediate=inner,
        rows=3,
        neuron_bytes=3 * row,
        slot_bytes=0,
        kernel="int4/int8",
        method="lowrank",
        predictor="lowrank/int8/int8",
        rank=RANK,
        predictor_bytes=RANK * (hidden + inner),
        recall=RECALL,
        predicted_active=FALSE_ALARMS * model.active,
        chosen=sizes.get("num_experts_per_tok", 1) / experts,
        attention_bytes=0,
        attention_kernel="int4/int8",
        kv_bytes=0,
        base_hot=0,
        cluster=1,
        frequencies=((1, power_law(inner, model.active).numpy()),),
        exact_zeros=True,
        experts=experts,
        block=False,
    )
    layer = replace(layer, slot_bytes=place_bytes([layer.entry(0)], OffloadConfig()))
    attention = (q + 2 * kv) * row + hidden * out_row
    block = {"attention_bytes": attention, "attention_calls": 2, "kv_bytes": 2 * 2 * kv, "block": True}
    layers = [replace(layer, **block), *[layer] * (experts - 1)] * blocks
    head_bytes = sizes["vocab_size"] * row
    fixed = blocks * attention + head_bytes + 2 * hidden * sizes["vocab_size"]
    return ModelShape(tuple(layers), head_bytes, "int4/int8", fixed, hidden, True, "float16")


def decode(row: Decoding, hardware: Hardware, *, recurring: bool) -> dict[str, Any]:
    """The fastest plan of one sequence, with as much of the memory for the NPU as is best.

    Returns:
        ``tokens_per_s``; ``ms`` by part (``cost.PARTS``); ``npu_ms`` and ``drive_ms``, hidden or not; ``read_bytes`` of
        a token; ``hit_rate``: of all neurons that are wanted, those that the cache has or the NPU; ``npu_bytes``,
        ``cache_bytes``: of neurons there.
    """
    shape = shape_of(row.model)
    share_of_misses = miss_share(shape, row.model.hits) if recurring else 1.0
    every = shape.slots * shape.place_bytes
    stored = row.memory != 1.0
    best: tuple[Cost, int] | None = None
    for share in _NPU_SHARES if row.npu else (0.0,):
        theirs, budget = int(share * every), None
        if row.memory > 1:
            budget = int(row.memory) - theirs
        elif stored:
            config = OffloadConfig()
            budget = shape.budget(int(row.memory * every) - theirs, batch=1, context=CONTEXT, config=config).total
        request = Request(shape, hardware, budget, theirs, (1,), CONTEXT, miss_share=share_of_misses)
        bucket = solve(request).buckets[0]
        cost = request.cost(1, bucket.hot, bucket.accelerator if theirs else (), bucket.resident if stored else ())
        if best is None or cost.total_ms < best[0].total_ms:
            best = cost, theirs
    assert best is not None
    cost, theirs = best
    npu = hardware.accelerator
    layers = list(zip(cost.layers, shape.layers, strict=True))
    npu_us = [_npu_us(hardware, y, at["accelerator_neurons"], 1) for at, y in layers] if npu and theirs else [0.0]
    none, hot = [0] * len(shape.layers), [at["hot_neurons"] for at in cost.layers]
    wanted = float(expected_misses(shape, 1, 0, none, hot, none).sum())
    return {
        "tokens_per_s": round(cost.tokens_per_s, 2),
        "ms": {part: round(ms, 2) for part, ms in cost.ms.items()},
        "npu_ms": round(sum(npu_us) / 1e3, 1),
        "drive_ms": round(sum(at["read_ms"] for at in cost.layers), 1),
        "read_bytes": round(cost.misses * shape.layers[0].file_slot_bytes),
        "hit_rate": round(1 - cost.misses / wanted, 3) if stored else None,
        "npu_bytes": theirs,
        "cache_bytes": cost.memory["resident"] + cost.memory["cold"],
    }


def _npu_us(hardware: Hardware, layer: LayerShape, neurons: int, tokens: float) -> float:
    assert hardware.accelerator is not None
    bits = 8 * layer.neuron_bytes / (layer.rows * layer.hidden)
    return hardware.accelerator.ffn_us(
        batch=max(1, round(tokens)), neurons=neurons, hidden=layer.hidden, rows=layer.rows, weight_bits=bits
    )


def prompt(row: Prompting, hardware: Hardware, tokens: int = PROMPT) -> dict[str, Any]:
    """A prompt whose layers are all dense, in pieces, for each of which what is not in memory is read once, in order.

    A layer is read while the one before it is computed. On the NPU: layers' multiplications at its rate or their bytes
    at its bandwidth, whichever takes longer, and a call for each linear layer or FFN; with ``ffn`` attention and its
    linear layers stay on the CPU, as ``export(target="qnn:...")`` leaves them.

    Returns:
        ``tokens_per_s``; ``ms``: ``npu``, ``cpu`` and ``waiting`` for reads, which add up.
    """
    shape, npu = shape_of(row.model), hardware.accelerator
    assert npu is not None
    ms, done = dict.fromkeys(("npu", "cpu", "waiting"), 0.0), 0
    away = sum(layer.slots * layer.file_slot_bytes for layer in shape.layers) * (1 - row.memory)
    blocks = [i for i, layer in enumerate(shape.layers) if layer.block]
    reading = hardware.reads.stream_us(away / len(blocks)) / 1e3
    reading *= hardware.interference.read_while_computing if away else 1
    while done < tokens:
        size = min(row.piece, tokens - done)
        for first, last in zip(blocks, [*blocks[1:], len(shape.layers)]):
            layer, ours = shape.layers[first], {"npu": 0.0, "cpu": 0.0}
            for ffn in shape.layers[first:last]:
                use, own = expert_use(ffn, size)
                if row.npu:
                    ours["npu"] += use * _npu_us(hardware, ffn, ffn.intermediate, own) / 1e3
                else:
                    ours["cpu"] += prompt_ffn_ms(ffn, hardware, size, ffn.intermediate, shape.weight_bytes)
            kv_bytes = size * (done + (size + 1) / 2) * layer.kv_bytes
            around = block_ms(shape, layer, hardware, size, 1, kv_bytes, compiled=True)
            if row.npu == "all":
                weights = numbers(layer.attention_kernel, layer.attention_bytes)
                macs = size * (weights + (done + (size + 1) / 2) * 2 * layer.hidden)
                read_us = layer.attention_bytes / npu.stream_gb_per_s / 1e3
                ours["npu"] += (
                    layer.attention_calls * npu.launch_us + max(read_us, macs / npu.gmacs_per_s / 1e3)
                ) / 1e3
                ours["cpu"] += around["glue"]
            else:
                ours["cpu"] += sum(around.values())
            for side, took in ours.items():
                ms[side] += took
            ms["waiting"] += max(0.0, reading - sum(ours.values()))
        done += size
    ms["waiting"] += reading  # of the first layer
    ms["cpu"] += linear_ms(hardware, shape.head_kernel, 1, shape.head_bytes, model_bytes=shape.weight_bytes)
    return {"tokens_per_s": round(tokens * 1e3 / sum(ms.values()), 1), "ms": {k: round(v, 1) for k, v in ms.items()}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", default="sm8650-ufs4.0", metavar="NAME", help="a preset, or a file, with an NPU")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Rows of ``DECODING`` and ``PROMPTS``, beside the paper's figures.

    Raises:
        ConfigError: no such profile, or one without an accelerator.
    """
    machine = find_hardware(args.hardware)
    decoding = []
    for row in DECODING:
        by = {name: decode(row, machine, recurring=name == "recurring") for name in ("independent", "recurring")}
        decoding.append(_about(row) | by)
    return {
        "simulated": True,
        "hardware": machine.name,
        "source": machine.source,
        "context": CONTEXT,
        "prompt": PROMPT,
        "decoding": decoding,
        "prompts": [_about(row) | {"piece": row.piece} | prompt(row, machine) for row in PROMPTS],
    }


def _about(row: Decoding | Prompting) -> dict[str, Any]:
    found = {"model": row.model.name, "memory": row.memory, "npu": row.npu}
    return found | {"paper": row.paper, "paper_source": row.source}


def _memory(row: dict[str, Any]) -> str:
    share = row["memory"]
    return f"{share / 1e9:g} GB" if share > 1 else {1.0: "all", 0.5: "half"}[share]


def _paper(row: dict[str, Any]) -> str:
    return "" if row["paper"] is None else f"{row['paper']:g} ({row['paper_source']})"


def _of_parts(*names: str) -> Any:
    """Milliseconds of these parts of a token together, of recurring tokens."""
    return lambda row: f"{sum(row['recurring']['ms'][name] for name in names):.1f}"


TABLES = (
    Table(
        "Decoding, tokens/s",
        lambda result: result["decoding"],
        {
            "model": at("model"),
            "memory": _memory,
            "by": lambda row: "CPU, NPU" if row["npu"] else "CPU",
            "paper": _paper,
            "independent": at("independent.tokens_per_s", ".1f"),
            "hits": at("independent.hit_rate", ".1%"),
            "recurring": at("recurring.tokens_per_s", ".1f"),
            "its hits": at("recurring.hit_rate", ".1%"),
            "attention ms": _of_parts("attention", "sdpa"),
            "predictor": _of_parts("predictor"),
            "hot": _of_parts("hot"),
            "cold": _of_parts("cold"),
            "waiting": _of_parts("io"),
            "rest": _of_parts("merge", "head", "glue"),
            "drive busy": at("recurring.drive_ms", ".1f"),
            "MB read": at("recurring.read_bytes", ".0f", 1e-6),
        },
    ),
    Table(
        "Prompts, tokens/s",
        lambda result: result["prompts"],
        {
            "model": at("model"),
            "memory": _memory,
            "on the NPU": lambda row: {"all": "all", "ffn": "feed-forward", "": "nothing"}[row["npu"]],
            "chunk": at("piece"),
            "paper": _paper,
            "here": at("tokens_per_s", ".0f"),
            "NPU ms": at("ms.npu", ".0f"),
            "CPU": at("ms.cpu", ".0f"),
            "waiting": at("ms.waiting", ".0f"),
        },
    ),
)


def about(result: Result) -> str:
    return (
        f"SIMULATED: {result['hardware']}, {result['source']} figures; nothing was measured. Decoding after "
        f"{result['context']} tokens; prompts of {result['prompt']}; times are of recurring tokens"
    )
