"""The simulator of ``benchmarks study`` beside the real engine over the real drive: a synthetic model, by share."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import cap
from benchmarks.arguments import add_source, list_of
from benchmarks.figures import at_least, known, label, spread
from benchmarks.offload import MODES
from benchmarks.study_model import StreamMisses, decode, locality_of, synthetic_shape, with_reads
from benchmarks.subject import Rooms, Subject, check_one, check_share, synthetic_store
from benchmarks.timed_steps import PROMPT, Round, Steps
from torch_pi2.base import process as machine
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.eval.token_source import tokens_of
from torch_pi2.machine.hardware import Hardware
from torch_pi2.planner.cost import Cost
from torch_pi2.planner.model_shape import ModelShape
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.shapes import SHAPES
from torch_pi2.store.storefile import STORE_FILE

#: Of ``offload``'s modes those that read by themselves and have a cache like the planner's.
SIMULATED = ("cache", "pipeline", "lookahead")
#: A prediction as near to what was measured as this is a good one.
NEAR = 0.15
#: A slow case's round ends after so many seconds.
_ROUND_S = 3.0
#: That reads; seconds of its reads with nothing beside them, and what their sizes are multiples of.
_ENGINE, _DRIVE_S, _PAGE = "io_uring", 1.0, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_source(parser, "synthetic model with a neuron store, of a shape by name", "llama-1b")
    add(
        "--ffn-in-memory",
        type=list_of(float),
        default=[0.3, 0.5, 0.7, 0.9],
        metavar="SHARES",
        help="default: 0.3,0.5,0.7,0.9",
    )
    add("--batch", type=list_of(common.positive), default=[1, 4], metavar="B,...", help="default: 1,4")
    add("--modes", type=list_of(str), default=[*SIMULATED], metavar="NAMES", help=f"default: {','.join(SIMULATED)}")
    add("--tokens", type=common.positive, default=24, metavar="N", help="steps of a round, at most")
    add("--rounds", type=common.positive, default=2, metavar="N", help="timed, after one that is not")
    add("--hardware", default="measured", metavar="NAME", help="profile of this machine (torch-pi2 doctor --measure)")
    add("--compiled", action="store_true", help="compile a step (default: Python around every layer)")
    add("--seed", type=common.seed, default=0)


def run(
    shape: str | None = None,
    folder: str | Path | None = None,
    *,
    ffn_in_memory: Sequence[float] = (0.3, 0.5, 0.7, 0.9),
    batch: Sequence[int] = (1, 4),
    modes: Sequence[str] = SIMULATED,
    tokens: int = 24,
    rounds: int = 2,
    hardware: str = "measured",
    compiled: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Decode at every share, batch size and mode, on torch's current number of threads, and predict the same.

    Returns:
        ``rows``: by case ``tokens_per_s`` measured (the median of rounds, with ``spread``), what is predicted
        (``predicted_...``), their ratio, and of both milliseconds of a step by part (``linears``, ``predictor``,
        ``ffn`` with what is waited for, ``rest``), hit rate, reads a step and milliseconds of the drive. ``near``: how
        many rows are within ``NEAR``. ``drive_over_profile``: by mode, how fast the drive was beside the profile's.

    Raises:
        ConfigError: a setting makes no sense, the model is no synthetic one of a shape by name, or there is no profile.
        Pi2Error: what making and loading a model raise.
    """
    from torch_pi2.machine.find import find_hardware

    at_least(2, tokens=tokens)
    at_least(1, rounds=rounds, modes=len(modes), batch=min(batch, default=0), shares=len(ffn_in_memory))
    known("mode", modes, SIMULATED)
    for share in ffn_in_memory:
        check_share(share)
    check_one(folder, shape)
    profile = find_hardware(hardware)
    folder = synthetic_store(shape or "llama-1b", seed) if folder is None else Path(folder)
    warmed = cap.warm(folder / PI2_FOLDER / STORE_FILE)
    rows: list[dict[str, Any]] = []
    drives: dict[str, float] = {}
    for mode in modes:
        model, rooms = _loaded(folder, mode, max(ffn_in_memory), max(batch) * (PROMPT + tokens), seed)
        subject = Subject.of(model, folder)
        name = _shape_name(subject)
        simulated = synthetic_shape(name, compiled=compiled)
        at = _beside(profile, folder / PI2_FOLDER / STORE_FILE, mode, simulated)
        drives[mode] = round(at.reads.stream_gb_per_s / profile.reads.stream_gb_per_s, 3)
        for size in batch:
            fed: list[torch.Tensor] = []
            for share, kept in _measured(
                model, rooms, mode, size, ffn_in_memory, tokens, rounds, compiled, folder, seed
            ):
                fed += [ids_BT for ids_BT, _ in kept]
                timed = [found for _, found in kept[1:]]
                counted = sum(found.steps for found in timed)
                misses = StreamMisses(simulated, locality_of(name), torch.cat(fed, 1), counted=counted)
                cost = decode(
                    simulated,
                    at,
                    misses,
                    batch=size,
                    share=share,
                    context=PROMPT + tokens // 2,
                    offload=MODES[mode].settings,
                )
                rows.append(_row(mode, size, share, timed, cost, simulated.layers[0].cluster * misses.wanted(size)))
        reads = model.torch_pi2.store.describe()
        del model
    return {
        "what": "study-validate",
        "shape": subject.shape,
        "weights": subject.weights,
        "activations": "int8",
        "synthetic": subject.synthetic,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "tokens_a_round": tokens,
        "rounds": rounds,
        "reads": reads,
        "file": f"warmed by one sequential {warmed} read",
        "drive_over_profile": drives,
        "hardware": {"name": profile.name, "source": profile.source, "hash": profile.hash},
        "near": sum(abs(row["predicted_over_measured"] - 1) <= NEAR for row in rows),
        "rows": rows,
        **machine.describe(),
    }


