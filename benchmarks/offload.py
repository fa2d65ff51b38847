"""A model larger than memory, step by step as the paper's ablation has it, beside llama.cpp under the same memory cap.

Each mode is a setting of how neurons come from flash, in a process of its own (memory is then that mode's), one after
another. The steps are those of PowerInfer-2 (arXiv 2406.06282): mmap, bundle, cache, pipeline; and a window over the
last tokens without a pipeline, as "LLM in a flash" (arXiv 2312.11514) has it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import cap
from benchmarks.arguments import add_activations, add_lengths, add_peers, add_source, names_of
from benchmarks.figures import of_store, spread
from benchmarks.gguf import write_gguf
from benchmarks.peer import Peer, PeerError
from benchmarks.subject import Rooms, synthetic_store
from benchmarks.tables import Result, Table, at, ranged
from torch_pi2.base.files import check_writable
from torch_pi2.base.progress import log
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.machine.device import find_device
from torch_pi2.ops import load
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.storefile import STORE_FILE
from torch_pi2.store.synthetic import TOPIC_TOKENS
from torch_pi2.types.offload import OffloadConfig

PEERS, ENGINES = ("llama.cpp",), ("auto", "pread", "io_uring")
STREAMS = {
    "topics": f"drawn at random, of one topic for {TOPIC_TOKENS} tokens on average: the locality of LLM in a flash",
    "independent": "drawn at random, independent: no locality but frequency",
}
#: For recording a trace, and for writing it.
TRACE_BYTES = 1 << 29
#: On top of a cap where prompts are timed: for llama.cpp, and what a budget does not count.
PROMPT_HEADROOM = 1 << 29
#: Tokens of a prompt, and of an answer that is not timed, before the first round.
_PROMPT, _WARM_UP = 8, 8
#: The same for llama.cpp, which takes seconds a token, and the tokens of its only round.
_LLAMA_PROMPT, _LLAMA_WARM_UP, _LLAMA_TOKENS = 1, 2, 4
#: Seconds of reads with nothing beside them, and what their sizes are multiples of.
_DRIVE_S, _PAGE = 2.0, 4096


@dataclass(frozen=True)
class Mode:
    """``cached``: whether neurons have a budget beyond what must stay in memory. ``settings``: of OffloadConfig."""

    cached: bool
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, engine: str, device: str | None = None) -> OffloadConfig:
        return OffloadConfig(**{"engine": engine, "device": device, **self.settings})


MODES = {
    "mmap": Mode(False, {"engine": "mmap", "pipeline": False}),
    "bundle": Mode(False, {"pipeline": False}),
    "cache": Mode(True, {"pipeline": False}),
    "pipeline": Mode(True),
    # Guesses are right nearly always where weights are random, as every layer then sees nearly the same input.
    "lookahead": Mode(True, {"lookahead": True}),
    # Nothing stays for being frequent there: only what the last tokens used.
    "llm-in-a-flash": Mode(True, {"pipeline": False, "policy": "lru", "window": 5, "hot_share": 0.0, "preload": False}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_source(parser, "with a neuron store (torch-pi2 pack)", "mistral-7b")
    add("--ffn-in-memory", type=float, default=0.5, metavar="SHARE", help="of the FFN's bytes, 0..1")
    add(
        "--modes",
        type=names_of(MODES),
        default=[*MODES],
        metavar="NAMES",
        help=f"comma-separated (default: {','.join(MODES)})",
    )
    add_lengths(parser, 0, 24, 2)
    add(
        "--prompt",
        type=common.count,
        default=0,
        metavar="N",
        help="tokens of prompts that are timed, too (default: none)",
    )
    add("--engine", choices=ENGINES, default="auto", help="of all modes but mmap")
    add("--device", metavar="NAME", help="simulate reads of ufs-4.0 or a JSON file (docs/DEVICES.md)")
    add(
        "--stream",
        choices=STREAMS,
        default="topics",
        help="tokens: of one topic for a while, as text is (default), or independent: the worst case",
    )
    add_activations(parser, "int8")
    add("--eager", dest="compiled", action="store_false", help="do not compile the decoding step")
    add_peers(parser, PEERS, "on the same shape, mapped, under the same memory cap (needs cgroup v1 and permission)")
    add("--trace", type=Path, metavar="FILE", help="what threads did in mode pipeline, for Perfetto (docs/TRACES.md)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Decode with each mode, on torch's current number of threads.

    Prompts are timed after decoding, as many as rounds and one more that warms up. On a simulated device ``mmap`` is
    left out. llama.cpp runs the same shape in Q4_0, mapped and not repacked. A trace is of the last round; all rounds
    are recorded, in ``TRACE_BYTES`` of memory beside the mode's cap: figures to look into, not to compare.

    Returns:
        ``modes``: by name ``tokens_per_s``, milliseconds of a token (``p50_ms``, ``p90_ms``, ``p99_ms``), bytes and
        reads a token, ``hit_rate``, ``io_critical_share`` (waiting for neurons, over wall time and threads; both None
        where the system reads), ``ffn_ms`` a token, ``cache_bytes``, ``peak_rss_bytes``, ``trace`` (what was recorded,
        or None) and ``capped``; with ``prompt`` its ``prompt_tokens_per_s`` and ``prompt_io_critical_share``. Where
        groups of cgroup v1 can be made every mode runs in one of ``cap_bytes``: the budget of a mode with a cache,
        what a process takes before it loads a model (``base_rss_bytes``), what compiling takes beside a budget
        (``compiling_bytes``: measured without a cap, in a process whose compiled code is on disk as that of the modes
        is), and ``headroom_bytes`` where prompts are timed.
        ``failed``: names of modes (and peers) that ended or could not load, and why. The others have their figures.
        ``against``: tokens/s of ``pipeline`` over those of other modes.
        ``peers``, machine and versions.

    Raises:
        ConfigError: options that contradict each other, or no store in the folder. CapError: llama.cpp is asked for
            where memory cannot be capped. PeerError: no mode could be measured. Pi2Error: what making a model raises.
    """
    modes, peers, device, engine, trace = args.modes, args.peers, args.device, args.engine, args.trace
    tokens, rounds, prompt, ffn_in_memory = args.tokens, args.rounds, args.prompt, args.ffn_in_memory
    if device is not None:
        modes = _simulated(device, modes, peers)
    if trace is not None:
        check_writable(trace)
    folder = _store(args.folder, args.shape, args.seed)
    capped = cap.available()
    if peers and not capped:
        with cap.MemoryCap(1 << 40):  # says why not
            pass
    settings: dict[str, Any] = {
        "folder": str(folder),
        "threads": torch.get_num_threads(),
        "activations": args.activations,
        "context": max(_PROMPT + _WARM_UP + rounds * tokens, prompt) + 1,
        "compiled": args.compiled,
        "seed": args.seed,
        "topics": args.stream == "topics",
    }
    rooms = Rooms(folder, settings["context"])
    base = _base_rss(settings["threads"])
    budget_bytes = rooms.budget(MODES["pipeline"].config(engine, device), ffn_in_memory)
    headroom = PROMPT_HEADROOM if prompt else 0
    compiling = 0
    if args.compiled:
        config = MODES["pipeline"].config(engine, device)
        compiling = _compiling_bytes(settings, rooms.budget(config, 0.0), config, base)
    cap_bytes = budget_bytes + base + compiling + headroom if capped else None
    path = folder / PI2_FOLDER / STORE_FILE
    warmed = cap.warm(path)
    measured: dict[str, dict[str, Any]] = {}
    about: dict[str, Any] = {}
    failed: dict[str, PeerError] = {}
    for name in modes:
        config = MODES[name].config(engine, device)
        room = rooms.budget(config, ffn_in_memory if MODES[name].cached else 0.0)
        how = {**settings, "budget": room, "offload": asdict(config)}
        how["trace"] = str(trace) if trace is not None and name == "pipeline" else None
        try:
            about, measured[name] = _mode(how, path, cap_bytes, tokens, rounds, prompt)
            kept = about["budget"]["cache"] + about["budget"]["gates"]
            measured[name]["ffn_in_memory"] = round(kept / rooms.ffn, 4)
        except PeerError as error:
            failed[name] = error
            log.error("mode %s: %s", name, error)
    if not measured:
        raise next(iter(failed.values()))
    against_peers = {}
    if "llama.cpp" in peers:
        assert cap_bytes is not None
        gguf = write_gguf(folder.parent / f"{about['subject']['stem']}.q4_0.gguf", rooms.hf, seed=args.seed)
        try:
            against_peers["llama.cpp"] = _llama(gguf, settings["threads"], cap_bytes, prompt)
        except PeerError as error:
            failed["llama.cpp"] = error
            log.error("llama.cpp: %s", error)
    if "llama.cpp" in against_peers:
        for key, ratio in (("tokens_per_s", "ratio"), ("prompt_tokens_per_s", "prompt_ratio")):
            ours, theirs = measured.get("pipeline", {}).get(key), against_peers["llama.cpp"].get(key)
            if ours and theirs:
                against_peers["llama.cpp"][ratio] = round(ours / theirs, 2)
    subject = about["subject"]
    return {
        **{name: subject[name] for name in ("shape", "weights", "synthetic")},
        "simulated": device or False,
        "ffn_bytes": rooms.ffn,
        "token_bytes": rooms.token,
        "budget_bytes": budget_bytes,
        "base_rss_bytes": base,
        "compiling_bytes": compiling,
        "headroom_bytes": headroom,
        "cap_bytes": cap_bytes,
        "tokens": STREAMS[args.stream],
        "tokens_a_round": tokens,
        "file": f"warmed by one sequential {warmed} read, then evicted from the page cache before each mode",
        "order": "modes one after another, each in a process of its own",
        "modes": measured,
        "failed": {name: str(error) for name, error in failed.items()},
        "against": _against(measured),
        "peers": against_peers,
    }


