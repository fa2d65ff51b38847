"""``torch-pi2 plan --machines``: in which way several machines compute a model fastest, and the command for that."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torch_pi2.cli import common

if TYPE_CHECKING:
    from torch_pi2.planner.model_shape import ModelShape


def for_group(args: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """Every way that is possible, the fastest first (``ways``), and the command for that (``pack``)."""
    from torch_pi2.planner.group import deal_out, read_machines

    members, link = read_machines(args.machines)
    context = args.context or 1024
    found = deal_out(shape, members, link, context=context)
    best = found[0]
    shares = ",".join(map(str, best.shares))
    return {
        "machines": [m.hardware.name for m in members],
        "link": {"mbit_per_s": link.mbit_per_s, "exchange_us": link.exchange_us},
        "context": context,
        "ways": [
            {
                "way": way.way,
                "attention": way.attention,
                "shares": list(way.shares),
                "tokens_per_s": way.tokens_per_s,
                "ms": way.ms,
                "link_ms": way.link_ms,
                "sent_bytes": way.sent_bytes,
                "members": list(way.members),
            }
            for way in found
        ],
        "pack": f"torch-pi2 pack {args.model} OUT --ranks {len(members)} --by {best.by} --shares {shares}",
        "generate": _options(best.way, best.attention),
    }


def _options(way: str, attention: str) -> str:
    """Of ``generate`` and the like."""
    by_heads = " --attention heads" if attention == "heads" else ""
    return "" if way == "layers" else f"--reduction {way}{by_heads}"


def render_group(result: dict[str, Any]) -> str:
    rows = []
    for way in result["ways"]:
        unit = "blocks" if way["way"] == "layers" else "chunks of each layer"
        memory = ", ".join(common.size(member["memory_bytes"]) for member in way["members"])
        kept = ", ".join(common.percent(member["in_memory"], 0) for member in way["members"])
        waits = ", ".join(f"{member['ms']['io']:.1f}" for member in way["members"])
        given = f"{', '.join(map(str, way['shares']))} {unit}"
        times = (f"{way['tokens_per_s']:.2f}", f"{way['ms']:.1f}", f"{way['link_ms']:.1f}")
        name = way["way"] + (", attention by heads" if way["attention"] == "heads" else "")
        rows.append((name, *times, given, memory, kept, waits))
    header = ("way", "tokens/s", "ms", "for the link", "machines have", "memory", "neurons in memory", "waiting ms")
    how = f"\ntorchrun ... -m torch_pi2 generate OUT {result['generate']}" if result["generate"] else ""
    link = result["link"]
    return (
        f"{', '.join(result['machines'])}; {link['mbit_per_s']:.0f} Mbit/s, {link['exchange_us']:.0f} us an exchange; "
        f"predicted, of one sequence after {result['context']} tokens\n{common.table(header, rows)}\n"
        f"{result['pack']}{how}"
    )
