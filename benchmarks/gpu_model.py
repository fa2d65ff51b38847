"""A whole model on a GPU: our layers beside dense ones; and, in less memory than it takes, beside offloading.

Greedy answers of one sequence. Models that are on the GPU as a whole have a static cache, whose steps transformers
compiles (``max-autotune``: into CUDA graphs); divided ones run eagerly. ``--device cpu`` runs the same calls there, to
see that they are right.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import add_lengths
from benchmarks.figures import alternate, ratios, summary
from benchmarks.subject import Subject, synthetic_folder
from benchmarks.tables import Result, Table, at, named, ranged
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.cli import common
from torch_pi2.layers.gpu import check_gpu
from torch_pi2.layers.of_model import homes
from torch_pi2.rewrite.gpu import hot_on_gpu, rest_bytes

#: Tokens of a greedy answer to ids ``[1, T]``.
Answer = Callable[[torch.Tensor], list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, metavar="DIR", help="model folder (default: work/bench/SHAPE-WEIGHTS-0.1, made)")
    add("--shape", default="mistral-7b", metavar="NAME", help="of the model that is made (default: %(default)s)")
    add("--weights", default="bfloat16", help="of the model that is made (default: %(default)s)")
    add("--share", type=float, metavar="S", help="of the FFNs' bytes in the GPU's memory: divided")
    add_lengths(parser, 16, 64, 5)
    add("--device", default="cuda", choices=("cuda", "cpu"))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a token of greedy answers, prompt included.

    With ``--share``: ``divided`` (:func:`torch_pi2.load` with ``gpu_memory``), ``offloaded`` (accelerate, the dense
    model with as much memory) and ``cpu`` (our steps there). Without: ``sparse`` and ``dense``, both as a whole on the
    GPU.

    Returns:
        ``ways``, by name: ``ms`` a token, ``spread``, and ``ours_over`` it: how many times as fast our first way is
        within each round; ``same``: of how many rounds the tokens were those of the first way.

    Raises:
        DeviceError: no GPU that has kernels. Pi2Error: the folder cannot be made or loaded.
    """
    import torch_pi2

    share, prompt, rounds, device = args.share, args.prompt, args.rounds, args.device
    tokens: int = args.tokens
    check_gpu(torch.device(device))
    folder = args.folder or synthetic_folder(args.shape, args.weights, args.seed)
    model: Any = torch_pi2.load(folder)
    subject, memory_bytes = Subject.of(model, folder), None
    if share is None:
        answers = {"sparse": _whole(model.to(device), tokens), "steps": _ours(model, tokens)}
        answers["dense"] = _whole(load_dense(folder).to(device), tokens)
    else:
        inside = sum(tensor.nbytes for home in homes(model) for tensor in home.buffers())
        memory_bytes = rest_bytes(model) + int(share * inside)
        hot_on_gpu(model, memory_bytes)
        answers = {"divided": _eager(model, device, tokens)}
        answers["offloaded"] = _eager(_offloaded(load_dense(folder), memory_bytes), device, tokens)
        answers["cpu"] = _ours(torch_pi2.load(folder), tokens)
    drawn = torch.Generator().manual_seed(args.seed)
    prompts = [torch.randint(model.config.vocab_size, (1, prompt), generator=drawn) for _ in range(rounds + 2)]
    said: dict[tuple[str, int], list[int]] = {}

    def timed(way: str, index: int) -> float:
        started = time.perf_counter()
        said[way, index] = answers[way](prompts[index])  # a list: the GPU is done
        return (time.perf_counter() - started) * 1e3 / tokens

    samples = alternate(tuple(answers), rounds + 2, timed)
    return {
        **subject.label(),
        "memory_bytes": memory_bytes,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "ways": _summaries(samples, said),
    }


def _summaries(
    samples: Mapping[str, Sequence[float]], said: Mapping[tuple[str, int], Sequence[int]]
) -> dict[str, dict[str, Any]]:
    """``ways`` of :func:`run`, of milliseconds and tokens in each round; two rounds were warm-up."""
    ours, *_ = samples
    ways = {}
    for way, every in samples.items():
        values, mine = every[2:], samples[ours][2:]
        same = sum(said[way, i] == said[ours, i] for i in range(len(every)))
        ways[way] = {**summary({"ms": values, "ours_over": ratios(values, mine)}), "same": same}
    return ways


def _settings(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _ours(model: Any, tokens: int) -> Answer:
    import torch_pi2

    def answer(ids: torch.Tensor) -> list[int]:
        return torch_pi2.generate(model, ids, max_new_tokens=tokens, eos_token_id=[]).sequences[0]

    return answer


def _whole(model: Any, tokens: int) -> Answer:
    from transformers import CompileConfig

    how = {"cache_implementation": "static", "compile_config": CompileConfig(mode="max-autotune", fullgraph=False)}

    def answer(ids: torch.Tensor) -> list[int]:
        there = ids.to(model.device)
        return type(model).generate(model, there, **how, **_settings(tokens))[0, ids.shape[1] :].tolist()

    return answer


def _eager(model: Any, device: str, tokens: int) -> Answer:
    def answer(ids: torch.Tensor) -> list[int]:
        out = type(model).generate(model, ids.to(device), **_settings(tokens))
        return out[0, ids.shape[1] :].tolist()

    return answer


def _offloaded(model: Any, memory_bytes: int) -> Any:
    """The dense model, of which accelerate keeps so much on the GPU and brings the rest there in every step."""
    accelerate: Any = importlib.import_module("accelerate")
    most = {0: memory_bytes, "cpu": 1 << 40}
    device_map = accelerate.infer_auto_device_map(model, most, no_split_module_classes=model._no_split_modules)
    return accelerate.dispatch_model(model, device_map)


TABLES = (
    Table(
        "Whole models on a GPU",
        lambda result: named(result["ways"]),
        {
            "": at("name"),
            "ms a token": ranged("ms", ".2f"),
            "ours over it": ranged("ours_over", ".2f"),
            "rounds with the same tokens": at("same"),
        },
    ),
)


def about(result: Result) -> str:
    memory = "" if result["memory_bytes"] is None else f", {common.size(result['memory_bytes'])} of its memory"
    return (
        f"{result['shape']} {result['weights']} on {result['device']}{memory}, prompt {result['prompt']}, answer "
        f"{result['tokens']}"
    )
