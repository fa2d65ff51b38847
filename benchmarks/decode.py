"""A whole model, prompt and answer, beside the memory roofline and beside other engines.

Everything alternates round by round in one run: the streaming read, the gathered read, our decoding at each batch size,
and a peer in a process of its own at each size that it supports. The figures are of speed only, whatever the model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import cap, traffic
from benchmarks.arguments import add_activations, add_lengths, add_peers, add_source, list_of
from benchmarks.attention import attention_ms
from benchmarks.figures import medians, ratios, spread, summary
from benchmarks.gguf import write_gguf
from benchmarks.peer import Peer
from benchmarks.peer_command import CommandPeer, program
from benchmarks.subject import Subject, synthetic_folder
from benchmarks.tables import Result, Table, at, ranged
from benchmarks.traffic import BYTES, Memory
from torch_pi2.cli import common
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError
from torch_pi2.formats import QUANTIZED
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.machine import process as machine
from torch_pi2.observe import counters, timings
from torch_pi2.ops import load as load_library

PEERS = ("llama.cpp",)

AnyPeer = Peer | CommandPeer
StartPeer = Callable[[int], AnyPeer]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_source(parser, "model folder", "mistral-7b")
    add("--weights", choices=QUANTIZED, default="int4", help="of what is made (default: int4)")
    add_activations(parser)
    add("--active", type=float, metavar="SHARE", help="of neurons, which fire in what is made (default: as published)")
    add("--exact", action="store_true", help="make it with the exact gate, not with a predictor")
    add_lengths(parser, 128, 32, 5)
    add(
        "--batch",
        type=list_of(common.positive),
        default=[1],
        metavar="B,...",
        help="sequences decoded together, comma-separated; the first is what the main figures are of",
    )
    add("--eager", dest="compiled", action="store_false", help="do not compile the decoding step")
    add_peers(parser, PEERS, "another engine on the same shape (Q4_0), in alternation")
    add(
        "--peer-command",
        dest="peer_commands",
        action="append",
        default=[],
        metavar="COMMAND",
        help="a program like llama-bench as another peer, with options of its own if need be; run once a round with "
        "-m, -t, -p, -n, -r 1 and -o json added; batch 1 only",
    )
    parser.set_defaults(memory_size=BYTES)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make (or take) a synthetic model, load it, and :func:`measure` it on torch's current number of threads.

    The GGUF file of peers, random weights of the same sizes, is written beside the folder.

    Returns:
        What :func:`measure` does; ``shape`` and ``weights`` of the loaded model, and as ``synthetic`` its label, or
        False if it is real.

    Raises:
        ConfigError: a setting makes no sense.
        Pi2Error: what :func:`torch_pi2.synthetic`, :func:`torch_pi2.load`, :class:`Decoder`, :class:`Peer` and
            :class:`CommandPeer` raise.
    """
    import torch_pi2

    peers, batch, commands, seed = args.peers, args.batch, args.peer_commands, args.seed
    for command in commands:
        program(command)
    if commands and 1 not in batch:
        raise ConfigError(
            "--batch with --peer-command",
            expected="1 among the sizes: such a program takes one sequence at once",
            found=",".join(map(str, batch)),
            fix="Add 1, or use --peer llama.cpp.",
        )
    made = {} if args.active is None else {"active": args.active}
    made |= {"predictor": None} if args.exact else {}
    folder = args.folder or synthetic_folder(args.shape or "mistral-7b", args.weights, seed, **made)
    cap.reset_peak()
    model: Any = torch_pi2.load(folder, activations=args.activations)
    subject = Subject.of(model, folder)
    gguf = folder.parent / f"{subject.stem}.q4_0.gguf"
    if peers or commands:
        write_gguf(gguf, model.config, seed=seed)
    threads = torch.get_num_threads()
    about = {"gguf": str(gguf), "threads": threads, "batches": batch}
    start: dict[str, StartPeer] = {
        name: lambda context: Peer("benchmarks.peer_llama", {**about, "context": context}) for name in peers
    }
    start |= {c: partial(CommandPeer, c, gguf, threads) for c in commands}
    measured = measure(
        model,
        prompt=args.prompt,
        tokens=args.tokens,
        rounds=args.rounds,
        batch=batch,
        compiled=args.compiled,
        peers=start,
        memory_size=args.memory_size,
        seed=seed,
    )
    return {**subject.label(), **measured}


