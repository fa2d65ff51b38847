"""Servers under load: requests/s, and how long clients wait, beside llama-cpp-python's own server.

Synthetic weights of the same sizes in both, the same requests (:mod:`benchmarks.words`), greedy, streamed, over
loopback. All servers stay loaded; one at a time has something to do, in alternation. Each of so many clients sends its
next request when the last is answered. Half of the prompts begin alike. The figures speak of speed only.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import server as servers
from benchmarks.arguments import add_activations, add_peers, add_seed, from_to, list_of
from benchmarks.clients import Load, Request, check, load
from benchmarks.figures import alternate, ratios, spread, summary
from benchmarks.gguf import write_gguf
from benchmarks.server import Server
from benchmarks.subject import WORK, synthetic_folder
from benchmarks.tables import Result, Table, at, ranged
from benchmarks.traffic import Memory
from benchmarks.words import save_tokenizer, text, vocabulary
from torch_pi2.cli import common
from torch_pi2.rewrite.skeleton import model_config

PEERS = ("llama.cpp",)
#: In milliseconds: of whole answers, and of their first text.
_WAITS: dict[str, Callable[[Any], float]] = {"latency": lambda a: a.whole_s, "first": lambda a: a.first_s}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_server(parser)
    add(
        "--clients",
        type=list_of(common.positive),
        default=[1, 4, 16],
        metavar="N,...",
        help="that ask at once, comma-separated (default: 1,4,16)",
    )
    add("--requests", type=common.positive, default=8, metavar="N", help="of a round, or one a client if that is more")
    add("--rounds", type=common.positive, default=3, metavar="N", help="alternating; one more before is warm-up")
    add("--prompts", type=from_to, default=[32, 256], metavar="FROM,TO", help="tokens of prompts (default: 32,256)")
    add("--answers", type=from_to, default=[16, 128], metavar="FROM,TO", help="tokens of answers (default: 16,128)")
    add(
        "--shared",
        type=common.count,
        default=128,
        metavar="T",
        help="tokens that half of the prompts begin with, at most",
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """What is served, and how."""
    add = parser.add_argument
    add("--shape", default="llama-1b", help="synthetic, made in work/bench if it is not there (default: llama-1b)")
    add("--weights", default="int4", choices=("int4", "int8"))
    add_activations(parser, "int8")
    add("--max-batch-size", type=common.positive, default=8, metavar="N", help="sequences we decode together")
    add("--compile", dest="compiled", action="store_true", help="compile our steps")
    add(
        "--prefix-cache",
        dest="prefix_caches",
        type=list_of(str),
        default=["256MiB", "0"],
        metavar="BYTES,...",
        help="a server of ours with each, comma-separated (default: 256MiB,0)",
    )
    add_peers(parser, PEERS, "llama-cpp-python's own server (Q4_0)")
    add_seed(parser)


class Served:
    """The servers of ``args`` (:func:`add_server`); ``context``: tokens of a prompt and its answer, at most."""

    def __init__(self, args: argparse.Namespace, context: int) -> None:
        self._args, self._context = args, context

    def files(self) -> tuple[Path, Path | None]:
        """The folder and, for peers, the GGUF file, made if they are not there."""
        args = self._args
        folder = synthetic_folder(args.shape, args.weights, args.seed)
        config = model_config(folder)
        save_tokenizer(folder, config.vocab_size)
        if not args.peers:
            return folder, None
        words = vocabulary(config.vocab_size)
        return folder, write_gguf(WORK / f"{args.shape}-words.q4_0.gguf", config, seed=args.seed, tokens=words)

    @contextlib.contextmanager
    def servers(self) -> Iterator[dict[str, Server]]:
        """By name, ours first; they end with the context."""
        folder, gguf = self.files()
        args, threads = self._args, torch.get_num_threads()
        with contextlib.ExitStack() as stack:
            found: dict[str, Server] = {}
            for prefix_cache in args.prefix_caches:
                started = servers.ours(
                    folder,
                    activations=args.activations,
                    threads=threads,
                    max_batch_size=args.max_batch_size,
                    prefix_cache=prefix_cache,
                    compiled=args.compiled,
                    context=self._context,
                )
                stack.callback(started.close)
                found[started.name] = started
            if gguf is not None:
                started = servers.llama(gguf, threads=threads, context=self._context)
                stack.callback(started.close)
                found[started.name] = started
            yield found

    def about(self) -> dict[str, Any]:
        import transformers

        config: Any = transformers.AutoConfig.from_pretrained(self.files()[0], local_files_only=True)
        return {"synthetic": config.torch_pi2_synthetic}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure servers with torch's current number of threads each.

    Returns:
        ``servers``, by name: what it is (``about``), ``peak_rss_bytes``, and ``loads``, for each number of ``clients``
        what :func:`_summary` gives. ``over``: for each number of clients, how many times as fast as the peer each of
        ours is, of requests/s within each round, and of waits of all rounds.

    Raises:
        PeerError: a server ended, or did not answer as it should.
        Pi2Error: what :func:`torch_pi2.synthetic` and :func:`benchmarks.gguf.write_gguf` raise.
    """
    prompts, answers, shared, clients = args.prompts, args.answers, args.shared, args.clients
    served = Served(args, context=prompts[1] + answers[1])
    drawn = Requests(prompts, answers, shared, args.seed)
    memory = Memory(1 << 14, 0.1, seed=args.seed)
    with served.servers() as running:
        for server in running.values():
            check(server, drawn.of("check", 3))
            load(server, drawn.falling(args.max_batch_size), args.max_batch_size)

        def one(name: str, index: int) -> tuple[float, list[Load]]:
            read = memory.read_gb_per_s()
            asked = [drawn.of(f"{index} {count}", max(args.requests, count)) for count in clients]
            return read, [load(running[name], r, count) for r, count in zip(asked, clients, strict=True)]

        kept = alternate(list(running), args.rounds, one)
        peaks = {name: server.peak_rss_bytes() for name, server in running.items()}
    loads = {name: [[r[i] for _, r in every] for i in range(len(clients))] for name, every in kept.items()}
    reads = [read for every in kept.values() for read, _ in every]
    return {
        **served.about(),
        "read_gb_per_s": round(statistics.median(reads), 3),
        "servers": {
            name: {
                "about": running[name].about,
                "peak_rss_bytes": peaks[name],
                "loads": [{"clients": n, **_summary(r)} for n, r in zip(clients, loads[name], strict=True)],
            }
            for name in running
        },
        "over": [
            {"clients": n, **_over({name: of[i] for name, of in loads.items()}, [*running][len(args.prefix_caches) :])}
            for i, n in enumerate(clients)
        ],
    }


