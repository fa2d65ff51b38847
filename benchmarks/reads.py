"""Which reads a trained model's neurons need: by the order in which they lie, and in one phase or two.

Of held-out text, what low-rank predictors want goes through the cache that runs in a store; what it lacks is read by
the engine's rules from devices of published figures, and from this machine's drive if a folder on it is named. Neurons
are as large as those of a 7B model in int4; times are modelled (:mod:`benchmarks.reads_model`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import torch_pi2
from benchmarks.arguments import list_of
from benchmarks.early import MODEL
from benchmarks.figures import at_least
from benchmarks.reads_model import GAPS, NEURONS, ORDERS, WAYS, Seen, narrower, orders, phases, timers_of
from benchmarks.subject import dense_of
from torch_pi2.base import process as machine
from torch_pi2.base.evaluating import evaluating
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.fitting.sets import MIN_SEQUENCES
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.graph.find import find_sites
from torch_pi2.ops import load as load_library
from torch_pi2.ops.activations import ACTIVATIONS, exact_zeros, on_up
from torch_pi2.planner.greedy import greedy_plan
from torch_pi2.types.config import Config
from torch_pi2.types.plan import LayerPlan

_WINDOW, _BATCH = 256, 4
_TOKENS, _CALIBRATION, _SHARES = 7168, 20_000, (0.25, 0.5, 0.75)
_DEVICES = ("ufs-4.0", "ufs-3.1", "nvme", "benchmarks/devices/nvme-gen3.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=MODEL, metavar="DIR", help="of a dense model (default: the trained one)")
    add("--tokens", type=common.positive, default=_TOKENS, metavar="N", help="held-out ones; half fill the cache")
    add("--calibration-tokens", type=common.positive, default=_CALIBRATION, metavar="N")
    add("--ffn-in-memory", type=list_of(float), default=list(_SHARES), metavar="SHARE,...", help="caches")
    add("--devices", type=list_of(str), default=list(_DEVICES), metavar="NAME,...", help="presets or descriptions")
    add("--drive", type=Path, metavar="DIR", help="also the drive of this folder, which is measured")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")


def run(
    folder: str | Path = MODEL,
    *,
    tokens: int = _TOKENS,
    calibration_tokens: int = _CALIBRATION,
    ffn_in_memory: Sequence[float] = _SHARES,
    devices: Sequence[str] = _DEVICES,
    drive: Path | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Replay what the model in ``folder`` wants of held-out text.

    Args: the options of the same names.

    Returns:
        ``layers``: of each the shares of ``hot`` neurons and of cold ones that are ``wanted``, of these the shares
        ``gate`` and ``fired`` of which the gate fires, and all of the neuron, and the predictor's ``recall``.
        ``caches``, by share of the neurons in memory: ``missed``, of wanted neurons, with ``gate`` and ``fired`` of
        these; ``orders``: per token of the 7B model ``reads``, ``bytes`` and by device ``ms`` for each ``order`` and
        ``gap`` (bytes); ``ms``: by device and way of reading (``benchmarks.reads_model.WAYS``). ``narrower``: by
        neurons of a layer the reads of ``chains`` over those of ``frequency``, with the first share.

    Raises:
        ConfigError: a setting makes no sense. Pi2Error: what loading models, profiling, fitting and measuring raise.
    """
    load_library()
    at_least(MIN_SEQUENCES * Config.seq_len, calibration_tokens=calibration_tokens)
    at_least(1, caches=len(ffn_in_memory))
    timers = timers_of(devices, drive)
    calibration, heldout, about = _watched(folder, tokens, calibration_tokens, trust_remote_code)
    caches = [
        {"share": share, **phases(heldout, share, timers), "orders": orders(calibration, heldout, share, timers)}
        for share in ffn_in_memory
    ]
    scale = narrower(calibration, heldout, ffn_in_memory[0])
    return {"what": "reads", **about, "caches": caches, "narrower": scale, **machine.describe()}


