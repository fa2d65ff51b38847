"""Several processes that each have a shard of one model, beside one process that has as much memory as each of them.

Each process has a core or a share of one, and a memory cap (cgroup) if groups can be made; between them is a network of
namespaces as slow as ``--links`` says. They share one drive, which several machines would not.
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
from benchmarks.arguments import list_of
from benchmarks.figures import at_least, known, of_store, shown, spread
from benchmarks.network import INTERFACE, Network
from benchmarks.peer import Peer
from benchmarks.subject import Rooms, check_share
from torch_pi2.cli import common
from torch_pi2.distributed.shard_store import shards_in
from torch_pi2.errors import ConfigError
from torch_pi2.formats import ACTIVATIONS
from torch_pi2.machine import process as machine
from torch_pi2.store.folder import PI2_FOLDER, read_config
from torch_pi2.store.storefile import STORE_FILE, StoreReader
from torch_pi2.store.superblock import LayerEntry
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.shard import REDUCTIONS
from torch_pi2.types.site import block_of

#: Attention is not divided by heads any more.
ATTENTION = ("whole",)

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
    add("--reductions", type=list_of(str), default=[*REDUCTIONS], metavar="NAMES", help="default: chunks,ranks")
    add("--attention", type=list_of(str), default=["whole"], metavar="NAMES", help="whole,heads (default: whole)")
    add("--prompt", type=common.positive, default=_PROMPT, metavar="N", help="tokens of a prompt that is timed, too")
    add(
        "--chunk-tokens",
        type=common.positive,
        default=0,
        metavar="N",
        help="of its pieces (default: by budget)",
    )
    add("--tokens", type=common.positive, default=24, metavar="N", help="of a round")
    add("--rounds", type=common.positive, default=2, metavar="N")
    add(
        "--core-share",
        type=common.probability,
        default=1.0,
        metavar="SHARE",
        help="of a core, for each process: where there are fewer cores than processes (default: 1)",
    )
    add("--activations", default="int8", choices=ACTIVATIONS, help="int8 is lossy")
    add("--eager", dest="compiled", action="store_false", help="do not compile the decoding step")
    add("--seed", type=common.seed, default=0)


def run(
    folder: Path,
    shards: Path,
    stages: Path | None = None,
    *,
    ffn_in_memory: float = 0.5,
    links: Sequence[str] = ("none",),
    reductions: Sequence[str] = REDUCTIONS,
    attention: Sequence[str] = ATTENTION[:1],
    prompt: int = _PROMPT,
    chunk_tokens: int = 0,
    tokens: int = 24,
    rounds: int = 2,
    core_share: float = 1.0,
    activations: str = "int8",
    compiled: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Decode with one process, then with all shards over each link, one after another, and with all ``stages``.

    Returns:
        ``alone`` and by ``links`` and reduction (and ``, heads`` where attention is divided; or ``layers``):
        ``tokens_per_s``, ``prompt_tokens_per_s``, ``spread``, what the first process read a token, ``sent_bytes`` a
        token (computed: what each process gives the others, or of stages the first one the second), ``ratio`` and
        ``prompt_ratio`` to the one alone, and ``same``: after which share of all tokens its most likely next one is
        that of the one alone, which was fed the same; and the ``link``, measured before.

    Raises:
        ConfigError: a setting makes no sense, or the shards are of another store. PeerError: a process ended.
        NetworkError: no namespaces can be made, for a link that is not ``none``.
    """
    at_least(1, tokens=tokens, rounds=rounds, links=len(links), reductions=len(reductions))
    check_share(ffn_in_memory)
    known("reduction", reductions, REDUCTIONS)
    known("attention", attention, ATTENTION)
    ranks, sizes = _sizes(folder, shards)
    ways = [_Way(shards, reduction, how) for how in attention for reduction in reductions]
    if stages is not None:
        _check_stages(folder, stages, ranks)
        ways.append(_Way(stages, "layers"))
    context = max(_PROMPT + _WARM_UP + rounds * tokens, prompt) + 1
    rooms = Rooms(folder, context)
    budget = rooms.budget(OffloadConfig(), ffn_in_memory)
    settings = {
        "threads": 1,
        "activations": activations,
        "context": context,
        "chunk_tokens": chunk_tokens,
        "compiled": compiled,
        "seed": seed,
        "topics": True,
        "budget": budget,
        "offload": asdict(OffloadConfig()),
        "trace": None,
    }
    cap_bytes = budget + _ROOM if cap.available() else None
    for path in (folder, *(path for one in {way.folder for way in ways} for path in shards_in(one).values())):
        cap.warm(path / PI2_FOLDER / STORE_FILE)
    asked = tokens, rounds, prompt, core_share
    alone = _measured([settings | {"folder": str(folder)}], None, cap_bytes, *asked)
    said = alone.pop("said")
    found: dict[str, Any] = {}
    for link in links:
        for way in ways:
            group = {
                "ranks": ranks,
                "reduction": way.way if way.way in REDUCTIONS else REDUCTIONS[0],
                "attention": way.attention,
                "port": _PORT,
            }
            each = [
                settings | {"folder": str(path), "group": group | {"rank": rank}}
                for rank, path in sorted(shards_in(way.folder).items())
            ]
            figures = _measured(each, link, cap_bytes, *asked)
            figures["sent_bytes"] = sizes[way.way] + (sizes["heads"] if way.attention == "heads" else 0)
            for ratio, rate in (("ratio", "tokens_per_s"), ("prompt_ratio", "prompt_tokens_per_s")):
                figures[ratio] = round(figures[rate] / alone[rate], 2)
            figures["same"] = sum(map(operator.eq, figures.pop("said"), said)) / len(said)
            found.setdefault(link, {})[way.name] = figures
    return {
        "what": "together",
        "model": alone.pop("subject"),
        "ranks": ranks,
        "activations": activations,
        "ffn_in_memory": ffn_in_memory,
        "budget_bytes": budget,
        "cap_bytes": cap_bytes,
        "threads": 1,
        "tokens_a_round": tokens,
        "prompt": prompt,
        "chunk_tokens": chunk_tokens,
        "rounds": rounds,
        "core_share": core_share,
        "compiled": compiled,
        "drive": "one, for all processes",
        "alone": alone,
        "links": found,
        **machine.describe(),
    }


