"""Questions that PowerInfer-2 leaves open, simulated: cache size against speed, what limits the pipeline, its ablation,
and several machines.

Nothing here is measured: every figure is :mod:`benchmarks.study_model`'s, of a hardware profile (docs/HARDWARE.md) and
descriptions of drives (docs/DEVICES.md). ``study-validate`` says how near that comes to the engine on a real drive.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import phone
from benchmarks.arguments import list_of
from benchmarks.figures import known
from benchmarks.study_model import OTHERS, StreamMisses, decode, drawn_misses, synthetic_shape, with_memory, with_reads
from torch_pi2.base import process as machine
from torch_pi2.cli import common
from torch_pi2.machine.device import find_device
from torch_pi2.machine.find import find_hardware
from torch_pi2.machine.hardware import Hardware, StoreCosts
from torch_pi2.machine.link import Link
from torch_pi2.machine.presets import device_reads
from torch_pi2.planner.choices import Choice
from torch_pi2.planner.cost import Cost, step_cost, streamed
from torch_pi2.planner.drive import offload_settings
from torch_pi2.planner.group import Member, deal_out
from torch_pi2.planner.misses import FrequencyMisses
from torch_pi2.planner.model_shape import ModelShape
from torch_pi2.planner.request import Task
from torch_pi2.store.shapes import SHAPES

_DEVICES = Path(__file__).parent / "devices"
MODELS = ("llama-1b", "mistral-7b", "llama-13b", "qwen3-30b-a3b", "mixtral-8x7b")
#: For machines, beside them; of ``OTHERS``, too.
LARGE = ("llama-70b", "deepseek-v3")
BATCHES = (1, 4, 8, 16, 32)
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
#: Presets and descriptions beside them.
DRIVES = ("ufs-3.1", "ufs-4.0", "ufs-4.1", "nvme-gen3", "nvme-gen4", "nvme-gen5")
MEMORY_GB_PER_S = (20, 30, 40, 60, 80, 100, 120)
#: Tokens before the one that is decoded.
CONTEXT = 256
#: What is limited, of the second question.
LIMITED, LIMITED_SHARES = "mistral-7b", (0.25, 0.5)
#: A drive is fast enough where a step takes at most so many times as long as with one that takes no time.
ENOUGH = 1.05
_FASTEST = 1e6
_READS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--part",
        choices=PARTS,
        default="cache",
        help="of these questions (default: cache)",
    )
    add(
        "--hardware",
        type=list_of(str),
        default=["measured", "sm8650-ufs4.0"],
        metavar="NAMES",
        help="profiles: measured, presets or files, comma-separated (not of ablation; default: measured,sm8650-ufs4.0)",
    )
    add(
        "--models",
        type=list_of(str),
        metavar="NAMES",
        help=f"of cache and machines (default: {','.join(MODELS)}, and for machines {','.join(LARGE)})",
    )
    add("--batch", type=list_of(common.positive), default=[*BATCHES], metavar="B,...", help="of cache")


def run(
    *,
    part: str = "cache",
    hardware: Sequence[str] = ("measured", "sm8650-ufs4.0"),
    models: Sequence[str] | None = None,
    batch: Sequence[int] = BATCHES,
) -> dict[str, Any]:
    """``rows`` of one of ``PARTS``, simulated.

    Raises:
        ConfigError: no such profile or model, or a profile that has no times for int4 weights.
    """
    known("part", [part], PARTS)
    models = models or (*MODELS, *LARGE[: len(LARGE) * (part == "machines")])
    known("model", models, SHAPES | OTHERS if part == "machines" else SHAPES)
    profiles = [find_hardware(name) for name in (ABLATED if part == "ablation" else hardware)]
    makers: dict[str, Callable[[Hardware], Iterator[dict[str, Any]]]] = {
        "cache": lambda profile: _cache(profile, models, batch),
        "drives": _drives,
        "ablation": _ablation,
        "machines": lambda profile: _machines(profile, models),
    }
    rows = [{"hardware": profile.name, **row} for profile in profiles for row in makers[part](profile)]
    return {
        "what": "study",
        "part": part,
        "simulated": True,
        "profiles": [{"name": p.name, "source": p.source, "hash": p.hash} for p in profiles],
        "context": phone.CONTEXT if part == "ablation" else CONTEXT,
        "rows": rows,
        **machine.describe(),
    }


# --- cache size against speed ---


def _cache(profile: Hardware, models: Sequence[str], batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    for name in models:
        shape = synthetic_shape(name)
        for size in batches:
            misses = drawn_misses(name, shape, size)
            wanted = shape.layers[0].cluster * misses.wanted(size)
            for share in SHARES:
                cost, streams = _faster(shape, profile, misses, size, share)
                yield {
                    "model": name,
                    "batch": size,
                    "ffn_in_memory": share,
                    "memory_bytes": cost.memory_bytes,
                    "tokens_per_s": round(cost.tokens_per_s, 3),
                    "hit_rate": None if streams else round(1 - cost.misses / wanted, 4),
                    "waiting": round(cost.ms["io"] / cost.total_ms, 4),
                    "streamed": streams,
                }


def _faster(shape: ModelShape, profile: Hardware, misses: StreamMisses, batch: int, share: float) -> tuple[Cost, bool]:
    """A step that reads what is wanted, or the whole of each layer in order, where that takes less time."""
    how: dict[str, Any] = {
        "batch": batch,
        "share": share,
        "context": CONTEXT,
        "offload": offload_settings(shape, profile),
    }
    costs = {False: decode(shape, profile, misses, **how)}
    layer = shape.layers[0]
    if streamed(layer, profile, batch, layer.intermediate):
        costs[True] = decode(shape, profile, misses, **how, whole=True)
    streams = min(costs, key=lambda which: costs[which].total_ms)
    return costs[streams], streams


# --- what limits the pipeline ---


def _drives(profile: Hardware) -> Iterator[dict[str, Any]]:
    shape = synthetic_shape(LIMITED)
    misses = drawn_misses(LIMITED, shape, 1)
    for share in LIMITED_SHARES:
        for gb_per_s in MEMORY_GB_PER_S:
            at = with_memory(profile, gb_per_s)

            def step(machine: Hardware, lookahead: bool = False, share: float = share) -> Cost:
                settings = offload_settings(shape, machine) | {"lookahead": lookahead}
                return decode(shape, machine, misses, batch=1, share=share, context=CONTEXT, offload=settings)

            free = step(with_reads(at, device_reads(find_drive(DRIVES[-1])), _FASTEST)).total_ms
            for drive in DRIVES:
                reads = device_reads(find_drive(drive))
                here = with_reads(at, reads)
                cost, ahead = step(here), step(here, lookahead=True)
                twice = {
                    "drive": with_reads(at, reads, 2),
                    "store": replace(here, store=StoreCosts(here.store.lookup_us / 2, here.store.slot_us / 2)),
                    "memory": with_reads(with_memory(profile, 2 * gb_per_s), reads),
                }
                saves = {what: round(1 - step(faster).total_ms / cost.total_ms, 4) for what, faster in twice.items()}
                depth = reads.best_depth(shape.place_bytes, reads.file_bytes)
                per_s = _READS * 1e6 / reads.us(_READS, shape.place_bytes, reads.file_bytes, depth)
                enough = _enough(at, reads, step, free)
                yield {
                    "model": LIMITED,
                    "ffn_in_memory": share,
                    "drive": drive,
                    "memory_gb_per_s": gb_per_s,
                    "tokens_per_s": round(cost.tokens_per_s, 3),
                    "lookahead_tokens_per_s": round(ahead.tokens_per_s, 3),
                    "waiting": round(cost.ms["io"] / cost.total_ms, 4),
                    "drive_ms": round(sum(y["read_ms"] for y in cost.layers), 3),
                    "ms": {part: round(ms, 3) for part, ms in cost.ms.items()},
                    "over_no_drive": round(cost.total_ms / free, 4),
                    "saved_by_twice": saves,
                    "binds": max(saves, key=lambda what: saves[what]),
                    "reads_per_s": round(per_s),
                    "enough_reads_per_s": round(enough * per_s),
                    "enough_mb_per_s": round(enough * per_s * shape.place_bytes / 1e6),
                }


def find_drive(name: str) -> Any:
    """One of ``DRIVES``: a preset, or a description in ``benchmarks/devices``."""
    path = _DEVICES / f"{name}.json"
    return find_device(path if path.is_file() else name)


def _enough(at: Hardware, reads: Any, step: Callable[[Hardware], Cost], free: float) -> float:
    """How many times as fast such a drive would have to be (``ENOUGH``), to 1 %."""
    low, high = 1e-3, _FASTEST
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        if step(with_reads(at, reads, middle)).total_ms <= ENOUGH * free:
            high = middle
        else:
            low = middle
    return float(f"{high:.3g}")


# --- the paper's ablation ---

#: Of Figures 7 and 14 (arXiv 2406.06282v3), Bamboo-7B with half of its feed-forward weights in flash. Of the second
#: phone Figure 7 has numbers without the models' names, of which the least and the most are given.
ABLATED = ("sm8650-ufs4.0", "sm8475-ufs3.1")
_PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "sm8650-ufs4.0": {
        "mmap": (0.40,), "bundle": (1.09,), "cache": (4.18,), "llm-in-a-flash": (2.4,), "pipeline": (9.60,),
        "xpu": (11.07,),
    },
    "sm8475-ufs3.1": {"mmap": (0.2, 0.5), "llm-in-a-flash": (1.3, 2.1), "xpu": (3.1, 7.0)},
}  # fmt: skip
#: Hits of the paper's cache (Fig. 14), and of its "LLM in a flash" (about 10 % of what is wanted comes from flash).
_HITS = {"cache": phone.SMALL.hits, "llm-in-a-flash": 0.90, "pipeline": phone.SMALL.hits}
_HALF = 0.5
#: What the system reads ahead of a mapped file that is read in order: Linux' default, read_ahead_kb.
_READ_AHEAD = 128 << 10


def _ablation(profile: Hardware) -> Iterator[dict[str, Any]]:
    shape = phone.shape_of(phone.SMALL)
    none = [0] * len(shape.layers)
    for step in ("mmap", "bundle", "cache", "llm-in-a-flash", "pipeline", "xpu"):
        row: dict[str, Any] = {"step": step, "paper": list(_PAPER[profile.name].get(step, ()))}
        if step == "xpu":
            made = phone.decode(phone.Decoding(phone.SMALL, _HALF, True, 0, ""), profile, recurring=True)
            yield row | {k: made[k] for k in ("tokens_per_s", "hit_rate", "read_bytes", "ms", "drive_ms")}
            continue
        if step == "mmap":
            yield row | _mapped(shape, profile)
            continue
        hits = _HITS.get(step)
        misses = None if hits is None else phone.Recurring(shape, hits)
        wanted = FrequencyMisses(shape).misses(1, 0, none, none).sum()
        settings = offload_settings(shape, profile) | {"pipeline": step == "pipeline"}
        cache_bytes = 0 if hits is None else int(_HALF * shape.slots) * shape.place_bytes
        cost = step_cost(
            shape, profile, batch=1, hot=none, cache_bytes=cache_bytes, misses=misses,
            resident=none, context=phone.CONTEXT, offload=settings,
        )  # fmt: skip
        yield row | {
            "tokens_per_s": round(cost.tokens_per_s, 2),
            "hit_rate": round(1 - cost.misses / wanted, 3),
            "read_bytes": round(cost.misses * shape.layers[0].file_slot_bytes),
            "ms": {part: round(ms, 2) for part, ms in cost.ms.items()},
            "drive_ms": round(sum(y["read_ms"] for y in cost.layers), 1),
        }


def _mapped(shape: ModelShape, profile: Hardware) -> dict[str, Any]:
    """All neurons computed, from a mapped file of which half fits: read round and round, none of it is found."""
    dense = [layer.intermediate for layer in shape.layers]
    cost = step_cost(shape, profile, batch=1, hot=dense, context=phone.CONTEXT)
    read = sum(layer.intermediate * layer.neuron_bytes for layer in shape.layers)
    device = find_device({"sm8650-ufs4.0": "ufs-4.0", "sm8475-ufs3.1": "ufs-3.1"}[profile.name])
    count = 512
    offsets = range(0, count * _READ_AHEAD, _READ_AHEAD)
    times = device.read_times(offsets, [_READ_AHEAD] * count, depth=1, range_bytes=read)
    drive_ms = read / (count * _READ_AHEAD / float(times[-1])) * 1e3
    ms = {**cost.ms, "io": drive_ms}
    return {
        "tokens_per_s": round(1e3 / sum(ms.values()), 2),
        "hit_rate": 0.0,
        "read_bytes": read,
        "ms": {part: round(value, 2) for part, value in ms.items()},
        "drive_ms": round(drive_ms, 1),
    }


# --- several machines ---

#: Mbit/s, and microseconds of an exchange: taken, not measured, but for what two processes on one machine take (80).
LINKS = {
    "Wi-Fi": (400, 2000),
    "1 GbE": (1_000, 200),
    "10 GbE": (10_000, 100),
    "25 GbE": (25_000, 80),
    "100 GbE": (100_000, 80),
}
COUNTS = (2, 4, 8, 16, 32, 64)
#: Of the model's neurons, what each machine has room for.
ROOMS = (0.3, 0.03)


def _machines(profile: Hardware, models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """As many alike, with a drive and one of ``ROOMS`` each; what caches lack by how often neurons fire."""
    for name, room in itertools.product(models, ROOMS):
        shape, costs = synthetic_shape(name), dict[Any, Any]()
        empty = Task(shape, profile, budget_bytes=0, batches=(1,), context=CONTEXT)
        budget = empty.smallest() + int(room * shape.slots) * shape.place_bytes
        task = replace(empty, budget_bytes=budget)
        hot = tuple(layer.base_hot for layer in shape.layers)
        alone = task.cost(1, Choice(hot, (0,) * len(hot))).tokens_per_s
        for link, (mbit_per_s, exchange_us) in LINKS.items():
            for count in COUNTS:
                if count > sum(layer.block for layer in shape.layers):
                    continue  # more machines than blocks or chunks
                members = [Member(profile, budget)] * count
                found = deal_out(shape, members, Link(mbit_per_s, exchange_us), context=CONTEXT, costs=costs)
                yield {
                    "model": name,
                    "room": room,
                    "memory_bytes": budget,
                    "link": link,
                    "machines": count,
                    "alone_tokens_per_s": round(alone, 3),
                    "ways": {
                        way.name: {"tokens_per_s": round(way.tokens_per_s, 3), "link_ms": round(way.link_ms, 3)}
                        for way in found
                    },
                }


PARTS = ("cache", "drives", "ablation", "machines")

CACHE = ("hardware", "model", "sequences", *(common.percent(share, 0) for share in SHARES))
LIMITS = (
    "hardware", "in memory", "memory GB/s", "drive", "tokens/s", "with look-ahead", "waiting",
    "saved by twice as fast: drive", "store", "memory", "reads/s", "enough", "MB/s",
)  # fmt: skip
DEALT = ("hardware", "model", "room", "link", "one machine", *(f"{count} machines" for count in COUNTS))
STEPS = ("hardware", "step", "paper", "simulated", "hits", "MB read", "drive ms", "waiting ms", "computing ms")


def cache_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Tokens/s of all sequences by neurons in memory; |: layers are streamed whole. Empty: of another part."""
    cases: dict[tuple[str, ...], list[str]] = {}
    for row in result["rows"] if result["part"] == "cache" else ():
        case = row["hardware"], row["model"], str(row["batch"])
        cases.setdefault(case, []).append(f"{row['tokens_per_s']:.2f}" + (" |" if row["streamed"] else ""))
    return [(*case, *speeds) for case, speeds in cases.items()]