def measure(
    model: nn.Module,
    *,
    prompt: int = 128,
    tokens: int = 32,
    rounds: int = 5,
    batch: Sequence[int] = (1,),
    compiled: bool = True,
    peers: Mapping[str, StartPeer] | None = None,
    memory_size: int = BYTES,
    seed: int = 0,
) -> dict[str, Any]:
    """Time a Hugging Face causal model, dense or optimised.

    Args:
        prompt, tokens: lengths of prompt and answer, for us and for peers.
        rounds: alternating rounds of all batch sizes (if there are several), and of each peer at all that it can; one
            more before is warm-up.
        batch: sequences decoded together; the first is what the main figures are of (the work split and the bytes
            only if it is 1, since in a batch several tokens share one read).
        peers: name -> function of a sequence's context length that starts it; one after another, each alternating
            with us. One with a ``name`` is reported by that.
        memory_size: bytes of the buffer for the plain reads.

    Returns:
        ``tokens_per_s``, ``prompt_tokens_per_s``, ``bytes_per_token`` (with ``bytes_by_part``), ``gb_per_s``,
        ``read_gb_per_s``, ``gather_gb_per_s``, ``of_read`` (gb_per_s over read_gb_per_s), ``ms_per_token`` by part
        (``sdpa``: the calls of an eager step, timed apart), ``peak_rss_bytes`` (loading, compiling, one prompt and
        answer), ``active_share`` (of the FFN's rows that were read), ``firing_share`` (of down columns), ``peers``,
        machine, versions and spreads.
        The main figures are of all ``rounds_kept`` rounds; ``batches`` (of several sizes) only of those in which the
        sizes alternate alone, as many for each. A peer's ``batches`` have for each size (its main figures are those of
        the first that it can, ``batch``) its rates, ours in the same rounds (``our_...``), ``ratio``, ``prompt_ratio``
        (ours over its) and spreads.
    """
    load_library()
    context = prompt + tokens + 1  # and one more step, whose attention is timed
    how: dict[str, Any] = {"max_tokens": context, "compiled": compiled}
    how["recorded"] = None if type(model).__module__.startswith("transformers.") else True  # code of a checkpoint, too
    ours = [_Ours(model, Decoder(model, batch=b, **how), seed) for b in batch]
    for engine in ours:
        engine.round(prompt, tokens)
    peak = cap.peak_rss_bytes()
    sites = sparse_layers(model)
    neuron_bytes = sites[0].neuron_rows[0].nbytes if sites else 1 << 14
    memory = Memory(neuron_bytes, ours[0].active_share() or 0.1, size=memory_size, seed=seed)
    plain: dict[str, list[float]] = {"read_gb_per_s": [], "gather_gb_per_s": []}

    def in_turn(engines: Sequence[_Ours]) -> Iterator[_Ours]:
        plain["read_gb_per_s"].append(memory.read_gb_per_s())
        plain["gather_gb_per_s"].append(memory.gather_gb_per_s())
        for engine in engines:
            engine.keep(engine.round(prompt, tokens))
            yield engine

    if not peers or len(ours) > 1:
        for _ in range(rounds):
            list(in_turn(ours))
    # before the rounds with peers
    batches = [engine.summary() for engine in ours] if len(ours) > 1 else []
    against: dict[str, dict[str, Any]] = {}
    for name, start in (peers or {}).items():
        peer = start(prompt + tokens)
        figures = _alternate(peer, in_turn, ours, prompt, tokens, rounds)
        name = getattr(peer, "name", name)
        while name in against:  # e.g. two builds of one program
            name += ", another"
        against[name] = figures
    result: dict[str, Any] = {
        "prompt": prompt,
        "tokens": tokens,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        **ours[0].summary(),
        **medians(plain),
        "peak_rss_bytes": peak,
        "batches": batches,
        "peers": against,
        **machine.describe(),
    }
    result["spread"] |= {name: spread(values) for name, values in plain.items()}
    if ours[0].batch == 1:
        result |= ours[0].roofline(memory, result["tokens_per_s"], result["read_gb_per_s"])
    return result


