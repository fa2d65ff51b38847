"""The solved plan against plans that need no solving, by batch size, in memory and over a store.

``planned`` is what the solver makes of a hardware profile and of how often neurons fire; ``greedy`` has hot what fires
often (``Config``), ``all-hot`` everything, ``all-cold`` nothing, ``random`` as many as greedy,
but any. All of them run one model, on the same tokens, in alternation. What plans are made of (statistics, recorded
accesses) comes from other tokens.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import cap
from benchmarks.arguments import add_planning, add_source, list_of
from benchmarks.figures import alternate, at_least, known, label, medians, over, shown, spread
from benchmarks.plan_model import Shuffled, Source, every_cold, find_folder
from benchmarks.subject import Subject, check_share
from benchmarks.timed_steps import PROMPT, Round, Steps
from torch_pi2.base import process as machine
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.eval.token_source import Tokens
from torch_pi2.ops import load as load_library
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.storefile import STORE_FILE
from torch_pi2.types.machine_plan import Bucket, HardwarePlan
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.stats import ActivationStats

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

PLANNED = "planned"
PLANNERS = (PLANNED, "greedy", "all-hot", "all-cold", "random")
#: Where neurons are: all in memory, or a share of their bytes.
MEMORY = ("whole", "half")
#: Steps after another plan has been put in place, not timed.
_WARM_UP = 2
#: Over a store: rounds that are not timed until two in a row find nearly the same share of neurons in the cache.
_SETTLE, _SETTLED = 6, 0.01
#: A slow plan's round ends after so many seconds.
_ROUND_S = 6.0
_WATCHED = (1, 2, 4, 8, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_source(parser, "optimised model, or a checkpoint to be optimised", "llama-1b")
    add("--method", choices=["exact", "lowrank"], help="of a checkpoint that is optimised, once (default: lowrank)")
    add("--batch", type=list_of(common.positive), default=[1, 4, 16], metavar="B,...", help="default: 1,4,16")
    add("--memory", type=list_of(str), default=[*MEMORY], metavar="NAMES", help="default: whole,half")
    add("--ffn-in-memory", type=float, default=0.5, metavar="SHARE", help="of the neurons' bytes, for --memory half")
    add(
        "--planners",
        type=list_of(str),
        default=[*PLANNERS],
        metavar="NAMES",
        help=f"comma-separated (default: {','.join(PLANNERS)})",
    )
    add("--tokens", type=common.positive, default=12, metavar="N", help="steps of a round, at most")
    add("--rounds", type=common.positive, default=5, metavar="N", help="of each planner in each case, in alternation")
    add_planning(parser)
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--eager", action="store_true", help="Python around every layer, as much for all (default)")
    steps.add_argument("--compiled", action="store_true", help="compile a step for each planner and batch size")


def run(
    shape: str | None = None,
    folder: str | Path | None = None,
    *,
    method: str | None = None,
    batch: Sequence[int] = (1, 4, 16),
    memory: Sequence[str] = MEMORY,
    ffn_in_memory: float = 0.5,
    planners: Sequence[str] = PLANNERS,
    tokens: int = 12,
    rounds: int = 5,
    activations: str | None = None,
    hardware: str | Hardware = "measured",
    compiled: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Time every planner in every case, on torch's current number of threads.

    Args: the options of the same names; ``planned`` is among ``planners``.

    Returns:
        ``rows``: by case ``memory``, ``batch``, ``tokens_per_s`` by planner, ``best`` (of the others),
        ``planned_over_best`` and ``planned_over`` each (medians of the ratios within a round; with ``spread``), and
        ``planners``: by name also ``predicted_tokens_per_s`` and its ratio to what was measured, milliseconds of a step
        by part, measured and predicted, the share of neurons that are hot, the hit rate and reads a step over a store,
        and ``same_as`` a planner before it that made the same plan, which then was timed once.
        Machine, versions and what the plans were made for.

    Raises:
        ConfigError: a setting makes no sense, there is no hardware profile, or too little memory for all planners at
            once. Pi2Error: what making, packing, loading and planning raise.
    """
    from torch_pi2.machine.find import find_hardware

    load_library()
    _check(batch, memory, ffn_in_memory, planners, tokens, rounds)
    profile = find_hardware(hardware) if isinstance(hardware, str) else hardware
    found = find_folder(folder, shape, method, trust_remote_code=trust_remote_code, seed=seed)
    source = Source(found, activations=activations, trust_remote_code=trust_remote_code, seed=seed)
    settings = _Settings(
        source, profile, tuple(sorted(set(batch))), tuple(planners), tokens, rounds, ffn_in_memory, compiled, seed
    )
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for name in dict.fromkeys(memory):
        made, told = (_in_memory if name == "whole" else _over_store)(settings)
        rows, about = rows + made, about | told
    return {
        "what": "plan",
        "shape": about["subject"].shape,
        "weights": source.weights,
        "activations": source.activations,
        "methods": sorted({layer.method for layer in source.plan.layers}),
        "synthetic": about["subject"].synthetic,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "tokens": about["tokens"],
        "tokens_a_round": tokens,
        "rounds": rounds,
        "seed": seed,
        "statistics": about["statistics"],
        "hardware": {"name": profile.name, "source": profile.source, "hash": profile.hash},
        "random": "as many hot neurons as greedy has, drawn at random: the layers' neurons are in another order, in "
        "memory as well as in a store of their own",
        **({"file": about["file"]} if "file" in about else {}),
        "rows": rows,
        **machine.describe(),
    }