def limit_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """``enough`` reads of a neuron a second: a step takes ``ENOUGH`` times as long as with reads that take no time."""
    return [
        (
            row["hardware"], common.percent(row["ffn_in_memory"], 0), str(row["memory_gb_per_s"]), row["drive"],
            f"{row['tokens_per_s']:.2f}", f"{row['lookahead_tokens_per_s']:.2f}", common.percent(row["waiting"]),
            *(common.percent(saved) for saved in row["saved_by_twice"].values()),
            f"{row['reads_per_s']:,}", f"{row['enough_reads_per_s']:,}", str(row["enough_mb_per_s"]),
        )
        for row in (result["rows"] if result["part"] == "drives" else ())
    ]  # fmt: skip


def step_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            row["hardware"], row["step"], " to ".join(f"{x:g}" for x in row["paper"]), f"{row['tokens_per_s']:.2f}",
            common.percent(row["hit_rate"]), f"{row['read_bytes'] / 1e6:.0f}", f"{row['drive_ms']:.1f}",
            f"{row['ms']['io']:.1f}", f"{sum(row['ms'].values()) - row['ms']['io']:.1f}",
        )
        for row in (result["rows"] if result["part"] == "ablation" else ())
    ]  # fmt: skip


def dealt_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Tokens/s in the fastest way, that, and in brackets the best of the others, layers or neurons.

    Empty: more machines than blocks of layers.
    """
    cases: dict[tuple[str, ...], dict[int, str]] = {}
    for row in result["rows"] if result["part"] == "machines" else ():
        room = f"{common.percent(row['room'], 0)}, {common.size(row['memory_bytes'])}"
        case = row["hardware"], row["model"], room, row["link"], f"{row['alone_tokens_per_s']:.2f}"
        ways = sorted(row["ways"], key=lambda way: -float(row["ways"][way]["tokens_per_s"]))
        other = next((way for way in ways if (way == "layers") != (ways[0] == "layers")), None)
        best, *rest = (f"{way} {row['ways'][way]['tokens_per_s']:.2f}" for way in (ways[0], other) if way)
        cases.setdefault(case, {})[row["machines"]] = best + "".join(f" ({one})" for one in rest)
    return [(*case, *(speeds.get(count, "") for count in COUNTS)) for case, speeds in cases.items()]


def render(result: dict[str, Any]) -> str:
    about = "; ".join(f"{p['name']} ({p['source']})" for p in result["profiles"])
    header, rows_of, note = {
        "cache": (CACHE, cache_rows, "tokens/s of all sequences by neurons in memory; | layers are streamed whole"),
        "drives": (LIMITS, limit_rows, f"enough: a step takes {ENOUGH:g} times as long as with reads of no time"),
        "machines": (
            DEALT,
            dealt_rows,
            "room: of the neurons, and what it takes with all else; heads: attention is divided, too",
        ),
        "ablation": (STEPS, step_rows, "paper: PowerInfer-2, arXiv 2406.06282v3, Figures 7 and 14"),
    }[result["part"]]
    head = f"SIMULATED, nothing was run: {about}; {result['context']} tokens before"
    return "\n".join((head, common.table(header, rows_of(result)), note))
