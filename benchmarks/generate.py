"""``model.generate`` over our steps, beside transformers' own and :func:`torch_pi2.generate`: whole answers, greedy."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.arguments import add_folder
from benchmarks.figures import alternate, at_least, label, spread, way_rows
from benchmarks.subject import WORK, Subject
from torch_pi2.cli import common
from torch_pi2.decode import hf_generate
from torch_pi2.decode.decoder import Decoder
from torch_pi2.machine import process as machine

WAYS = ("transformers", "first", "model.generate", "torch_pi2.generate")
COMPILED = "torch_pi2.generate, compiled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_folder(parser)
    add("--prompt", type=common.positive, default=64, metavar="T", help="tokens of the prompt (default: 64)")
    add("--tokens", type=common.positive, default=32, metavar="N", help="tokens of the answer (default: 32)")
    add("--rounds", type=common.positive, default=5, metavar="N", help="alternating; one more before is warm-up")
    add("--compiled", action="store_true", help="with compiled steps, too, and what compiling takes")
    add("--seed", type=common.seed, default=0)


def run(
    folder: str | Path | None = None,
    *,
    prompt: int = 64,
    tokens: int = 32,
    rounds: int = 5,
    compiled: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Milliseconds of one greedy answer, prompt included.

    Args:
        compiled: also of :func:`torch_pi2.generate` with compiled steps.

    Returns:
        ``ways``, by name: ``ms``, its ``spread``, and ``times_as_fast`` as transformers within each round; ``same``: of
        how many answers the tokens were those of transformers, whose attention sums in another order (in bfloat16 two
        tokens often tie). ``first`` is ``model.generate`` of a model that has not generated before: its steps are
        recorded. With ``compiled``: ``compiling``, the ``ms`` by which the first compiled answer is
        longer than others, and whether the code was ``found`` on disk: run it twice.

    Raises:
        ConfigError: a setting makes no sense. Pi2Error: the folder cannot be loaded.
    """
    import torch_pi2

    at_least(1, prompt=prompt, tokens=tokens, rounds=rounds)
    folder = Path(folder or WORK / "llama-1b-int4-0.1")
    if not (folder / "pi2").is_dir():
        torch_pi2.synthetic(folder, "llama-1b", active=0.1, weights="int4", seed=seed)
    model: Any = torch_pi2.load(folder)
    subject, drawn = Subject.of(model, folder), torch.Generator().manual_seed(seed)
    prompts = [torch.randint(model.config.vocab_size, (1, prompt), generator=drawn) for _ in range(rounds + 1)]
    how: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def first(ids: torch.Tensor) -> Any:
        kept = vars(model)[hf_generate.ATTRIBUTE]
        hf_generate.attach(model)  # without what earlier calls have recorded
        try:
            return model.generate(ids, **how)
        finally:
            object.__setattr__(model, hf_generate.ATTRIBUTE, kept)

    calls: dict[str, Any] = {
        "transformers": lambda ids: type(model).generate(model, ids, **how)[0, prompt:].tolist(),
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
        decoders.append(Decoder(model, max_tokens=prompt + tokens, logits=True))
        before = counters["aot_autograd"]["autograd_cache_hit"]
        compiling["ms"] = answer(COMPILED, 0)
        compiling["found"] = counters["aot_autograd"]["autograd_cache_hit"] > before
    ms = {way: values[1:] for way, values in alternate(tuple(calls), rounds + 1, answer).items()}
    ways = {}
    for way, values in ms.items():
        ratios = [theirs / ours for theirs, ours in zip(ms["transformers"], values, strict=True)]
        ways[way] = {
            "ms": round(statistics.median(values), 1),
            "times_as_fast": round(statistics.median(ratios), 3),
            "spread": {"ms": spread(values, 1), "times_as_fast": spread(ratios)},
            "same": sum(said[way, i] == said["transformers", i] for i in range(rounds + 1)),
        }
    head = {"what": "generate", "shape": subject.shape, "weights": subject.weights, "synthetic": subject.synthetic}
    about = {"prompt": prompt, "tokens": tokens, "rounds": rounds, "threads": torch.get_num_threads(), "seed": seed}
    if compiling:
        compiling["ms"] = round(compiling["ms"] - statistics.median(ms[COMPILED]), 1)
    return {**head, **about, "ways": ways, "compiling": compiling, **machine.describe()}


def render(result: dict[str, Any]) -> str:
    rows = way_rows(result["ways"], "times_as_fast", result["rounds"] + 1, digits=0)
    found = result["compiling"]
    known = " (code found on disk)" if found.get("found") else ""
    return "\n".join(
        (
            f"{result['shape']} {result['weights']}, {result['threads']} threads, prompt {result['prompt']}, answer "
            f"{result['tokens']}",
            common.table(("way", "ms", "from - to", "times as fast", "from - to", "same"), rows),
            *((f"compiling: {found['ms'] / 1e3:.1f} s{known}",) if found else ()),
            label(result),
        )
    )
