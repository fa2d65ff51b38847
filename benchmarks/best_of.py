"""Best-of-N: several continuations of one prompt of which one ends every few steps, under plans that follow or do not.

PowerInfer-2 (arXiv 2406.06282, figure 13) decodes four and lets one end every four iterations. Here a plan that follows
the batch is compared with plans for one sequence and for all of them, and with the model's own hot neurons whatever the
batch: ``unplanned``, the paper's CPU-only. All run one model, or over a store one each, on the same tokens, in
alternation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.arguments import add_planning, add_source
from benchmarks.figures import alternate, at_least, label, medians, over, shown, spread
from benchmarks.plan_model import Source, every_cold, find_folder
from benchmarks.subject import Subject, check_share
from benchmarks.timed_steps import PROMPT
from torch_pi2.base import process as machine
from torch_pi2.cli import common
from torch_pi2.decode.adapt import engine_of, follow
from torch_pi2.decode.decode import Decoder
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops import load as load_library
from torch_pi2.rewrite.handle import store_of
from torch_pi2.types.machine_plan import Bucket, HardwarePlan
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import Plan

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

FOLLOWS, UNPLANNED = "follows", "unplanned"
#: Rounds that are not timed: caches fill, and what is compiled is compiled.
_WARM_UP, _WARM_UP_STORE = 1, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_source(parser, "optimised model (with --ffn-in-memory: is packed)", "llama-1b")
    add("--sequences", type=common.positive, default=4, metavar="N", help="at the start")
    add("--every", type=common.positive, default=4, metavar="STEPS", help="after so many one sequence ends")
    add("--rounds", type=common.positive, default=5, metavar="N", help="of each plan, in alternation")
    add("--ffn-in-memory", type=float, default=1.0, metavar="SHARE", help="of the neurons' bytes; 1: no store")
    add_planning(parser)
    add("--compiled", action="store_true", help="compile a step for each plan and number of sequences")


def run(
    shape: str | None = None,
    folder: str | Path | None = None,
    *,
    sequences: int = 4,
    every: int = 4,
    rounds: int = 5,
    ffn_in_memory: float = 1.0,
    hardware: str | Hardware = "measured",
    activations: str | None = None,
    compiled: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Plan a model for this machine and :func:`measure` it on torch's current number of threads.

    Args: the options of the same names.

    Returns:
        What :func:`measure` does, what it is of, machine and versions.

    Raises:
        ConfigError: a setting makes no sense, or there is no hardware profile. Pi2Error: what making, loading and
            planning raise.
    """
    from torch_pi2.machine.find import find_hardware
    from torch_pi2.planner.misses import ReplayMisses
    from torch_pi2.planner.model_shape import ModelShape
    from torch_pi2.planner.solve import solve

    load_library()
    _check(sequences, every, rounds, ffn_in_memory)
    profile = find_hardware(hardware) if isinstance(hardware, str) else hardware
    found = find_folder(folder, shape, None, trust_remote_code=trust_remote_code, seed=seed)
    source = Source(found, activations=activations, trust_remote_code=trust_remote_code, seed=seed)
    batches, context = tuple(range(1, sequences + 1)), PROMPT + sequences * every
    stored = ffn_in_memory < 1
    # for keys and values of one sequence: with more of them the plan makes the cache smaller
    room = source.budget(ffn_in_memory, context, OffloadConfig()).total if stored else None
    model = source.whole() if room is None else source.over_store(room, context, OffloadConfig())
    stats, about = source.statistics(model, batches)
    planned = ModelShape.of(model, stats, every_cold(source.own, stats), compiled=compiled)
    misses = ReplayMisses(source.accesses(model, sequences), planned) if stored else None
    solved = solve(planned, profile, budget_bytes=room, batches=batches, context=context, misses=misses)
    plans = compared(solved, source.own, sequences)
    if room is None:
        models = dict.fromkeys(plans, model)
    else:
        config = OffloadConfig(**solved.offload)
        models = {name: source.over_store(room, context, config) for name in plans}
    tokens = source.tokens(model, "heldout", sequences, seed + 10)
    drawn = [tokens.draw(PROMPT + sequences * every) for _ in range(rounds + _WARM_UP_STORE)]
    subject = Subject.of(model, source.folder)
    del model
    measured = measure(models, plans, drawn, sequences=sequences, every=every, rounds=rounds, compiled=compiled)
    return {
        "what": "best-of",
        "shape": subject.shape,
        "weights": source.weights,
        "activations": source.activations,
        "synthetic": subject.synthetic,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "ffn_in_memory": ffn_in_memory,
        "budget_bytes": room,
        "tokens": tokens.about,
        "statistics": about,
        "seed": seed,
        "hardware": {"name": profile.name, "source": profile.source, "hash": profile.hash},
        **measured,
        **machine.describe(),
    }