def _check(
    batch: Sequence[int],
    memory: Sequence[str],
    ffn_in_memory: float,
    planners: Sequence[str],
    tokens: int,
    rounds: int,
) -> None:
    at_least(2, tokens=tokens)
    at_least(1, batch=min(batch, default=0), memory=len(memory), rounds=rounds)
    check_share(ffn_in_memory)
    known("memory", memory, MEMORY)
    known("planner", planners, PLANNERS)
    if PLANNED not in planners or len(set(planners)) < 2:
        raise ConfigError(
            "planners", expected=f"{PLANNED} and others", found=",".join(planners), fix="Add what is missing."
        )


@dataclass(frozen=True)
class _Settings:
    """Of :func:`run`."""

    source: Source
    hardware: Any
    batches: tuple[int, ...]
    planners: tuple[str, ...]
    tokens: int
    rounds: int
    share: float
    compiled: bool
    seed: int

    @property
    def context(self) -> int:
        """Tokens of a sequence: every round begins after the prompt."""
        return PROMPT + self.tokens

    @property
    def counted(self) -> list[int]:
        """Batch sizes that statistics are of."""
        return sorted({*_WATCHED, *self.batches})

    def draw(self, model: Any, batch: int) -> Tokens:
        """What is timed: other tokens than those that plans are made of."""
        return self.source.tokens(model, "heldout", batch, self.seed + 10 * batch)


def _plans(
    settings: _Settings, shape: Any, batch: int, *, budget: int | None = None, misses: Any = None
) -> dict[str, HardwarePlan]:
    """Each planner's plan for one batch size."""
    from torch_pi2.planner.baselines import fixed_plan
    from torch_pi2.planner.solve import solve

    how: dict[str, Any] = {
        "budget_bytes": budget,
        "batches": (batch,),
        "context": settings.context,
        "misses": misses,
    }
    plans = {}
    for name in settings.planners:
        if name == PLANNED:
            plans[name] = solve(shape, settings.hardware, **how)
        elif name == "random":
            greedy = fixed_plan(shape, settings.hardware, "greedy", **how)
            # predicted for the most frequent neurons, which these are not
            plans[name] = replace(greedy, buckets=tuple(replace(bucket, ms={}) for bucket in greedy.buckets))
        else:
            plans[name] = fixed_plan(shape, settings.hardware, name, **how)
    return plans


def _shape(settings: _Settings, model: Any, stats: ActivationStats) -> Any:
    from torch_pi2.planner.model_shape import ModelShape

    return ModelShape.of(model, stats, every_cold(settings.source.own, stats), compiled=settings.compiled)


