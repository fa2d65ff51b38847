"""A whole model, prompt and answer, beside the memory roofline and beside other engines.

Everything alternates round by round in one run: the streaming read, the gathered read, our decoding at each batch size,
and a peer in a process of its own at each that it can. Medians and their spread. The figures speak of speed only,
whatever the model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import traffic
from benchmarks.arguments import add_activations, list_of
from benchmarks.figures import at_least, known, label, medians, spread
from benchmarks.gguf import write_gguf
from benchmarks.memory import BYTES, Memory
from benchmarks.peer import Peer
from benchmarks.peer_command import CommandPeer, program
from benchmarks.subject import Subject
from torch_pi2.cli import common
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError
from torch_pi2.formats import QUANTIZED
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.machine import process as machine
from torch_pi2.observe import attention, counters, timings
from torch_pi2.ops import load as load_library

#: Module of each.
PEERS = {"llama.cpp": "benchmarks.peer_llama", "openvino": "benchmarks.peer_openvino", "torch": "benchmarks.peer_torch"}

AnyPeer = Peer | CommandPeer
StartPeer = Callable[[int], AnyPeer]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    # no defaults here: given with a folder that has something else, they are an error
    add("--shape", help="as `torch-pi2 synthetic --shape` (default: the folder's, or mistral-7b)")
    add("--weights", choices=QUANTIZED, help="default: the folder's, or int4")
    add_activations(parser)
    add(
        "--active",
        type=float,
        metavar="SHARE",
        help="mean share of neurons that fire, 0..1 (default: the folder's, or 0.1)",
    )
    add("--prompt", type=common.positive, default=128, metavar="T", help="tokens of the prompt")
    add("--tokens", type=common.positive, default=32, metavar="N", help="tokens of the answer")
    add(
        "--rounds", type=common.positive, default=5, metavar="N", help="alternating rounds, of batches and of each peer"
    )
    add(
        "--batch",
        type=list_of(common.positive),
        default=[1],
        metavar="B,...",
        help="sequences decoded together, comma-separated; the first is what the main figures are of",
    )
    add("--folder", type=Path, metavar="DIR", help="model folder; made if it is not there (default: in work/bench)")
    add("--eager", dest="compiled", action="store_false", help="do not compile the decoding step")
    add("--cpp-wrapper", action="store_true", help="compile what lies between kernels in C++ too (takes minutes)")
    add(
        "--peer",
        dest="peers",
        action="append",
        default=[],
        choices=PEERS,
        help="another engine on the same shape, in alternation: llama.cpp or openvino (GenAI; both Q4_0) or torch "
        "(dense, bfloat16, compiled)",
    )
    add(
        "--peer-command",
        dest="peer_commands",
        action="append",
        default=[],
        metavar="COMMAND",
        help="a program like llama-bench as another peer, with options of its own if need be; run once a round with "
        "-m, -t, -p, -n, -r 1 and -o json added; batch 1 only",
    )
    add("--peer-file", type=Path, metavar="FILE", help="what these programs load (default: the Q4_0 file of the shape)")
    add("--seed", type=common.seed, default=0)


def run(
    shape: str | None = None,
    weights: str | None = None,
    *,
    activations: str = "float",
    active: float | None = None,
    prompt: int = 128,
    tokens: int = 32,
    rounds: int = 5,
    batch: Sequence[int] = (1,),
    folder: str | Path | None = None,
    compiled: bool = True,
    cpp_wrapper: bool = False,
    peers: Iterable[str] = (),
    peer_commands: Iterable[str] = (),
    peer_file: str | Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Make (or take) a synthetic model, load it, and :func:`measure` it on torch's current number of threads.

    Args: the options of the same names, and
        folder: where the model is or shall be (default ``work/bench/<shape>-<weights>-<active>``), synthetic or real;
            the GGUF file of peers, random weights of the same sizes, is written beside it.

    Returns:
        What :func:`measure` does; ``shape`` and ``weights`` of the loaded model, and as ``synthetic`` its label, or
        False if it is real.

    Raises:
        ConfigError: a setting makes no sense, or contradicts the folder.
        Pi2Error: what :func:`torch_pi2.synthetic`, :func:`torch_pi2.load`, :class:`Decoder`, :class:`Peer` and
            :class:`CommandPeer` raise.
    """
    import torch_pi2

    peers, batch, commands = list(peers), list(batch), list(peer_commands)
    _check(prompt, tokens, rounds, batch, peers)
    _check_commands(commands, peer_file, batch)
    new_shape, new_weights, new_active = shape or "mistral-7b", weights or "int4", 0.1 if active is None else active
    folder = Path(folder or Path("work") / "bench" / f"{new_shape}-{new_weights}-{new_active:g}")
    if not (folder / "pi2").is_dir():
        torch_pi2.synthetic(folder, new_shape, active=new_active, weights=new_weights, seed=seed)
    machine.reset_peak()
    model: Any = torch_pi2.load(folder, activations=activations)
    subject = Subject.of(model, folder)
    subject.check(shape, weights, active)
    gguf = folder.parent / f"{subject.stem}.q4_0.gguf"
    if {"llama.cpp", "openvino"} & {*peers} or (commands and peer_file is None):
        write_gguf(gguf, model.config, seed=seed)
    threads = torch.get_num_threads()
    about = {"gguf": str(gguf), "folder": str(folder), "threads": threads, "batches": batch}
    start: dict[str, StartPeer] = {name: _starts(PEERS[name], about) for name in peers}
    start |= {c: partial(CommandPeer, c, Path(peer_file or gguf), threads) for c in commands}
    measured = measure(
        model,
        prompt=prompt,
        tokens=tokens,
        rounds=rounds,
        batch=batch,
        compiled=compiled,
        cpp_wrapper=cpp_wrapper,
        peers=start,
        seed=seed,
    )
    head = {"what": "decode", "shape": subject.shape, "weights": subject.weights, "activations": activations}
    return {**head, "synthetic": subject.synthetic, **measured}


