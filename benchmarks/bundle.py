"""Bundles in the C++ runner by what keys and values are stored in, beside PyTorch's ``Decoder``, at several lengths.

With ``peer`` also beside ExecuTorch's own Llama export of the same sizes, which computes all neurons. Rounds alternate;
every round of a bundle is a process of its own, with one prompt and its answer before what is timed; the peer stays
loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import add_folder, list_of
from benchmarks.executorch_llama import exported
from benchmarks.figures import alternate, at_least, known, label, spread
from benchmarks.peer import Peer
from benchmarks.subject import RUNNER, WORK, Subject
from torch_pi2.cli import common
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError
from torch_pi2.export.cached_attention import KV_DTYPES, packed
from torch_pi2.machine import process as machine
from torch_pi2.observe.steps import timed_steps
from torch_pi2.types.config import KV_FORMATS

DECODER = "PyTorch's Decoder"
PEERS = {"executorch": "ExecuTorch's own export"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_folder(parser)
    add("--kv", type=list_of(str), default=list(KV_FORMATS), metavar="FORMAT,...", help="of keys and values")
    add("--prompts", type=list_of(int), default=[64, 3900], metavar="T,...", help="tokens of prompts")
    add("--max-tokens", type=common.positive, default=4096, metavar="N", help="that the bundles have room for")
    add("--tokens", type=common.positive, default=48, metavar="N", help="tokens of the answer")
    add("--rounds", type=common.positive, default=3, metavar="N")
    add("--peer", choices=PEERS, help="executorch: a dense Llama of the same sizes as its own script exports it")
    add("--seed", type=common.seed, default=0)


def run(
    folder: str | Path | None = None,
    *,
    kv: Sequence[str] = KV_FORMATS,
    prompts: Sequence[int] = (64, 3900),
    max_tokens: int = 4096,
    tokens: int = 48,
    rounds: int = 3,
    peer: str | None = None,
    seed: int = 0,
    runner: Path = RUNNER,
) -> dict[str, Any]:
    """Tokens per second of prompts and of decoding; bundles are kept in ``work/bench`` for the next time.

    Returns:
        ``ways``: for each bundle and :data:`DECODER`, by tokens of the prompt, ``prompt`` and ``decode`` (tokens/s)
        with their spreads, ``of_decoder`` (decoding, as a share of that within each round); of bundles ``peak_bytes``.
        With ``peer`` also how many times as fast as it, within each round, prompts are (``prompt_times_peer``) and
        decoding (``decode_times_peer``); ``peer`` is what it says of itself.
        ``kv_gb_per_s``: bytes of keys and values by which steps at the longest length read more than at the shortest
        over the time that they take longer, beside ``read_gb_per_s`` of plain reads of such a cache.

    Raises:
        ConfigError: a setting makes no sense, the runner was not built, or the peer has no form for the model.
        PeerError: the peer cannot be made or run.
    """
    import torch_pi2

    known("kv", kv, KV_FORMATS)
    known("peer", [] if peer is None else [peer], PEERS)
    at_least(1, tokens=tokens, rounds=rounds, **{f"prompts[{i}]": n for i, n in enumerate(prompts)})
    if max(prompts) + tokens > max_tokens or not runner.is_file():
        raise ConfigError(
            "benchmarks bundle",
            expected=f"prompts and answers of at most {max_tokens} tokens, and {runner}",
            found=f"{max(prompts)} + {tokens} tokens" if runner.is_file() else "no runner",
            fix="Choose a larger --max-tokens; make runner.",
        )
    folder = Path(folder or WORK / "llama-1b-int4-0.1")
    if not (folder / "pi2").is_dir():
        torch_pi2.synthetic(folder, "llama-1b", active=0.1, weights="int4", seed=seed)
    model: Any = torch_pi2.load(folder, activations="int8")
    subject, drawn, threads = Subject.of(model, folder), torch.Generator().manual_seed(seed), torch.get_num_threads()
    bundles = {f"runner, {name}": WORK / f"bundle-{folder.name}-{name}-{max_tokens}" for name in kv}
    for name, bundle in zip(kv, bundles.values(), strict=True):
        if not bundle.is_dir():
            torch_pi2.export(model, bundle, max_tokens=max_tokens, batches=(1,), kv=name)
    program = None if peer is None else exported(model.config, WORK, max_tokens, seed)
    other = None if peer is None else Peer("benchmarks.peer_executorch", {"program": str(program), "threads": threads})
    ids = {n: torch.randint(3, model.config.vocab_size, (1, n + tokens), generator=drawn) for n in prompts}
    decoder = Decoder(model, max_tokens=max_tokens)
    peak: dict[str, int] = {}

    def measured(way: str, _: int) -> dict[int, tuple[float, float]]:
        found = {}
        for n, ids_1T in ids.items():
            if way == DECODER:
                started = time.perf_counter()
                decoder.prompt(ids_1T[:, :n])
                seconds = time.perf_counter() - started
                steps = timed_steps(decoder, ids_1T[:, n:])
                found[n] = n / seconds, steps.steps / steps.seconds
                continue
            if other is not None and way not in bundles:
                took = other.round(n, tokens)
                found[n] = n / took["prompt_s"], tokens / took["decode_s"]
                continue
            said = ",".join(map(str, ids_1T[0, :n].tolist()))
            command = [runner, bundles[way], "--ids", said, "--max-new-tokens", tokens, "--threads", threads, "--json"]
            done = subprocess.run([*map(str, command), "--repeat", "1"], stdout=subprocess.PIPE, check=True)
            report = json.loads(done.stdout)
            found[n] = report["prompt_tokens_per_second"]["median"], report["tokens_per_second"]["median"]
            peak[way] = max(peak.get(way, 0), report["memory"]["peak_bytes"])
        return found

    ways = (DECODER, *bundles, *([] if peer is None else [PEERS[peer]]))
    try:
        measured(DECODER, 0)  # compiles
        rates = alternate(ways, rounds, measured)
    finally:
        if other is not None:
            other.close()
    config = model.config.get_text_config(decoder=True)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads
    row = {name: packed(torch.zeros(width), dtype).nbytes for name, dtype in KV_DTYPES.items()}
    table: dict[str, Any] = {}
    for way in ways:
        by_length = {}
        for n in prompts:
            read, decoded = zip(*(found[n] for found in rates[way]), strict=True)
            shares = [found[n][1] / theirs[n][1] for found, theirs in zip(rates[way], rates[DECODER], strict=True)]
            by_length[n] = {
                "prompt": round(statistics.median(read), 1),
                "decode": round(statistics.median(decoded), 2),
                "of_decoder": round(statistics.median(shares), 3),
                "spread": {"prompt": spread(read, 1), "decode": spread(decoded, 2), "of_decoder": spread(shares)},
            }
            if peer is not None:
                times = [
                    [found[n][i] / theirs[n][i] for found, theirs in zip(rates[way], rates[PEERS[peer]], strict=True)]
                    for i in range(2)
                ]
                names = ("prompt_times_peer", "decode_times_peer")
                by_length[n] |= {name: round(statistics.median(some), 2) for name, some in zip(names, times)}
                by_length[n]["spread"] |= {name: spread(some, 2) for name, some in zip(names, times)}
        table[way] = {"lengths": by_length}
        if way in peak and len(prompts) > 1:
            least, most = min(prompts), max(prompts)
            more = 1 / by_length[most]["decode"] - 1 / by_length[least]["decode"]
            size = per_token * row[way.partition(", ")[2]] * (most - least)
            table[way] |= {"peak_bytes": peak[way], "kv_gb_per_s": round(size / more / 1e9, 1) if more > 0 else None}
    return {
        "what": "bundle",
        "shape": subject.shape,
        "weights": subject.weights,
        "synthetic": subject.synthetic,
        "prompts": list(prompts),
        "max_tokens": max_tokens,
        "tokens": tokens,
        "rounds": rounds,
        "threads": threads,
        "seed": seed,
        "ways": table,
        "peer": None if other is None else other.about,
        "read_gb_per_s": _read_gb_per_s(),
        **machine.describe(),
    }


def _read_gb_per_s(size: int = 1 << 29, rounds: int = 5) -> float:
    """Of plain reads of memory that no cache has."""
    rows = torch.ones(size // 4 // 1024, 1, 1024)
    torch.ops.pi2.plain_read(rows, None)
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        torch.ops.pi2.plain_read(rows, None)
        taken.append(time.perf_counter() - started)
    return round(size / statistics.median(taken) / 1e9, 1)


def render(result: dict[str, Any]) -> str:
    def ranged(found: dict[str, Any], name: str, digits: int) -> str:
        low, high = found["spread"][name]
        return f"{found[name]:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    rows, theirs = [], result.get("peer")
    for way, of_way in result["ways"].items():
        for n in result["prompts"]:
            found = of_way["lengths"][n]
            speeds = ranged(found, "prompt", 0), ranged(found, "decode", 1), ranged(found, "of_decoder", 2)
            peak, kv = of_way.get("peak_bytes"), of_way.get("kv_gb_per_s")
            times = [ranged(found, f"{name}_times_peer", 2) for name in ("prompt", "decode")] if theirs else []
            ours = f"{peak / 1e9:.2f}" if peak else "", f"{kv:.1f}" if kv else ""
            rows.append((way, str(n), *speeds, *times, *ours))
    beside = ("prompt / peer's", "decoded / peer's") if theirs else ()
    heads = ("way", "prompt", "prompt tokens/s", "decoded tokens/s", "of Decoder's", *beside, "peak GB", "KV GB/s")
    return "\n".join(
        (
            f"{result['shape']} {result['weights']}, {result['threads']} threads, room for {result['max_tokens']} "
            f"tokens, answer {result['tokens']}; plain reads {result['read_gb_per_s']} GB/s",
            common.table(heads, rows),
            *([f"peer: {theirs['engine']}, {theirs['weights']}, {theirs['threads']} threads"] if theirs else []),
            label(result),
        )
    )
