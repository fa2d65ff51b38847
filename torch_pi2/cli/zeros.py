"""Measure how many neurons of each feed-forward layer are zero, or nearly, on a text.

MODEL stays as it is. Float weights larger than the free memory are read layer by layer.
"""

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.base.progress import phase
from torch_pi2.cli import common, inspect, models, verdict
from torch_pi2.errors import ArtifactError

_SHARES = ("zeros", "near_zeros", "below_gate")
EXAMPLE = "torch-pi2 zeros model.gguf --text notes.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=common.RUNNABLE)
    common.add_text(parser)
    add("--tokens", type=common.positive, default=4096, help="tokens of the text, rounded up to whole batches")
    near = "share of the norm of a token's neurons that its near zeros have together, at most"
    add("--near", type=float, default=0.01, metavar="SHARE", help=near)
    common.add_loading(parser)
    common.add_mapped(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2
    from torch_pi2.rewrite.skeleton import model_config
    from torch_pi2.store.trust import has_tokenizer

    if Path(args.model).is_dir() and not has_tokenizer(Path(args.model)):  # perhaps it is no model at all
        model_config(Path(args.model), trust_remote_code=args.trust_remote_code)
    tokenizer = models.load_tokenizer(args)
    text, model = common.text_of(args, tokenizer, args.tokens), _loaded(args)
    how = {"tokenizer": tokenizer, **common.given(args, "tokens", "near")}
    found = torch_pi2.zeros(model, text, **how, progress=not args.quiet)
    about = {"model": str(args.given), **common.given(args, "text", "near"), "tokens": found.tokens}
    means = {share: found.mean(share) for share in _SHARES}
    return about | {"layers": [vars(layer) for layer in found.layers], "left": found.left, **means}


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


def render(result: dict[str, Any]) -> str:
    layers = [layer | {f"{name}_share": layer[name] for name in _SHARES} for layer in result["layers"]]
    lines = [
        common.records(layers, ("key", "form", "neurons", "calls", *(f"{name}_share" for name in _SHARES))),
        *inspect.stays_dense(result["left"]),
        "near zeros: of the neurons with the smallest values, as many as have together at most "
        f"{common.percent(result['near'])} of the norm of a token's; below gate: the same of those with the smallest "
        "gates, which is what a threshold skips",
        ", ".join(f"{name.replace('_', ' ')} {common.percent(result[name])}" for name in _SHARES)
        + f" of all neurons, {result['tokens']} tokens",
    ]
    if any(layer["method"] == "threshold" for layer in result["layers"]):
        lines.append("a threshold can skip more for more loss: torch-pi2 optimize --max-loss finds out how much")
    return "\n".join(lines)