def _follow(model: Any, plan: HardwarePlan, batch: int) -> None:
    """Let ``model`` run as ``plan`` says for ``batch`` sequences."""
    from torch_pi2.decode.adapt import follow

    follow(model, plan).batch(batch)


# --- all neurons in memory ---


def _in_memory(settings: _Settings) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows, and what they are of. One model, whose plan is switched before each round."""
    model = settings.source.whole()
    stats, about = settings.source.statistics(model, settings.counted)
    shape = _shape(settings, model, stats)
    other = Shuffled(model, settings.seed) if "random" in settings.planners else None
    rows: list[dict[str, Any]] = []
    drawn = ""
    for batch in settings.batches:
        tokens = settings.draw(model, batch)
        case = _Case(settings, "whole", batch, _plans(settings, shape, batch))
        case.alternate(_switching(settings, model, other, case.plans, batch, tokens.draw(PROMPT)), tokens)
        rows, drawn = [*rows, case.row()], tokens.about
    return rows, {"subject": Subject.of(model, settings.source.folder), "statistics": about, "tokens": drawn}


def _switching(
    settings: _Settings,
    model: Any,
    other: Shuffled | None,
    plans: Mapping[str, HardwarePlan],
    batch: int,
    prompt_BT: torch.Tensor,
) -> Callable[[str, torch.Tensor], Round]:
    """Rounds of one model that follows one plan after another."""
    steps: dict[str, Steps] = {}  # the same for all; compiled each its own, made while its plan is in place

    def run_round(name: str, ids_BT: torch.Tensor) -> Round:
        if other is not None:
            other.put(name == "random")
        _follow(model, plans[name], batch)
        key = name if settings.compiled else ""
        if key not in steps:
            steps[key] = Steps(model, batch, prompt_BT, settings.tokens, compiled=settings.compiled)
        steps[key].run(ids_BT[:, :_WARM_UP])
        return steps[key].run(ids_BT, _ROUND_S)

    return run_round


# --- a share of them, the rest in a store ---


def _over_store(settings: _Settings) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows, and what they are of. A model for each planner, whose cache keeps what its plan has put there."""
    from torch_pi2.planner.misses import ReplayMisses

    source, most = settings.source, max(settings.batches) * settings.context
    model = source.over_store(source.budget(settings.share, most, OffloadConfig()).total, most, OffloadConfig())
    stats, about = source.statistics(model, settings.counted)
    shape = _shape(settings, model, stats)
    misses = ReplayMisses(source.accesses(model, max(settings.batches)), shape)
    told = {"subject": Subject.of(model, source.folder), "statistics": about}
    del model
    stores = [source.store(), *([source.shuffled_store()] if "random" in settings.planners else [])]
    warmed = sorted({cap.warm(store / PI2_FOLDER / STORE_FILE) for store in stores})
    rows: list[dict[str, Any]] = []
    drawn = ""
    for batch in settings.batches:
        case, drawn = _stored_case(settings, shape, batch, misses)
        rows.append(case.row())
    return rows, told | {"tokens": drawn, "file": f"warmed by one sequential {' and '.join(warmed)} read"}


def _stored_case(settings: _Settings, shape: Any, batch: int, misses: Any) -> tuple[_Case, str]:
    """One batch size, all rounds done, and what its tokens are."""
    source, context = settings.source, batch * settings.context
    room = source.budget(settings.share, context, OffloadConfig())
    plans = _plans(settings, shape, batch, budget=room.total, misses=misses)
    case = _Case(settings, "half", batch, plans, budget=room.total, neurons=room.neurons)
    _check_memory(room.total, len(case.timed))
    models = {}
    for name in case.timed:
        config = OffloadConfig(**plans[name].offload)
        models[name] = source.over_store(room.total, context, config, shuffled=name == "random")
        _follow(models[name], plans[name], batch)
    tokens = settings.draw(models[case.timed[0]], batch)
    prompt_BT = tokens.draw(PROMPT)
    steps = {
        name: Steps(model, batch, prompt_BT, settings.tokens, compiled=settings.compiled)
        for name, model in models.items()
    }

    def round_of(name: str, ids_BT: torch.Tensor) -> Round:
        return steps[name].run(ids_BT, _ROUND_S)

    case.settle(round_of, tokens)
    case.alternate(round_of, tokens)
    return case, tokens.about


