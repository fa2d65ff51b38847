"""Bundles in the C++ runner by the format of keys and values, beside PyTorch's ``Decoder``, at several lengths.

With ``peer`` also beside ExecuTorch's own Llama export of the same sizes, which computes all neurons. Rounds alternate;
every round of a bundle is a process of its own, with one prompt and its answer before what is timed; the peer stays
loaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from typing import Any

import torch

from benchmarks.arguments import add_folder, add_lengths, list_of, names_of
from benchmarks.executorch_llama import exported
from benchmarks.figures import alternate, ratios, summary
from benchmarks.peer import Peer
from benchmarks.subject import RUNNER, WORK, Subject, check_runner, synthetic_folder
from benchmarks.tables import Result, Table, at, ranged
from torch_pi2.cli import common
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError
from torch_pi2.observe.steps import timed_steps
from torch_pi2.types.config import KV_FORMATS

DECODER = "PyTorch's Decoder"
PEERS = {"executorch": "ExecuTorch's own export"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_folder(parser)
    add("--kv", type=names_of(KV_FORMATS), default=list(KV_FORMATS), metavar="FORMAT,...", help="of keys and values")
    add("--prompts", type=list_of(common.positive), default=[64, 3900], metavar="T,...", help="tokens of prompts")
    add("--max-tokens", type=common.positive, default=4096, metavar="N", help="context length of the bundles")
    add_lengths(parser, 0, 48, 3)
    add("--peer", choices=PEERS, help="executorch: a dense Llama of the same sizes as its own script exports it")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of prompts and of decoding; bundles are kept in ``work/bench`` for the next time.

    Returns:
        ``ways``: for each bundle and :data:`DECODER`, by tokens of the prompt, ``prompt`` and ``decode`` (tokens/s)
        with their spreads, ``of_decoder`` (decoding, as a share of that within each round); of bundles ``peak_bytes``.
        With ``peer`` also how many times as fast as it, within each round, prompts are (``prompt_times_peer``) and
        decoding (``decode_times_peer``); ``peer`` is what it says of itself.

    Raises:
        ConfigError: a setting makes no sense, the runner was not built, or the peer has no form for the model.
        PeerError: the peer cannot be made or run.
    """
    import torch_pi2

    kv, prompts, max_tokens, tokens, peer = args.kv, args.prompts, args.max_tokens, args.tokens, args.peer
    check_runner()
    if max(prompts) + tokens > max_tokens:
        expected, fix = f"prompts and answers of at most {max_tokens} tokens", "Choose a larger --max-tokens."
        raise ConfigError("--prompts", expected=expected, found=f"{max(prompts)} + {tokens} tokens", fix=fix)
    folder = args.folder or synthetic_folder("llama-1b", "int4", args.seed)
    model: Any = torch_pi2.load(folder, activations="int8")
    subject, drawn, threads = (
        Subject.of(model, folder),
        torch.Generator().manual_seed(args.seed),
        torch.get_num_threads(),
    )
    bundles = {f"runner, {name}": WORK / f"bundle-{folder.name}-{name}-{max_tokens}" for name in kv}
    for name, bundle in zip(kv, bundles.values(), strict=True):
        if not bundle.is_dir():
            torch_pi2.export(model, bundle, max_tokens=max_tokens, batches=(1,), kv=name)
    program = None if peer is None else exported(model.config, WORK, max_tokens, args.seed)
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
                found[n] = n / seconds, len(steps.answers) / steps.seconds
                continue
            if other is not None and way not in bundles:
                took = other.round(n, tokens)
                found[n] = n / took["prompt_s"], tokens / took["decode_s"]
                continue
            said = ",".join(map(str, ids_1T[0, :n].tolist()))
            command = [RUNNER, bundles[way], "--ids", said, "--max-new-tokens", tokens, "--threads", threads, "--json"]
            done = subprocess.run([*map(str, command), "--repeat", "1"], stdout=subprocess.PIPE, check=True)
            report = json.loads(done.stdout)
            found[n] = report["prompt_tokens_per_second"]["median"], report["tokens_per_second"]["median"]
            peak[way] = max(peak.get(way, 0), report["memory"]["peak_bytes"])
        return found

    ways = (DECODER, *bundles, *([] if peer is None else [PEERS[peer]]))
    try:
        measured(DECODER, 0)  # compiles
        rates = alternate(ways, args.rounds, measured)
    finally:
        if other is not None:
            other.close()
    table: dict[str, Any] = {}
    for way in ways:
        by_length = {}
        for n in prompts:
            columns = {"prompt": [found[n][0] for found in rates[way]], "decode": [found[n][1] for found in rates[way]]}
            columns["of_decoder"] = ratios(columns["decode"], [found[n][1] for found in rates[DECODER]])
            if peer is not None:
                theirs = rates[PEERS[peer]]
                columns["prompt_times_peer"] = ratios(columns["prompt"], [found[n][0] for found in theirs])
                columns["decode_times_peer"] = ratios(columns["decode"], [found[n][1] for found in theirs])
            by_length[n] = summary(columns)
        table[way] = {"lengths": by_length}
        if way in peak:
            table[way]["peak_bytes"] = peak[way]
    return {**subject.label(), "ways": table, "peer": None if other is None else other.about}


def _rows(result: Result) -> list[dict[str, Any]]:
    return [
        {"way": way, "length": length, **figures, "peak": found.get("peak_bytes")}
        for way, found in result["ways"].items()
        for length, figures in found["lengths"].items()
    ]


TABLES = (
    Table(
        "Bundles in the C++ runner",
        _rows,
        {
            "": at("way"),
            "prompt": at("length"),
            "prompt tokens/s": ranged("prompt", ".0f"),
            "decoded tokens/s": ranged("decode", ".1f"),
            "of Decoder's": ranged("of_decoder", ".2f"),
            "prompt / peer's": ranged("prompt_times_peer", ".2f"),
            "decoded / peer's": ranged("decode_times_peer", ".2f"),
            "peak": at("peak", common.size),
        },
    ),
)


def about(result: Result) -> str:
    peer = result.get("peer")
    return (
        f"{result['shape']} {result['weights']}, {result['threads']} threads, room for {result['max_tokens']} tokens, "
        f"answer {result['tokens']}"
        + (f"; peer: {peer['engine']}, {peer['weights']}, {peer['threads']} threads" if peer else "")
    )