class _Ours:
    """Our engine at one batch size, and what its kept rounds gave."""

    def __init__(self, model: nn.Module, decoder: Decoder, seed: int) -> None:
        self.model, self.decoder, self.batch = model, decoder, decoder.batch
        self._generator = torch.Generator().manual_seed(seed)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self.kept: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}

    def round(self, prompt: int, tokens: int) -> dict[str, Any]:
        """Another random prompt and its answer; only decoding is split and counted."""
        ids_BT = torch.randint(self._vocabulary, (self.batch, prompt), generator=self._generator)
        started = time.perf_counter()
        next_B1 = self.decoder.prompt(ids_BT)
        prompt_s = time.perf_counter() - started
        counters.reset()
        timings.read()
        started = time.perf_counter()
        for _ in range(tokens):
            next_B1 = self.decoder.step(next_B1)
        decode_s = time.perf_counter() - started
        self._last = {
            "prompt_s": prompt_s,
            "decode_s": decode_s,
            "prompt": prompt,
            "tokens": tokens,
            "counters": counters.read(reset=True),
            "timings": timings.read(),
            "next": next_B1,
        }
        return self._last

    def keep(self, measured: dict[str, Any]) -> None:
        self.kept.append(measured)

    def _median(self, of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(of, self.kept))

    def rates(self) -> dict[str, list[float]]:
        """Tokens of all sequences per second, by round."""
        return {
            "tokens_per_s": [self.batch * r["tokens"] / r["decode_s"] for r in self.kept],
            "prompt_tokens_per_s": [self.batch * r["prompt"] / r["prompt_s"] for r in self.kept],
        }

    def active_share(self) -> float:
        """Of the rows a dense FFN would read, the share that was read; 0 without sparse layers."""
        total = self._last["counters"]
        return float(traffic.ffn_rows(total) / total["dense_rows"]) if total["dense_rows"] else 0.0

    def summary(self) -> dict[str, Any]:
        rates, total = self.rates(), self._last["counters"]
        return {
            "batch": self.batch,
            "rounds_kept": len(self.kept),
            **summary(rates),
            "active_share": round(self.active_share(), 4),
            "firing_share": round(total["down_rows"] / total["neurons"], 4) if total["neurons"] else 0.0,
        }

    def roofline(self, memory: Memory, tokens_per_s: float, read_gb_per_s: float) -> dict[str, Any]:
        """Bytes and milliseconds of a token of a batch of one, beside a plain read."""
        parts = self.bytes_by_part()
        total = sum(parts.values())
        gb_per_s = total * tokens_per_s / 1e9
        return {
            "bytes_per_token": total,
            "bytes_by_part": parts,
            "gb_per_s": round(gb_per_s, 2),
            "of_read": round(gb_per_s / read_gb_per_s, 3),
            "ms_per_token": self.split(memory),
        }

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes one token of a batch of one reads."""
        row = traffic.ffn_row_bytes(self.model)
        ffn = self._median(lambda r: traffic.ffn_rows(r["counters"]) / r["tokens"]) * row
        cache = traffic.cache_bytes(self.decoder.cache)
        return {**traffic.fixed_bytes(self.model, self._head), "ffn": round(ffn), "cache": cache}

    def split(self, memory: Memory) -> dict[str, float]:
        """Milliseconds per token by part; ``sdpa`` at the length of the end of a round.

        ``python`` is the rest: norms, rotary embedding, Python around it all.
        """
        sdpa = attention_ms(self.model, self.decoder, self._last["next"], memory.read_gb_per_s)

        def of_kind(kind: int) -> float:
            return self._median(lambda r: timings.milliseconds(r["timings"], kind) / r["tokens"])

        def of_linears(head: int) -> float:  # the head has a row for each token of the vocabulary
            def ms(r: dict[str, Any]) -> float:
                rows = [row for row in r["timings"] if (row[1] == self._vocabulary) == bool(head)]
                return timings.milliseconds(rows, timings.LINEAR) / r["tokens"]

            return self._median(ms)

        linears = of_linears(0)
        others = {"predictor": of_kind(timings.PREDICTOR), "ffn": of_kind(timings.FFN), "head": of_linears(1)}
        total = self._median(lambda r: r["decode_s"] / r["tokens"] * 1e3)
        parts = {
            "total": total,
            "attention": linears + sdpa,
            "linears": linears,
            "sdpa": sdpa,
            **others,
            "python": total - linears - sdpa - sum(others.values()),
        }
        return {name: round(ms, 4) for name, ms in parts.items()}


def _alternate(
    peer: AnyPeer,
    in_turn: Callable[[Sequence[_Ours]], Iterable[_Ours]],
    ours: Sequence[_Ours],
    prompt: int,
    tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """Our round of one size, the peer's, our next size, and so on; ratios (ours over theirs) are of neighbours."""
    engines = [engine for engine in ours if engine.batch == 1 or not peer.one_sequence]
    theirs: list[list[dict[str, Any]]] = [[] for _ in engines]
    with closing(peer):
        for engine in engines:
            peer.round(prompt, tokens, engine.batch)
        for _ in range(rounds):
            for engine, kept in zip(in_turn(engines), theirs, strict=True):
                kept.append(peer.round(prompt, tokens, engine.batch))
    by_batch = [_compared(engine, kept, prompt, tokens) for engine, kept in zip(engines, theirs, strict=True)]
    every = [r for kept in theirs for r in kept]
    return {
        **by_batch[0],
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in every),
        "major_faults": sum(r.get("major_faults", 0) for r in every),
        "about": peer.about,
        "batches": by_batch if len(ours) > 1 else [],
    }