class _Way(NamedTuple):
    """A folder of shards and how they compute together: a reduction, or ``layers``; and attention."""

    folder: Path
    way: str
    attention: str = ATTENTION[0]

    @property
    def name(self) -> str:
        """For results."""
        return self.way + ("" if self.attention == ATTENTION[0] else f", {self.attention}")


def _sizes(folder: Path, shards: Path) -> tuple[int, dict[str, int]]:
    """How many shards there are, and what one gives each of the others for a token, in bytes. Raises ConfigError."""
    found = shards_in(shards)
    if not found:
        raise ConfigError(
            str(shards), expected="shards", found="none", fix=f"torch-pi2 pack {folder} {shards} --ranks 2"
        )
    with StoreReader(folder / PI2_FOLDER / STORE_FILE) as whole, StoreReader(found[0] / PI2_FOLDER / STORE_FILE) as one:
        if one.model_hash != whole.model_hash:
            raise ConfigError(
                str(shards), expected=f"shards of {folder}", found="those of another model", fix="Pack them again."
            )
        calls: dict[object, list[LayerEntry]] = {}
        for key, entry in zip(one.keys, one.entries, strict=True):
            calls.setdefault(block_of(key), []).append(entry)
        sums = sum(entries[0].hidden for entries in calls.values())  # experts of a block are added together, by rank
        chunks = sum(
            entry.hidden * (-(-entry.neurons // (entry.chunk or entry.neurons)) if not others else 1)
            for entry, *others in calls.values()
        )
        hidden = one.entries[0].hidden * (whole.float_dtype or torch.float32).itemsize
    config = read_config(folder)
    queries = config["num_attention_heads"]
    width = queries * (config.get("head_dim") or config["hidden_size"] // queries) // len(found)
    heads = 4 * width * config["num_hidden_layers"]
    return len(found), {"chunks": 4 * chunks, "ranks": 4 * sums, "layers": hidden, "heads": heads}


def _check_stages(folder: Path, stages: Path, ranks: int) -> None:
    """Raises ConfigError: others than ``ranks`` stages of the store ``folder``."""
    found = shards_in(stages)
    with StoreReader(folder / PI2_FOLDER / STORE_FILE) as whole:
        parts = []
        for path in found.values():
            with StoreReader(path / PI2_FOLDER / STORE_FILE) as one:
                parts.append(one.model_hash == whole.model_hash and one.shard is not None and one.shard.by_layers)
    if len(parts) != ranks or not all(parts):
        raise ConfigError(
            str(stages),
            expected=f"{ranks} stages of {folder}",
            found=f"{len(parts)} shards" if all(parts) else "others",
            fix=f"torch-pi2 pack {folder} {stages} --ranks {ranks} --by layers",
        )


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
            "tokens_per_s": round(statistics.median(rates), 3),
            "prompt_tokens_per_s": round(statistics.median(prompts), 1),
            "spread": {"tokens_per_s": spread(rates), "prompt_tokens_per_s": spread(prompts)},
            "p50_ms": round(statistics.median(steps) * 1e3, 2),
            **of_store([r["stats"] for r in kept], len(steps), sum(steps), 1),
            "peak_rss_bytes": kept[-1]["peak_rss_bytes"],
            "said": [token for r in kept for token in r["said"]],
            "subject": peers[0].about["subject"],
            **({"link": peers[0].about["link"]} if "link" in peers[0].about else {}),
        }


#: Of :func:`rows_of`.
HEADER = (
    "",
    "tokens/s (range)",
    "ratio",
    "predicted",
    "prompts",
    "ratio",
    "in the cache",
    "read a token",
    "sent a token",
    "same next tokens",
)


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One process, and the others by link and reduction."""

    def row(name: str, case: Mapping[str, Any]) -> tuple[str, ...]:
        low, high = case["spread"]["tokens_per_s"]
        least, most = case["spread"].get("prompt_tokens_per_s", (0, 0))  # earlier results have none
        return (
            name,
            f"{case['tokens_per_s']:.2f} ({low:.2f} to {high:.2f})",
            shown(case.get("ratio"), "{:.2f}".format),
            shown(case.get("predicted_tokens_per_s"), "{:.2f}".format),
            f"{case['prompt_tokens_per_s']:.1f} ({least:.1f} to {most:.1f})" if most else "",
            shown(case.get("prompt_ratio"), "{:.2f}".format),
            shown(case["hit_rate"], common.percent),
            common.size(case["bytes_read_per_token"]),
            shown(case.get("sent_bytes"), common.size),
            shown(case.get("same"), common.percent),
        )

    share = result.get("core_share", 1)
    part = "" if share == 1 else f", {share:g} of a core"
    rows = [row(f"one process{part}", result["alone"])]
    for link, cases in result["links"].items():
        name = "no limit" if link == "none" else f"{link} Mbit/s"
        rows += [row(f"{result['ranks']} processes{part}, {name}, {way}", case) for way, case in cases.items()]
    return rows


def render(result: dict[str, Any]) -> str:
    about = f"{result['model']['shape']}, {result['ffn_in_memory']:.0%} of the neurons in each process, "
    about += "a core each" if result.get("core_share", 1) == 1 else f"{result['core_share']:g} of a core each"
    return f"{about}\n{common.table(HEADER, rows_of(result))}"
