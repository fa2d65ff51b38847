"""Sizes of a layer's hot part for Qualcomm's NPU, as the compiler states them: nine graphs, one copy of the weights.

    python -m benchmarks.qnn out.json --soc SM8650 --hidden 4096

Random weights; no speed is measured, as there is no NPU. Needs the extra ``qnn``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch

from torch_pi2.base.files import atomic_write
from torch_pi2.machine.process import describe

CHUNK, CHUNKS, BATCHES = 512, (1, 2, 4), (1, 2, 4)


def measure(soc: str, hidden: int, precision: str, blocks: int) -> dict[str, Any]:
    """What :func:`torch_pi2.export.qnn.lower_hot` reports of a gated layer, and its context over its unique weights."""
    from torch_pi2.export import qnn
    from torch_pi2.export.hot import HotChunks

    random = torch.Generator().manual_seed(0)
    neurons = CHUNK * max(CHUNKS)
    site: Any = SimpleNamespace(activation="relu", activation_on_up=False, gated=True)
    rows = [torch.randn((neurons, hidden), generator=random) / hidden**0.5 for _ in range(3)]
    graphs = {f"hot{k}_b{b}": qnn.Graph((b, 1), [k]) for k in CHUNKS for b in BATCHES}
    settings = qnn.Settings(soc, precision=precision, blocks=blocks)
    lowered = qnn.lower_hot(
        [HotChunks(site, rows, chunk=CHUNK)], [torch.randn((64, hidden), generator=random)], graphs, settings
    )
    layer = lowered.report["layer0"]
    unique = round(neurons * 3 * hidden * settings.bits / 8)
    ratio = layer["context_bytes"] / unique
    return {
        "what": "qnn",
        "machine": describe(),
        "hidden": hidden,
        "unique_bytes": unique,
        "context_over_unique": ratio,
        **asdict(settings),
        **lowered.about,
        "layers": [layer],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("--soc", default="SM8650")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--precision", default="w4a16")
    parser.add_argument("--blocks", type=int, default=16)
    args = parser.parse_args(argv)
    found = measure(args.soc, args.hidden, args.precision, args.blocks)
    atomic_write(args.out, json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