def _watched(
    folder: str | Path, tokens: int, calibration_tokens: int, trust: bool
) -> tuple[list[Seen], list[Seen], dict[str, Any]]:
    """What layers want of calibration text and of held-out text, with predictors fitted to the former; about them."""
    trust = trust or Path(folder) == MODEL  # our own model brings its code
    model, tokenizer = dense_of(folder, "float32", trust, False)
    sites = find_sites(model)
    if any(site.experts or site.gate is None or NEURONS % site.intermediate for site in sites):
        raise ConfigError(
            str(folder),
            expected=f"a model of gated layers whose neurons divide {NEURONS}, without experts",
            found=", ".join(sorted({f"{site.form}, {site.intermediate} neurons" for site in sites})),
            fix="Choose another model.",
        )
    exact = all(exact_zeros(site.activation) for site in sites)
    config = Config(method="lowrank", max_loss=None if exact else 0.005, calibration_tokens=calibration_tokens)
    text = common.stdlib_sample("train", tokenizer, calibration_tokens)
    given: Any = {"config": config, "tokenizer": tokenizer, "progress": True}
    stats = torch_pi2.profile(model, text, **given)
    fitted = torch_pi2.fit(model, text, stats=stats, **given)
    layers = [layer for layer in greedy_plan(sites, stats, fitted, config).layers if layer.site.key in fitted]
    cuts = {layer.site.key: stats[layer.site.key].cut for layer in layers}
    seen = []
    for sample, count in ((text, calibration_tokens), (common.stdlib_sample("heldout", tokenizer, tokens), tokens)):
        ids = torch.tensor(tokenizer(sample, verbose=False)["input_ids"])[:count]
        ids_NT = ids[: len(ids) // _WINDOW * _WINDOW].view(-1, _WINDOW)
        at_least(2 * NEURONS // sites[0].intermediate, **{"tokens, in whole windows of 256": ids_NT.numel()})
        seen.append(_seen(model, layers, fitted, cuts, ids_NT))
    shares = [
        {
            "key": layer.site.key,
            "hot": of.n_hot / layer.site.intermediate,
            "recall": getattr(fitted[layer.site.key].card, "recall", None),
            **of.shares(of.wanted),
        }
        for layer, of in zip(layers, seen[1], strict=True)
    ]
    synthetic = getattr(model.config, "torch_pi2_synthetic", False)
    about = {"folder": Path(folder).resolve().name, "form": sites[0].form, "synthetic": synthetic}
    texts = {"tokens": len(seen[1][0].wanted), "calibration_tokens": len(seen[0][0].wanted)}
    return seen[0], seen[1], {**about, **texts, "layers": shares}


def _seen(
    model: Any,
    layers: Sequence[LayerPlan],
    fitted: Mapping[str, Any],
    cuts: Mapping[str, float | torch.Tensor],
    ids_NT: torch.Tensor,
) -> list[Seen]:
    """What ``layers`` want of tokens, in their order, while what is not predicted is left out."""
    inputs: dict[str, list[torch.Tensor]] = {layer.site.key: [] for layer in layers}

    def keep(key: str) -> Any:
        return lambda _, args: inputs[key].append(args[0].detach().flatten(0, 1))

    hooks = [model.get_submodule(key).register_forward_pre_hook(keep(key)) for key in inputs]
    cold = {layer.site.key: layer.order[layer.n_hot :].long() for layer in layers}
    with evaluating(model), PredictedMaskMode(model, [layer.site for layer in layers], fitted, cold):
        for some in ids_NT.split(_BATCH):
            model(some, use_cache=False)
    for hook in hooks:
        hook.remove()
    found = []
    for layer in layers:
        site, order, w = layer.site, layer.order.long(), layer.site.weights(model)
        predictor, x_NH = fitted[site.key], torch.cat(inputs[site.key])
        assert w.gate is not None
        with torch.no_grad():
            wanted_NI = predictor.scores(x_NH) >= predictor.threshold
            wanted_NI[:, order[: layer.n_hot]] = True
            gate_NI = ACTIVATIONS[site.activation](F.linear(x_NH, w.gate, w.bias_gate)).abs() > cuts[site.key]
            up_NI = on_up(site.activation, site.activation_on_up)(F.linear(x_NH, w.up, w.bias_up)) != 0
        found.append(Seen(layer.n_hot, wanted_NI[:, order], gate_NI[:, order], (gate_NI & up_NI)[:, order]))
    return found


ORDER_HEADER = ("in memory", "device", *ORDERS, "chains / frequency", "the same, gap 16 KiB")
COUNT_HEADER = ("in memory", "missed", "order", "reads", "read", f"reads, gap {GAPS[1] >> 10} KiB", "read")
PHASE_HEADER = ("in memory", "device", "gate fires", "neuron fires", *WAYS, "best of two phases / of one")


def order_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Milliseconds of a token by order, each with its best gap."""
    rows = []
    for cache in result["caches"]:
        for device in cache["ms"]:
            at = {(p["order"], p["gap"]): p["ms"][device] for p in cache["orders"]}
            ms = {name: min(took for (order, _), took in at.items() if order == name) for name in ORDERS}
            ratios = (ms["chains"] / ms["frequency"], at["chains", GAPS[1]] / at["frequency", GAPS[1]])
            shown = (*(f"{ms[name]:.2f}" for name in ORDERS), *(f"{ratio:.3f}" for ratio in ratios))
            rows.append((common.percent(cache["share"], 0), device, *shown))
    return rows


def count_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Reads and bytes of a token by order."""
    rows = []
    for cache in result["caches"]:
        for name in ORDERS:
            points = [p for p in cache["orders"] if p["order"] == name][:2]
            cells = [text for p in points for text in (f"{p['reads']:.0f}", f"{p['bytes'] / 1e6:.1f} MB")]
            rows.append((common.percent(cache["share"], 0), common.percent(cache["missed"]), name, *cells))
    return rows


def phase_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Milliseconds of a token by way of reading."""
    rows = []
    for cache in result["caches"]:
        about = (common.percent(cache["gate"]), common.percent(cache["fired"]))
        for device, ms in cache["ms"].items():
            ratio = min(ms[way] for way in WAYS[2:]) / min(ms[way] for way in WAYS[:2])
            took = (f"{ms[way]:.2f}" for way in WAYS)
            rows.append((common.percent(cache["share"], 0), device, *about, *took, f"{ratio:.3f}"))
    return rows


def render(result: Mapping[str, Any]) -> str:
    layers = [
        (y["key"], *(common.percent(y[name]) for name in ("hot", "recall", "wanted", "gate", "fired")))
        for y in result["layers"]
    ]
    narrow = ", ".join(f"{ratio:.3f} of {neurons}" for neurons, ratio in result["narrower"].items())
    about = (
        f"{result['folder']} ({result['form']}), {result['tokens']:,} held-out tokens; neurons of a 7B model, modelled"
    )
    return "\n".join(
        (
            about,
            common.table(("layer", "hot", "recall", "cold wanted", "of these gate fires", "neuron fires"), layers),
            common.table(COUNT_HEADER, count_rows(result)),
            common.table(ORDER_HEADER, order_rows(result)),
            f"reads of chains / of frequency by neurons of a layer: {narrow}",
            common.table(PHASE_HEADER, phase_rows(result)),
        )
    )
