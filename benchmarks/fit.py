"""Predictors fitted to a checkpoint of a real model's sizes with random weights, which stay in their files: memory.

What a fit takes in memory depends on the sizes of one layer, not on their number. Predictors of random weights are no
use, so few tokens and steps will do: with more, each layer takes longer and has larger files of samples.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import Result, Table, at
from torch_pi2.base.tensorfile import Spec, TensorWriter
from torch_pi2.checkpoint.mapped import load_mapped
from torch_pi2.cli import common
from torch_pi2.fitting.fit import fit
from torch_pi2.fitting.search import FitSettings
from torch_pi2.graph.find import search
from torch_pi2.machine import process as machine
from torch_pi2.profiling.data import MIN_SEQUENCES
from torch_pi2.profiling.run import profile
from torch_pi2.rewrite.skeleton import on_meta, skeleton
from torch_pi2.store.shapes import SHAPES, build_config

#: Tokens of a sequence, and sequences of a batch.
_LENGTH, _BATCH = 64, 4
#: Rows of a matrix that are random; the others repeat them.
_RANDOM_BYTES = 1 << 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="mistral-7b")
    add("--layers", type=common.positive, metavar="N", help="default: the shape's")
    add("--tokens", type=common.positive, default=_LENGTH * MIN_SEQUENCES, metavar="N", help="of calibration")
    add("--steps", type=common.positive, default=8, metavar="N", help="of the optimiser (a real fit: 500)")
    add("--folder", type=Path, metavar="DIR", help="for the checkpoint and samples (default: temporary)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Profile a random ReLU model and fit a predictor to every layer of it.

    Returns:
        ``checkpoint_bytes``; in ``phases`` the ``seconds`` and ``peak_rss_bytes`` of each; in ``rss_by_layer`` the
        memory of the process, not its peak, after the predictor of each layer; ``ranks``; ``work_bytes`` on disk.

    Raises:
        Pi2Error: what fitting raises, of too few tokens too.
    """
    tokens, steps, folder = args.tokens, args.steps, args.folder
    phases: dict[str, dict[str, float]] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        machine.reset_peak()
        start = time.perf_counter()
        yield
        phases[name] = {"seconds": time.perf_counter() - start, "peak_rss_bytes": machine.peak_rss_bytes()}

    with tempfile.TemporaryDirectory(dir=folder) as made:
        root, by_layer = Path(made), list[int]()
        more = {} if args.layers is None else {"num_hidden_layers": args.layers}
        _write(root, build_config(args.shape, hidden_act="relu", **more))
        with phase("load"):
            model: Any = load_mapped(root, scratch=root)
            sites = search(on_meta(model), on_meta=True).sites
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (tokens // _LENGTH, _LENGTH), generator=generator)
        shaped: dict[str, Any] = {"batch_size": _BATCH, "seq_len": _LENGTH}
        with phase("profile"):
            stats = profile(model, ids, sites, progress=False, **shaped)
        # random gates let half of all neurons fire: none are hot, or there would be few to predict
        settings = FitSettings(hot_frequency=1.01, steps=steps, max_rounds=1, n_tokens=20_000, **shaped)
        with phase("fit"), _each_layer(lambda: by_layer.append(_rss_bytes())):
            found = fit(model, ids, sites, stats, settings, work=root / "work", progress=False)
        return {
            "layers": len(sites),
            "checkpoint_bytes": (root / "model.safetensors").stat().st_size,
            "work_bytes": sum(path.stat().st_size for path in (root / "work").rglob("*") if path.is_file()),
            "phases": phases,
            "rss_by_layer": by_layer,
            "ranks": [predictor.rank for predictor in found.values()],
        }


@contextmanager
def _each_layer(look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` when the search goes on to another layer."""
    from torch_pi2.fitting import search as searching

    choose = searching.Search.choose_rank

    def watched(self: Any, layer: Any) -> None:
        choose(self, layer)
        look()

    searching.Search.choose_rank = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        searching.Search.choose_rank = choose  # type: ignore[method-assign]


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _write(folder: Path, config: Any) -> None:
    """A checkpoint of ``config`` with random weights in bfloat16."""
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1))
    with torch.device("meta"):
        specs = {name: Spec(tuple(p.shape), torch.bfloat16) for name, p in skeleton(folder).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    with TensorWriter(folder / "model.safetensors", specs, {"format": "pt"}) as out:
        for name, spec in specs.items():
            if len(spec.shape) < 2:
                out.write(name, torch.ones(spec.shape, dtype=spec.dtype))
                continue
            rows = max(1, min(spec.shape[0], _RANDOM_BYTES * spec.shape[0] // spec.nbytes))
            some = (torch.randn(rows, *spec.shape[1:], generator=generator) / spec.shape[-1] ** 0.5).to(spec.dtype)
            for row in range(0, spec.shape[0], rows):
                out.write(name, some[: spec.shape[0] - row], row=row)


def _rows(result: Result) -> list[dict[str, Any]]:
    row = {"first": result["rss_by_layer"][0], "last": result["rss_by_layer"][-1], **result}
    return [row]


TABLES = (
    Table(
        "Memory of a fit",
        _rows,
        {
            "layers": at("layers"),
            "weights in files": at("checkpoint_bytes", common.size),
            "peak of profile": at("phases.profile.peak_rss_bytes", common.size),
            "of fit": at("phases.fit.peak_rss_bytes", common.size),
            "after the first layer": at("first", common.size),
            "after the last": at("last", common.size),
            "samples and predictors on disk": at("work_bytes", common.size),
        },
        "Predictors fitted to random weights that stay in their files: the most memory of the process in each phase, "
        "and its memory after the first layer and after the last. The number of layers should not matter.",
    ),
)


def about(result: Result) -> str:
    return (
        f"{result['shape']}, random weights, {result['tokens']} tokens, {result['steps']} steps, ranks "
        f"{min(result['ranks'])} to {max(result['ranks'])}"
    )
