"""A bundle that is larger than memory, in the C++ runner, by budget.

Rounds alternate between budgets; each is a process of its own, with a random prompt and an answer drawn at a
temperature at which nearly every token is as likely as any other: other neurons are wanted for each.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import add_lengths, list_of
from benchmarks.figures import alternate, summary
from benchmarks.subject import FIRING, RUNNER, WORK, check_runner
from benchmarks.tables import Result, Table, at, named, ranged
from torch_pi2.base.units import parse_bytes
from torch_pi2.cli import common
from torch_pi2.export.manifest import Manifest
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.of_model import homes
from torch_pi2.machine import process as machine
from torch_pi2.rewrite.state import get_state
from torch_pi2.store.synthetic import build_config
from torch_pi2.types.site import FFNSite, LinearRef


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="mixtral-8x7b-quarter", help="synthetic, made in work/bench if it is not there")
    add(
        "--distinct-layers", type=common.positive, default=3, metavar="N", help="the others have the same weights again"
    )
    add("--budgets", type=list_of(str), default=["1.75GB", "4.75GB"], metavar="SIZE,...", help="of the whole process")
    add("--kv", default="float16", metavar="FORMAT", help="of keys and values")
    add_lengths(parser, 64, 32, 3)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second by budget; the bundle is kept in ``work/bench`` for the next time.

    Returns:
        ``budgets``: for each ``prompt`` and ``decode`` (tokens/s) with their spreads, and of decoding ``in_cache``
        (share of the neurons wanted), ``mb_per_token`` read, ``waited`` (share of the threads' time in layers);
        ``peak_bytes`` of the process. ``export``: ``seconds`` and ``peak_bytes``, None where the bundle was there.

    Raises:
        ConfigError: a setting makes no sense, or the runner was not built.
    """
    shape, distinct_layers, prompt, tokens, rounds = (
        getattr(args, name) for name in ("shape", "distinct_layers", "prompt", "tokens", "rounds")
    )
    check_runner()
    bundle, exported = WORK / f"bundle-{shape}-{distinct_layers}-{args.kv}", None
    if not bundle.is_dir():
        exported = _export(bundle, shape, distinct_layers, args.kv, prompt + tokens, args.seed)
    manifest = Manifest.load(bundle)
    drawn, threads, found = torch.Generator().manual_seed(args.seed), torch.get_num_threads(), {}
    assert manifest.model.vocab is not None
    prompts = torch.randint(3, manifest.model.vocab, (rounds + 1, prompt), generator=drawn).tolist()

    def measured(budget: str, number: int) -> dict[str, Any]:
        command = [RUNNER, bundle, "--ids", ",".join(map(str, prompts[number])), "--budget", parse_bytes(budget)]
        command += ["--max-new-tokens", tokens, "--temperature", 100, "--seed", number, "--threads", threads, "--json"]
        done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, check=True)
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    for budget in args.budgets:
        measured(budget, rounds)  # for what reads of a file are slower the first time
    reports = alternate(args.budgets, rounds, measured)
    for budget in args.budgets:
        runs, decode = reports[budget], [report["stages"]["decode"] for report in reports[budget]]
        speeds = {
            "prompt": [report["prompt_tokens_per_second"] for report in runs],
            "decode": [report["tokens_per_second"] for report in runs],
        }
        steps = sum(report["decode_steps"] for report in runs)
        found[budget] = {
            **summary(speeds),
            "in_cache": round(sum(d["hits"] for d in decode) / sum(d["wanted"] for d in decode), 3),
            "mb_per_token": round(sum(d["bytes_read"] for d in decode) / steps / 1e6, 1),
            "waited": round(sum(d["wait_ns"] for d in decode) / max(1, sum(d["busy_ns"] for d in decode)), 3),
            "peak_bytes": max(report["memory"]["peak_bytes"] for report in runs),
        }
    return {
        "synthetic": json.loads((bundle / "config.json").read_text())["torch_pi2_synthetic"],
        "store_bytes": manifest.store_bytes,
        "fixed_bytes": manifest.fixed_bytes,
        "budgets": found,
        "export": exported,
    }