def _shape_name(subject: Subject) -> str:
    if not subject.synthetic or subject.shape not in SHAPES:
        raise ConfigError(
            f"--folder {subject.folder}",
            expected=f"a synthetic model of {', '.join(SHAPES)}",
            found=subject.shape,
            fix="Make one with torch-pi2 synthetic --shape NAME, and pack it.",
        )
    return subject.shape


def _loaded(folder: Path, mode: str, share: float, context: int, seed: int) -> tuple[Any, Rooms]:
    import torch_pi2

    config, rooms = MODES[mode].config(_ENGINE), Rooms(folder, context)
    budget = rooms.budget(config, share)
    return torch_pi2.load(folder, activations="int8", budget=budget, offload=config, context=context), rooms


def _measured(
    model: Any, rooms: Rooms, mode: str, batch: int, shares: Sequence[float], tokens: int, rounds: int, compiled: bool,
    folder: Path, seed: int,
) -> list[tuple[float, list[tuple[torch.Tensor, Round]]]]:  # fmt: skip
    """Rounds at each share with what they were fed, the largest first: the cache of one model is made smaller."""
    from torch_pi2.decode.budget import set_budget

    drawn = tokens_of(model, folder, "heldout", batch, seed, False)
    set_budget(model, rooms.budget(MODES[mode].config(_ENGINE), max(shares)))
    steps = Steps(model, batch, drawn.draw(PROMPT), tokens, compiled=compiled)
    found = []
    for share in sorted(shares, reverse=True):
        set_budget(model, rooms.budget(MODES[mode].config(_ENGINE), share))
        kept = []
        for _ in range(1 + rounds):
            ids_BT = drawn.draw(tokens)
            measured = steps.run(ids_BT, _ROUND_S)
            kept.append((ids_BT[:, : measured.steps], measured))
        found.append((share, kept))
    return found


