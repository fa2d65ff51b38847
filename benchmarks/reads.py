"""Which reads the neurons of a trained model need, by the order in which the neurons lie in the store.

Low-rank predictors say which neurons held-out text needs. The cache of a store is replayed over them, and its misses
are read by the engine's rules from devices of published figures. Neurons have the size of a 7B model's in int4: distant
tokens of the small model lie side by side as one token of a layer that wide. Times are modelled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import torch_pi2
from benchmarks.arguments import add_trained, list_of
from benchmarks.beside import floats
from benchmarks.tables import Result, Table, at
from torch_pi2.base.evaluating import evaluating
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.graph.find import find_sites
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import called_modules, sparse_layers
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.machine.device import Device, find_device
from torch_pi2.ops import load as load_library
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.types.config import Config
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.stats import pack_bits, unpack_bits

_WINDOW, _BATCH = 256, 4
_TOKENS, _CALIBRATION, _SHARES = 7168, 20_000, (0.25, 0.5, 0.75)
_DEVICES = ("ufs-4.0", "ufs-3.1", "nvme", "benchmarks/devices/nvme-gen3.json")


#: Of the 7B model, and bytes of one of its neurons in int4 (6,912) in pages.
NEURONS, LAYERS, SLOT = 14336, 32, 8192
ORDERS = ("frequency", "random", "chains")
GAPS = (0, OffloadConfig.gap_bytes, 1 << 16)
HOT_SHARE = 0.25  # of the cache, as OffloadConfig has it with lfu
_TIMED = 32  # tokens of each layer whose reads are timed

#: Seconds of reads that begin at ``offsets`` and have ``sizes``, both in bytes, when all are asked for at once.
Seconds = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class Seen:
    """The neurons that the tokens of a layer need, bool ``[N, I]``, in the order of the plan: hot ones first."""

    key: str
    n_hot: int
    wanted: torch.Tensor


def ordered(name: str, wanted_NI: torch.Tensor, head: int) -> torch.Tensor:
    """Int64 ``[I]``, place -> plan position: the first ``head`` stay, others by what is wanted with what."""
    cold_NC = wanted_NI[:, head:].double()
    if name == "frequency":
        new_C = torch.arange(cold_NC.shape[1])
    elif name == "random":
        new_C = torch.randperm(cold_NC.shape[1], generator=torch.Generator().manual_seed(0))
    else:
        both_CC = cold_NC.T @ cold_NC
        one_C = both_CC.diagonal()
        either_CC = one_C[:, None] + one_C - both_CC  # tokens that want one of the two at least
        near_CC = (both_CC / either_CC.clamp_min(1)).fill_diagonal_(0)
        new_C = chains(near_CC)
    return torch.cat([torch.arange(head), head + new_C])


def chains(near_CC: torch.Tensor) -> torch.Tensor:
    """The nearest pairs are linked first, until all are one path (as Ripple does, arXiv 2410.19274)."""
    first_P, second_P = np.triu_indices(len(near_CC), 1)
    best_P = np.argsort(-near_CC.numpy()[first_P, second_P], kind="stable")
    chain_of = {i: [i] for i in range(len(near_CC))}
    for a, b in zip(first_P[best_P].tolist(), second_P[best_P].tolist(), strict=True):
        one, other = chain_of[a], chain_of[b]
        if one is other or a not in (one[0], one[-1]) or b not in (other[0], other[-1]):
            continue
        if one[-1] != a:
            one.reverse()
        one += other if other[0] == b else other[::-1]
        chain_of |= dict.fromkeys(other, one)
    return torch.tensor(chain_of[0])


def missed(layers: Sequence[Seen], share: float) -> list[torch.Tensor]:
    """Bool ``[N / 2, I]`` of each layer: what a cache of so many of all neurons lacks, after half of the tokens."""
    tokens, neurons = layers[0].wanted.shape
    bits = torch.stack([pack_bits(layer.wanted) for layer in layers], 1).flatten()
    calls = torch.arange(len(layers), dtype=torch.int32).repeat(tokens)
    about = torch.tensor([(neurons, 1)] * len(layers))
    accesses = (calls, torch.zeros(len(calls), dtype=torch.uint8), bits, about)
    slots = round(share * neurons * len(layers))
    bits = torch.ops.pi2.replay_missed(*accesses, "lfu", slots, HOT_SHARE, True, 0)
    return [unpack_bits(rows, neurons)[tokens // 2 :] for rows in bits.view(tokens, len(layers), -1).unbind(1)]


def wide(rows_NI: torch.Tensor) -> np.ndarray:
    """Bool ``[G, 14336]``: tokens far apart, side by side; at most ``_TIMED`` of them."""
    beside = NEURONS // rows_NI.shape[1]
    groups = len(rows_NI) // beside
    wide_GW = rows_NI[: groups * beside].unflatten(0, (beside, groups)).transpose(0, 1).flatten(1)
    found: np.ndarray = wide_GW[:: -(-groups // _TIMED)].numpy()
    return found


def merged(starts: np.ndarray, nbytes: int, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and sizes of reads of ``nbytes`` at each of ``starts``, ascending: the rules of engine/read_batch.h."""
    firsts: list[int] = []
    lasts: list[int] = []
    for start in starts.tolist():
        if firsts and start - lasts[-1] <= nbytes + gap and start + nbytes - firsts[-1] <= OffloadConfig.run_bytes:
            lasts[-1] = start
        else:
            firsts.append(start)
            lasts.append(start)
    return np.array(firsts, np.int64), np.array(lasts, np.int64) - np.array(firsts, np.int64) + nbytes


