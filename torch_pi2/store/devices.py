"""Storage devices that reads can be made as slow as: presets, and descriptions in JSON files (docs/DEVICES.md).

What is measured over one of them is simulated, and has to be called so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import torch

from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.ops import load
from torch_pi2.store.device_presets import PRESETS

_MB = 1e6
_WHERE_FROM = ("from", "assumed")
_AXES = {"random": ("block_bytes", "range_bytes", "depth"), "sequential": ("block_bytes", "depth")}
_FIX = "Correct the description; its format is in docs/DEVICES.md."


@dataclass(frozen=True)
class Device:
    """A device as the core's model has it.

    Attributes:
        name: of its description, with ``@core`` if another core than the first was asked for.
        numbers: what ``pi2::DeviceModel::parse`` (csrc/io/device_model.h) takes, in SI units.
    """

    name: str
    numbers: tuple[float, ...]

    def read_times(self, offsets: Sequence[int], sizes: Sequence[int], *, depth: int, range_bytes: int) -> torch.Tensor:
        """When the device would have finished reads, in seconds, float64 ``[n]``; nothing is read.

        Args:
            offsets, sizes: of each read, in bytes, in order.
            depth: so many are asked for at time 0, and another whenever one is over.
            range_bytes: over which they are spread.
        """
        load()
        times: torch.Tensor = torch.ops.pi2.device_times(
            list(self.numbers), range_bytes, depth, list(offsets), list(sizes)
        )
        return times


def find_device(device: str | Path) -> Device:
    """A preset by name, or the device that a JSON file describes; ``ufs-4.0@little`` as one of its cores sees it.

    Raises:
        ConfigError: no preset and no file has this name, or the device no such core.
        ArtifactError: the file is not a description that makes sense.
    """
    text = str(device)
    name, core = text.rsplit("@", 1) if _core_follows(text) else (text, None)
    if name in PRESETS:
        return parse_device(PRESETS[name], f"preset {name}", core)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            "device",
            expected=f"{', '.join(PRESETS)} or a JSON file",
            found=repr(text),
            fix="Name one of them; docs/DEVICES.md says how to describe another.",
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(str(path), expected="JSON", found=f"{type(error).__name__}: {error}", fix=_FIX) from error
    return parse_device(description, str(path), core)


def _core_follows(text: str) -> bool:
    return "@" in text and text not in PRESETS and not Path(text).is_file()


def parse_device(description: Any, what: str = "device", core: str | None = None) -> Device:
    """The device that a description (docs/DEVICES.md) is of.

    Args:
        what: names it in errors. core: that issues the reads, one of its ``cores``; by default the first.

    Raises:
        ArtifactError: it makes no sense. ConfigError: it has no such core.
    """
    part = _Part(what)
    part.keys(description, ("name", "source", "latency_us", "max_depth", "random", "sequential"), ("cores",))
    name = part.text(description, "name")
    part.text(description, "source")
    latency = _figure(part.of("latency_us"), description["latency_us"], least=0)
    depth = _figure(part.of("max_depth"), description["max_depth"], least=1)
    numbers = [latency * 1e-6, depth, _core_cost(part.of("cores"), description.get("cores", []), core)]
    for table in _AXES:
        numbers += _table(part.of(table), description[table], _AXES[table])
    load()
    try:
        torch.ops.pi2.device_times(numbers, 1, 1, [], [])  # the core's own checks
    except RuntimeError as error:
        part.wrong("a device that makes sense", str(error).splitlines()[0].rpartition("pi2: device: ")[2])
    return Device(name if core is None else f"{name}@{core}", tuple(numbers))


class _Part:
    """A part of a description, for messages; ``path`` leads to it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def of(self, key: str | int) -> _Part:
        return _Part(f"{self.path}, {key}")

    def wrong(self, expected: str, found: str) -> NoReturn:
        raise ArtifactError(self.path, expected=expected, found=found, fix=_FIX)

    def keys(self, value: Any, needed: Iterable[str], allowed: Iterable[str] = ()) -> None:
        needed, allowed = list(needed), list(allowed)
        if not isinstance(value, Mapping):
            self.wrong("an object", repr(value))
        if missing := [key for key in needed if key not in value]:
            self.wrong(f"a field {missing[0]}", "none")
        if unknown := [key for key in value if key not in needed and key not in allowed]:
            self.wrong(f"no other fields than {', '.join([*needed, *allowed])}", str(unknown[0]))

    def text(self, value: Mapping[str, Any], key: str) -> str:
        found = value[key]
        if not isinstance(found, str) or not found.strip():
            self.of(key).wrong("text", repr(found))
        return found

    def number(self, value: Mapping[str, Any], key: str, least: float) -> float:
        found = value[key]
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found) or found < least:
            self.of(key).wrong(f"a number, {least:g} or more", repr(found))
        return float(found)

    def row(self, value: Any, needed: Iterable[str]) -> None:
        """An object with these fields, and where its figures are from."""
        self.keys(value, needed, _WHERE_FROM)
        told = [key for key in _WHERE_FROM if key in value]
        if not told:
            self.wrong("where the figure is from, or what is assumed (from, assumed)", "neither")
        for key in told:
            self.text(value, key)

    def rows(self, value: Any, least: int) -> None:
        if not isinstance(value, list) or len(value) < least:
            self.wrong(f"a list of {least} or more", repr(value))


def _figure(part: _Part, value: Any, *, least: float) -> float:
    part.row(value, ("value",))
    return part.number(value, "value", least)


def _core_cost(part: _Part, cores: Any, core: str | None) -> float:
    """Seconds that a command takes longer than on the first core, for which the tables are."""
    part.rows(cores, 0)
    seconds: dict[str, float] = {}
    for i, row in enumerate(cores):
        at = part.of(i)
        at.row(row, ("name", "block_bytes", "mb_per_s"))
        name = at.text(row, "name")
        if name in seconds:
            at.wrong("another name", name)
        seconds[name] = at.number(row, "block_bytes", 1) / (at.number(row, "mb_per_s", 0.1) * _MB)
        if seconds[name] < next(iter(seconds.values())):
            at.wrong("a core no faster than the first", name)
    if core is None:
        return 0.0
    if core not in seconds:
        raise ConfigError(
            f"{part.path} of the device",
            expected=" or ".join(seconds) or "none (the device has no cores)",
            found=core or "no name",
            fix="Name one of them after the @, or none.",
        )
    return seconds[core] - next(iter(seconds.values()))


def _table(part: _Part, rows: Any, axes: Sequence[str]) -> list[float]:
    """A table as the core takes it: sizes of axes, their points, and bytes per second."""
    part.rows(rows, 1)
    found: dict[tuple[float, ...], float] = {}
    for i, row in enumerate(rows):
        at = part.of(i)
        at.row(row, (*axes, "mb_per_s"))
        point = tuple(at.number(row, axis, 1) for axis in axes)
        if point in found:
            at.wrong("each block, range and depth once", "the same again")
        found[point] = at.number(row, "mb_per_s", 0.1) * _MB
    points = [sorted(set(values)) for values in zip(*found, strict=True)]
    for wanted in product(*points):
        if wanted not in found:
            named = ", ".join(f"{axis} {value:g}" for axis, value in zip(axes, wanted, strict=True))
            part.wrong("a row for every combination of its blocks, ranges and depths", f"none for {named}")
    if "range_bytes" not in axes:
        points.insert(1, [1.0])
    return [*(float(len(p)) for p in points), *(x for p in points for x in p), *(found[p] for p in sorted(found))]
