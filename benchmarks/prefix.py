"""The first text of an answer whose prompt begins as one before did, beside that of a prompt which is all new."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.arguments import list_of
from benchmarks.clients import Request, load
from benchmarks.figures import at_least, label, spread
from benchmarks.serve import Served, add_server
from benchmarks.server import Server
from benchmarks.words import text
from torch_pi2.cli import common
from torch_pi2.machine import process as machine

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


def run(
    shape: str = "llama-1b",
    weights: str = "int4",
    *,
    activations: str = "int8",
    lanes: int = 8,
    compiled: bool = False,
    prefix_caches: Sequence[str] = ("256MiB",),
    peers: Sequence[str] = (),
    prefix: int = 256,
    suffixes: Sequence[int] = (1, 16),
    rounds: int = 9,
    seed: int = 0,
) -> dict[str, Any]:
    """Milliseconds to the first text, over HTTP, of prompts that are all new (``cold``), that begin as the cold one of
    the same round (``warm``), and that are the new tokens ``alone``: what would be left if known ones cost nothing.

    Returns:
        ``servers``, by name: for each suffix (``rows``) medians and ranges of the three, and ``ratio``, cold over warm
        within each round.

    Raises:
        ConfigError, PeerError, Pi2Error: as :func:`benchmarks.serve.run`.
    """
    at_least(1, prefix=prefix, suffixes=min(suffixes, default=0), rounds=rounds)
    served = Served(
        shape, weights, activations, torch.get_num_threads(), lanes, compiled, prefix_caches, peers,
        context=prefix + max(suffixes) + _ANSWER, seed=seed,
    )  # fmt: skip
    with served.servers() as running:
        kept: dict[tuple[str, int], list[dict[str, float]]] = {}
        for index in range(rounds + 1):
            for name in running:
                for suffix in suffixes:
                    kept.setdefault((name, suffix), []).append(_round(running[name], prefix, suffix, index, seed))
    return {
        "what": "prefix",
        **served.about(),
        "prefix": prefix,
        "rounds": rounds,
        "servers": {
            name: {
                "about": running[name].about,
                "rows": [{"suffix": suffix, **_summary(kept[name, suffix][1:])} for suffix in suffixes],
            }
            for name in running
        },
        "seed": seed,
        **machine.describe(),
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
    medians = {name: round(statistics.median(values), 2) for name, values in by_name.items()}
    return {**medians, "spread": {name: spread(values, 2) for name, values in by_name.items()}}


def render(result: dict[str, Any]) -> str:
    rows = [
        (
            name,
            f"{result['prefix']} + {row['suffix']}",
            *(f"{row[f'{kind}_ms']:.1f}" for kind in KINDS),
            f"{row['ratio']:.1f}",
            "{:.1f} to {:.1f}".format(*row["spread"]["ratio"]),
        )
        for name, server in result["servers"].items()
        for row in server["rows"]
    ]
    header = ("server", "prompt", "cold ms", "warm ms", "suffix alone ms", "cold / warm", "from - to")
    head = f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads"
    return "\n".join([head, common.table(header, rows), label(result)])
