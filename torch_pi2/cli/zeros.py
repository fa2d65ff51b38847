"""Measure how many neurons of each feed-forward layer are zero, or nearly, on a text, and what skipping them saves.

MODEL stays as it is. Float weights larger than the free memory are read layer by layer. The last line is one of a
Markdown table, such as that of docs/MODELS.md.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from torch_pi2.base.progress import phase
from torch_pi2.cli import common, inspect, models, verdict
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.types.config import WEIGHTS

_SHARES = ("zeros", "near_zeros", "below_gate")
EXAMPLE = "torch-pi2 zeros model.gguf --text notes.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=common.RUNNABLE)
    common.add_text(parser)
    add("--tokens", type=common.positive, default=4096, help="tokens of the text, rounded up to whole batches")
    near = "share of the norm of a token's neurons that its near zeros have together, at most"
    add("--near", type=float, default=0.01, metavar="SHARE", help=near)
    add("--weights", choices=WEIGHTS, default="int4", help="format that is assumed for bytes and speed")
    add("--hardware", metavar="NAME", help="profile to predict speed with (default: measured, if there is one)")
    common.add_loading(parser)
    common.add_mapped(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2
    from torch_pi2.machine.find import find_hardware
    from torch_pi2.planner.zeros import gains
    from torch_pi2.rewrite.skeleton import model_config
    from torch_pi2.store.trust import has_tokenizer

    hardware, unknown = None, None
    try:
        hardware = find_hardware(args.hardware or "measured")
    except ConfigError as error:
        if args.hardware is not None:
            raise
        unknown = f"speed is not predicted, as this machine was not measured. {error.fix}"
    if Path(args.model).is_dir() and not has_tokenizer(Path(args.model)):  # perhaps it is no model at all
        model_config(Path(args.model), trust_remote_code=args.trust_remote_code)
    tokenizer = models.load_tokenizer(args)
    text, model = common.text_of(args, tokenizer, args.tokens), _loaded(args)
    how = {"tokenizer": tokenizer, **common.given(args, "tokens", "near")}
    found = torch_pi2.zeros(model, text, **how, progress=not args.quiet)
    layers = [{name: value for name, value in vars(layer).items() if name != "site"} for layer in found.layers]
    about = {"model": str(args.given), **common.given(args, "text", "near", "weights")}
    about |= {"tokens": found.tokens, "asked_tokens": args.tokens}
    result = about | {"layers": layers, "left": found.left, **{share: found.mean(share) for share in _SHARES}}
    result["gains"] = gains(model, found.layers, hardware, args.weights)
    return result | {"hardware": hardware and hardware.name, "not_predicted": unknown, "row": _row(result)}


def _loaded(args: argparse.Namespace) -> Any:
    """The dense model, mapped if it does not fit. Raises ArtifactError: nor can it be, as its weights are quantised."""
    import torch_pi2
    from torch_pi2.eval.verdict import weight_bytes
    from torch_pi2.rewrite.skeleton import skeleton
    from torch_pi2.store.storefile import weights_path

    folder = Path(args.model)
    if weights_path(folder / "pi2") is None:
        if folder.is_dir() and (why := verdict.no_memory(weight_bytes(folder))) and not args.mapped:
            phase(f"layer by layer: {why}")
            args.mapped = True
        args.out = None
        return models.load_dense(args)
    import torch

    with torch.device("meta"):
        meta = skeleton(folder, trust_remote_code=args.trust_remote_code)
    if why := verdict.no_memory(weight_bytes(folder) + sum(p.nbytes for p in meta.parameters())):
        fix = "Name its float checkpoint, which is read layer by layer."
        raise ArtifactError(f"{args.given}, dequantised", expected="room for it", found=why, fix=fix)
    phase(f"load {args.model}")
    return torch_pi2.load_dense(folder, dtype=models.dtype_of(args), trust_remote_code=args.trust_remote_code)


def _row(result: dict[str, Any]) -> str:
    """A line of a Markdown table: model, layers, zeros, near zeros, and what measured them."""

    def sizes(layer: dict[str, Any]) -> str:
        experts = "" if layer["experts"] == 1 else f"{layer['experts']} experts "
        return f"{experts}`{layer['form']}`, {layer['hidden']} → {layer['neurons']}"

    layers = "; ".join(f"{count} × {text}" for text, count in Counter(map(sizes, result["layers"])).items())
    shares = []
    for share in _SHARES[:2]:
        every = [layer[share] for layer in result["layers"]]
        ends = f" ({common.percent(min(every))} to {common.percent(max(every))})" if len(every) > 1 else ""
        shares.append(f"{common.percent(result[share])}{ends}")
    name = Path(result["model"]).resolve().name
    command = f"torch-pi2 zeros {name} --text {Path(result['text']).name}"
    for option, usual in {"near": 0.01, "asked_tokens": 4096}.items():
        command += "" if result[option] == usual else f" --{option.removeprefix('asked_')} {result[option]:g}"
    return f"| {name} | {layers} | {' | '.join(shares)} | measured: `{command}`, {result['tokens']:,} tokens |"


def render(result: dict[str, Any]) -> str:
    layers = [layer | {f"{name}_share": layer[name] for name in _SHARES} for layer in result["layers"]]
    lines = [
        common.records(layers, ("key", "form", "neurons", "calls", *(f"{name}_share" for name in _SHARES))),
        *inspect.stays_dense(result["left"]),
        "near zeros: of the neurons with the smallest values, as many as have together at most "
        f"{common.percent(result['near'])} of the norm of a token's; below gate: the same of those with the smallest "
        "gates, which is what a threshold skips",
        f"\nexpected for one token, {result['weights']} weights in memory:",
        common.records(result["gains"], ("method", "lossless", "ffn_bytes", "bytes", "tokens_per_s")),
        *([result["not_predicted"]] if result["not_predicted"] else []),
    ]
    if any(layer["method"] == "threshold" for layer in result["layers"]):
        lines.append("a threshold can skip more for more loss: torch-pi2 optimize --max-loss finds out how much")
    return "\n".join([*lines, "", result["row"]])
