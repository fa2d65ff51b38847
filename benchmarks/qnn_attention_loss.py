"""What attention, and the last linear layer, on the NPU cost a trained model, by the bits of their weights.

    python -m benchmarks.qnn_attention_loss out.json

Quantised as they are compiled, with ranges from other text than what is scored, and computed in PyTorch: nats per token
of held-out text, read in pieces over the keys and values of the pieces before. Needs executorch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from torch_pi2.base.files import atomic_write
from torch_pi2.base.process import describe

MODEL = Path(__file__).resolve().parent.parent / "examples" / "models" / "drelu-stdlib-5m"
#: Precision and size of groups of weights. Bundles have the first, or the last where memory is short.
KINDS = {"8 bits": ("w8a16", 0), "4 bits": ("w4a16", 0), "4 bits in groups of 32": ("w4a16", 32)}
ROOM, PIECE = 256, 64


def measure(folder: Path, tokens: int) -> dict[str, Any]:
    """Nats per token of the model in ``folder``, and how much more with parts of each of :data:`KINDS`."""
    import transformers

    from torch_pi2.cli.common import stdlib_sample
    from torch_pi2.export import qnn
    from torch_pi2.export.calibrate import calls_of
    from torch_pi2.export.decoder import Lanes
    from torch_pi2.export.hot_attention import AttentionPart, HeadPart, samples_of, states_of, switched
    from torch_pi2.export.qnn.quantize import pt2e

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    train, text = (stdlib_sample(split, tokenizer, tokens) for split in ("train", "heldout"))
    ids_T = tokenizer(text, return_tensors="pt")["input_ids"][0]
    windows = [ids_T[at : at + ROOM + 1] for at in range(0, min(tokens, len(ids_T)) - ROOM, ROOM)]
    lanes = Lanes(model.eval().requires_grad_(False), 1, ROOM)
    switches, head = switched(lanes)
    assert head is not None
    wholes = [switch.whole for switch in switches]
    seen: list[Any] = calls_of(model, [*wholes, head.whole], states_of, train, tokenizer)

    @torch.no_grad()
    def nats() -> float:
        total = 0.0
        for window in windows:
            for at in range(0, ROOM, PIECE):
                positions = torch.arange(at, at + PIECE)[None]
                ids_1T, zero = window[None, at : at + PIECE], torch.zeros(1, dtype=torch.int64)
                logits = lanes.run(ids_1T, positions, zero, lambda cache: cache, torch.arange(PIECE))
                total += float(F.cross_entropy(logits[0], window[at + 1 : at + PIECE + 1], reduction="sum"))
        return total / (len(windows) * ROOM)

    with torch.no_grad():
        parts: list[tuple[Any, Any, Any, Any]] = []
        for i, switch in enumerate(switches):
            part, call = AttentionPart(switch.call), switch.call
            parts.append((part, qnn.zeros(call.shapes(2, 3)), call.open, samples_of(part, seen[i])))
        width = switches[0].call.widths[0]
        parts.append((HeadPart(head.whole), (torch.zeros(2, 3, width),), [(0, 1)], [tuple(x) for x in seen[-1]]))
    floats, kinds = nats(), {}
    for kind, (precision, block) in KINDS.items():
        settings, made = qnn.Settings("SM8650", precision), []
        for part, example, dims, samples in parts:
            program: Any = qnn.open_program(part, example, dims).module(check_guards=False)
            made.append(pt2e(program, samples, settings, block))
        changes = {}
        for name, attention, last in (("attention", True, False), ("last layer", False, True), ("both", True, True)):
            for switch, quantized in zip(switches, made):
                switch.part = quantized if attention else None
            head.part = made[-1] if last else None
            changes[name] = nats() / floats - 1
        kinds[kind] = changes
    about = {"what": "qnn-attention-loss", "machine": describe(), "model": folder.name}
    return {**about, "heldout_tokens": len(windows) * ROOM, "nats_per_token": floats, "kinds": kinds}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("--model", type=Path, default=MODEL, help="a Hugging Face decoder (default: the trained one)")
    parser.add_argument("--tokens", type=int, default=4096, help="of held-out text (default %(default)s)")
    args = parser.parse_args(argv)
    os.environ.setdefault("QNN_SDK_ROOT", "")  # the quantiser would download an SDK, and needs none
    atomic_write(args.out, json.dumps(measure(args.model, args.tokens), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
