"""``model.generate`` over our steps, beside transformers' own and :func:`torch_pi2.generate`: whole answers, greedy."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.arguments import add_folder, add_lengths
from benchmarks.figures import alternate, ratios, summary
from benchmarks.subject import Subject, synthetic_folder
from benchmarks.tables import Result, Table, at, named, ranged
from torch_pi2.decode import hf_generate
from torch_pi2.decode.decoder import Decoder

COMPILED = "torch_pi2.generate, compiled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    add_lengths(parser, 64, 32, 5)
    parser.add_argument("--compiled", action="store_true", help="also with compiled steps, and what compiling takes")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of one greedy answer, prompt included.

    Returns:
        ``ways``, by name: ``ms``, its ``spread``, and ``times_as_fast`` as transformers within each round; ``same``: of
        how many answers the tokens were those of transformers, whose attention sums in another order (in bfloat16 two
        tokens often tie). ``first`` is ``model.generate`` of a model that has not generated before: its steps are
        recorded. With ``compiled``: ``compiling``, the ``ms`` by which the first compiled answer is
        longer than others, and whether the code was ``found`` on disk: run it twice.

    Raises:
        Pi2Error: the folder cannot be loaded.
    """
    import torch_pi2

    prompt, tokens, rounds, compiled = args.prompt, args.tokens, args.rounds, args.compiled
    folder = args.folder or synthetic_folder("llama-1b", "int4", args.seed)
    model: Any = torch_pi2.load(folder)
    subject, drawn = Subject.of(model, folder), torch.Generator().manual_seed(args.seed)
    prompts = [torch.randint(model.config.vocab_size, (1, prompt), generator=drawn) for _ in range(rounds + 1)]
    how: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def first(ids: torch.Tensor) -> Any:
        kept = vars(model)[hf_generate.ATTRIBUTE]
        hf_generate.attach(model)  # without what earlier calls have recorded
        try:
            return model.generate(ids, **how)
        finally:
            object.__setattr__(model, hf_generate.ATTRIBUTE, kept)

    own = type(model).generate.__wrapped__  # transformers' loop and the model's own steps
    calls: dict[str, Any] = {
        "transformers": lambda ids: own(model, ids, **how)[0, prompt:].tolist(),
        "first": lambda ids: first(ids)[0, prompt:].tolist(),
        "model.generate": lambda ids: model.generate(ids, **how)[0, prompt:].tolist(),
        "torch_pi2.generate": lambda ids: torch_pi2.generate(
            model, ids, max_new_tokens=tokens, eos_token_id=[]
        ).sequences[0],
    }
    decoders: list[Decoder] = []
    if compiled:
        calls[COMPILED] = lambda ids: torch_pi2.generate(
            model, ids, max_new_tokens=tokens, eos_token_id=[], decoder=decoders[-1]
        ).sequences[0]
    said: dict[tuple[str, int], list[int]] = {}

    def answer(way: str, index: int) -> float:
        started = time.perf_counter()
        said[way, index] = calls[way](prompts[index])
        return (time.perf_counter() - started) * 1e3

    compiling: dict[str, Any] = {}
    if compiled:
        decoders.append(Decoder(model, max_tokens=prompt + tokens, logits=True, compiled=True))
        before = counters["aot_autograd"]["autograd_cache_hit"]
        compiling["ms"] = answer(COMPILED, 0)
        compiling["found"] = counters["aot_autograd"]["autograd_cache_hit"] > before
    ms = {way: values[1:] for way, values in alternate(tuple(calls), rounds + 1, answer).items()}
    ways = {}
    for way, values in ms.items():
        ways[way] = {
            **summary({"ms": values, "times_as_fast": ratios(ms["transformers"], values)}),
            "same": sum(said[way, i] == said["transformers", i] for i in range(rounds + 1)),
        }
    if compiling:
        compiling["ms"] = round(compiling["ms"] - statistics.median(ms[COMPILED]), 1)
    return {**subject.label(), "ways": ways, "compiling": compiling}


TABLES = (
    Table(
        "model.generate",
        lambda result: named(result["ways"]),
        {
            "": at("name"),
            "ms": ranged("ms", ".0f"),
            "times as fast as transformers": ranged("times_as_fast", ".2f"),
            "answers with the same tokens": at("same"),
        },
        "Whole greedy answers in one process, in alternation. *First*: of a model that has not generated before, whose "
        "steps are recorded.",
    ),
    Table(
        "Compiling",
        lambda result: [result["compiling"]] if result["compiling"] else [],
        {"the first answer takes longer by, ms": at("ms", ".0f"), "code found on disk": at("found", str)},
    ),
)


def about(result: Result) -> str:
    return (
        f"{result['shape']} {result['weights']}, {result['threads']} threads, prompt {result['prompt']}, answer "
        f"{result['tokens']}"
    )
