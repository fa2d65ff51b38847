"""What attention, and the last linear layer, on the NPU cost a trained model, by the bits of their weights.

    python -m benchmarks.qnn_attention_loss out.json --emulator SM8650

Quantised as they are compiled, with ranges from other text than what is scored, and computed in PyTorch: nats per token
of held-out text, read in pieces over the keys and values of the pieces before. Needs executorch. With ``--emulator``
what bundles have is compiled, too, and reads the first of that text on Qualcomm's x86 emulator of the NPU (needs the
extra ``qnn``): its loss, and the error of each layer on what it sees there, against PyTorch and against float32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.emulator import Emulated, weights_alone
from torch_pi2.base.files import atomic_write
from torch_pi2.machine.process import describe

MODEL = Path(__file__).resolve().parent.parent / "examples" / "models" / "drelu-stdlib-5m"
#: Precision, size of groups of weights, and whether those of attention are chosen by GPTQ.
KINDS = {
    "8 bits": ("w8a16", 0, False),
    "4 bits": ("w4a16", 0, False),
    "4 bits in groups of 32": ("w4a16", 32, False),
    "4 bits, GPTQ": ("w4a16", 0, True),
    "4 bits in groups of 32, GPTQ": ("w4a16", 32, True),
}
#: Those that bundles have: the first, or the last where memory is short.
COMPILED = ("8 bits", "4 bits in groups of 32, GPTQ")
ROOM, PIECE = 256, 64


@dataclass(frozen=True)
class _Part:
    """A part of the model: in floats, shapes of its inputs by sequences and tokens, open dimensions, calibration."""

    name: str
    module: nn.Module
    shapes: Callable[[int, int], Any]
    open: Any
    samples: Sequence[tuple[torch.Tensor, ...]]

    def program(self) -> torch.export.ExportedProgram:
        from torch_pi2.export import qnn

        return qnn.open_program(self.module, qnn.zeros(self.shapes(2, 3)), self.open)


class Decoder:
    """The model in ``folder``, with parts in the places of attention and of the last linear layer.

    Args:
        tokens: of held-out text that are scored, as many as whole windows hold.
    """

    def __init__(self, folder: Path, tokens: int) -> None:
        import transformers

        from torch_pi2.cli.common import stdlib_sample
        from torch_pi2.export.calibrate import calls_of
        from torch_pi2.export.decoder import Lanes
        from torch_pi2.export.hot_attention import attention_calls, head_of, states_of

        model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        train, text = (stdlib_sample(split, tokenizer, tokens) for split in ("train", "heldout"))
        ids_T = tokenizer(text, return_tensors="pt")["input_ids"][0]
        self.windows = [ids_T[at : at + ROOM + 1] for at in range(0, min(tokens, len(ids_T)) - ROOM, ROOM)]
        self._lanes = Lanes(model.eval().requires_grad_(False), 1, ROOM)
        self._calls, head = attention_calls(self._lanes), head_of(self._lanes)
        assert head is not None
        self._head: nn.Module = head
        attentions = [call.module for call in self._calls]
        seen: list[Any] = calls_of(model, [*attentions, head], states_of, train, tokenizer)
        self.parts = [*map(self._attention, self._calls, seen), self._last(seen[-1])]

    @staticmethod
    def _attention(call: Any, seen: Any) -> _Part:
        from torch_pi2.export.hot_attention import AttentionPart, part_name, samples_of

        part = AttentionPart(call)
        return _Part(part_name(call.layer), part, call.shapes, call.open, samples_of(part, seen))

    def _last(self, seen: Any) -> _Part:
        from torch_pi2.export.hot_attention import HEAD, HeadPart

        width = self._calls[0].widths[0]

        def shapes(batch: int, tokens: int) -> Any:
            return [((batch, tokens, width), torch.float32)]

        return _Part(HEAD, HeadPart(self._head), shapes, [(0, 1)], [tuple(x) for x in seen])

    @torch.no_grad()
    def nats(self, windows: Sequence[torch.Tensor], parts: Mapping[str, nn.Module]) -> float:
        """Per token of ``windows``, computed with ``parts``, by their names."""
        from torch_pi2.export.hot_attention import with_parts

        lanes, total = with_parts(self._lanes, self._calls, parts), 0.0
        for window in windows:
            for at in range(0, ROOM, PIECE):
                positions = torch.arange(at, at + PIECE)[None]
                ids_1T, zero = window[None, at : at + PIECE], torch.zeros(1, dtype=torch.int64)
                logits = lanes.run(ids_1T, positions, zero, lambda cache: cache, torch.arange(PIECE))
                total += float(F.cross_entropy(logits[0], window[at + 1 : at + PIECE + 1], reduction="sum"))
        return total / (len(windows) * ROOM)


def quantized(parts: Sequence[_Part], kind: str) -> dict[str, nn.Module]:
    """Each part in a kind of weights, by name, in PyTorch."""
    from torch_pi2.export import qnn
    from torch_pi2.export.hot_attention import HEAD
    from torch_pi2.export.qnn.quantize import held_back, pt2e

    precision, block, gptq = KINDS[kind]
    made: dict[str, nn.Module] = {}
    for part in parts:
        program: Any = part.program().module(check_guards=False)
        chosen_on = held_back(part.samples)[0] if gptq and part.name != HEAD else ()
        made[part.name] = pt2e(program, part.samples, qnn.Settings("SM8650", precision), block, chosen_on)
    return made


def measure(folder: Path, tokens: int, emulator: str | None = None, emulated: int = 0) -> dict[str, Any]:
    """Nats per token of the model in ``folder``, and how much more with parts of each of :data:`KINDS`.

    ``emulated``: of the tokens, so many are read on the emulator, too.
    """
    with torch.no_grad():
        decoder = Decoder(folder, tokens)
        floats, kinds = decoder.nats(decoder.windows, {}), {}
        for kind in KINDS:
            made = quantized(decoder.parts, kind)
            head = decoder.parts[-1].name
            attention = {name: part for name, part in made.items() if name != head}
            changes: dict[str, Any] = {}
            for name, some in (("attention", attention), ("last layer", {head: made[head]}), ("both", made)):
                changes[name] = decoder.nats(decoder.windows, some) / floats - 1
            by_weights = {name: weights_alone(part) for name, part in made.items()}
            changes["both, by weights"] = decoder.nats(decoder.windows, by_weights) / floats - 1
            if emulator is not None and kind in COMPILED:
                changes["emulator"] = _on_emulator(decoder, made, kind, emulator, emulated)
            kinds[kind] = changes
            print(kind, changes, flush=True)
    about = {"what": "qnn-attention-loss", "machine": describe(), "model": folder.name, "emulator": emulator}
    return {**about, "heldout_tokens": len(decoder.windows) * ROOM, "nats_per_token": floats, "kinds": kinds}


class _Compared(nn.Module):
    """The first of several modules; how far others are from it, on what it is given, is summed."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.all = nn.ModuleList(modules)
        self.squares = torch.zeros(len(modules), dtype=torch.float64)

    def forward(self, *inputs: torch.Tensor) -> Any:
        found, *others = (module(*inputs) for module in self.all)
        y = found[0].double()
        differences = [y, *(y - other[0].double() for other in others)]
        self.squares += torch.stack([difference.square().sum() for difference in differences])
        return found

    def errors(self) -> list[float]:
        """Of the others' first outputs, relative (L2)."""
        return [float(e) for e in (self.squares[1:] / self.squares[0]).sqrt()]