class Requests:
    """Drawn requests: no two of a run have the same prompt, but every other one begins with the same text.

    Args:
        prompts, answers: tokens, the least and the most. shared: tokens of that text, at most.
    """

    def __init__(self, prompts: Sequence[int], answers: Sequence[int], shared: int, seed: int) -> None:
        self._prompts, self._answers, self._seed = prompts, answers, seed
        self._begin = text(shared, random.Random(f"{seed} shared"))

    def of(self, what: str, count: int) -> list[Request]:
        """``what``: the same gives the same requests."""
        drawn = random.Random(f"{self._seed} {what}")
        return [self._one(drawn, drawn.randint(*self._answers), i % 2 == 0) for i in range(count)]

    def falling(self, count: int) -> list[Request]:
        """So many at once, which end one after another: each number of sequences comes once."""
        drawn = random.Random(f"{self._seed} falling")
        least = min(2, self._answers[1])
        return [self._one(drawn, min(least + 2 * i, self._answers[1]), i % 2 == 0) for i in range(count)]

    def _one(self, drawn: random.Random, answer: int, shares: bool) -> Request:
        tokens = drawn.randint(*self._prompts)
        begin = self._begin[: max(0, tokens - self._prompts[0] // 2)] if shares else ""
        return Request(begin + text(tokens - len(begin), drawn), tokens, answer)


def percentile(values: Sequence[float], share: float) -> float:
    """The least of ``values`` that so large a share of them is not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _rates(rounds: Sequence[Load]) -> dict[str, list[float]]:
    return {
        "requests_per_s": [len(r.answers) / r.wall_s for r in rounds],
        "tokens_per_s": [sum(a.answer_tokens for a in r.answers) / r.wall_s for r in rounds],
    }


def _waits(rounds: Sequence[Load]) -> dict[str, float]:
    """Of all rounds together, since one has few answers."""
    found: dict[str, float] = {}
    for name, seconds in _WAITS.items():
        values = [seconds(answer) * 1e3 for r in rounds for answer in r.answers]
        found |= {f"{name}_p50_ms": percentile(values, 0.5), f"{name}_p99_ms": percentile(values, 0.99)}
    return found


def _summary(rounds: Sequence[Load]) -> dict[str, Any]:
    """Medians and ranges of rates over rounds; waits of all answers, which end at their last or begin at their first
    text; ``client_share``: of one processor, that the clients took."""
    rates = _rates(rounds)
    return {
        **summary(rates),
        **{name: round(value, 1) for name, value in _waits(rounds).items()},
        "answers": sum(len(r.answers) for r in rounds),
        "client_share": round(sum(r.client_s for r in rounds) / sum(r.wall_s for r in rounds), 3),
    }


def _over(loads: Mapping[str, Sequence[Load]], peers: Sequence[str]) -> dict[str, Any]:
    """By each of ours: ``requests_per_s`` over the peer's, and the peer's waits over ours: above 1, ours is ahead."""
    found: dict[str, Any] = {}
    for peer in peers:
        for name in (name for name in loads if name not in peers):
            times = ratios(_rates(loads[name])["requests_per_s"], _rates(loads[peer])["requests_per_s"])
            own, its = _waits(loads[name]), _waits(loads[peer])
            found[name] = {
                "peer": peer,
                "requests_per_s": round(statistics.median(times), 3),
                "spread": spread(times),
                **{wait: round(its[wait] / own[wait], 3) for wait in own},
            }
    return {"ours": found}


_WAIT_NAMES = {
    "p50 ms": "latency_p50_ms",
    "p99 ms": "latency_p99_ms",
    "first text p50 ms": "first_p50_ms",
    "first text p99 ms": "first_p99_ms",
}
TABLES = (
    Table(
        "Servers under load",
        lambda result: [{"server": name, **at} for name, server in result["servers"].items() for at in server["loads"]],
        {
            "server": at("server"),
            "clients": at("clients"),
            "requests/s": ranged("requests_per_s", ".2f"),
            "tokens/s": ranged("tokens_per_s", ".1f"),
            **{title: at(name, ".0f") for title, name in _WAIT_NAMES.items()},
        },
        "Clients that each send their next request when the last is answered, streamed and greedy over loopback; half "
        "of the prompts begin alike, and none comes twice. One server at a time has something to do. p50 and p99 are "
        "of all rounds together. llama-cpp-python's server answers one request at a time.",
    ),
    Table(
        "Servers under load: how many times as good as the peer",
        lambda result: [
            {"clients": at["clients"], "server": name, **ratio, "spread": {"requests_per_s": ratio["spread"]}}
            for at in result["over"]
            for name, ratio in at["ours"].items()
        ],
        {
            "server": at("server"),
            "clients": at("clients"),
            "requests/s": ranged("requests_per_s", ".2f"),
            **{title.replace(" ms", ""): at(name, ".2f") for title, name in _WAIT_NAMES.items()},
        },
        "Our requests/s over the peer's, and its waits over ours: above 1, ours is ahead.",
    ),
)


def about(result: Result) -> str:
    low, high = result["prompts"]
    return (
        f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads, "
        f"prompts of {low} to {high}, answers of {result['answers'][0]} to {result['answers'][1]} tokens"
    )
