"""Simulated storage devices that slow reads down: presets, and JSON descriptions (docs/DEVICES.md)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.fields import Field, argument
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.ops import load

_MB = 1e6
_WHERE_FROM = ("from", "assumed")
_AXES = {"random": ("block_bytes", "range_bytes", "depth"), "sequential": ("block_bytes", "depth")}
_FIX = "Correct the description; its format is in docs/DEVICES.md."


_KB4, _KB512, _MB128, _MB512 = 4 << 10, 512 << 10, 128 << 20, 512 << 20
_PAPER = "PowerInfer-2, arXiv 2406.06282v3"
_MEASURED, _TABLE_1 = f"{_PAPER}, measurements of UFS 4.0 around Fig. 3b", f"{_PAPER}, Table 1"


def _rate(at: Sequence[int], mb_per_s: float, assumed: str, published: str = "") -> dict[str, Any]:
    """A row of a table; ``at``: block, range and depth of random reads, block and depth of sequential ones."""
    axes = _AXES["random" if len(at) == 3 else "sequential"]
    row = {**dict(zip(axes, at, strict=True)), "mb_per_s": mb_per_s, "assumed": assumed}
    return row | ({"from": published} if published else {})


_UFS_4_0: dict[str, Any] = {
    "name": "ufs-4.0",
    "source": f"{_PAPER}: OnePlus 12, Snapdragon 8 Gen 3, UFS 4.0",
    "latency_us": {
        "value": 5.3,
        "assumed": "what 4 KB take longer at 450 MB/s (sequential, if one at a time) than at 1,076 MB/s (if 32 are)",
    },
    "max_depth": {"value": 32, "from": "Ripple, arXiv 2410.19274: one command queue of 32 entries"},
    "random": [
        _rate((_KB4, _MB128, 32), 1076.10, "the depth", f"{_TABLE_1}, big core"),
        _rate((_KB4, _MB512, 32), 850, "just below; the depth and the core", f"{_MEASURED}: below 850 MB/s"),
        _rate((_KB512, _MB128, 32), 3500, "the range, the depth and the core", _MEASURED),
        _rate(
            (_KB512, _MB512, 32),
            3500,
            "no effect of the range at this size; the paper says that it is strongest for small blocks",
        ),
    ],
    "sequential": [
        _rate(
            (_KB4, 1),
            450,
            "the depth: less than random reads of this size can only be one at a time; the core",
            _MEASURED,
        ),
        _rate((_KB4, 32), 1076.10, "as random reads over 128 MB"),
        _rate((_KB512, 1), 3844.5, "4,000 MB/s and the latency"),
        _rate((_KB512, 32), 4000, "the depth and the core", _MEASURED),
    ],
}


#: Built-in descriptions; ``from``: a figure's source, ``assumed``: the parts of it that were not published.
PRESETS: dict[str, dict[str, Any]] = {"ufs-4.0": _UFS_4_0}


@dataclass(frozen=True)
class Device:
    """A device; ``numbers``: arguments of ``pi2::DeviceModel::parse`` (csrc/io/device_model.h), in SI units."""

    name: str
    numbers: tuple[float, ...]

    def read_times(self, offsets: Sequence[int], sizes: Sequence[int], *, depth: int, range_bytes: int) -> torch.Tensor:
        """Simulated completion times in seconds, float64 ``[n]``, of these reads in a loop of ``depth``."""
        load()
        return torch.ops.pi2.device_times(list(self.numbers), range_bytes, depth, list(offsets), list(sizes))


def find_device(device: str | Path) -> Device:
    """A preset by name, or a JSON file. Raises ConfigError: neither exists. ArtifactError: it is invalid."""
    name, path = str(device), Path(device)
    if name in PRESETS:
        return parse_device(PRESETS[name], f"preset {name}")
    if not os.path.lexists(path):
        fix = "Name one of them; docs/DEVICES.md says how to describe another."
        argument(name, "device", fix).wrong(f"{', '.join(PRESETS)} or a JSON file", repr(name))
    return parse_device(parse(read_bytes(path, fix=_FIX), path, fix=_FIX), str(path))


def parse_device(description: Any, what: str = "device") -> Device:
    """The device of a description (docs/DEVICES.md), named ``what`` in errors. Raises ArtifactError: it is invalid."""
    part = Field(description, what, _FIX)
    # older files have cores
    part.names(("name", "source", "latency_us", "max_depth", "random", "sequential"), ("cores",))
    name = part.at("name").text()
    part.at("source").text()
    latency, depth = _figure(part.at("latency_us"), least=0), _figure(part.at("max_depth"), least=1)
    numbers = [latency * 1e-6, depth, 0.0]  # 0: no overhead of the issuing core
    for table, axes in _AXES.items():
        numbers += _table(part.at(table), axes)
    load()
    try:
        torch.ops.pi2.device_times(numbers, 1, 1, [], [])  # the core's own checks
    except RuntimeError as error:
        part.wrong("a device that makes sense", str(error).splitlines()[0].rpartition("pi2: device: ")[2])
    return Device(name, tuple(numbers))


def _row(row: Field, needed: Iterable[str]) -> None:
    """Check an object with these fields and the source of its figures."""
    sources = [key for key in _WHERE_FROM if key in row.names(needed, _WHERE_FROM)]
    if not sources:
        row.wrong("where the figure is from, or what is assumed (from, assumed)", "neither")
    for key in sources:
        row.at(key).text()


def _figure(figure: Field, *, least: float) -> float:
    _row(figure, ("value",))
    return figure.at("value").number(least)


def _table(table: Field, axes: Sequence[str]) -> list[float]:
    """A table in the core's format: sizes of axes, their points, and bytes per second."""
    found: dict[tuple[float, ...], float] = {}
    for row in table.items(1):
        _row(row, (*axes, "mb_per_s"))
        point = tuple(row.at(axis).number(1) for axis in axes)
        if point in found:
            row.wrong("each block, range and depth once", "the same again")
        found[point] = row.at("mb_per_s").number(0.1) * _MB
    points = [sorted(set(values)) for values in zip(*found, strict=True)]
    if math.prod(map(len, points)) > len(found):
        missing = next(wanted for wanted in product(*points) if wanted not in found)
        named = ", ".join(f"{axis} {value:g}" for axis, value in zip(axes, missing, strict=True))
        table.wrong("a row for every combination of its blocks, ranges and depths", f"none for {named}")
    if "range_bytes" not in axes:
        points.insert(1, [1.0])
    return [*(float(len(p)) for p in points), *(x for p in points for x in p), *(found[p] for p in sorted(found))]