def _check(prompt: int, tokens: int, rounds: int, batch: Sequence[int], peers: Sequence[str]) -> None:
    at_least(1, prompt=prompt, tokens=tokens, rounds=rounds, batch=min(batch, default=0))
    known("peer", peers, PEERS)


def _starts(module: str, settings: Mapping[str, Any]) -> StartPeer:
    return lambda context: Peer(module, {**settings, "context": context})


def _check_commands(commands: Sequence[str], file: str | Path | None, batch: Sequence[int]) -> None:
    for command in commands:
        program(command)
    if commands and 1 not in batch:
        raise ConfigError(
            "--batch with --peer-command",
            expected="1 among the sizes: such a program takes one sequence at once",
            found=",".join(map(str, batch)),
            fix="Add 1, or use --peer llama.cpp.",
        )
    if file is not None and not (commands and Path(file).is_file()):
        raise ConfigError(
            "--peer-file",
            expected="a file, and --peer-command for what loads it",
            found=f"{'no such file as ' if commands else 'only '}{Path(file).name}",
            fix="Give both, or leave it out.",
        )


def measure(
    model: nn.Module,
    *,
    prompt: int = 128,
    tokens: int = 32,
    rounds: int = 5,
    batch: Sequence[int] = (1,),
    compiled: bool = True,
    cpp_wrapper: bool = False,
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
        (and ``sdpa_from``: ``profiler``, ``timed apart``, or None, when ``sdpa`` and ``attention`` are None and
        ``python`` contains it), ``peak_rss_bytes`` (loading, compiling, one prompt and answer), ``active_share`` (of
        the FFN's rows that were read), ``firing_share`` (of down columns), ``peers``, machine, versions and spreads.
        The main figures are of all ``rounds_kept`` rounds; ``batches`` (of several sizes) only of those in which the
        sizes alternate alone, as many for each. A peer's ``batches`` have for each size (its main figures are those of
        the first that it can, ``batch``) its rates, ours in the same rounds (``our_...``), ``ratio``, ``prompt_ratio``
        (ours over its) and spreads.
    """
    load_library()
    _check(prompt, tokens, rounds, batch, [])
    context = prompt + tokens + attention.SPARE_TOKENS
    ours = [
        _Ours(model, Decoder(model, max_tokens=context, batch=b, compiled=compiled, cpp_wrapper=cpp_wrapper), seed)
        for b in batch
    ]
    for engine in ours:
        engine.round(prompt, tokens)
    peak = machine.peak_rss_bytes()
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
        "cpp_wrapper": cpp_wrapper,
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
            **medians(rates),
            "active_share": round(self.active_share(), 4),
            "firing_share": round(total["down_rows"] / total["neurons"], 4) if total["neurons"] else 0.0,
            "spread": {name: spread(values) for name, values in rates.items()},
        }

    def roofline(self, memory: Memory, tokens_per_s: float, read_gb_per_s: float) -> dict[str, Any]:
        """Bytes and milliseconds of a token of a batch of one, beside a plain read."""
        parts = self.bytes_by_part()
        total = sum(parts.values())
        gb_per_s = total * tokens_per_s / 1e9
        split, sdpa_from = self.split(memory)
        return {
            "bytes_per_token": total,
            "bytes_by_part": parts,
            "gb_per_s": round(gb_per_s, 2),
            "of_read": round(gb_per_s / read_gb_per_s, 3),
            "ms_per_token": split,
            "sdpa_from": sdpa_from,
        }

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes one token of a batch of one reads."""
        row = traffic.ffn_row_bytes(self.model)
        ffn = self._median(lambda r: traffic.ffn_rows(r["counters"]) / r["tokens"]) * row
        cache = traffic.cache_bytes(self.decoder.cache)
        return {**traffic.fixed_bytes(self.model, self._head), "ffn": round(ffn), "cache": cache}

    def split(self, memory: Memory) -> tuple[dict[str, float | None], str | None]:
        """Milliseconds per token by part, and where ``sdpa`` (at the length of the end of a round) comes from.

        ``python`` is the rest: norms, rotary embedding, Python around it all, and SDPA if it could not be seen.
        """
        sdpa, sdpa_from = attention.milliseconds(self.model, self.decoder, self._last["next"], memory.read_gb_per_s)

        def of_kind(kind: int) -> float:
            return self._median(lambda r: timings.milliseconds(r["timings"], kind) / r["tokens"])

        def of_linears(head: int) -> float:
            return self._median(lambda r: timings.split_head(r["timings"], self._vocabulary)[head] / r["tokens"])

        linears = of_linears(0)
        others = {"predictor": of_kind(timings.PREDICTOR), "ffn": of_kind(timings.FFN), "head": of_linears(1)}
        total = self._median(lambda r: r["decode_s"] / r["tokens"] * 1e3)
        parts: dict[str, float | None] = {
            "total": total,
            "attention": None if sdpa is None else linears + sdpa,
            "linears": linears,
            "sdpa": sdpa,
            **others,
            "python": total - linears - (sdpa or 0.0) - sum(others.values()),
        }
        return {name: None if ms is None else round(ms, 4) for name, ms in parts.items()}, sdpa_from


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
    try:
        for engine in engines:
            peer.round(prompt, tokens, engine.batch)
        for _ in range(rounds):
            for engine, kept in zip(in_turn(engines), theirs, strict=True):
                kept.append(peer.round(prompt, tokens, engine.batch))
    finally:
        peer.close()
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
        measured[ratio] = [a / b for a, b in zip(rates[-len(theirs) :], measured[name], strict=True)]
    spreads = {name: spread(values) for name, values in measured.items()}
    return {"batch": ours.batch, **medians(measured), "spread": spreads}


def render(result: dict[str, Any]) -> str:
    lines = [
        f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads, "
        f"{result['machine']['kernels']} kernels, prompt {result['prompt']}, answer {result['tokens']}",
        f"{result['tokens_per_s']:.2f} tokens/s, prompt {result['prompt_tokens_per_s']:.1f} tokens/s, "
        f"{common.percent(result['active_share'])} of FFN rows read, at most {common.size(result['peak_rss_bytes'])}",
    ]
    if "bytes_per_token" in result:
        parts = [(name, "" if ms is None else f"{ms:.2f}") for name, ms in result["ms_per_token"].items()]
        lines += [
            f"{common.size(result['bytes_per_token'])} a token: {result['gb_per_s']:.1f} GB/s, "
            f"{common.percent(result['of_read'])} of a streaming read ({result['read_gb_per_s']:.1f}; "
            f"gathered {result['gather_gb_per_s']:.1f})",
            common.table(("part", "ms/token"), parts),
            f"sdpa: {result['sdpa_from'] or 'not seen, python contains it'}",
        ]
    if result["batches"]:
        rows = [
            (
                b["batch"],
                b["rounds_kept"],
                f"{b['tokens_per_s']:.2f}",
                "{:.2f} to {:.2f}".format(*b["spread"]["tokens_per_s"]),
                f"{b['prompt_tokens_per_s']:.1f}",
                "{:.1f} to {:.1f}".format(*b["spread"]["prompt_tokens_per_s"]),
            )
            for b in result["batches"]
        ]
        lines.append(common.table(("batch", "rounds", "tokens/s", "from - to", "prompt tokens/s", "from - to"), rows))
    lines += [line for name, peer in result["peers"].items() for line in _peer_lines(name, peer, result)]
    return "\n".join([*lines, label(result)])


def _peer_lines(name: str, peer: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[str]:
    batches = result["batches"]
    for at in peer["batches"] or [peer]:
        low, high = at["spread"]["ratio"]
        yield (
            name + (f", batch {at['batch']}" if batches else "") + f": {at['tokens_per_s']:.2f} tokens/s, prompt "
            f"{at['prompt_tokens_per_s']:.1f}; ours, {at['our_tokens_per_s']:.2f}, is {at['ratio']:.2f} times as fast "
            f"({low:.2f} to {high:.2f}), prompt, {at['our_prompt_tokens_per_s']:.1f}, {at['prompt_ratio']:.2f}"
        )
    if len(peer["batches"]) < len(batches):
        yield f"{name}: batch 1 only, as it takes one sequence at once"
    if "answer_after" in peer["about"]:
        yield f"{name}: its answers come after {peer['about']['answer_after']} tokens, ours after {result['prompt']}"
