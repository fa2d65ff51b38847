"""A bundle that is larger than memory, in the C++ runner, by budget.

Rounds alternate between budgets; each is a process of its own, with a random prompt and an answer drawn at a
temperature at which nearly every token is as likely as any other: other neurons are wanted for each.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import list_of
from benchmarks.figures import alternate, at_least, label, spread
from benchmarks.subject import FIRING, RUNNER, WORK
from torch_pi2.base.units import parse_bytes
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.export.manifest import Manifest
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.of_model import homes
from torch_pi2.machine import process as machine
from torch_pi2.rewrite.handle import parts_of
from torch_pi2.store.shapes import build_config
from torch_pi2.types.site import FFNSite, LinearRef


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="mixtral-8x7b-quarter", help="synthetic, made in work/bench if it is not there")
    add(
        "--distinct-layers", type=common.positive, default=3, metavar="N", help="the others have the same weights again"
    )
    add("--budgets", type=list_of(str), default=["1.75GB", "4.75GB"], metavar="SIZE,...", help="of the whole process")
    add("--kv", default="float16", metavar="FORMAT", help="of keys and values")
    add("--prompt", type=common.positive, default=64, metavar="T", help="tokens of prompts")
    add("--tokens", type=common.positive, default=32, metavar="N", help="tokens of answers")
    add("--rounds", type=common.positive, default=3, metavar="N")
    add("--seed", type=common.seed, default=0)


def run(
    shape: str = "mixtral-8x7b-quarter",
    *,
    distinct_layers: int = 3,
    budgets: Sequence[str] = ("1.75GB", "4.75GB"),
    kv: str = "float16",
    prompt: int = 64,
    tokens: int = 32,
    rounds: int = 3,
    seed: int = 0,
    runner: Path = RUNNER,
) -> dict[str, Any]:
    """Tokens per second by budget; the bundle is kept in ``work/bench`` for the next time.

    Returns:
        ``budgets``: for each ``prompt`` and ``decode`` (tokens/s) with their spreads, and of decoding ``in_cache``
        (share of the neurons wanted), ``mb_per_token`` read, ``waited`` (share of the threads' time in layers);
        ``peak_bytes`` of the process. ``export``: ``seconds`` and ``peak_bytes``, None where the bundle was there.

    Raises:
        ConfigError: a setting makes no sense, or the runner was not built.
    """
    at_least(1, distinct_layers=distinct_layers, prompt=prompt, tokens=tokens, rounds=rounds)
    if not runner.is_file():
        raise ConfigError("benchmarks bundle-offload", expected=str(runner), found="no runner", fix="make runner.")
    bundle, exported = WORK / f"bundle-{shape}-{distinct_layers}-{kv}", None
    if not bundle.is_dir():
        exported = _export(bundle, shape, distinct_layers, kv, prompt + tokens, seed)
    manifest = Manifest.load(bundle)
    drawn, threads, found = torch.Generator().manual_seed(seed), torch.get_num_threads(), {}
    assert manifest.model.vocab is not None
    prompts = torch.randint(3, manifest.model.vocab, (rounds + 1, prompt), generator=drawn).tolist()

    def measured(budget: str, number: int) -> dict[str, Any]:
        command = [runner, bundle, "--ids", ",".join(map(str, prompts[number])), "--budget", parse_bytes(budget)]
        command += ["--max-new-tokens", tokens, "--temperature", 100, "--seed", number, "--threads", threads, "--json"]
        done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, check=True)
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    for budget in budgets:
        measured(budget, rounds)  # for what reads of a file are slower the first time
    reports = alternate(tuple(budgets), rounds, measured)
    for budget in budgets:
        runs, decode = reports[budget], [report["stages"]["decode"] for report in reports[budget]]
        speeds = {
            "prompt": [report["prompt_tokens_per_second"] for report in runs],
            "decode": [report["tokens_per_second"] for report in runs],
        }
        steps = sum(report["decode_steps"] for report in runs)
        found[budget] = {
            **{name: round(statistics.median(all_of), 2) for name, all_of in speeds.items()},
            "spread": {name: spread(all_of, 2) for name, all_of in speeds.items()},
            "in_cache": round(sum(d["hits"] for d in decode) / sum(d["wanted"] for d in decode), 3),
            "mb_per_token": round(sum(d["bytes_read"] for d in decode) / steps / 1e6, 1),
            "waited": round(sum(d["wait_ns"] for d in decode) / max(1, sum(d["busy_ns"] for d in decode)), 3),
            "peak_bytes": max(report["memory"]["peak_bytes"] for report in runs),
        }
    return {
        "what": "bundle-offload",
        "shape": shape,
        "synthetic": json.loads((bundle / "config.json").read_text())["torch_pi2_synthetic"],
        "distinct_layers": distinct_layers,
        "kv": kv,
        "prompt": prompt,
        "tokens": tokens,
        "rounds": rounds,
        "threads": threads,
        "seed": seed,
        "store_bytes": manifest.store_bytes,
        "fixed_bytes": manifest.fixed_bytes,
        "budgets": found,
        "export": exported,
        **machine.describe(),
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
    blocks, parts = model.model.layers, parts_of(model)
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


def render(result: dict[str, Any]) -> str:
    rows = []
    for budget, found in result["budgets"].items():
        speeds = [
            f"{found[name]:.2f} ({found['spread'][name][0]:.2f} to {found['spread'][name][1]:.2f})"
            for name in ("prompt", "decode")
        ]
        shares = f"{found['in_cache']:.1%}", f"{found['mb_per_token']:.0f}", f"{found['waited']:.0%}"
        rows.append((budget, *speeds, *shares, f"{found['peak_bytes'] / 1e9:.2f}"))
    heads = ("budget", "prompt tokens/s", "decoded tokens/s", "in the cache", "MB read a token", "waited", "peak GB")
    exported = result["export"]
    took = f"; exported in {exported['seconds']:.0f} s, {exported['peak_bytes'] / 1e9:.1f} GB" if exported else ""
    return "\n".join(
        (
            f"{result['shape']} (weights of {result['distinct_layers']} layers, again and again), int4, store "
            f"{result['store_bytes'] / 1e9:.1f} GB, {result['threads']} threads, prompts of {result['prompt']} tokens"
            f"{took}",
            common.table(heads, rows),
            label(result),
        )
    )
