"""``plan_for``: the hardware plan of PowerInfer-2: how a model runs on one machine, by batch size.

For each batch size a neuron is hot if it is active in a large enough share of steps. Several shares are tried, and the
one with the fastest predicted step (:mod:`torch_pi2.planner.cost`) wins. In memory that is nearly always the default.
Over a store it finds the one case with a measured gain (docs/RESULTS.md): a layer is read whole where the union of a
batch's active neurons is expected to be large.

An accelerator's memory, shared by all batch sizes, is divided among layers by PowerInfer's integer program (arXiv
2312.12456, section 6.3; :func:`choose`), which here minimises predicted time.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from torch_pi2.base.fields import Field, checked
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.progress import bar
from torch_pi2.base.units import parse_bytes
from torch_pi2.errors import CalibrationError
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.machine.find import find_hardware
from torch_pi2.machine.hardware import Hardware
from torch_pi2.planner.cost import ffn_ms, switch_point, without_gpu
from torch_pi2.planner.model_shape import LayerShape, ModelShape
from torch_pi2.planner.request import BATCHES, Counts, Request, check
from torch_pi2.rewrite.gpu import neuron_bytes
from torch_pi2.rewrite.state import get_state, stored_stats
from torch_pi2.types.method import Method
from torch_pi2.types.plan import ACCELERATOR_CHUNK, OFFLOAD_SETTINGS, Bucket, HardwarePlan, Plan, PromptPlan
from torch_pi2.types.stats import ActivationStats

#: Relative gap at which the search stops, and its time limit in seconds.
GAP, SECONDS = 1e-4, 20.0


def choose(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Choose one option per layer with the least total cost whose sizes fit into ``capacity`` together.

    A multiple-choice knapsack, solved by HiGHS (``scipy.optimize.milp``); deterministic unless the time limit is hit.
    ``costs``, ``sizes``: of the options of each layer; sizes ascend from 0.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    if all(len(line) == 1 for line in costs):
        return [0] * len(costs)
    cost = np.concatenate([np.asarray(line, dtype=np.float64) for line in costs])
    nbytes = np.concatenate([np.asarray(line, dtype=np.float64) for line in sizes])
    ends = np.cumsum([len(line) for line in costs])
    layer = np.repeat(np.arange(len(costs)), [len(line) for line in costs])
    one_each = csr_array((np.ones(len(cost)), (layer, np.arange(len(cost)))))
    scale = max(1.0, float(capacity))
    fits = LinearConstraint(nbytes[None] / scale, -np.inf, capacity / scale)
    limits, whole = [fits, LinearConstraint(one_each, 1.0, 1.0)], np.ones(len(cost))
    options = {"time_limit": SECONDS, "mip_rel_gap": GAP}
    solution = milp(cost, integrality=whole, bounds=Bounds(0, 1), constraints=limits, options=options)
    if solution.x is None:  # time limit
        return [0] * len(costs)
    picked = [int(np.argmax(options)) for options in np.split(solution.x, ends[:-1])]
    # HiGHS keeps constraints within 1e-6 only; bytes are a hard limit here.
    while sum(line[n] for line, n in zip(sizes, picked, strict=True)) > capacity:
        largest = max(range(len(picked)), key=lambda i: sizes[i][picked[i]])
        picked[largest] -= 1
    return picked


#: Shares of steps from which a neuron is hot, the default first. 0: all neurons; above 1: none.
HOT_SHARES = (0.5, 0.0, 0.05, 0.1, 0.2, 0.35, 0.75, 0.9, 1.1)
#: The default share wins if it is slower by less than this: predictions are no more exact.
_NEAR = 0.02
#: Hot neurons are a multiple of this, so that runs of neurons are whole pages, or all.
_STEP = 64
#: A layer with at least this share of its neurons hot has all of them hot: one long read instead of many.
_WHOLE = 0.9


@checked
@fresh_settings()
def plan_for(
    model: nn.Module,
    hardware: str | Path | Hardware = "measured",
    *,
    stats: ActivationStats | None = None,
    budget: float | str | None = None,
    accelerator_memory: float | str = 0,
    batches: Sequence[int] = BATCHES,
    context: int = 1024,
    fixed_hot_set: bool = False,
    progress: bool = False,
) -> Plan:
    """The model's plan with a part for ``hardware``: hot, resident and cached neurons for each batch size.

    ::

        torch_pi2.follow(model, torch_pi2.plan_for(model, "measured"))

    Args:
        model: optimised or loaded, in memory or over a store; not modified.
        hardware: ``measured`` (``torch-pi2 doctor --measure``), a preset (``sm8650-ufs4.0``), a file, or a profile.
        stats: firing frequencies (default: those the model was optimised with, or those in its folder).
        budget: bytes of memory (or ``"2.5GiB"``) for a model over a store; None: everything is in memory.
        accelerator_memory: bytes for hot neurons on the accelerator.
        batches: batch sizes to plan for. context: tokens per sequence for which memory is planned.
        fixed_hot_set: same hot neurons at all batch sizes, so that results do not depend on the batch even where
            predictors miss neurons.
        progress: show a bar on standard error (in terminals) if planning takes over two seconds.

    Raises:
        CalibrationError: there are no statistics.
        ConfigError: the model is dense, the hardware is unknown, the budget is too small (the message has the
            minimum), or another setting is invalid.
        UnsupportedModelError: accelerator memory for neurons of two formats.
    """
    state = get_state(model)
    known = stats or state.stats or stored_stats(model)
    if known is None:
        fix = "Profile a text, and pass its statistics (stats=, --stats)."
        expected = "statistics: how often neurons fire decides which are hot"
        Field(stats, f"planning a {type(model).__name__}", fix, CalibrationError).wrong(expected, "none")
    base = without_hot(state.plan)
    shape = ModelShape.of(model, known, base)
    found = hardware if isinstance(hardware, Hardware) else find_hardware(hardware)
    ours, theirs = None if budget is None else parse_bytes(budget), parse_bytes(accelerator_memory)
    request = Request(shape, found, ours, theirs, batches, context, fixed_hot_set)
    return with_hardware(base, solve(request, progress=progress))


def without_hot(plan: Plan) -> Plan:
    """``plan`` without hot neurons in ``exact`` layers, where they do not affect results."""
    layers = [replace(layer, n_hot=0) if layer.method == Method.EXACT else layer for layer in plan.layers]
    return Plan(layers, plan.model_hash, dict(plan.made_by))


def with_hardware(plan: Plan, hardware: HardwarePlan) -> Plan:
    """``plan`` with ``hardware`` attached; ``n_hot`` of ``exact`` layers is the least of all buckets."""
    layers = []
    for index, layer in enumerate(plan.layers):
        fewest = min(bucket.hot[index] for bucket in hardware.buckets)
        layers.append(replace(layer, n_hot=fewest) if layer.method == Method.EXACT else layer)
    return Plan(layers, plan.model_hash, plan.made_by | {"planner": hardware.made_for["planner"]}, hardware)


def plannable_gpu_bytes(model: nn.Module, hardware: Hardware, gpu_bytes: int) -> int:
    """How many of ``gpu_bytes`` a plan for ``hardware`` can give to neurons of ``model``.

    0 if the profile has no GPU, or if layers have thresholds or are experts, whose neurons cannot be hot. Biases and
    orders are subtracted, as plans count rows alone.
    """
    theirs, layers = hardware.accelerator, sparse_layers(model)
    never_hot = any(layer.method == Method.THRESHOLD or layer.site.experts is not None for layer in layers)
    if theirs is None or not theirs.holds_rest or never_hot:
        return 0
    beside = sum(neuron_bytes(layer) * layer.site.intermediate - layer.neuron_rows.nbytes for layer in layers)
    return max(0, min(gpu_bytes - beside, theirs.memory_bytes))


def solve(request: Request, *, progress: bool = False) -> HardwarePlan:
    """The plan for a machine, deterministic. Raises what :func:`~torch_pi2.planner.request.check` does."""
    check(request)
    plans: dict[int, tuple[Counts, Counts]] = {}
    if request.accelerator_bytes:
        plans = _with_accelerator(request)
    else:
        for group in bar(request.groups, "plan, batch sizes", progress, delay=2):
            hot = _hot(request, group)
            plans |= dict.fromkeys(group, (hot, ()))
    none = (0,) * len(request.shape.layers)
    buckets = []
    for batch, (hot, accelerator) in plans.items():
        resident, ms = request.resident(batch, accelerator), request.step(batch, hot, accelerator)
        buckets.append(Bucket(batch, hot, accelerator or none, resident, request.cache_bytes(batch), ms))
    hardware, last = request.hardware, buckets[-1]
    # prompt lengths from which to compute dense; above any step
    cpu = without_gpu(hardware)
    found = [switch_point(cpu, layer, hot) for layer, hot in zip(request.shape.layers, last.hot, strict=True)]
    dense_from = tuple(max(at, last.batch + 1) if at else 0 for at in found)
    made_for: dict[str, object] = {"hardware": hardware.name, "hash": hardware.hash, "source": hardware.source}
    made_for["planner"] = "cost model"
    made_for["settings"] = {"batches": list(request.batches), "fixed_hot_set": request.fixed_hot_set}
    return HardwarePlan(
        made_for=made_for,
        budget_bytes=request.budget_bytes,
        accelerator_bytes=request.accelerator_bytes,
        context=request.context,
        buckets=tuple(buckets),
        prompt=PromptPlan(dense_from),
        offload={name: getattr(request.offload, name) for name in OFFLOAD_SETTINGS} if request.stored else {},
        # where all cores compute, I/O threads share them
        threads={"compute": hardware.threads, "io": int(request.stored and hardware.cores > hardware.threads)},
        cluster=request.shape.layers[0].cluster,
    )


def hot_count(layer: LayerShape, batch: int, share: float, step: int = _STEP) -> int:
    """Neurons active in ``share`` of steps, by ``step``, or all; ``base_hot`` of dense, threshold, expert layers."""
    if layer.method in (Method.DENSE, Method.THRESHOLD) or layer.experts > 1 or layer.chosen < 1:
        return layer.base_hot
    wanted = int((layer.frequency(batch) >= share).sum())
    if wanted >= _WHOLE * layer.intermediate:
        return layer.intermediate
    return max(layer.base_hot, wanted // step * step)


def _candidates(request: Request, group: Sequence[int], step: int = _STEP) -> list[Counts]:
    by_share = [tuple(hot_count(y, group[0], share, step) for y in request.shape.layers) for share in HOT_SHARES]
    return list(dict.fromkeys(by_share))


def _hot(request: Request, group: tuple[int, ...]) -> Counts:
    """The hot neurons with the fastest steps, or those of the default share if hardly slower."""
    candidates = _candidates(request, group)
    best = min(candidates, key=lambda hot: _ms(request, group, hot))
    return candidates[0] if _ms(request, group, candidates[0]) <= (1 + _NEAR) * _ms(request, group, best) else best


def _ms(request: Request, group: Sequence[int], hot: Counts, accelerator: Counts = ()) -> float:
    """Milliseconds a token, summed over the batch sizes of ``group``."""
    return sum(math.fsum(request.step(b, hot, accelerator).values()) / b for b in group)


def _with_accelerator(request: Request) -> dict[int, tuple[Counts, Counts]]:
    """Batch size -> hot neurons, and those of them on the accelerator.

    The accelerator's memory holds the same neurons at all batch sizes. A GPU with the rest of the model computes all of
    them; an NPU computes fewer where that is faster. Layer times exclude reads from a store: further hot neurons are
    then chosen among the shares, by whole steps.
    """
    layers = request.shape.layers
    firsts = [_chunks(layer) for layer in layers]
    sizes = [[n * layer.neuron_bytes for n in counts] for layer, counts in zip(layers, firsts, strict=True)]
    tables = [_options(request, group, firsts) for group in request.groups]
    costs = [np.sum([[ms for ms, _, _ in table[i]] for table in tables], axis=0).tolist() for i in range(len(layers))]
    picked, plan = choose(costs, sizes, request.accelerator_bytes), dict[int, tuple[Counts, Counts]]()
    for group, table in zip(request.groups, tables, strict=True):
        chosen = [line[n] for line, n in zip(table, picked, strict=True)]
        accelerator, hots = tuple(n for _, _, n in chosen), [tuple(h for _, h, _ in chosen)]
        if request.stored:
            hots += [tuple(map(max, hot, accelerator)) for hot in _candidates(request, group, ACCELERATOR_CHUNK)]
        plan |= dict.fromkeys(group, (min(hots, key=lambda hot: _ms(request, group, hot, accelerator)), accelerator))
    return plan


def _options(request: Request, group: Sequence[int], firsts: Sequence[Sequence]) -> list[list[tuple[float, int, int]]]:
    """Per layer and number of neurons the accelerator may hold: (milliseconds, hot neurons, neurons it computes)."""
    theirs, options = request.hardware.accelerator, []
    shared = theirs is not None and not theirs.holds_rest
    hots = [set(counts) for counts in zip(*_candidates(request, group, ACCELERATOR_CHUNK), strict=True)]
    for layer, counts, hot in zip(request.shape.layers, firsts, hots, strict=True):

        def ms(hot: int, first: int, layer: LayerShape = layer) -> float:
            return sum(math.fsum(ffn_ms(layer, request.hardware, b, hot, first).values()) / b for b in group)

        line = [min((ms(max(h, first), first), max(h, first), first) for h in hot) for first in counts]
        options.append([min(line[: n + 1]) for n in range(len(line))] if shared else line)
    return options


def _chunks(layer: LayerShape) -> list[int]:
    """Numbers of neurons an accelerator may hold: whole chunks, or all; none of experts and threshold layers."""
    if layer.experts > 1 or layer.chosen < 1 or layer.method == Method.THRESHOLD:
        return [0]
    return [*range(0, layer.intermediate, ACCELERATOR_CHUNK), layer.intermediate]