def _missed_share(heldout: Sequence[Seen], share: float) -> dict[str, float]:
    missing = missed(heldout, share)
    wanted = sum(int(y.wanted[-len(m) :].sum()) for y, m in zip(heldout, missing, strict=True))
    return {"missed": sum(int(m.sum()) for m in missing) / wanted}


def orders(
    calibration: Sequence[Seen], heldout: Sequence[Seen], share: float, timers: Mapping[str, Seconds]
) -> list[dict[str, Any]]:
    """What a token of the 7B model reads, by order and gap, with so much of all neurons in the cache."""
    points = []
    for name in ORDERS:
        heads = [max(y.n_hot, round(HOT_SHARE * share * y.wanted.shape[1])) for y in calibration]
        places = [ordered(name, y.wanted, head) for y, head in zip(calibration, heads, strict=True)]
        missing = missed([replace(y, wanted=y.wanted[:, place_I]) for y, place_I in zip(heldout, places)], share)
        slots = [np.flatnonzero(row) for missing_NI in missing for row in wide(missing_NI)]
        of_token = LAYERS / len(slots)
        for gap in GAPS:
            reads = [merged(s * SLOT, SLOT, gap) for s in slots]
            ms = {device: of_token * 1e3 * sum(seconds(*r) for r in reads) for device, seconds in timers.items()}
            count = {"reads": sum(len(o) for o, _ in reads), "bytes": sum(int(sizes.sum()) for _, sizes in reads)}
            points.append({"order": name, "gap": gap, **{k: of_token * n for k, n in count.items()}, "ms": ms})
    return points