def _export(bundle: Path, shape: str, distinct_layers: int, kv: str, max_tokens: int, seed: int) -> dict[str, Any]:
    """Seconds, and bytes of this process at most."""
    import torch_pi2

    layers = build_config(shape).num_hidden_layers
    few = WORK / f"{shape}-{distinct_layers}"
    if not (few / "pi2").is_dir():
        firing = {"active": 0.1} | FIRING.get(shape, {})
        torch_pi2.synthetic(few, shape, layers=min(layers, distinct_layers), weights="int4", seed=seed, **firing)
    model: Any = torch_pi2.load(few, activations="int8")
    repeat_layers(model, layers)
    started = time.perf_counter()
    torch_pi2.export(model, bundle, max_tokens=max_tokens, max_prompt=64, batches=(1,), kv=kv)
    return {"seconds": round(time.perf_counter() - started, 1), "peak_bytes": machine.peak_rss_bytes()}


def repeat_layers(model: Any, count: int) -> None:
    """Give an optimised decoder ``count`` layers, those that it has again and again, over the same tensors."""
    blocks, parts = model.model.layers, get_state(model)
    few = len(blocks)
    plans = {block: [p for p in parts.plan.layers if _in(p.site, block)] for block in range(few)}
    shared = {id(thing): thing for thing in (*model.parameters(), *model.buffers(), model.config)}
    for number in range(few, count):
        own = plans[number % few]
        again = copy.deepcopy(blocks[number % few], dict(shared))
        first = len(parts.plan.layers)
        sites = {p.site.key: _moved(p.site, number % few, number, first + i) for i, p in enumerate(own)}
        parts.plan.layers += [replace(p, site=sites[p.site.key]) for p in own]
        for home in homes(nn.ModuleList([again])):
            if isinstance(home, SparseExperts):
                home.sites = tuple(sites[site.key] for site in home.sites)
                module = home.sites[0].experts or ""
                home.site = replace(home.sites[0], key=module, owner=module)
            else:
                home.site = sites[home.site.key]
        again.self_attn.layer_idx = number
        blocks.append(again)
    model.config.num_hidden_layers = count


def _in(site: FFNSite, block: int) -> bool:
    return site.key.startswith(f"model.layers.{block}.")


def _moved(site: FFNSite, block: int, to: int, layer: int) -> FFNSite:
    """The same site in another block."""

    def named(name: Any) -> Any:
        return name.replace(f"model.layers.{block}.", f"model.layers.{to}.", 1) if isinstance(name, str) else name

    def moved(value: Any) -> Any:
        if isinstance(value, LinearRef):
            return replace(value, weight=named(value.weight), bias=named(value.bias))
        return tuple(map(named, value)) if isinstance(value, tuple) else named(value)

    return replace(site, **({name: moved(value) for name, value in vars(site).items()} | {"layer": layer}))


TABLES = (
    Table(
        "Bundles larger than memory in the C++ runner",
        lambda result: named(result["budgets"]),
        {
            "budget": at("name"),
            "prompt tokens/s": ranged("prompt", ".2f"),
            "decoded tokens/s": ranged("decode", ".2f"),
            "in the cache": at("in_cache", common.percent),
            "MB read a token": at("mb_per_token", ".0f"),
            "waited": at("waited", common.percent),
            "peak": at("peak_bytes", common.size),
        },
    ),
)


def about(result: Result) -> str:
    exported = result["export"]
    return (
        f"{result['shape']} (weights of {result['distinct_layers']} layers, repeated), int4, store "
        f"{common.size(result['store_bytes'])}, {result['threads']} threads, prompts of {result['prompt']} tokens"
        + (f"; exported in {exported['seconds']:.0f} s, {common.size(exported['peak_bytes'])}" if exported else "")
    )