def _check_memory(budget: int, planners: int) -> None:
    """Raises ConfigError where models of all planners do not fit at once: they are compared in alternation."""
    needed, left = budget * planners, _available_bytes()
    if left is not None and needed > left:
        raise ConfigError(
            f"{planners} planners over a store",
            expected=f"{needed / 2**30:.1f} GiB of memory, for a model each",
            found=f"{left / 2**30:.1f} GiB",
            fix="Choose fewer --planners, or a smaller --ffn-in-memory or --batch.",
        )


def _available_bytes() -> int | None:
    """Memory that can still be had; None where the system does not say."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


# --- a case ---


@dataclass
class _Case:
    """One batch size in one kind of memory: every planner's rounds."""

    settings: _Settings
    memory: str
    batch: int
    plans: Mapping[str, HardwarePlan]
    budget: int | None = None
    neurons: int = 0
    kept: dict[str, list[Round]] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.same = _same(self.plans, self.batch)
        self.timed = [name for name in self.plans if name not in self.same]

    def settle(self, run_round: Callable[[str, torch.Tensor], Round], tokens: Tokens) -> None:
        """Run every planner until its cache has what it is going to have."""
        hits: dict[str, list[float]] = {name: [] for name in self.timed}
        arranging = dict.fromkeys(hits, 0)
        for _ in range(_SETTLE):
            ids_BT = tokens.draw(self.settings.tokens)
            for name, found in hits.items():
                if len(found) < 2 or abs(found[-1] - found[-2]) > _SETTLED or arranging[name]:
                    measured = run_round(name, ids_BT)
                    found.append(_hit_rate([measured]) or 0.0)
                    arranging[name] = (measured.stats or {}).get("arranging", 0)
        self.settled = {name: len(found) for name, found in hits.items()}

    def alternate(self, run_round: Callable[[str, torch.Tensor], Round], tokens: Tokens) -> None:
        """All planners on the same tokens, then on others; each round begins with another planner."""
        drawn = [tokens.draw(self.settings.tokens) for _ in range(self.settings.rounds)]
        self.kept = alternate(self.timed, len(drawn), lambda name, index: run_round(name, drawn[index]))

    def _rates(self, name: str) -> list[float]:
        return [self.batch * r.steps / r.seconds for r in self.kept[self.same.get(name, name)]]

    def row(self) -> dict[str, Any]:
        rates = {name: self._rates(name) for name in self.plans}
        found, ratios = medians(rates), over(rates, PLANNED)
        best, planned_over = max(ratios, key=lambda name: statistics.median(rates[name])), medians(ratios, 4)
        return {
            "memory": self.memory,
            "ffn_in_memory": 1.0 if self.memory == "whole" else self.settings.share,
            "batch": self.batch,
            "budget_bytes": self.budget,
            "tokens_per_s": found,
            "best": best,
            "planned_over_best": planned_over[best],
            "planned_over": planned_over,
            "spread": {name: spread(values, 4) for name, values in ratios.items()},
            "planners": {name: self._planner(name, rates[name], found[name]) for name in self.plans},
        }

    def _planner(self, name: str, rates: Sequence[float], median: float) -> dict[str, Any]:
        bucket, rounds = self.plans[name].bucket(self.batch), self.kept[self.same.get(name, name)]
        predicted = self.batch * 1e3 / bucket.total_ms if bucket.total_ms else None
        sizes = [layer.site.intermediate for layer in self.settings.source.plan.layers]
        parts = {part: round(statistics.median(r.ms[part] for r in rounds), 4) for part in rounds[0].ms}
        figures: dict[str, Any] = {
            "tokens_per_s": median,
            "spread": spread(rates, 4),
            "predicted_tokens_per_s": None if predicted is None else round(predicted, 3),
            "predicted_over_measured": None if predicted is None else round(predicted / median, 3),
            "ms_per_step": parts,
            "predicted_ms": {part: round(ms, 4) for part, ms in bucket.ms.items()},
            "hot_share": round(sum(bucket.hot) / sum(sizes), 4),
            "hot": list(bucket.hot),
            "same_as": self.same.get(name),
        }
        if self.budget is None:
            return figures
        steps, total = sum(r.steps for r in rounds), _total(rounds)
        seconds = sum(r.seconds for r in rounds)
        return figures | {
            "resident_share": round(sum(bucket.resident) / sum(sizes), 4),
            "cache_bytes": total["cache_bytes"],
            "neurons_in_memory": round(total["cache_bytes"] / self.neurons, 4),
            "offload": dict(self.plans[name].offload),
            "settled_after": self.settled.get(self.same.get(name, name)),
            "hit_rate": round(_hit_rate(rounds) or 0.0, 4),
            "reads_per_step": round(total["reads"] / steps, 1),
            "bytes_read_per_step": round(total["bytes_read"] / steps),
            "io_critical_share": round(total["wait_ns"] / 1e9 / torch.get_num_threads() / seconds, 4),
        }


