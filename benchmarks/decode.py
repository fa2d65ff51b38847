"""A whole model, prompt and answer, beside the memory roofline and beside other engines.

Everything alternates round by round in one run: the streaming read, the gathered read, our decoding at each batch size,
and a peer in a process of its own. Medians and their spread. The figures speak of speed only, whatever the model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from benchmarks.subject import Subject
from torch_pi2.base import process as machine
from torch_pi2.cli import common
from torch_pi2.decode.decode import Decoder
from torch_pi2.formats import QUANTIZED
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.observe import attention, counters, timings
from torch_pi2.ops import load as load_library

PEERS = ("llama.cpp", "torch")

StartPeer = Callable[[int], Peer]


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
        help="another engine on the same shape, in alternation: llama.cpp (Q4_0) or torch (dense, bfloat16, compiled)",
    )
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
    seed: int = 0,
) -> dict[str, Any]:
    """Make (or take) a synthetic model, load it, and :func:`measure` it on torch's current number of threads.

    Args: the options of the same names, and
        folder: where the model is or shall be (default ``work/bench/<shape>-<weights>-<active>``), synthetic or real;
            llama.cpp's file, random weights of the same sizes, is written beside it.

    Returns:
        What :func:`measure` does; ``shape`` and ``weights`` of the loaded model, and as ``synthetic`` its label, or
        False if it is real.

    Raises:
        ConfigError: a setting makes no sense, or contradicts the folder.
        Pi2Error: what :func:`torch_pi2.synthetic`, :func:`torch_pi2.load`, :class:`Decoder` and :class:`Peer` raise.
    """
    import torch_pi2

    peers, batch = list(peers), list(batch)
    _check(prompt, tokens, rounds, batch, peers)
    new_shape, new_weights, new_active = shape or "mistral-7b", weights or "int4", 0.1 if active is None else active
    folder = Path(folder or Path("work") / "bench" / f"{new_shape}-{new_weights}-{new_active:g}")
    if not (folder / "pi2").is_dir():
        torch_pi2.synthetic(folder, new_shape, active=new_active, weights=new_weights, seed=seed)
    machine.reset_peak()
    model: Any = torch_pi2.load(folder, activations=activations)
    subject = Subject.of(model, folder)
    subject.check(shape, weights, active)
    start: dict[str, StartPeer] = {}
    if "llama.cpp" in peers:
        gguf = write_gguf(folder.parent / f"{subject.stem}.q4_0.gguf", model.config, seed=seed)
        start["llama.cpp"] = lambda context: Peer(
            "benchmarks.peer_llama",
            {"gguf": str(gguf), "threads": torch.get_num_threads(), "context": context},
        )
    if "torch" in peers:
        start["torch"] = lambda context: Peer(
            "benchmarks.peer_torch",
            {"folder": str(folder), "threads": torch.get_num_threads(), "context": context},
        )
    measured = measure(
        model,
        prompt=prompt,
        tokens=tokens,
        rounds=rounds,
        batch=batch,
        compiled=compiled,
        cpp_wrapper=cpp_wrapper,
        peers={name: start[name] for name in peers},
        seed=seed,
    )
    head = {"what": "decode", "shape": subject.shape, "weights": subject.weights, "activations": activations}
    return {**head, "synthetic": subject.synthetic, **measured}


def _check(prompt: int, tokens: int, rounds: int, batch: Sequence[int], peers: Sequence[str]) -> None:
    at_least(1, prompt=prompt, tokens=tokens, rounds=rounds, batch=min(batch, default=0))
    known("peer", peers, PEERS)


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
        rounds: alternating rounds of all batch sizes (if there are several), and of the first with each peer; one
            more before is warm-up.
        batch: sequences decoded together; the first is what the main figures are of (the work split and the bytes
            only if it is 1, since in a batch several tokens share one read).
        peers: name -> function of the context length that starts it; one after another, each alternating with us.
        memory_size: bytes of the buffer for the plain reads.

    Returns:
        ``tokens_per_s``, ``prompt_tokens_per_s``, ``bytes_per_token`` (with ``bytes_by_part``), ``gb_per_s``,
        ``read_gb_per_s``, ``gather_gb_per_s``, ``of_read`` (gb_per_s over read_gb_per_s), ``ms_per_token`` by part
        (and ``sdpa_from``: ``profiler``, ``timed apart``, or None, when ``sdpa`` and ``attention`` are None and
        ``python`` contains it), ``peak_rss_bytes`` (loading, compiling, one prompt and answer), ``active_share`` (of
        the FFN's rows that were read), ``firing_share`` (of down columns), ``peers``, machine, versions and spreads.
        The main figures are of all ``rounds_kept`` rounds; ``batches`` (of several sizes) only of those in which the
        sizes alternate, as many for each.
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

    def our_round(engines: Sequence[_Ours]) -> None:
        plain["read_gb_per_s"].append(memory.read_gb_per_s())
        plain["gather_gb_per_s"].append(memory.gather_gb_per_s())
        for engine in engines:
            engine.keep(engine.round(prompt, tokens))

    if not peers or len(ours) > 1:
        for _ in range(rounds):
            our_round(ours)
    # before the rounds with peers, which only the first batch size has
    batches = [engine.summary() for engine in ours] if len(ours) > 1 else []
    against = {}
    for name, start in (peers or {}).items():
        against[name] = _alternate(start(prompt + tokens), lambda: our_round(ours[:1]), ours[0], prompt, tokens, rounds)
    main = ours[0].summary()
    result: dict[str, Any] = {
        "prompt": prompt,
        "tokens": tokens,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "cpp_wrapper": cpp_wrapper,
        **main,
        **medians(plain),
        "peak_rss_bytes": peak,
        "batches": batches,
        "peers": against,
        **machine.describe(),
    }
    result["spread"] |= {name: spread(values) for name, values in plain.items()}
    if ours[0].batch == 1:
        parts = ours[0].bytes_by_part()
        total = sum(parts.values())
        gb_per_s = total * main["tokens_per_s"] / 1e9
        split, sdpa_from = ours[0].split(memory)
        result |= {
            "bytes_per_token": total,
            "bytes_by_part": parts,
            "gb_per_s": round(gb_per_s, 2),
            "of_read": round(gb_per_s / result["read_gb_per_s"], 3),
            "ms_per_token": split,
            "sdpa_from": sdpa_from,
        }
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
    peer: Peer, our_round: Callable[[], None], ours: _Ours, prompt: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Our round, the peer's, and so on; ratios (ours over theirs) are of neighbours."""
    try:
        peer.round(prompt, tokens)
        first, theirs = len(ours.kept), []
        for _ in range(rounds):
            our_round()
            theirs.append(peer.round(prompt, tokens))
    finally:
        peer.close()
    measured = {
        "tokens_per_s": [tokens / r["decode_s"] for r in theirs],
        "prompt_tokens_per_s": [prompt / r["prompt_s"] for r in theirs],
    }
    for name, ours_by_round in ours.rates().items():
        ratio = "ratio" if name == "tokens_per_s" else "prompt_ratio"
        measured[ratio] = [a / b for a, b in zip(ours_by_round[first:], measured[name])]
    return {
        **medians(measured),
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in theirs),
        "major_faults": sum(r.get("major_faults", 0) for r in theirs),
        "about": peer.about,
        "spread": {name: spread(values) for name, values in measured.items()},
    }


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
    for name, peer in result["peers"].items():
        low, high = peer["spread"]["ratio"]
        lines.append(
            f"{name}: {peer['tokens_per_s']:.2f} tokens/s, prompt {peer['prompt_tokens_per_s']:.1f}; "
            f"ours is {peer['ratio']:.2f} times as fast ({low:.2f} to {high:.2f}), prompt {peer['prompt_ratio']:.2f}"
        )
    return "\n".join([*lines, label(result)])
