"""Simulated storage devices that slow reads down: presets, and JSON descriptions (docs/DEVICES.md)."""

import json
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

_HERE, _MB = Path(__file__).parent, 1e6
_WHERE_FROM = ("from", "assumed")
_AXES = {"random": ("block_bytes", "range_bytes", "depth"), "sequential": ("block_bytes", "depth")}
_FIX = "Correct the description; its format is in docs/DEVICES.md."


#: Built-in descriptions, files beside this module; ``from``: a figure's source, ``assumed``: what was not published.
PRESETS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in _HERE.glob("*.json")}


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
    part.names(("name", "source", "latency_us", "max_depth", "random", "sequential"))
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
