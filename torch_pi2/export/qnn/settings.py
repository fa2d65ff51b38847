"""Settings of the NPU's compiler, and its report, ``qnn.json`` of a bundle."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import argument, check_fields, limited
from torch_pi2.base.files import read_json

REPORT_FILE = "qnn.json"
REPORT_FORMAT, REPORT_VERSION = "torch_pi2.qnn", 1

#: Supported SoCs: part number -> product name and NPU version.
SOCS = {
    "SM8550": "Snapdragon 8 Gen 2 (HTP V73)",
    "SM8650": "Snapdragon 8 Gen 3 (HTP V75)",
    "SM8750": "Snapdragon 8 Elite (HTP V79)",
    "SM8845": "Snapdragon 8 Gen 5 (HTP V81)",
    "SM8850": "Snapdragon 8 Elite Gen 5 (HTP V81)",
}

#: w4a16: 4-bit weights with a scale per output channel or group of inputs, 16-bit activations. w8a16: 8-bit weights.
#: fp16: both float16.
PRECISIONS = ("w4a16", "w8a16", "fp16")

#: Group sizes, along the input.
BLOCKS = (16, 32, 64)
#: The default group: 4.5 bits per weight.
BLOCK = 16
#: Group outside FFNs, if memory does not suffice for 8 bits.
PART_BLOCK = 32
#: Most bytes of weights on an NPU, from the compiler's log.
MOST_BYTES = 3584 << 20

#: Kind of a part (its name without the layer's number) -> its name in messages, and how to export without it.
_KINDS = {
    "layer": ("hot neurons of layer {}", "Choose another precision or fewer hot chunks (hot, hot_prompts)"),
    "attention": ("attention of layer {}", "Pass hot_attention='none' (the CPU computes it), or a smaller max_tokens"),
}


@dataclass(frozen=True)
class Settings:
    """How hot parts are compiled.

    Attributes:
        soc: one of :data:`SOCS`.
        precision: one of :data:`PRECISIONS`; all are lossy, w4a16 most.
        blocks: of w4a16: 16, 32 or 64 weights per scale along the input; 0: a scale per output channel; "auto": 16
            where it divides a layer.
        weight_sharing: one copy of the weights for all graphs of a layer. Phones need it; Qualcomm's x86 emulator
            cannot load such files.
        quantization: of 4-bit weights in FFNs and attention: ``rtn`` (round to nearest) or ``gptq`` on calibration
            inputs, which takes longer (:mod:`.weights`).
        timeout_s: seconds per layer.
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
        """Mean bits per weight, including group scales."""
        block = BLOCK if self.blocks == "auto" else int(self.blocks)
        return {"w4a16": 4 + (8 / block if block else 0), "w8a16": 8, "fp16": 16}[self.precision]

    def part_bits(self, block: int) -> float:
        """Bits per weight outside FFNs: 8, or 4 in groups of ``block``; 16 with fp16."""
        return 16 if self.precision == "fp16" else 4 + 8 / block if block else 8


def title(name: str) -> str:
    """The name of a part in messages: ``layer3`` -> "hot neurons of layer 3"."""
    kind = name.rstrip(string.digits)
    return _KINDS[kind][0].format(name.removeprefix(kind)) if kind in _KINDS else name


def how_to_avoid(name: str) -> str:
    """How to export without the part ``name``."""
    kind = name.rstrip(string.digits)
    return (f"{_KINDS[kind][1]}, or export" if kind in _KINDS else "Export") + " with target='xnnpack'."


@dataclass(frozen=True)
class Graph:
    """A static graph of every layer: leading sizes of its input, such as ``(2, 1)``, and hot chunks of each layer."""

    shape: tuple[int, ...]
    chunks: Sequence[int]


def read_report(path: Path) -> dict[str, Any]:
    """The report at ``path``. Raises ArtifactError."""
    return read_json(path, REPORT_FORMAT, REPORT_VERSION)