def _check(sequences: int, every: int, rounds: int, ffn_in_memory: float) -> None:
    at_least(2, sequences=sequences)
    at_least(1, every=every, rounds=rounds)
    check_share(ffn_in_memory)


def compared(plan: HardwarePlan, own: Plan, sequences: int) -> dict[str, HardwarePlan]:
    """``plan``, its parts for one sequence and for all of them for every batch, and the hot neurons of ``own``."""
    fixed = {f"for {batch}": replace(plan, buckets=(plan.bucket(batch),)) for batch in (1, sequences)}
    nothing = (0,) * len(own.layers)
    greedy = Bucket(1, tuple(layer.n_hot for layer in own.layers), nothing, nothing)
    # without a budget of its own: a store keeps what it keeps without a plan
    unplanned = replace(plan, buckets=(greedy,), budget_bytes=None)
    return {FOLLOWS: plan, **fixed, UNPLANNED: unplanned}


@dataclass
class _Round:
    """Seconds of the steps at each number of sequences, and of the switches to them; whole: with both."""

    steps_s: dict[int, list[float]] = field(default_factory=dict)
    switch_s: dict[int, float] = field(default_factory=dict)
    whole_s: float = 0.0


def measure(
    models: Mapping[str, nn.Module],
    plans: Mapping[str, HardwarePlan],
    drawn: Sequence[torch.Tensor],
    *,
    sequences: int,
    every: int,
    rounds: int,
    compiled: bool = False,
) -> dict[str, Any]:
    """Time every plan.

    Args:
        models: by name of a plan the model that follows it, which may be the same for several.
        drawn: int64 ``[sequences, prompt + sequences * every]`` for each round and those of warm-up: the prompt is the
            first row's, then each sequence is fed with its own row.

    Returns:
        ``batches``: for each number of sequences ``tokens_per_s`` by plan (medians over rounds), ``spread``, ``over``
        (medians of ratios within a round, ``follows`` over the others), ``predicted_tokens_per_s`` and the share of
        neurons that are ``hot``. ``whole``: the same of all steps together, with what lies between them.
        ``switch``: milliseconds that a change of plan takes (keys and values included) and its share of a step.
    """
    names = list(plans)
    timed = {name: _Timed(models[name], plans[name], sequences, every, drawn[0].shape[1], compiled) for name in names}
    over_store = any(store_of(model) is not None for model in models.values())
    warm_up = _WARM_UP_STORE if over_store else _WARM_UP
    found = alternate(names, warm_up + rounds, lambda name, index: timed[name].round(drawn[index]))
    kept = {name: rounds_of[warm_up:] for name, rounds_of in found.items()}
    batches = [_at(batch, kept, plans, models) for batch in range(sequences, 0, -1)]
    total = sum(range(1, sequences + 1)) * every
    whole = {name: [total / r.whole_s for r in kept[name]] for name in names}
    return {
        "sequences": sequences,
        "every": every,
        "rounds": rounds,
        "batches": batches,
        "whole": _rates(whole),
        "switch": _switch(kept[FOLLOWS]),
    }


