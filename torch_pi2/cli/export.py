"""Write a model as a bundle: a folder that ExecuTorch runs, on this machine or on a phone.

MODEL is a folder written by `torch-pi2 optimize`, quantised or not, or a Hugging Face checkpoint of a ReLU-family
model, which then gets the lossless exact gate.
"""

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.cli import common, models
from torch_pi2.formats import ACTIVATIONS
from torch_pi2.types.config import HOT_ATTENTION, KV_FORMATS, LINEARS

EXAMPLE = "torch-pi2 export my-sparse-model --out bundle --target xnnpack --max-tokens 512"
#: Tokens of ``--text`` for calibration.
_TOKENS = 8704


def _chunks(text: str) -> dict[int, int]:
    pairs = (part.partition("=") for part in text.split(","))
    return {common.positive(batch): int(chunks) for batch, _, chunks in pairs}


_CHUNKS = common.named("comma-separated list of batch=chunks", _chunks, "B=CHUNKS,...")
_BLOCKS = common.named("auto or size of a group", lambda text: text if text == "auto" else int(text), "auto|0|16|32|64")
_PIECES = common.named("none or sizes", lambda text: () if text == "none" else common.sizes(text), "none|N,...")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    common.add_model(parser)
    common.add_out(parser)
    add("--target", default="xnnpack", metavar="xnnpack|qnn:SOC", help="qnn: SM8550, SM8650, SM8750, SM8845 or SM8850")
    add("--max-tokens", type=common.positive, default=512, help="tokens of prompt and answer together")
    add("--max-prompt", type=common.positive, default=256, help="prompt tokens read at once")
    add("--batches", type=common.sizes, default=(1, 2, 4), help="sequences decoded together")
    add("--linears", choices=LINEARS, default="float32", help="linear layers outside FFNs; int8, int4: lossy")
    add("--budget", metavar="BYTES", help="memory for a packed MODEL, such as 2GiB (default: all of it)")
    add("--kv", choices=KV_FORMATS, default="float32", help="format of keys and values; float16, int8: lossy")
    inputs = "of a model with int4 or int8 weights: round its layers' inputs, too (lossy; default for imports of GGUF)"
    add("--activations", choices=ACTIVATIONS, help=inputs)
    hot = "chunks of 512 neurons on the accelerator, by batch size (default: from the statistics; xnnpack: none)"
    add("--hot", type=_CHUNKS, help=hot)
    pieces = "pieces of prompts that the accelerator reads whole (default: 128 on an NPU that holds all layers)"
    add("--hot-prompts", type=_PIECES, help=pieces)
    attention = "whether the accelerator computes attention in pieces of prompts (default: on an NPU that holds it)"
    add("--hot-attention", choices=HOT_ATTENTION, help=attention)
    group = parser.add_argument_group("hot neurons on the NPU (lossy)")
    add = group.add_argument
    add("--precision", choices=("w4a16", "w8a16", "fp16"), default="w4a16", help="weights and inputs there")
    blocks = "with w4a16, weights of a group that has a scale; 0: one scale for each output channel; auto: 16"
    add("--blocks", type=_BLOCKS, default="auto", help=blocks)
    how = "with w4a16, weights to nearest, or by what outputs lose on --text, which takes longer"
    add("--quantization", choices=("rtn", "gptq"), default="rtn", help=how)
    copies = "a copy per batch size: for Qualcomm's emulator, not for phones"
    add("--no-weight-sharing", action="store_true", help=copies)
    common.add_text(group)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2
    from torch_pi2.cli.doctor import check_target
    from torch_pi2.export.api import export
    from torch_pi2.export.manifest import Manifest
    from torch_pi2.export.qnn import problems as problems_of

    common.check_out(args.out)
    check_target(args.target)
    kind, _, soc = args.target.partition(":")
    if kind == "qnn" and (problems := problems_of(soc)):
        raise problems[0]
    folder, tokenizer = Path(args.model), None
    if (folder / "pi2").is_dir():
        model = models.load_sparse(argparse.Namespace(**vars(args), context=64))  # enough for export's checks
    else:
        model = torch_pi2.optimize(models.load_dense(args))
    # a folder without a tokenizer (synthetic models) becomes a bundle that takes token ids
    if not folder.is_dir() or any(folder.glob("tokenizer*")):
        tokenizer = models.load_tokenizer(args)
    calibrated = args.target != "xnnpack" and args.precision != "fp16"
    names = ("target", "max_tokens", "max_prompt", "batches", "linears", "kv", "hot", "hot_prompts", "hot_attention")
    how: Any = {**common.given(args, *names, "precision", "blocks", "quantization"), "progress": not args.quiet}
    how["calibration"] = common.text_of(args, tokenizer, _TOKENS) if calibrated else None
    export(model, args.out, tokenizer=tokenizer, weight_sharing=not args.no_weight_sharing, **how)
    manifest = Manifest.load(args.out).to_json()
    return {"out": str(args.out), "manifest": manifest}


def render(result: dict[str, Any]) -> str:
    manifest = result["manifest"]
    rows = [(name, common.size(entry["bytes"])) for name, entry in manifest["files"].items()]
    lossy = "".join(f"\nlossy: {text}" for text in manifest["lossy"])
    methods, how = ", ".join(manifest["methods"]), f"run it: torch-pi2 run {result['out']} --prompt '...'"
    done = f"{result['out']}: {manifest['kind']} for {manifest['target']}, methods {methods}{lossy}"
    return f"{common.table(('file', 'bytes'), rows)}\n{done}\n{how}"