def _compared(ours: _Ours, theirs: Sequence[Mapping[str, Any]], prompt: int, tokens: int) -> dict[str, Any]:
    """Our last rounds and theirs, as many, of one batch size."""
    measured = {
        "tokens_per_s": [ours.batch * tokens / r["decode_s"] for r in theirs],
        "prompt_tokens_per_s": [ours.batch * prompt / r["prompt_s"] for r in theirs],
    }
    for name, rates in ours.rates().items():
        ratio = "ratio" if name == "tokens_per_s" else "prompt_ratio"
        measured[f"our_{name}"] = rates[-len(theirs) :]
        measured[ratio] = ratios(rates[-len(theirs) :], measured[name])
    return {"batch": ours.batch, **summary(measured)}


def _peer_rows(result: Result) -> list[dict[str, Any]]:
    """By peer and batch size; files from before peers had batches have the first size alone."""
    return [
        {"peer": name, "faults": peer["major_faults"], "batch": 1, **one}
        for name, peer in result["peers"].items()
        for one in peer.get("batches") or [peer]
    ]


def _parts(result: Result) -> list[dict[str, Any]]:
    ms = result.get("ms_per_token", {})
    return [{"part": name, "ms": value, "share": value and value / ms["total"]} for name, value in ms.items()]


TABLES = (
    Table(
        "Whole models",
        lambda result: [result],
        {
            "tokens/s": ranged("tokens_per_s", ".2f"),
            "prompt tokens/s": ranged("prompt_tokens_per_s", ".1f"),
            "FFN rows read": at("active_share", common.percent),
            "a token reads": at("bytes_per_token", common.size),
            "GB/s": at("gb_per_s", ".1f"),
            "streaming read": at("read_gb_per_s", ".1f"),
            "gathered": at("gather_gb_per_s", ".1f"),
            "of streaming": at("of_read", common.percent),
            "peak memory": at("peak_rss_bytes", common.size),
        },
        "*Streaming* is a plain read of 1 GiB in the same run, *gathered* one of random neurons of the model's size.",
    ),
    Table(
        "Milliseconds per token",
        _parts,
        {"part": at("part"), "ms": at("ms", ".2f"), "of all": at("share", common.percent)},
        "*sdpa* is timed apart (in older results as torch's profiler saw it); *python* is the rest.",
    ),
    Table(
        "Batches",
        lambda result: result["batches"],
        {
            "batch": at("batch"),
            "rounds": at("rounds_kept"),
            "tokens/s": ranged("tokens_per_s", ".2f"),
            "prompt tokens/s": ranged("prompt_tokens_per_s", ".1f"),
        },
    ),
    Table(
        "Other engines, in alternation",
        _peer_rows,
        {
            "engine": at("peer"),
            "batch": at("batch"),
            "tokens/s": at("tokens_per_s", ".2f"),
            "ours": at("our_tokens_per_s", ".2f"),
            "ours / its": ranged("ratio", ".2f"),
            "prompt tokens/s": at("prompt_tokens_per_s", ".1f"),
            "our prompt": at("our_prompt_tokens_per_s", ".1f"),
            "prompt: ours / its": ranged("prompt_ratio", ".2f"),
            "major faults": at("faults"),
        },
    ),
)


def about(result: Result) -> str:
    return (
        f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads, "
        f"prompt {result['prompt']}, answer {result['tokens']}"
    )