def _beside(profile: Hardware, path: Path, mode: str, shape: ModelShape) -> Hardware:
    """``profile`` with the drive as fast as it is now: reads of this file by the engine, with nothing beside them."""
    config, block = MODES[mode].config(_ENGINE), -(-shape.place_bytes // _PAGE) * _PAGE
    nbytes = path.stat().st_size // block * block
    done, wall_s, _ = torch.ops.pi2.read_rates(
        str(path), config.engine, config.direct, block, config.io_threads, nbytes, False, _DRIVE_S
    ).tolist()
    known_us = profile.read_us(done, block, range_bytes=nbytes, depth=config.io_threads)
    return with_reads(profile, profile.reads, known_us / 1e6 / wall_s)


def _row(mode: str, batch: int, share: float, rounds: Sequence[Round], cost: Cost, wanted: float) -> dict[str, Any]:
    rates = [batch * r.steps / r.seconds for r in rounds]
    median, steps, stats = statistics.median(rates), sum(r.steps for r in rounds), [r.stats or {} for r in rounds]
    total = {key: sum(s[key] for s in stats) for key in ("wanted", "hits", "reads", "bytes_read", "wait_ns", "io_ns")}
    ms, seconds = cost.ms, sum(r.seconds for r in rounds)
    return {
        "mode": mode,
        "batch": batch,
        "ffn_in_memory": share,
        "tokens_per_s": round(median, 3),
        "spread": spread(rates),
        "predicted_tokens_per_s": round(cost.tokens_per_s, 3),
        "predicted_over_measured": round(cost.tokens_per_s / median, 3),
        "ms": {part: round(statistics.median(r.ms[part] for r in rounds), 3) for part in rounds[0].ms},
        "predicted_ms": {
            "linears": round(ms["attention"] + ms["head"], 3),
            "predictor": round(ms["predictor"], 3),
            "ffn": round(ms["hot"] + ms["cold"] + ms["io"] + ms["merge"], 3),
            "rest": round(ms["sdpa"] + ms["glue"], 3),
        },
        "hit_rate": round(total["hits"] / total["wanted"], 4),
        "predicted_hit_rate": round(1 - cost.misses / wanted, 4),
        "reads": round(total["reads"] / steps, 1),
        "predicted_reads": round(sum(layer["reads"] for layer in cost.layers), 1),
        "bytes_read": round(total["bytes_read"] / steps),
        "waiting": round(total["wait_ns"] / 1e9 / torch.get_num_threads() / seconds, 4),
        "drive_ms": round(total["io_ns"] / 1e6 / steps, 2),
        "predicted_drive_ms": round(sum(layer["read_ms"] for layer in cost.layers), 2),
        "predicted_io_ms": round(ms["io"], 2),
    }


HEADER = (
    "mode", "sequences", "in memory", "tokens/s", "range", "predicted", "predicted / measured", "hits", "predicted",
    "reads a step", "predicted", "drive ms", "predicted", "linears, predictor, FFN, rest ms", "predicted",
)  # fmt: skip


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A case each; * is farther from what was measured than ``NEAR``."""
    return [
        (
            r["mode"], str(r["batch"]), common.percent(r["ffn_in_memory"], 0), f"{r['tokens_per_s']:.2f}",
            "{:.2f} to {:.2f}".format(*r["spread"]), f"{r['predicted_tokens_per_s']:.2f}",
            f"{r['predicted_over_measured']:.2f}" + ("" if abs(r["predicted_over_measured"] - 1) <= NEAR else " *"),
            common.percent(r["hit_rate"]), common.percent(r["predicted_hit_rate"]), f"{r['reads']:.0f}",
            f"{r['predicted_reads']:.0f}", f"{r['drive_ms']:.1f}", f"{r['predicted_drive_ms']:.1f}",
            *(", ".join(f"{r[ms][part]:.1f}" for part in r["predicted_ms"]) for ms in ("ms", "predicted_ms")),
        )
        for r in result["rows"]
    ]  # fmt: skip


def render(result: dict[str, Any]) -> str:
    steps = "compiled steps" if result["compiled"] else "eager steps"
    about = f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads"
    near = f"{result['near']} of {len(result['rows'])} within {common.percent(NEAR, 0)} (the others: *)"
    where = f"reads: {result['reads']}; hardware {result['hardware']['name']}; file {result['file']}"
    return "\n".join((f"{about}, {steps}", common.table(HEADER, rows_of(result)), near, where, label(result)))