def _on_emulator(decoder: Decoder, made: Mapping[str, nn.Module], kind: str, soc: str, tokens: int) -> dict[str, Any]:
    """Loss with all parts on the emulator, beside that in floats and in PyTorch, on the first ``tokens``."""
    from torch_pi2.export import qnn

    precision, block, gptq = KINDS[kind]
    settings = qnn.Settings(soc, precision, weight_sharing=False)
    inputs = [
        (
            p,
            qnn.PartInputs(
                p.samples, {"piece": p.shapes(1, PIECE)}, p.open, block, gptq and p is not decoder.parts[-1]
            ),
        )
        for p in decoder.parts
    ]
    lowered = qnn.lower_parts(((part.name, part.program(), given) for part, given in inputs), settings)
    windows, compared = decoder.windows[: tokens // ROOM], {}
    for part in decoder.parts:
        ran = Emulated(lowered.modules["piece"][part.name], qnn.zeros(part.shapes(1, PIECE)), "piece")
        compared[part.name] = _Compared(ran, made[part.name], part.module)
    found: dict[str, Any] = {"tokens": len(windows) * ROOM, "nats_per_token": decoder.nats(windows, {})}
    for name, parts in (("pytorch", made), ("emulator", compared)):
        found[name] = decoder.nats(windows, parts) / found["nats_per_token"] - 1
    errors = {name: one.errors() for name, one in compared.items()}
    found["against_pytorch"] = {name: of_part[0] for name, of_part in errors.items()}
    found["against_float32"] = {name: of_part[1] for name, of_part in errors.items()}
    found["context_bytes"] = {name: report["context_bytes"] for name, report in lowered.report.items()}
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("--model", type=Path, default=MODEL, help="a Hugging Face decoder (default: the trained one)")
    parser.add_argument("--tokens", type=int, default=4096, help="of held-out text (default %(default)s)")
    parser.add_argument("--emulator", metavar="SOC", help="also compile the parts for it, and run them")
    parser.add_argument(
        "--emulator-tokens", type=int, default=1024, help="that are read on the emulator (default %(default)s)"
    )
    args = parser.parse_args(argv)
    os.environ.setdefault("QNN_SDK_ROOT", "")  # the quantiser would download an SDK, and needs none
    found = measure(args.model, args.tokens, args.emulator, args.emulator_tokens)
    atomic_write(args.out, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
