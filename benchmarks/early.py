"""Predictors that see a trained model's layer before it is reached: what reading ahead of time could go by.

Of each layer, at one recall, the share of its cold neurons that a predictor of its own input wants, one of the input of
attention before it, and one of the input of the feed-forward layer before that; and the recall that the layer's own
predictor has on this last input, which ``OffloadConfig.lookahead`` goes by.

Of a mixture of experts, how many of those that a layer chooses its router finds in the input of the mixture before, and
what reading them early changes: decoded text over a store on a simulated device.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_pi2
from benchmarks.figures import alternate, at_least, known, of_store, over, spread
from benchmarks.subject import Rooms, check_share
from torch_pi2.base import process as machine
from torch_pi2.base.evaluating import evaluating
from torch_pi2.cli import common
from torch_pi2.decode.decoder import Decoder
from torch_pi2.eval.loss import nats_per_token
from torch_pi2.fitting.train import calibrate, measure, train_matrices
from torch_pi2.graph.find import find_sites
from torch_pi2.graph.routed import Routed, modules_of
from torch_pi2.graph.router import LinearRouter, find_router
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.profiling.samples import Samples
from torch_pi2.types.config import Config
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import pack_bits

MODEL = Path(__file__).resolve().parent.parent / "examples" / "models" / "drelu-stdlib-5m"
_LENGTH, _BATCH = 128, 8
#: Tokens of which predictors are fitted, thresholds set, and figures taken: of ten sequences so many.
_PARTS = {"fit": 7, "calibrate": 2, "evaluate": 1}
INPUTS = ("own", "attention", "before")
#: Tokens to see on what leaving out experts costs, and shares of a token's weight below which they are.
_HELDOUT, LEAST = 8192, (0.05, 0.1, 0.2, 0.3)
#: Over a store: tokens before timing, and of each of so many rounds.
_WARM_UP, _DECODED, _ROUNDS = 32, 128, 6
#: What is skipped of experts over a store: nothing of those chosen, or what sign bits say.
METHODS = ("exact", "signbit")
MIXTURE = ("mixture", "chosen", "are the usual ones", "are those of the token before", "are guessed, of so many")
LEFT_OUT = ("experts below", "of choices", "loss without them", "weights scaled to their sum")
OVER_STORE = ("", "tokens/s", "waiting", "read a token", "reads", "guessed in vain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=MODEL, metavar="DIR", help="of a Llama in floats (default: the trained model)")
    add("--tokens", type=common.positive, default=26_880, metavar="N", help="of the standard library")
    add("--rank", type=common.positive, default=80, metavar="R", help="of all predictors")
    add("--recall", type=common.probability, default=0.85, metavar="R", help="of all predictors")
    add("--steps", type=common.positive, default=500, metavar="N", help="of the optimiser")
    add("--device", metavar="NAME", help="of mixtures: decode over a store on it (ufs-4.0, ...; docs/DEVICES.md)")
    add("--method", choices=METHODS, default="signbit", help="of experts there: neurons that are read")
    add("--ffn-in-memory", type=float, default=0.25, metavar="SHARE", help="of the neurons' bytes there, 0..1")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")


def run(
    folder: str | Path = MODEL,
    *,
    tokens: int = 26_880,
    rank: int = 80,
    recall: float = 0.85,
    steps: int = 500,
    device: str | None = None,
    method: str = "signbit",
    ffn_in_memory: float = 0.25,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Fit predictors of all inputs to every layer of the model in ``folder``; a mixture is routed early instead.

    Args: the options of the same names.

    Returns:
        In ``layers`` of each its key, and by input (:data:`INPUTS`, and ``lookahead``) ``recall`` and ``active``, the
        share of cold neurons that are predicted; of the first layer no inputs of one before it.
        Of a mixture ``experts``, ``chosen``, and the share of choices that are among those ``guessed`` (by how many
        are), among as many that are chosen most (``usual``), and among those of the token before (``last``). Beside
        ``layers`` then ``left_out``: what leaving out experts of little weight would cost; and with ``device``
        ``store``: by whether look-ahead is on, ``tokens_per_s`` and what the store did.

    Raises:
        ConfigError: a setting makes no sense. Pi2Error: what loading models raises.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    at_least(10 * _LENGTH, tokens=tokens)
    known("method", [method], METHODS)
    check_share(ffn_in_memory)
    trust = trust_remote_code or Path(folder) == MODEL  # our own model brings its code
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust, dtype=torch.float32)
    text = tokenizer(common.stdlib_sample("train", tokenizer, tokens), verbose=False)["input_ids"]
    ids_NT = torch.tensor(text[: tokens // _LENGTH * _LENGTH]).view(-1, _LENGTH)
    sites = find_sites(model)
    if any(site.experts for site in sites):
        found: dict[str, Any] = {"layers": _mixtures(model, sites, ids_NT)}
        heldout = tokenizer(common.stdlib_sample("heldout", tokenizer, _HELDOUT), verbose=False)["input_ids"]
        found["left_out"] = _left_out(model, sites, torch.tensor(heldout[:_HELDOUT]).view(-1, _LENGTH))
        if device is not None:
            found["store"] = _look_ahead(model, tokenizer, device, method, ffn_in_memory)
        return {"what": "early", **machine.describe(), "model": Path(folder).name, "tokens": ids_NT.numel(), **found}
    seen = _inputs(model, sites, ids_NT)
    layers = [
        _layer(site, [seen[site.layer], *([seen[site.layer - 1]] if site.layer else [])], rank, recall, steps)
        for site in sites
    ]
    about = {"model": Path(folder).name, "tokens": ids_NT.numel(), "rank": rank, "steps": steps}
    return {"what": "early", **machine.describe(), **about, "layers": layers}


def _inputs(model: Any, sites: list[FFNSite], ids_NT: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Of each layer what its parts see of all tokens: ``own``, ``attention``, and ``fired`` bits."""
    seen: list[dict[str, list[torch.Tensor]]] = [{"own": [], "attention": [], "fired": []} for _ in sites]

    def keep(to: list[torch.Tensor], bits: bool = False) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            rows = x.detach().reshape(-1, x.shape[-1])
            to.append(pack_bits(rows != 0) if bits else rows)

        return hook

    for site, of in zip(sites, seen, strict=True):
        block = model.model.layers[site.layer]
        parts = ((block.mlp, "own"), (block.self_attn, "attention"), (block.mlp.down_proj, "fired"))
        for module, name in parts:
            module.register_forward_pre_hook(keep(of[name], name == "fired"), with_kwargs=True)
    with evaluating(model):
        for some in ids_NT.split(_BATCH):
            model(some, use_cache=False)
    # sequences in turn to fit, calibrate and evaluate, so that all three are of all files
    turns = torch.tensor([i for i, count in enumerate(_PARTS.values()) for _ in range(count)])
    order = torch.argsort(turns.repeat(-(-len(ids_NT) // 10))[: len(ids_NT)], stable=True)
    rows = (order[:, None] * _LENGTH + torch.arange(_LENGTH)).flatten()
    return [{name: torch.cat(values)[rows] for name, values in of.items()} for of in seen]


def _layer(site: FFNSite, seen: list[dict[str, torch.Tensor]], rank: int, recall: float, steps: int) -> dict[str, Any]:
    """Figures of one layer; ``seen``: its inputs, and those of the layer before it."""
    total = len(seen[0]["fired"])
    ends = [total * 7 // 10, total * 9 // 10, total]

    def parts(x_NH: torch.Tensor) -> list[Samples]:
        cuts = [slice(start, end) for start, end in zip([0, *ends], ends)]
        return [Samples(x_NH[cut], seen[0]["fired"][cut], site.intermediate) for cut in cuts]

    inputs = {"own": seen[0]["own"], "attention": seen[0]["attention"]}
    if len(seen) > 1:
        inputs["before"] = seen[1]["own"]
    often_I = Samples(inputs["own"], seen[0]["fired"], site.intermediate).fired().float().mean(0)
    cold = torch.nonzero(often_I < Config.hot_frequency).flatten()
    found: dict[str, Any] = {"key": site.key}
    for name, x_NH in inputs.items():
        fit, held, last = parts(x_NH)
        made = LowRank.quantised(*train_matrices(fit, rank=rank, neurons=cold, steps=steps))
        predictor = calibrate(made, held, site, target_recall=recall, neurons=cold)
        cards = {name: measure(predictor, last, site, neurons=cold)}
        if name == "own" and "before" in inputs:
            cards["lookahead"] = measure(predictor, parts(inputs["before"])[2], site, neurons=cold)
        found |= {name: {"recall": card.recall, "active": card.predicted_active} for name, card in cards.items()}
    return found


def _mixtures(model: Any, sites: list[FFNSite], ids_NT: torch.Tensor) -> list[dict[str, Any]]:
    """Figures of each mixture; of sequences in turn as many are left out as predictors are fitted to."""
    modules = modules_of(sites)
    routed: dict[str, list[Routed]] = {name: [] for name in modules}

    def keep(name: str) -> Any:
        count = len(modules[name])
        return lambda _, args, kwargs: routed[name].append(Routed.of(args, kwargs, count))

    hooks = [model.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True) for name in modules]
    try:
        with evaluating(model):
            for some in ids_NT.split(_BATCH):
                model(some, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    found: list[dict[str, Any]] = []
    before: torch.Tensor | None = None
    for name, own in modules.items():
        x_TH, index_TK = (torch.cat([getattr(r, part) for r in routed[name]]) for part in ("x_TH", "index_TK"))
        block = model.get_submodule(name.rpartition(".")[0])
        router = find_router(block, model.get_submodule(name), len(own))
        found.append({"key": name, **_routing(index_TK, len(own)), **_guessed(router, before, index_TK)})
        before = x_TH
    return found


def _routing(index_TK: torch.Tensor, experts: int) -> dict[str, Any]:
    chosen = index_TK.shape[-1]
    most = torch.bincount(index_TK.flatten(), minlength=experts).topk(chosen).indices.expand_as(index_TK)
    last = _recall(index_TK[:-1], index_TK[1:])
    return {"experts": experts, "chosen": chosen, "usual": _recall(most, index_TK), "last": last}


def _guessed(router: LinearRouter | None, x_TH: torch.Tensor | None, index_TK: torch.Tensor) -> dict[str, Any]:
    if router is None or x_TH is None:
        return {}
    few = router.chosen
    guesses = {n: replace(router, chosen=n) for n in (few, few + 1, 2 * few) if n < len(router.weight)}
    return {"guessed": {str(n): _recall(guess.choose(x_TH), index_TK) for n, guess in guesses.items()}}


def _recall(guess_TG: torch.Tensor, index_TK: torch.Tensor) -> float:
    """The share of ``index_TK`` that is in the rows of ``guess_TG``."""
    return float((guess_TG[:, :, None] == index_TK[:, None, :]).any(1).float().mean())


def _left_out(model: Any, sites: list[FFNSite], ids_NT: torch.Tensor) -> dict[str, dict[str, float]]:
    """By :data:`LEAST`, the share of choices with less of their token's weight than that (``choices``), and by what
    part the loss on ``ids_NT`` grows without them: the other weights as they are (``kept``), or ``scaled`` to the same
    sum.
    """
    modules, batches = modules_of(sites), list(ids_NT.split(_BATCH))
    few, all_choices = 0, 0

    def without(least: float, scaled: bool, count: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            nonlocal few, all_choices
            x_TH, index_TK, routing_TK = Routed.of(args, kwargs, count)
            sum_T1 = routing_TK.sum(-1, keepdim=True)
            few_TK = routing_TK < least * sum_T1
            few, all_choices = few + int(few_TK.sum()), all_choices + few_TK.numel()
            rest_TK = routing_TK.masked_fill(few_TK, 0)
            return (x_TH, index_TK, rest_TK * (sum_T1 / rest_TK.sum(-1, keepdim=True)) if scaled else rest_TK), {}

        return hook

    def loss(least: float, scaled: bool) -> float:
        hooks = [
            model.get_submodule(name).register_forward_pre_hook(without(least, scaled, len(own)), with_kwargs=True)
            for name, own in modules.items()
        ]
        try:
            return nats_per_token(model, batches)
        finally:
            for hook in hooks:
                hook.remove()

    whole = nats_per_token(model, batches)
    found = {}
    for least in LEAST:
        few, all_choices = 0, 0
        kept, scaled = (loss(least, how) / whole - 1 for how in (False, True))
        found[f"{least:g}"] = {"choices": few / all_choices, "kept": kept, "scaled": scaled}
    return found


def _look_ahead(model: Any, tokenizer: Any, device: str, method: str, share: float) -> dict[str, Any]:
    ways: dict[str, dict[str, Any]] = {"off": {}, "on": {"lookahead": True}}
    with tempfile.TemporaryDirectory() as work:
        folder = packed(model, tokenizer, Path(work), Config(method=method))
        found, gains = over_store(folder, tokenizer, device, share, ways)
    gain = statistics.median(gains["on"])
    return {"method": method, **found, "gain": round(gain, 3), "gain_spread": spread(gains["on"])}


def packed(model: Any, tokenizer: Any, work: Path, config: Config, **found: Any) -> Path:
    """A store of ``model``, which is changed, in ``work``; ``found``: statistics and predictors, if it has them."""
    text = common.stdlib_sample("train", tokenizer, config.calibration_tokens)
    torch_pi2.save(torch_pi2.optimize(model, text, config, tokenizer=tokenizer, **found), work / "model")
    torch_pi2.pack(work / "model", work / "store")
    return work / "store"


def over_store(
    folder: Path,
    tokenizer: Any,
    device: str,
    share: float,
    ways: Mapping[str, Mapping[str, Any]],
    begin: Callable[[str, Any], None] = lambda name, model: None,
    trust_remote_code: bool = False,
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Held-out text, decoded over the store in ``folder`` with the settings of reading of each way in alternation, each
    over a cache of its own; and how many times as fast as the first each other way was, by round. ``begin`` is called
    with the name of a way and its model, before anything is read.
    """
    tokens = _WARM_UP + _ROUNDS * _DECODED
    text = common.stdlib_sample("heldout", tokenizer, tokens)
    ids_T = torch.tensor(tokenizer(text, verbose=False)["input_ids"][:tokens])
    rooms = Rooms(folder, tokens)

    def begun(name: str) -> tuple[Any, Decoder]:
        # From the page cache: this machine's drive must not be slower than the one that is simulated.
        config = OffloadConfig(device=device, direct=False, **ways[name])
        given: dict[str, Any] = {"offload": config, "context": tokens, "trust_remote_code": trust_remote_code}
        model = torch_pi2.load(folder, budget=rooms.budget(config, share), **given)
        begin(name, model)
        return model, _decoder(model, ids_T)

    decoders = {name: begun(name) for name in ways}

    def decode(name: str, index: int) -> tuple[list[float], Mapping[str, int]]:
        stored, decoder = decoders[name]
        stored.torch_pi2.store.stats(reset=True)
        first = _WARM_UP + index * _DECODED
        ends = [time.perf_counter()]
        for token in ids_T[first : first + _DECODED]:
            decoder.step(token.view(1, 1))
            ends.append(time.perf_counter())
        return [end - start for start, end in pairwise(ends)], stored.torch_pi2.store.stats()

    rounds = alternate(list(decoders), _ROUNDS, decode)
    reads = next(iter(decoders.values()))[0].torch_pi2.store.describe()
    modes = {name: _figures(found) for name, found in rounds.items()}
    seconds = {name: [sum(steps) for steps, _ in found] for name, found in rounds.items()}
    about = {"simulated": device, "reads": reads, "ffn_in_memory": share}
    return {**about, "modes": modes}, over(seconds, next(iter(ways)))


def _decoder(model: Any, ids_T: torch.Tensor) -> Decoder:
    decoder = Decoder(model, max_tokens=len(ids_T))
    decoder.prompt(ids_T[None, : _WARM_UP // 2])
    for token in ids_T[_WARM_UP // 2 : _WARM_UP]:
        decoder.step(token.view(1, 1))
    return decoder


def _figures(rounds: list[tuple[list[float], Mapping[str, int]]]) -> dict[str, Any]:
    """Of each way; ``step_ms``: the median step of each round, which other work on the machine disturbs least."""
    seconds, stats = [sum(steps) for steps, _ in rounds], [s for _, s in rounds]
    tokens, rates = len(rounds) * _DECODED, [_DECODED / s for s in seconds]
    sums = {key: sum(s[key] for s in stats) / tokens for key in ("wanted", "hits", "guessed", "used")}
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "spread": spread(rates, 1),
        "step_ms": [round(1e3 * statistics.median(steps), 4) for steps, _ in rounds],
        **of_store(stats, tokens, sum(seconds), torch.get_num_threads()),
        "waited_per_token": round(sums["wanted"] - sums["hits"] - sums["used"], 1),
        "used_per_token": round(sums["used"], 1),
        "unused_per_token": round(sums["guessed"] - sums["used"], 1),
    }


def render(result: dict[str, Any]) -> str:
    if any("experts" in layer for layer in result["layers"]):
        return _render_mixtures(result)

    def cell(layer: dict[str, Any], name: str) -> str:
        found = layer.get(name)
        return "" if found is None else f"{found['recall']:.1%} by {found['active']:.1%}"

    names = {"own": "its own", "attention": "attention's", "before": "the FFN's before", "lookahead": "look-ahead"}
    rows = [(layer["key"], *(cell(layer, name) for name in names)) for layer in result["layers"]]
    about = f"{result['model']}, {result['tokens']} tokens, rank {result['rank']}: recall by share of cold neurons"
    return f"{about}\n{common.table(('input', *names.values()), rows)}"


def mixture_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Cells of each mixture, for tables: key, choices, and shares of them that are found."""
    return [
        [
            layer["key"],
            f"{layer['chosen']} of {layer['experts']}",
            *(f"{layer[name]:.1%}" for name in ("usual", "last")),
            ", ".join(f"{share:.1%} of {n}" for n, share in layer.get("guessed", {}).items()),
        ]
        for layer in result["layers"]
        if "experts" in layer
    ]


def left_out_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Cells of experts of less weight than so much, for tables: shares of choices, and what they cost."""
    found = result.get("left_out", {})
    return [
        [f"{float(least):.0%}", f"{of['choices']:.1%}", *(f"{of[how]:+.2%}" for how in ("kept", "scaled"))]
        for least, of in found.items()
    ]


def store_rows(store: Mapping[str, Any], way: str = "look-ahead") -> list[list[str]]:
    """Cells of decoding in each way, for tables."""
    modes = store.get("modes", {})
    return [
        [
            f"{way} {name}",
            f"{m['tokens_per_s']:.1f} ({m['spread'][0]:.1f} to {m['spread'][1]:.1f})",
            f"{m['io_critical_share']:.1%}",
            f"{m['bytes_read_per_token'] / 1e6:.2f} MB",
            f"{m['reads_per_token']:.1f}",
            f"{m['unused_per_token']:.1f}",
        ]
        for name, m in modes.items()
    ]


def _render_mixtures(result: dict[str, Any]) -> str:
    text = f"{result['model']}, {result['tokens']} tokens: shares of the experts that are chosen\n"
    text += common.table(MIXTURE, [tuple(row) for row in mixture_rows(result)])
    text += f"\n\nheld-out text\n{common.table(LEFT_OUT, [tuple(row) for row in left_out_rows(result)])}"
    if "store" not in result:
        return text
    store = result["store"]
    about = f"{store['reads']}, {store['ffn_in_memory']:.0%} of neurons in memory, {store['method']}"
    text += f"\n\n{about}\n{common.table(OVER_STORE, [tuple(row) for row in store_rows(store)])}"
    low, high = store["gain_spread"]
    return f"{text}\nlook-ahead: {store['gain']:.2f} times ({low:.2f} to {high:.2f}) the tokens/s"
