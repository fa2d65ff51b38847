"""Sizes of a layer's attention for Qualcomm's NPU, as the compiler states them: steps of 1 and 4, and a piece of 128.

    python -m benchmarks.qnn_attention out.json --socs SM8550,SM8650,SM8750,SM8845,SM8850 --room 1024

The attention of Mistral-7B (hidden size 4096, 32 heads, 8 of keys) with random weights; no speed is measured, as there
is no NPU. Needs the extra ``qnn``.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from torch_pi2.base.files import atomic_write
from torch_pi2.machine.process import describe

GRAPHS = {"decode_b1": (1, 1), "decode_b4": (4, 1), "prefill_128": (1, 128)}


def measure(soc: str, hidden: int, room: int, precision: str, block: int) -> dict[str, Any]:
    """What :func:`torch_pi2.export.qnn.lower_parts` reports of it, and its context over its unique weights."""
    from transformers import MistralConfig, MistralForCausalLM

    from torch_pi2.export import qnn
    from torch_pi2.export.decoder import Lanes
    from torch_pi2.export.hot_attention import AttentionPart, attention_calls, samples_of

    heads = hidden // 128
    config = MistralConfig(
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        vocab_size=64,
        sliding_window=None,
        max_position_embeddings=room,
    )
    torch.manual_seed(0)
    lanes = Lanes(MistralForCausalLM(config).eval().requires_grad_(False), 4, room)
    (call,) = attention_calls(lanes)
    part = AttentionPart(call)
    states = [torch.randn(1, 128, width) for width in call.widths]
    samples = [] if precision == "fp16" else samples_of(part, [states])
    graphs = {name: call.shapes(*sizes) for name, sizes in GRAPHS.items()}
    inputs = qnn.PartInputs(samples, graphs, call.open, block)
    program = qnn.open_program(part, qnn.zeros(call.shapes(2, 3)), call.open)
    settings = qnn.Settings(soc, precision=precision, outliers=0)
    report = qnn.lower_parts([("attention0", program, inputs)], settings).report["attention0"]
    unique = sum(p.numel() for p in part.parameters()) * settings.part_bits(block) // 8
    return {"soc": soc, "unique_bytes": unique, "context_over_unique": report["context_bytes"] / unique, **report}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("--socs", default="SM8650", help="comma-separated (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=4096, help="a multiple of 128 (default %(default)s)")
    parser.add_argument("--room", type=int, default=1024, help="tokens of a lane (default %(default)s)")
    parser.add_argument("--precision", default="w4a16")
    parser.add_argument("--block", type=int, default=0, help="groups of 4-bit weights; 0: 8 bits (default %(default)s)")
    args = parser.parse_args(argv)
    found = [measure(soc, args.hidden, args.room, args.precision, args.block) for soc in args.socs.split(",")]
    about = {"what": "qnn_attention", "machine": describe(), "hidden": args.hidden, "room": args.room}
    atomic_write(args.out, json.dumps({**about, "precision": args.precision, "socs": found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
