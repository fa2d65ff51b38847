"""Record how often each FFN neuron fires on calibration text, and write stats.safetensors.

Several processes can share the text: `torchrun --nproc-per-node N -m torch_pi2 profile ...`. The result is the same as
that of one process with as many threads.
"""

from __future__ import annotations

import argparse
from typing import Any

from torch_pi2.cli import common
from torch_pi2.cli.processes import together

EXAMPLE = "torch-pi2 profile my-model --out my-stats --tokens 20000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    common.add_mapped(parser)
    common.add_out(parser)
    common.add_text(parser)
    common.add_config(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2
    from torch_pi2.cli.inspect import describe
    from torch_pi2.distributed.ranks import Ranks

    common.check_out(args.out)
    with together(args):
        config, model, tokenizer, text = common.calibration(args)
        how = {"tokenizer": tokenizer, "config": config, "progress": not args.quiet}
        stats = torch_pi2.profile(model, text, shared=True, **how)
        Ranks(together=True).first(lambda: stats.save(args.out))
    return {"out": str(args.out), **describe(args.out)}


def render(result: dict[str, Any]) -> str:
    from torch_pi2.cli.inspect import render as render_folder

    return f"{render_folder(result)}\nwrote {result['out']}"