def timers_of(devices: Sequence[str]) -> dict[str, Seconds]:
    """By device, from its description."""
    depth, whole = OffloadConfig.io_threads, LAYERS * NEURONS * SLOT

    def modelled(device: Device) -> Seconds:
        def seconds(offsets: np.ndarray, sizes: np.ndarray) -> float:
            times = device.read_times(offsets.tolist(), sizes.tolist(), depth=depth, range_bytes=whole)
            return float(times[-1]) if len(times) else 0.0

        return seconds

    return {device.name: modelled(device) for device in map(find_device, devices)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=common.positive, default=_TOKENS, metavar="N", help="held-out ones; half fill the cache")
    add_trained(parser, _CALIBRATION)
    add("--ffn-in-memory", type=list_of(common.share), default=list(_SHARES), metavar="SHARE,...", help="caches")
    add("--devices", type=list_of(str), default=list(_DEVICES), metavar="NAME,...", help="presets or descriptions")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Replay what the model needs for held-out text.

    Returns:
        ``layers``: of each the share of ``hot`` neurons, and of cold ones that are ``wanted``. ``caches``, by share of
        the neurons in memory: ``missed``, of wanted neurons; ``orders``: per token of the 7B model ``reads``, ``bytes``
        and by device ``ms`` for each ``order`` and ``gap`` (bytes).

    Raises:
        ConfigError: a model of another form. Pi2Error: what loading models, profiling and fitting raise.
    """
    load_library()
    timers = timers_of(args.devices)
    calibration, heldout, about = _watched(args)
    caches = [
        {"share": share, **_missed_share(heldout, share), "orders": orders(calibration, heldout, share, timers)}
        for share in args.ffn_in_memory
    ]
    return {**about, "caches": caches}


def _watched(args: argparse.Namespace) -> tuple[list[Seen], list[Seen], dict[str, Any]]:
    """What layers need for calibration text and for held-out text, with predictors fitted to the former."""
    make, tokenizer = floats(args)
    model = make()
    sites = find_sites(model)
    if any(site.experts or site.gate is None or NEURONS % site.intermediate for site in sites):
        raise ConfigError(
            str(args.folder),
            expected=f"a model of gated layers whose neurons divide {NEURONS}, without experts",
            found=", ".join(sorted({f"{site.form}, {site.intermediate} neurons" for site in sites})),
            fix="Choose another model.",
        )
    exact, tokens = all(exact_zeros(site.activation) for site in sites), args.calibration_tokens
    config = Config(method="lowrank", max_loss=None if exact else 0.005, calibration_tokens=tokens)
    text = common.stdlib_sample("train", tokenizer, tokens)
    torch_pi2.optimize(model, text, config, tokenizer=tokenizer, progress=True)
    layers = [layer for layer in sparse_layers(model) if layer.has_predictor]
    seen = []
    for sample, count in ((text, tokens), (common.stdlib_sample("heldout", tokenizer, args.tokens), args.tokens)):
        ids = torch.tensor(tokenizer(sample, verbose=False)["input_ids"])[:count]
        ids_NT = ids[: len(ids) // _WINDOW * _WINDOW].view(-1, _WINDOW)
        if ids_NT.numel() < (least := 2 * NEURONS // sites[0].intermediate):
            raise ConfigError(
                "tokens, in windows of 256", expected=f"{least} or more", found=str(ids_NT.numel()), fix="Take more."
            )
        seen.append(_seen(model, layers, ids_NT))
    shares = [
        {"key": y.key, "hot": y.n_hot / y.wanted.shape[1], "wanted": float(y.wanted[:, y.n_hot :].float().mean())}
        for y in seen[1]
    ]
    synthetic = getattr(model.config, "torch_pi2_synthetic", False)
    about = {"form": sites[0].form, "synthetic": synthetic, "tokens": len(seen[1][0].wanted)}
    return seen[0], seen[1], {**about, "layers": shares}


def _seen(model: Any, layers: Sequence[SparseFFN], ids_NT: torch.Tensor) -> list[Seen]:
    """What ``layers`` need for tokens: hot neurons, and those that predictors choose."""
    wanted: dict[str, list[torch.Tensor]] = {layer.site.key: [] for layer in layers}

    def keep(layer: SparseFFN) -> Any:
        op, settings = layer.predictor_call()

        def hook(_: Any, inputs: Any) -> None:
            cold_TC = op(inputs[0].flatten(0, 1), *layer.predictor(), *settings)
            hot_TH = torch.ones(len(cold_TC), layer.n_hot, dtype=torch.bool)
            wanted[layer.site.key].append(torch.cat([hot_TH, cold_TC], 1))

        return called[layer].register_forward_pre_hook(hook)

    called = called_modules(model)
    hooks = [keep(layer) for layer in layers]
    with evaluating(model), torch.no_grad(), sparse_only():
        for some in ids_NT.split(_BATCH):
            model(some, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [Seen(layer.site.key, layer.n_hot, torch.cat(wanted[layer.site.key])) for layer in layers]


def _counts(result: Result) -> list[dict[str, Any]]:
    """Reads and bytes of a token by order, without gaps and with the engine's."""
    rows = []
    for cache in result["caches"]:
        for name in ORDERS:
            plain, gaps = [point for point in cache["orders"] if point["order"] == name][:2]
            shares = {"share": cache["share"], "missed": cache["missed"]}
            rows.append({**shares, "order": name, "plain": plain, "gaps": gaps})
    return rows


def _times(result: Result) -> list[dict[str, Any]]:
    """Milliseconds of a token by order, each with its best gap."""
    rows = []
    for cache in result["caches"]:
        for device in cache["orders"][0]["ms"]:
            points = [(point["order"], point["ms"][device]) for point in cache["orders"]]
            ms = {name: min(took for order, took in points if order == name) for name in ORDERS}
            rows.append({"share": cache["share"], "device": device, **ms, "ratio": ms["chains"] / ms["frequency"]})
    return rows


_GAP = f"gap {GAPS[1] >> 10} KiB"
TABLES = (
    Table(
        "Orders of neurons",
        _counts,
        {
            "in memory": at("share", common.percent),
            "missed": at("missed", common.percent),
            "order": at("order"),
            "reads": at("plain.reads", ".0f"),
            "read": at("plain.bytes", common.size),
            f"reads, {_GAP}": at("gaps.reads", ".0f"),
            f"read, {_GAP}": at("gaps.bytes", common.size),
        },
        "Of the neurons that a token of a 7B model reads (int4, 8 KiB each with direct reads), modelled from "
        "those that a small trained model wants of held-out text: with what share of all neurons in the cache (LFU) "
        "which share of those wanted is missed, and per token reads and bytes without reading gaps, and with gaps.",
    ),
    Table(
        "Orders of neurons: modelled times",
        _times,
        {
            "in memory": at("share", common.percent),
            "device": at("device"),
            **{f"{name} ms": at(name, ".2f") for name in ORDERS},
            "chains / frequency": at("ratio", ".3f"),
        },
        "Milliseconds of a token's reads, each order with its best gap.",
    ),
)


def about(result: Result) -> str:
    return (
        f"{result['folder']} ({result['form']}), {result['tokens']:,} held-out tokens; neurons of a 7B model, modelled"
    )
