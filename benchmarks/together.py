"""Several processes with a shard of one model each, beside one process that has as much memory as each of them.

Each process has a core or a share of one, and a memory cap if cgroups can be made. They communicate over network
namespaces limited to the speeds of ``--links``. They share one drive, unlike several machines.
"""

from __future__ import annotations

import argparse
import operator
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import cap
from benchmarks.arguments import add_activations, add_lengths, list_of, names_of
from benchmarks.figures import of_store, summary
from benchmarks.network import INTERFACE, Network
from benchmarks.peer import Peer
from benchmarks.subject import Rooms
from benchmarks.tables import Result, Table, at, ranged
from torch_pi2.cli import common
from torch_pi2.distributed.shard_store import shards_in
from torch_pi2.errors import ConfigError
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.storefile import STORE_FILE, StoreReader
from torch_pi2.store.superblock import LayerEntry
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.shard import REDUCTIONS
from torch_pi2.types.site import block_of

#: Tokens of a prompt, and of an answer that is not timed, before the first round.
_PROMPT, _WARM_UP = 8, 8
_PORT = 29477
#: Of a process whose threads share a core: in the usual class of Linux's scheduler one that wakes takes it from another
#: that would have been done with it in a microsecond, and some messages wait for the next tick, 4 ms.
_BATCH = ("chrt", "-b", "0")
#: Beside a budget, for what compiling and Python take; the same for all.
_ROOM = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="a store (torch-pi2 pack)")
    add("--shards", type=Path, required=True, metavar="DIR", help="its shards (torch-pi2 pack DIR OUT --ranks N)")
    add("--stages", type=Path, metavar="DIR", help="as many that have whole layers (--by layers)")
    add("--ffn-in-memory", type=float, default=0.5, metavar="SHARE", help="of the neurons' bytes, in each process")
    add(
        "--links",
        type=list_of(str),
        default=["none", "10000", "1000"],
        metavar="MBIT,...",
        help="between processes; none: as fast as it goes (default: none,10000,1000)",
    )
    add("--reductions", type=names_of(REDUCTIONS), default=[*REDUCTIONS], metavar="NAMES", help="default: chunks,ranks")
    add("--prompt", type=common.positive, default=_PROMPT, metavar="N", help="tokens of a prompt that is timed, too")
    add("--chunk-tokens", type=common.positive, default=0, metavar="N", help="of its pieces (default: by budget)")
    add_lengths(parser, 0, 24, 2)
    add(
        "--core-share",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of a core, for each process: where there are fewer cores than processes (default: 1)",
    )
    add_activations(parser, "int8")
    add("--eager", dest="compiled", action="store_false", help="do not compile the decoding step")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Decode with one process, then with all shards over each link, one after another, and with all ``stages``.

    Returns:
        ``alone`` and by ``links`` and reduction (or ``layers``):
        ``tokens_per_s``, ``prompt_tokens_per_s``, ``spread``, what the first process read a token, ``sent_bytes`` a
        token (computed: what each process gives the others, or of stages the first one the second), ``ratio`` and
        ``prompt_ratio`` to the one alone, and ``same``: after which share of all tokens its most likely next one is
        that of the one alone, which was fed the same.

    Raises:
        ConfigError: the shards are of another store. PeerError: a process ended.
        NetworkError: no namespaces can be made, for a link that is not ``none``.
    """
    folder, stages, tokens, rounds, prompt = args.folder, args.stages, args.tokens, args.rounds, args.prompt
    ranks, sizes = _sizes(folder, args.shards)
    ways = [_Way(args.shards, reduction) for reduction in args.reductions]
    if stages is not None:
        if len(_shards(folder, stages, by_layers=True)) != ranks:
            raise ConfigError(str(stages), expected=f"{ranks} stages", found="others", fix="Pack as many as shards.")
        ways.append(_Way(stages, "layers"))
    context = max(_PROMPT + _WARM_UP + rounds * tokens, prompt) + 1
    rooms = Rooms(folder, context)
    budget = rooms.budget(OffloadConfig(), args.ffn_in_memory)
    settings = {
        "threads": 1,
        "activations": args.activations,
        "context": context,
        "chunk_tokens": args.chunk_tokens,
        "compiled": args.compiled,
        "seed": args.seed,
        "topics": True,
        "budget": budget,
        "offload": asdict(OffloadConfig()),
        "trace": None,
    }
    cap_bytes = budget + _ROOM if cap.available() else None
    for path in (folder, *(path for one in {way.folder for way in ways} for path in shards_in(one).values())):
        cap.warm(path / PI2_FOLDER / STORE_FILE)
    asked = tokens, rounds, prompt, args.core_share
    alone = _measured([settings | {"folder": str(folder)}], None, cap_bytes, *asked)
    said = alone.pop("said")
    found: dict[str, Any] = {}
    for link in args.links:
        for way in ways:
            group = {"ranks": ranks, "reduction": way.way if way.way in REDUCTIONS else REDUCTIONS[0], "port": _PORT}
            each = [
                settings | {"folder": str(path), "group": group | {"rank": rank}}
                for rank, path in sorted(shards_in(way.folder).items())
            ]
            figures = _measured(each, link, cap_bytes, *asked)
            figures["sent_bytes"] = sizes[way.way]
            for ratio, rate in (("ratio", "tokens_per_s"), ("prompt_ratio", "prompt_tokens_per_s")):
                figures[ratio] = round(figures[rate] / alone[rate], 2)
            figures["same"] = sum(map(operator.eq, figures.pop("said"), said)) / len(said)
            found.setdefault(link, {})[way.way] = figures
    return {
        "model": alone.pop("subject"),
        "ranks": ranks,
        "budget_bytes": budget,
        "cap_bytes": cap_bytes,
        "tokens_a_round": tokens,
        "threads": 1,
        "drive": "one, for all processes",
        "alone": alone,
        "links": found,
    }


class _Way(NamedTuple):
    """A folder of shards and how they compute together: a reduction, or ``layers``."""

    folder: Path
    way: str


def _sizes(folder: Path, shards: Path) -> tuple[int, dict[str, int]]:
    """How many shards there are, and what one gives each of the others for a token, in bytes."""
    found = _shards(folder, shards)
    with StoreReader(folder / PI2_FOLDER / STORE_FILE) as whole, StoreReader(found[0] / PI2_FOLDER / STORE_FILE) as one:
        calls: dict[object, list[LayerEntry]] = {}
        for key, entry in zip(one.keys, one.entries, strict=True):
            calls.setdefault(block_of(key), []).append(entry)
        sums = sum(entries[0].hidden for entries in calls.values())  # experts of a block are added together, by rank
        chunks = sum(
            entry.hidden * (-(-entry.neurons // (entry.chunk or entry.neurons)) if not others else 1)
            for entry, *others in calls.values()
        )
        hidden = one.entries[0].hidden * (whole.float_dtype or torch.float32).itemsize
    return len(found), {"chunks": 4 * chunks, "ranks": 4 * sums, "layers": hidden}


def _shards(folder: Path, shards: Path, *, by_layers: bool = False) -> dict[int, Path]:
    """By rank the shards of the store ``folder``. Raises ConfigError: there are none, or others."""
    found, hashes = shards_in(shards), set()
    for path in (folder, *found.values()):
        with StoreReader(path / PI2_FOLDER / STORE_FILE) as one:
            hashes.add(one.model_hash)
            wrong = path != folder and (one.shard is None or one.shard.by_layers != by_layers)
            hashes |= {"wrong"} if wrong else set()
    if not found or len(hashes) > 1:
        how = " --by layers" if by_layers else ""
        fix = f"torch-pi2 pack {folder} {shards} --ranks 2{how}"
        raise ConfigError(str(shards), expected=f"shards of {folder}{how}", found="others or none", fix=fix)
    return found


def _measured(
    each: Sequence[Mapping[str, Any]],
    link: str | None,
    cap_bytes: int | None,
    tokens: int,
    rounds: int,
    prompt: int,
    core_share: float,
) -> dict[str, Any]:
    """Figures of processes with these settings, each on a core, which run the same rounds at the same time."""
    with ExitStack() as held, ThreadPoolExecutor(len(each)) as at_once:
        network = None
        if link not in (None, "none"):
            network = held.enter_context(Network(len(each), float(link)))
        address = network.address(0) if network else "127.0.0.1"

        def start(rank: int) -> Peer:
            group = {"group": each[rank]["group"] | {"address": address}} if "group" in each[rank] else {}
            cores = os.cpu_count() or 1
            before = [*_BATCH, "taskset", "-c", str(rank % cores)]
            if network:
                before = network.inside(rank) + before
            env = {"GLOO_SOCKET_IFNAME": INTERFACE if network else "lo", "OMP_NUM_THREADS": "1"}
            caps: list[cap.MemoryCap | cap.CpuCap] = []
            if cap_bytes:
                caps.append(cap.MemoryCap(cap_bytes, name=f"rank-{rank}"))
            if core_share < 1:
                caps.append(cap.CpuCap(core_share, name=f"rank-{rank}"))
            for one in caps:  # joined from outside of the namespace, which does not see groups
                folder = held.enter_context(one).folder
                before = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(folder), *before]
            peer = Peer("benchmarks.peer_offload", {**each[rank], **group}, before=before, env=env)
            held.callback(peer.close)
            return peer

        def ask(prompt: int, answer: int) -> dict[str, Any]:
            answers: list[dict[str, Any]] = [*at_once.map(lambda peer: peer.round(prompt, answer), peers)]
            return answers[0]

        peers = list(at_once.map(start, range(len(each))))
        ask(_PROMPT, _WARM_UP)
        kept = [ask(0, tokens) for _ in range(rounds)]
        prompts = [prompt / ask(prompt, 0)["prompt_s"] for _ in range(rounds + 1)][1:]  # the first has a cold cache
        steps = [s for r in kept for s in r["step_s"]]
        rates = [len(r["step_s"]) / sum(r["step_s"]) for r in kept]
        return {
            **summary({"tokens_per_s": rates, "prompt_tokens_per_s": prompts}),
            "p50_ms": round(statistics.median(steps) * 1e3, 2),
            **of_store([r["stats"] for r in kept], len(steps), sum(steps), 1),
            "peak_rss_bytes": kept[-1]["peak_rss_bytes"],
            "said": [token for r in kept for token in r["said"]],
            "subject": peers[0].about["subject"],
        }


def _rows(result: Result) -> list[dict[str, Any]]:
    """One process, and the others by link and reduction."""
    rows = [{"case": "one process", **result["alone"]}]
    for link, cases in result["links"].items():
        name = "no limit" if link == "none" else f"{link} Mbit/s"
        rows += [{"case": f"{result['ranks']} processes, {name}, {way}", **case} for way, case in cases.items()]
    return rows


TABLES = (
    Table(
        "Several processes",
        _rows,
        {
            "": at("case"),
            "tokens/s": ranged("tokens_per_s", ".2f"),
            "ratio": at("ratio", ".2f"),
            "predicted tokens/s": at("predicted_tokens_per_s", ".2f"),
            "prompt tokens/s": ranged("prompt_tokens_per_s", ".1f"),
            "ratio of prompts": at("prompt_ratio", ".2f"),
            "in the cache": at("hit_rate", common.percent),
            "a token reads": at("bytes_read_per_token", common.size),
            "a token sends": at("sent_bytes", common.size),
            "same next tokens": at("same", common.percent),
        },
        "Each process has a core, a memory cap and a shard, beside one process with a core and the same cap, all on "
        "one drive. *Predicted*, in older results, is what the planner expected.",
    ),
)


def about(result: Result) -> str:
    share = result.get("core_share", 1)
    return f"{result['model']['shape']}, {common.percent(result['ffn_in_memory'])} of the neurons in each process, " + (
        "a core each" if share == 1 else f"{share:g} of a core each"
    )
