"""Print the hit rates of caches of other sizes and policies on recorded accesses.

FILE is written by torch_pi2.record_accesses(model, FILE). The replayed cache is that of stores; `optimal` knows the
future. Hot share, initial filling and window are those of the run unless they are given.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.cli import common

EXAMPLE = "torch-pi2 replay accesses.safetensors --budget 30%,50%,700MiB --policies lru,lfu,optimal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="written by torch_pi2.record_accesses")
    add(
        "--budget",
        default="30%,50%,70%",
        metavar="SIZES",
        help="of the cache: shares of all neurons, or bytes, comma-separated",
    )
    add("--policies", metavar="NAMES", help="comma-separated (default: all, and optimal)")
    add(
        "--hot-share",
        type=float,
        metavar="SHARE",
        help="of the cache, for the most frequent neurons: never evicted (default: as it ran)",
    )
    add("--window", type=int, metavar="N", help="calls of a layer whose neurons stay; 0: none (default: as it ran)")
    add("--empty", action="store_true", help="begin with an empty cache instead of the most frequent neurons")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.observe import replay
    from torch_pi2.observe.accesses import Accesses
    from torch_pi2.ops.constants import lists

    accesses = Accesses.load(args.file)
    policies = args.policies.split(",") if args.policies else [*lists().policies, replay.OPTIMAL]
    slots = [replay.slots_of(accesses, text) for text in args.budget.split(",")]
    how = {"hot_share": args.hot_share, "window": args.window, "preload": False if args.empty else None}
    caches = replay.replay_all(accesses, policies, slots, progress=not args.quiet, **how)
    again = replay.as_run(accesses) if accesses.run["whole"] else None
    return {
        "file": str(args.file),
        "model_hash": accesses.model_hash,
        "calls": len(accesses.layers),
        "passes": accesses.passes,
        "neurons": sum(layer.neurons for layer in accesses.stored),
        "slots": accesses.slots,
        "run": accesses.run,
        "as_run": again and {**again.to_json(), "same": again.hits == accesses.run["hits"]},
        "caches": [cache.to_json() for cache in caches],
    }


def render(result: dict[str, Any]) -> str:
    rows = [
        (
            common.percent(cache["share"]),
            common.size(cache["cache_bytes"]),
            cache["policy"],
            common.percent(cache["hit_rate"], 2),
            f"{cache['reads_per_pass']:.1f}",
            common.size(cache["read_bytes_per_pass"]),
        )
        for cache in result["caches"]
    ]
    run, again = result["run"], result["as_run"]
    hit_rate = run["hits"] / run["wanted"] if run["wanted"] else 0.0
    same = "not comparable: the cache changed by more than the recorded calls"
    if again is not None:
        same = "a replay has the same hits" if again["same"] else f"A REPLAY HAS {common.percent(again['hit_rate'], 2)}"
    return (
        f"{result['calls']} calls, {result['passes']} tokens and prompts; {result['neurons']} neurons in "
        f"{result['slots']} slots\n"
        f"the run: {run['policy']}, {common.percent(run['slots'] / result['slots'])} of the slots, "
        f"{common.percent(hit_rate, 2)} hits ({same})\n"
        f"{common.table(('cache', 'bytes', 'policy', 'hits', 'reads/token', 'read/token'), rows)}"
    )