def _same(plans: Mapping[str, HardwarePlan], batch: int) -> dict[str, str]:
    """Planner -> one before it whose plan is the same: measured twice, they would differ by noise alone."""
    seen: dict[Any, str] = {}
    same: dict[str, str] = {}
    for name, plan in plans.items():
        bucket = plan.bucket(batch)
        key = (bucket.hot, bucket.accelerator, bucket.resident, bucket.cache_bytes, tuple(sorted(plan.offload.items())))
        if name == "random" and not _takes_all_or_none(bucket):
            continue
        if key in seen:
            same[name] = seen[key]
        else:
            seen[key] = name
    return same


def _takes_all_or_none(bucket: Bucket) -> bool:
    """Whether it makes no difference which neurons come first: none of them is hot or kept."""
    return not any(bucket.hot) and not any(bucket.resident) and bucket.cache_bytes == 0


def _total(rounds: Sequence[Round]) -> dict[str, int]:
    """Sums of what the store counted; its sizes are those of the last round."""
    sums = ("wanted", "hits", "reads", "bytes_read", "wait_ns")
    counted = [r.stats or {} for r in rounds]
    return {**counted[-1], **{key: sum(stats[key] for stats in counted) for key in sums}}


def _hit_rate(rounds: Sequence[Round]) -> float | None:
    total = _total(rounds)
    return total["hits"] / total["wanted"] if total["wanted"] else None


def render(result: dict[str, Any]) -> str:
    names = list(result["rows"][0]["tokens_per_s"])
    header = ("memory", "batch", *names, "predicted", "hits", "best other", "planned / best")
    rows = [
        (
            r["memory"] if r["ffn_in_memory"] == 1 else f"{common.percent(r['ffn_in_memory'])} of neurons",
            r["batch"],
            *(_rate(r["planners"][name], f"{r['tokens_per_s'][name]:.2f}") for name in names),
            shown(r["planners"]["planned"]["predicted_tokens_per_s"], "{:.2f}".format),
            shown(r["planners"]["planned"].get("hit_rate"), common.percent),
            r["best"],
            "{:.3f} ({:.3f} to {:.3f})".format(r["planned_over_best"], *r["spread"][r["best"]]),
        )
        for r in result["rows"]
    ]
    steps = "compiled steps" if result["compiled"] else "eager steps, Python in all"
    lines = [
        f"{result['shape']} {result['weights']}, {result['activations']} activations, "
        f"{' and '.join(result['methods'])}, {result['threads']} threads, {steps}, "
        f"for hardware {result['hardware']['name']} ({result['hardware']['source']})",
        common.table(header, rows),
        "tokens/s, medians; = as another one, which made the same plan; predicted: of planned",
        f"tokens: {result['tokens']}; plans are made of others ({result['statistics']})",
    ]
    return "\n".join([*lines, label(result)])


def _rate(planner: dict[str, Any], rate: str) -> str:
    return f"= {planner['same_as']}" if planner["same_as"] else rate