def _simulated(device: str, modes: Sequence[str], peers: Sequence[str]) -> list[str]:
    """Modes that a device can be simulated for. Raises ConfigError: no such device, or another engine to compare."""
    find_device(device)
    if peers:
        fix = "Another engine reads at this machine's speed; compare with it without a device."
        raise ConfigError("--device with --peer", expected="one of them", found="both", fix=fix)
    return [name for name in modes if name != "mmap"]


def _store(folder: Path | None, shape: str | None, seed: int) -> Path:
    """The folder with a store; made where none is named. Raises ConfigError."""
    if folder is not None:
        if not (folder / PI2_FOLDER / STORE_FILE).is_file():
            expected = f"a folder with a neuron store ({PI2_FOLDER}/{STORE_FILE})"
            raise ConfigError(str(folder), expected=expected, found="none", fix="Make one with `torch-pi2 pack`.")
        return folder
    return synthetic_store(shape or "mistral-7b", seed)


def _base_rss(threads: int) -> int:
    """Resident memory of a process that is ready to load a model."""
    with closing(Peer("benchmarks.peer_offload", {"threads": threads})) as peer:
        return int(peer.about["base_rss_bytes"])


def _compiling_bytes(settings: Mapping[str, Any], budget: int, config: OffloadConfig, base: int) -> int:
    """What compiling a step takes beside ``budget``: of a second process, after one that left compiled code on disk."""
    how = {**settings, "budget": budget, "offload": asdict(config), "trace": None}
    most = 0
    for _ in range(2):
        with closing(Peer("benchmarks.peer_offload", how)) as peer:
            most = peer.round(_PROMPT, 1)["peak_rss_bytes"]
    return max(0, most - base - budget)


