"""The first text of an answer whose prompt begins as one before did, beside that of a prompt which is all new."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.arguments import list_of
from benchmarks.clients import Request, load
from benchmarks.figures import summary
from benchmarks.serve import Served, add_server
from benchmarks.server import Server
from benchmarks.tables import Result, Table, at, ranged
from benchmarks.words import text
from torch_pi2.cli import common

#: Tokens of an answer: its first text is measured.
_ANSWER = 2
KINDS = ("cold", "warm", "alone")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    add = parser.add_argument
    add(
        "--prefix", type=common.positive, default=256, metavar="T", help="tokens that prompts begin with (default: 256)"
    )
    add(
        "--suffix",
        dest="suffixes",
        type=list_of(common.positive),
        default=[1, 16],
        metavar="T,...",
        help="tokens after it that are always new, comma-separated (default: 1,16)",
    )
    add("--rounds", type=common.positive, default=9, metavar="N", help="alternating; one more before is warm-up")
    parser.set_defaults(prefix_caches=["256MiB"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first text, over HTTP, of prompts that are all new (``cold``), that begin as the cold one of
    the same round (``warm``), and that are the new tokens ``alone``: what would be left if known ones cost nothing.

    Returns:
        ``servers``, by name: for each suffix (``rows``) medians and ranges of the three, and ``ratio``, cold over warm
        within each round.

    Raises:
        PeerError, Pi2Error: as :func:`benchmarks.serve.run`.
    """
    prefix, suffixes, seed = args.prefix, args.suffixes, args.seed
    served = Served(args, context=prefix + max(suffixes) + _ANSWER)
    with served.servers() as running:
        kept: dict[tuple[str, int], list[dict[str, float]]] = {}
        for index in range(args.rounds + 1):
            for name in running:
                for suffix in suffixes:
                    kept.setdefault((name, suffix), []).append(_round(running[name], prefix, suffix, index, seed))
    return {
        **served.about(),
        "servers": {
            name: {
                "about": running[name].about,
                "rows": [{"suffix": suffix, **_summary(kept[name, suffix][1:])} for suffix in suffixes],
            }
            for name in running
        },
    }


def _round(server: Server, prefix: int, suffix: int, index: int, seed: int) -> dict[str, float]:
    drawn = random.Random(f"{seed} {suffix} {index}")
    begin = text(prefix, drawn)
    prompts = {"cold": begin + text(suffix, drawn), "warm": begin + text(suffix, drawn), "alone": text(suffix, drawn)}
    found = {}
    for kind in KINDS:
        request = Request(prompts[kind], len(prompts[kind]), _ANSWER)
        found[kind] = load(server, [request], 1).answers[0].first_s * 1e3
    return found


def _summary(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    by_name = {f"{kind}_ms": [r[kind] for r in rounds] for kind in KINDS}
    by_name["ratio"] = [r["cold"] / r["warm"] for r in rounds]
    return summary(by_name)


TABLES = (
    Table(
        "Prompts that begin alike",
        lambda result: [
            {"server": name, "prompt": f"{result['prefix']} + {row['suffix']}", **row}
            for name, server in result["servers"].items()
            for row in server["rows"]
        ],
        {
            "server": at("server"),
            "prompt": at("prompt"),
            "new ms": ranged("cold_ms", ".1f"),
            "known prefix ms": ranged("warm_ms", ".1f"),
            "suffix alone ms": at("alone_ms", ".1f"),
            "new / known": ranged("ratio", ".1f"),
        },
        "Milliseconds to the first text of an answer, over loopback: of prompts that are all new, of those that begin "
        "as the one before, and of their last tokens alone, which would be left if known tokens cost nothing.",
    ),
)


def about(result: Result) -> str:
    return f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads"