class _Timed:
    """Rounds of one plan."""

    def __init__(
        self, model: nn.Module, plan: HardwarePlan, sequences: int, every: int, tokens: int, compiled: bool
    ) -> None:
        self._model, self._plan, self._sequences, self._every = model, plan, sequences, every
        self._decoder = Decoder(model, max_tokens=tokens, batch=sequences, compiled=compiled)

    def round(self, ids_BT: torch.Tensor) -> _Round:
        """One sequence after another ends."""
        engine = engine_of(self._model)
        if engine is None or engine.plan is not self._plan:
            engine = follow(self._model, self._plan)
        decoder, found = self._decoder, _Round()
        prompt = ids_BT.shape[1] - self._sequences * self._every
        decoder.prompt(ids_BT[:1, :prompt])
        decoder.fork(self._sequences)
        at = prompt
        begun = time.perf_counter()
        for batch in range(self._sequences, 0, -1):
            started = time.perf_counter()
            if batch < self._sequences:
                decoder.keep(range(batch))
                engine.batch(batch)
            found.switch_s[batch] = time.perf_counter() - started
            steps = []
            for _ in range(self._every):
                started = time.perf_counter()
                decoder.step(ids_BT[:batch, at : at + 1])
                steps.append(time.perf_counter() - started)
                at += 1
            found.steps_s[batch] = steps
        found.whole_s = time.perf_counter() - begun
        return found


def _at(
    batch: int,
    kept: Mapping[str, Sequence[_Round]],
    plans: Mapping[str, HardwarePlan],
    models: Mapping[str, nn.Module],
) -> dict[str, Any]:
    neurons = sum(layer.site.intermediate for layer in sparse_layers(models[FOLLOWS]))
    rates = {name: [batch * len(r.steps_s[batch]) / sum(r.steps_s[batch]) for r in kept[name]] for name in kept}
    planned = plans[FOLLOWS].bucket(batch)
    return {
        "batch": batch,
        **_rates(rates),
        "predicted_tokens_per_s": round(batch * 1e3 / planned.total_ms, 3) if planned.total_ms else None,
        "hot": {name: round(sum(plan.bucket(batch).hot) / neurons, 4) for name, plan in plans.items()},
    }


def _rates(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {
        "tokens_per_s": medians(rates),
        "spread": {name: spread(values) for name, values in rates.items()},
        "over": medians(over(rates, FOLLOWS), 4),
    }


def _switch(rounds: Sequence[_Round]) -> dict[str, Any]:
    """Of all changes of the number of sequences; what a step took is that of the sequences that are left."""
    most = max(rounds[0].steps_s)
    switches = [(r.switch_s[b], statistics.median(r.steps_s[b])) for r in rounds for b in r.steps_s if b < most]
    return {
        "ms": round(statistics.median(s for s, _ in switches) * 1e3, 4),
        "most_ms": round(max(s for s, _ in switches) * 1e3, 4),
        "of_a_step": round(statistics.median(s / step for s, step in switches), 5),
        "most_of_a_step": round(max(s / step for s, step in switches), 5),
    }


def render(result: dict[str, Any]) -> str:
    names = list(result["whole"]["tokens_per_s"])
    rows = [
        (
            r.get("batch", "all"),
            *(f"{r['tokens_per_s'][name]:.2f}" for name in names),
            shown(r.get("predicted_tokens_per_s"), "{:.2f}".format),
            *(f"{r['over'][name]:.3f}" for name in names[1:]),
            *(common.percent(r["hot"][name]) if "hot" in r else "" for name in names),
        )
        for r in [*result["batches"], result["whole"]]
    ]
    ratios, hot = (f"/ {name}" for name in names[1:]), (f"hot, {name}" for name in names)
    switch = result["switch"]
    share = result["ffn_in_memory"]
    lines = [
        f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads, "
        f"{'compiled steps' if result['compiled'] else 'eager steps, Python in all'}, "
        f"{'all' if share == 1 else common.percent(share)} of the neurons in memory, "
        f"for hardware {result['hardware']['name']} ({result['hardware']['source']})",
        common.table(("sequences", *names, "predicted", *ratios, *hot), rows),
        f"tokens/s, medians of {result['rounds']} rounds; one of {result['sequences']} sequences ends every "
        f"{result['every']} steps; / is how many times as fast the plan that follows is",
        f"a change of plan takes {switch['ms']:.3f} ms (at most {switch['most_ms']:.3f}), "
        f"{common.percent(switch['of_a_step'], 2)} of a step (at most {common.percent(switch['most_of_a_step'], 2)})",
        f"tokens: {result['tokens']}; the plan is made of others ({result['statistics']})",
    ]
    return "\n".join([*lines, label(result)])
