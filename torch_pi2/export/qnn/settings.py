"""What is compiled, and for which phone; and ``qnn.json`` of a bundle, what the compiler reported."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import argument, check_fields, limited
from torch_pi2.base.files import parse_json, read_text

REPORT_FILE = "qnn.json"
REPORT_FORMAT, REPORT_VERSION = "torch_pi2.qnn", 1

#: Supported systems on a chip: part number -> the name on the box and the version of its NPU.
SOCS = {
    "SM8550": "Snapdragon 8 Gen 2 (HTP V73)",
    "SM8650": "Snapdragon 8 Gen 3 (HTP V75)",
    "SM8750": "Snapdragon 8 Elite (HTP V79)",
    "SM8845": "Snapdragon 8 Gen 5 (HTP V81)",
    "SM8850": "Snapdragon 8 Elite Gen 5 (HTP V81)",
}

#: w4a16: weights 4 bit with a scale per output channel or group of inputs, activations 16 bit. w8a16: weights 8 bit.
#: fp16: both float16.
PRECISIONS = ("w4a16", "w8a16", "fp16")

#: Weights that may share a scale, along the input.
BLOCKS = (16, 32, 64)

#: Weights of a group by default: 4.5 bits a weight.
BLOCK = 16

#: Groups of weights outside feed-forward layers where there is no memory for 8 bits.
PART_BLOCK = 32

#: Weights that an NPU can have at most, as its compiler's log prints it.
MOST_BYTES = 3584 << 20

#: Kind of a part, the word before the layer's number in its name -> what messages call it, how to export without it.
_KINDS = {
    "layer": ("hot neurons of layer {}", "Choose another precision or fewer hot chunks (hot, hot_prompts)"),
    "attention": ("attention of layer {}", "Pass hot_attention='none' (the CPU computes it), or a smaller max_tokens"),
}


@dataclass(frozen=True)
class Settings:
    """How hot parts are compiled.

    Attributes:
        soc: one of :data:`SOCS`.
        precision: one of :data:`PRECISIONS`; all are lossy against float32, w4a16 most.
        blocks: with w4a16: 16, 32 or 64: each group of so many weights along the input has a scale; 0: a scale per
            output channel; "auto": groups of 16 where they divide a layer.
        weight_sharing: one copy of the weights for all graphs of a layer. Phones need it; Qualcomm's x86 emulator
            refuses to load such files, so what is to run there is compiled without.
        quantization: how 4-bit weights of feed-forward layers and of attention are chosen: ``rtn`` to nearest,
            ``gptq`` by what outputs lose on calibration inputs, which takes longer (:mod:`.weights`).
        timeout_s: seconds that one layer may take.
    """

    soc: str
    precision: str = limited(choices=PRECISIONS, default="w4a16")
    blocks: int | str = "auto"
    weight_sharing: bool = True
    timeout_s: float = limited(above=True, default=1800.0)
    quantization: str = limited(choices=("rtn", "gptq"), default="rtn")

    def __post_init__(self) -> None:
        check_fields(self, "{} of the hot part")
        for name, good, expected in (
            ("blocks", self.blocks in ("auto", 0, *BLOCKS), "'auto', 0, 16, 32 or 64"),
            ("quantization", self.quantization == "rtn" or self.precision == "w4a16", "rtn, or gptq with w4a16"),
        ):
            if not good:
                argument(getattr(self, name), f"{name} of the hot part").wrong(expected)

    @property
    def bits(self) -> float:
        """Bits of a weight on average, with scales of groups and without those of channels."""
        block = BLOCK if self.blocks == "auto" else int(self.blocks)
        return {"w4a16": 4 + (8 / block if block else 0), "w8a16": 8, "fp16": 16}[self.precision]

    def part_bits(self, block: int) -> float:
        """Bits of a weight outside feed-forward layers: 8, or 4 in groups of ``block``; in fp16 16."""
        return 16 if self.precision == "fp16" else 4 + 8 / block if block else 8


def title(name: str) -> str:
    """What messages call the part ``name``: ``layer3`` are the hot neurons of layer 3."""
    kind = name.rstrip(string.digits)
    return _KINDS[kind][0].format(name.removeprefix(kind)) if kind in _KINDS else name


def how_to_avoid(name: str) -> str:
    """How to export if the part ``name`` cannot be compiled."""
    kind = name.rstrip(string.digits)
    return (f"{_KINDS[kind][1]}, or export" if kind in _KINDS else "Export") + " with target='xnnpack'."


@dataclass(frozen=True)
class Graph:
    """One graph of every layer, named as the method of the program that it is for.

    Attributes:
        shape: leading sizes of its input, for instance ``(2, 1)``: x is ``[2, 1, H]``. Graphs of an NPU are static.
        chunks: hot chunks of each layer in this graph, at least one.
    """

    shape: tuple[int, ...]
    chunks: Sequence[int]


def read_report(path: Path) -> dict[str, Any]:
    """The report at ``path``. Raises ArtifactError: it is missing, damaged, or no such report."""
    return parse_json(read_text(path), path, REPORT_FORMAT, REPORT_VERSION)
