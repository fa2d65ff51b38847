"""Predictors that see a trained model's layer before it is reached: what reading ahead of time could go by.

Of each layer, at one recall, the share of its cold neurons that a predictor of its own input wants, one of the input of
attention before it, and one of the input of the feed-forward layer before that; and the recall that the layer's own
predictor has on this last input, which ``OffloadConfig.lookahead`` goes by.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.figures import at_least
from torch_pi2.base import process as machine
from torch_pi2.base.evaluating import evaluating
from torch_pi2.cli import common
from torch_pi2.fitting.train import calibrate, measure, train_matrices
from torch_pi2.graph.find import find_sites
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.profiling.samples import Samples
from torch_pi2.spec.config import Config
from torch_pi2.spec.site import FFNSite
from torch_pi2.spec.stats import pack_bits

MODEL = Path(__file__).resolve().parent.parent / "examples" / "models" / "drelu-stdlib-5m"
_LENGTH, _BATCH = 128, 8
#: Tokens of which predictors are fitted, thresholds set, and figures taken: of ten sequences so many.
_PARTS = {"fit": 7, "calibrate": 2, "evaluate": 1}
INPUTS = ("own", "attention", "before")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=MODEL, metavar="DIR", help="of a Llama in floats (default: the trained model)")
    add("--tokens", type=common.positive, default=26_880, metavar="N", help="of the standard library")
    add("--rank", type=common.positive, default=80, metavar="R", help="of all predictors")
    add("--recall", type=common.probability, default=0.85, metavar="R", help="of all predictors")
    add("--steps", type=common.positive, default=500, metavar="N", help="of the optimiser")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")


def run(
    folder: str | Path = MODEL,
    *,
    tokens: int = 26_880,
    rank: int = 80,
    recall: float = 0.85,
    steps: int = 500,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Fit predictors of all inputs to every layer of the model in ``folder``.

    Args: the options of the same names.

    Returns:
        In ``layers`` of each its key, and by input (:data:`INPUTS`, and ``lookahead``) ``recall`` and ``active``, the
        share of cold neurons that are predicted; of the first layer no inputs of one before it.

    Raises:
        ConfigError: a setting makes no sense. Pi2Error: what loading models raises.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    at_least(10 * _LENGTH, tokens=tokens)
    trust = trust_remote_code or Path(folder) == MODEL  # our own model brings its code
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust, dtype=torch.float32)
    text = tokenizer(common.stdlib_sample("train", tokenizer, tokens), verbose=False)["input_ids"]
    ids_NT = torch.tensor(text[: tokens // _LENGTH * _LENGTH]).view(-1, _LENGTH)
    sites = find_sites(model)
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


def render(result: dict[str, Any]) -> str:
    def cell(layer: dict[str, Any], name: str) -> str:
        found = layer.get(name)
        return "" if found is None else f"{found['recall']:.1%} by {found['active']:.1%}"

    names = {"own": "its own", "attention": "attention's", "before": "the FFN's before", "lookahead": "look-ahead"}
    rows = [(layer["key"], *(cell(layer, name) for name in names)) for layer in result["layers"]]
    about = f"{result['model']}, {result['tokens']} tokens, rank {result['rank']}: recall by share of cold neurons"
    return f"{about}\n{common.table(('input', *names.values()), rows)}"