def _mode(
    settings: Mapping[str, Any], path: Path, cap_bytes: int | None, tokens: int, rounds: int, prompt: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the process says of itself, and the figures of one mode."""
    cap.evict(path)
    if cap_bytes and settings["trace"]:
        cap_bytes += TRACE_BYTES
    with (
        cap.MemoryCap(cap_bytes) if cap_bytes else nullcontext() as group,
        closing(Peer("benchmarks.peer_offload", {**settings, "cap": group and str(group.folder)})) as peer,
    ):
        first = peer.round(_PROMPT, _WARM_UP)
        kept = [peer.round(0, tokens) for _ in range(rounds)]
        prompts = [peer.round(prompt, 0) for _ in range(rounds + 1)][1:] if prompt else []
        most = group.most_bytes() if group else None
    figures = _figures(kept, int(settings["threads"]))
    return peer.about, {
        **figures,
        **({"hit_rate": None, "io_critical_share": None} if settings["offload"]["engine"] == "mmap" else {}),
        "prompt_s": round(first["prompt_s"], 2),
        **_beside_the_drive([r["stats"] for r in kept], path, peer.about["reads"], settings["offload"]),
        **_prompts(prompts, prompt, int(settings["threads"]), settings["offload"]["engine"] == "mmap"),
        "reads": peer.about["reads"],
        "offload": settings["offload"],
        "trace": kept[-1]["trace"],
        "budget_bytes": peer.about["budget"]["total"],
        "cache_bytes": kept[-1]["stats"]["cache_bytes"],
        "peak_rss_bytes": (prompts or kept)[-1]["peak_rss_bytes"],
        "capped": group is not None,
        "group_peak_bytes": most,
    }


def _beside_the_drive(
    stats: Sequence[Mapping[str, int]], path: Path, reads: str, offload: Mapping[str, Any]
) -> dict[str, float | None]:
    """``drive_reads_per_s``: random reads of the mean size, of the same file by the same engine, with nothing beside;
    ``drive_share``: what the mode had of these while any read was under way. None: it read nothing itself.
    """
    count, nbytes, io_s = (sum(s[name] for s in stats) for name in ("reads", "bytes_read", "io_ns"))
    if not count or offload["device"] or offload["engine"] == "mmap":
        return {"drive_reads_per_s": None, "drive_share": None}
    load()
    engine, direct = reads.split(", ")[0], reads.endswith("direct")
    block, whole = -(-nbytes // count // _PAGE) * _PAGE, path.stat().st_size // _PAGE * _PAGE
    done, wall_s, _ = torch.ops.pi2.read_rates(
        str(path), engine, direct, block, offload["io_threads"], whole, False, _DRIVE_S
    ).tolist()
    return {"drive_reads_per_s": round(done / wall_s), "drive_share": round(count / (io_s / 1e9) / (done / wall_s), 4)}


def _figures(rounds: Sequence[Mapping[str, Any]], threads: int) -> dict[str, Any]:
    steps = sorted(s for r in rounds for s in r["step_s"])
    tokens = len(steps)
    disk = [r["disk_bytes"] for r in rounds]
    rates = [len(r["step_s"]) / sum(r["step_s"]) for r in rounds]
    return {
        "tokens_per_s": round(statistics.median(rates), 3),
        "spread": {"tokens_per_s": spread(rates)},
        **{f"p{p}_ms": round(_percentile(steps, p) * 1e3, 2) for p in (50, 90, 99)},
        "disk_bytes_per_token": None if None in disk else round(sum(disk) / tokens),
        **of_store([r["stats"] for r in rounds], tokens, sum(steps), threads),
        "ffn_ms": round(sum(r["ffn_s"] for r in rounds) / tokens * 1e3, 2),
    }


def _prompts(rounds: Sequence[Mapping[str, Any]], tokens: int, threads: int, mapped: bool) -> dict[str, Any]:
    if not rounds:
        return {}
    rates, stats = [tokens / r["prompt_s"] for r in rounds], [r["prompt_stats"] for r in rounds]
    seconds = sum(r["prompt_s"] for r in rounds)
    return {
        "prompt_tokens_per_s": round(statistics.median(rates), 2),
        "prompt_spread": spread(rates, 2),
        "prompt_bytes_read": round(statistics.median(s["bytes_read"] for s in stats)),
        "prompt_io_critical_share": None
        if mapped
        else round(sum(s["wait_ns"] for s in stats) / 1e9 / threads / seconds, 4),
    }


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest rank: a value that was measured."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _against(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    if "pipeline" not in measured:
        return {}
    ours = measured["pipeline"]["tokens_per_s"]
    return {name: round(ours / m["tokens_per_s"], 2) for name, m in measured.items() if name != "pipeline"}


def _llama(gguf: Path, threads: int, cap_bytes: int, prompt: int) -> dict[str, Any]:
    """llama.cpp in a group of ``cap_bytes``: a few tokens, as it takes seconds for each, and one prompt."""
    warmed = cap.warm(gguf)
    with cap.MemoryCap(cap_bytes) as group:
        context = max(_LLAMA_PROMPT + _LLAMA_TOKENS, prompt) + 1
        how = {"gguf": str(gguf), "threads": threads, "context": context, "repack": False, "cap": str(group.folder)}
        with closing(Peer("benchmarks.peer_llama", how)) as peer:
            peer.round(_LLAMA_PROMPT, _LLAMA_WARM_UP)
            theirs = peer.round(_LLAMA_PROMPT, _LLAMA_TOKENS)
            seconds = peer.round(prompt, 0)["prompt_s"] if prompt else None
            most = group.most_bytes()
    disk = theirs["disk_bytes"]
    return {
        "tokens_per_s": round(_LLAMA_TOKENS / theirs["decode_s"], 4),
        "tokens": _LLAMA_TOKENS,
        **({"prompt_tokens_per_s": round(prompt / seconds, 2)} if seconds else {}),
        "disk_bytes_per_token": None if disk is None else round(disk / _LLAMA_TOKENS),
        "major_faults": theirs["major_faults"],
        "peak_rss_bytes": theirs["peak_rss_bytes"],
        "capped": True,
        "group_peak_bytes": most,
        "file": f"warmed by one sequential {warmed} read",
        "about": peer.about,
    }


def _rows(result: Result) -> list[dict[str, Any]]:
    """Modes, then other engines under the same cap."""
    rows = [{"mode": name, "over": result["against"].get(name), **mode} for name, mode in result["modes"].items()]
    for row in rows:
        row["read"] = row["bytes_read_per_token"] or row["disk_bytes_per_token"] or 0
        row["mode"] += " (traced)" if row.get("trace") else ""
    for name, peer in result["peers"].items():
        read, ours = peer["disk_bytes_per_token"], {"over": peer.get("ratio"), "prompt_over": peer.get("prompt_ratio")}
        rows.append({"mode": name, "read": read, **ours, **peer})
    return rows


TABLES = (
    Table(
        "Larger than memory",
        _rows,
        {
            "mode": at("mode"),
            "tokens/s": ranged("tokens_per_s", ".2f"),
            "p50 ms": at("p50_ms", ".1f"),
            "p90 ms": at("p90_ms", ".1f"),
            "p99 ms": at("p99_ms", ".1f"),
            "MB/token": at("read", ".1f", 1e-6),
            "reads/token": at("reads_per_token", ".0f"),
            "hits": at("hit_rate", common.percent),
            "I/O waited for": at("io_critical_share", common.percent),
            "of the drive": at("drive_share", common.percent),
            "FFN ms": at("ffn_ms", ".1f"),
            "prompt tokens/s": at("prompt_tokens_per_s", ".1f"),
            "peak memory": at("peak_rss_bytes", common.size),
            "pipeline / it": at("over", ".2f"),
        },
        "The share of the neurons' bytes that a run names has room in memory; the rest is read from a store whose file "
        "is warm (one sequential read before), each mode in a process of its own, one after another, in a memory cap "
        "where the machine has one (page cache counts). Tokens are drawn at random: of one topic for a while, which "
        'gives neurons the locality that "LLM in a flash" measured on text, or independently. *I/O waited for*: share '
        "of the compute threads' time in which they had nothing to compute. *Of the drive*: reads a second while any "
        "was under way, of those that the same engine makes of the same file with nothing beside it.",
    ),
)


def about(result: Result) -> str:
    cap_bytes, stream = result["cap_bytes"], ", independent tokens" if "independent" in result["tokens"] else ""
    return (
        f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads, "
        f"{common.percent(result['ffn_in_memory'])} of {common.size(result['ffn_bytes'])} of neurons in memory, "
        + (f"cap {common.size(cap_bytes)}" if cap_bytes else "no memory cap")
        + stream
        + (f", SIMULATED {result['simulated']}" if result.get("simulated") else "")
    )


def notes(result: Result) -> list[str]:
    lines = [f"{name} failed: {why}" for name, why in result["failed"].items()]
    if result["simulated"]:
        late = common.percent(max(m["late_share"] for m in result["modes"].values()))
        lines.append(f"simulated device {result['simulated']}; at most {late} of reads took longer here than there")
    if result["prompt"]:
        waits = {name: mode["prompt_io_critical_share"] for name, mode in result["modes"].items()}
        shares = ", ".join(f"{name} {common.percent(share)}" for name, share in waits.items() if share is not None)
        lines.append(f"prompts of {result['prompt']} tokens, share of their time waiting for reads: {shares}")
    return [*lines, f"tokens {result['tokens']}; file {result['file']}"]
