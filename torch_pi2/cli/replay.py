"""Print the hit rates of caches of other sizes and policies on recorded accesses.

FILE is written by torch_pi2.record_accesses(model, FILE). The replayed cache is that of stores, with the hot share
and window of the run; `optimal` knows the future.
"""

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.cli import common

EXAMPLE = "torch-pi2 replay accesses.safetensors --budget 30%,50%,700MiB --policies lru,lfu,optimal"
#: Fields in the table of replayed caches.
_CACHE = ("share", "cache_bytes", "policy", "hit_rate", "reads_per_pass", "read_bytes_per_pass")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="written by torch_pi2.record_accesses")
    budget = "of the cache: shares of all neurons, or bytes, comma-separated"
    add("--budget", default="30%,50%,70%", metavar="SIZES", help=budget)
    add("--policies", metavar="NAMES", help="comma-separated names, or FILE.py:CLASS (default: all, and optimal)")
    add("--empty", action="store_true", help="start with an empty cache instead of the most frequent neurons")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.observe import policies, replay
    from torch_pi2.observe.accesses import Accesses

    accesses = Accesses.load(args.file)
    names = args.policies.split(",") if args.policies else policies.policy_names()
    slots = [replay.slots_of(accesses, text) for text in args.budget.split(",")]
    preload = False if args.empty else None
    caches = replay.replay_all(accesses, names, slots, progress=not args.quiet, preload=preload)
    again = replay.as_run(accesses) if accesses.run["whole"] else None
    same = again and {**vars(again), "same": again.hits == accesses.run["hits"]}
    counts = {"calls": len(accesses.layers), "passes": accesses.passes}
    counts |= {"neurons": sum(layer.neurons for layer in accesses.stored), "slots": accesses.slots}
    found = {"run": accesses.run, "as_run": same, "caches": [vars(cache) for cache in caches]}
    return {"file": str(args.file), "model_hash": accesses.model_hash, **counts, **found}


def render(result: dict[str, Any]) -> str:
    run, again = result["run"], result["as_run"]
    hit_rate = common.percent(run["hits"] / run["wanted"] if run["wanted"] else 0.0, 2)
    same = "not comparable: the cache changed by more than the recorded calls"
    if again is not None:
        other = f"A REPLAY HAS {common.percent(again['hit_rate'], 2)}"
        same = "a replay has the same hits" if again["same"] else other
    slots = f"{result['neurons']} neurons in {result['slots']} slots"
    share = common.percent(run["slots"] / result["slots"])
    return (
        f"{result['calls']} calls, {result['passes']} tokens and prompts; {slots}\n"
        f"the run: {run['policy']}, {share} of the slots, {hit_rate} hits ({same})\n"
        f"{common.records(result['caches'], _CACHE)}"
    )
