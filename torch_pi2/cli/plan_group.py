"""``torch-pi2 plan --machines``: how to partition a model among several machines, and the command for that."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch_pi2.cli import common

if TYPE_CHECKING:
    from torch_pi2.planner.model_shape import ModelShape


def for_group(args: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """All possible partitions (``ways``), the fastest first, and the command that makes it (``pack``)."""
    from torch_pi2.planner.group import plan_partition, read_machines

    members, link = read_machines(args.machines)
    context = args.context or 1024
    plans = plan_partition(shape, members, link, context=context)
    best = plans[0]
    shares = ",".join(map(str, best.shares))
    return {
        "machines": [m.hardware.name for m in members],
        "link": asdict(link),
        "context": context,
        "ways": [asdict(plan) | {"tokens_per_s": plan.tokens_per_s} for plan in plans],
        "pack": f"torch-pi2 pack {args.model} OUT --ranks {len(members)} --by {best.by} --shares {shares}",
        "generate": "" if best.way == "layers" else f"--reduction {best.way}",
    }


def render_group(result: dict[str, Any]) -> str:
    rows = []
    for way in result["ways"]:
        unit = "blocks" if way["way"] == "layers" else "chunks of each layer"
        memory = ", ".join(common.size(member["memory_bytes"]) for member in way["members"])
        kept = ", ".join(common.percent(member["in_memory"], 0) for member in way["members"])
        waits = ", ".join(f"{member['ms']['io']:.1f}" for member in way["members"])
        given = f"{', '.join(map(str, way['shares']))} {unit}"
        times = (f"{way['tokens_per_s']:.2f}", f"{way['ms']:.1f}", f"{way['link_ms']:.1f}")
        rows.append((way["way"], *times, given, memory, kept, waits))
    header = ("way", "tokens/s", "ms", "for the link", "machines have", "memory", "neurons in memory", "waiting ms")
    how = f"\ntorchrun ... -m torch_pi2 generate OUT {result['generate']}" if result["generate"] else ""
    link = result["link"]
    return (
        f"{', '.join(result['machines'])}; {link['mbit_per_s']:.0f} Mbit/s, {link['exchange_us']:.0f} us an exchange; "
        f"predicted, of one sequence after {result['context']} tokens\n{common.table(header, rows)}\n"
        f"{result['pack']}{how}"
    )
