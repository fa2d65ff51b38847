"""Training samples for predictors: FFN inputs and fired neurons of a bounded uniform sample of tokens."""

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.crc32c import crc32c_of_file
from torch_pi2.base.dtypes import DTYPES, dtype_name
from torch_pi2.base.fields import Field, shown
from torch_pi2.base.files import atomic_write, json_text, read_json, writing
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.graph.routed import chosen_shares
from torch_pi2.profiling.data import batches
from torch_pi2.profiling.recorder import Firing, record, threshold_map
from torch_pi2.types.site import MOST_SIZE, FFNSite
from torch_pi2.types.stats import Reservoir, pack_bits, unpack_bits

#: Index of a folder of samples, written last; its format and version.
_INDEX, _FORMAT = "samples.json", ("torch_pi2.samples", 1)


@dataclass
class Samples:
    """Tokens of one FFN: inputs ``x_NH [N, H]`` in the model's dtype; ``fired_bits [N, ceil(I/8)]`` uint8
    (:func:`torch_pi2.types.stats.pack_bits`).
    """

    x_NH: torch.Tensor
    fired_bits: torch.Tensor
    intermediate: int

    def __len__(self) -> int:
        return len(self.x_NH)

    def fired(self, rows: slice | torch.Tensor | None = None) -> torch.Tensor:
        """``[n, I]`` bool."""
        return unpack_bits(self.fired_bits if rows is None else self.fired_bits[rows], self.intermediate)

    def split(self, held_back: float) -> "tuple[Samples, Samples]":
        """``(fitting part, held-back part)``; the latter is the last ``held_back`` share of the tokens."""
        cut = max(1, min(len(self) - 1, round(len(self) * (1 - held_back))))
        halves = (slice(cut), slice(cut, None))
        one, other = (Samples(self.x_NH[half], self.fired_bits[half], self.intermediate) for half in halves)
        return one, other


class _Collector:
    """Sink that samples one layer's tokens uniformly, in memory or in files whose names begin with ``path``."""

    def __init__(
        self, site: FFNSite, n_tokens: int, threshold: float | torch.Tensor, seed: int, path: Path | None = None
    ) -> None:
        self.site, self.threshold, self._path = site, threshold, path
        self.reservoir = Reservoir(n_tokens, seed)
        self._rows: dict[str, torch.Tensor] = {}
        self.dtype = torch.float32

    def add(self, firing: Firing) -> None:
        x_NH = firing.x_TH[firing.real_T]
        self.dtype = x_NH.dtype
        rows, slots = self.reservoir.place(len(x_NH))
        if len(rows):
            self._put("x", slots, x_NH[rows])
            self._put("fired", slots, pack_bits(firing.score_TI[firing.real_T][rows] > self.threshold))

    def _put(self, part: str, slots: torch.Tensor, rows: torch.Tensor) -> None:
        if self._path is None:
            if part not in self._rows:
                self._rows[part] = torch.zeros(self.reservoir.size, rows.shape[1], dtype=rows.dtype)
            self._rows[part][slots] = rows
        else:  # mapped only for this write: mapped pages count as memory of the process
            _rows_in(self._path, part, self.reservoir.size, rows.shape[1], rows.dtype, writable=True)[slots] = rows

    @property
    def count(self) -> int:
        return min(self.reservoir.seen, self.reservoir.size)

    def result(self) -> Samples:
        x, bits = (self._rows[part][: self.count].clone() for part in ("x", "fired"))
        return Samples(x, bits, self.site.intermediate)

    def entry(self) -> dict[str, Any]:
        sizes = {"hidden": self.site.hidden, "intermediate": self.site.intermediate}
        files = {part: file for part in ("x", "fired") if self._path and (file := _file(self._path, part)).exists()}
        crcs = {part: crc32c_of_file(file)[1] for part, file in files.items()}
        return {"rows": self.count, "dtype": dtype_name(self.dtype), **sizes, "crc32c": crcs}


def _file(path: Path, part: str) -> Path:
    return path.with_name(f"{path.name}.{part}")


def _rows_in(
    path: Path, part: str, rows: int, width: int, dtype: torch.dtype, *, writable: bool = False, crc: object = None
) -> torch.Tensor:
    """``[rows, width]`` mapped from ``path.part``. Raises ArtifactError: a full disk, a short file, another ``crc``."""
    file, nbytes, fix = _file(path, part), rows * width * dtype.itemsize, f"Remove {path.parent}; begin again."
    with writing(path.parent):
        if writable and not file.exists():
            with open(file, "xb") as created:
                os.posix_fallocate(created.fileno(), 0, nbytes)  # on a full disk a write to mapped memory kills
        if not nbytes:
            return torch.empty(rows, width, dtype=dtype)
        if (size := file.stat().st_size) < nbytes:
            raise ArtifactError(str(file), expected=f"{nbytes} bytes", found=str(size), fix=fix)
        if crc is not None and (found := crc32c_of_file(file)[1]) != crc:
            raise ArtifactError(str(file), expected=f"checksum {shown(crc)}", found=f"damage ({found})", fix=fix)
        return torch.from_file(str(file), shared=writable, size=rows * width, dtype=dtype).view(rows, width)


class SampleFiles(Mapping[str, Samples]):
    """Samples in a folder, mapped when looked up. Raises ArtifactError: there are none, or they are damaged."""

    def __init__(self, folder: Path) -> None:
        path = folder / _INDEX
        index = Field(read_json(path, *_FORMAT), str(path), f"Remove {folder}; begin again.")
        entries = index.at("samples").each().items()
        self._entries = {key: (folder / str(i), entry) for i, (key, entry) in enumerate(entries)}

    def __getitem__(self, key: str) -> Samples:
        path, entry = self._entries[key]
        crcs = entry.at("crc32c", {}).names(allowed=None)  # earlier versions have none
        rows, hidden, intermediate = (entry.at(n).whole(0, MOST_SIZE) for n in ("rows", "hidden", "intermediate"))
        x_NH = _rows_in(path, "x", rows, hidden, DTYPES[entry.at("dtype").text(DTYPES)], crc=crcs.get("x"))
        fired = _rows_in(path, "fired", rows, -(-intermediate // 8), torch.uint8, crc=crcs.get("fired"))
        return Samples(x_NH, fired, intermediate)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def collect_samples(
    model: nn.Module,
    data: Any,
    sites: Sequence[FFNSite],
    n_tokens: int,
    *,
    thresholds: float | Mapping[str, float | torch.Tensor] | None = None,
    seed: int = 0,
    folder: Path | None = None,
    progress: bool = True,
) -> Mapping[str, Samples]:
    """A uniform sample (a reservoir's) of at most ``n_tokens`` real tokens per site, the same tokens for all sites
    (fewer for experts, which get few of all): site key -> :class:`Samples`, in random order.

    Args:
        model, data: see :func:`torch_pi2.profiling.run.profile`. thresholds: a neuron fires iff its score exceeds this
            (0: exact; one for all neurons of a site, or ``[I]``). folder: for the samples; a complete folder is
            returned unchanged. None: in memory.

    Raises:
        ConfigError: ``n_tokens`` below 1. ArtifactError: ``folder`` is on a full disk. CalibrationError and others: as
            ``profile``.
    """
    if folder is not None and (folder / _INDEX).exists():
        return SampleFiles(folder)
    if n_tokens < 1:
        raise ConfigError("n_tokens", expected="at least 1", found=str(n_tokens), fix="20000 is a good start.")
    cuts = threshold_map(sites, thresholds)
    counts = _tokens(model, sites, n_tokens)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)  # left incomplete by a killed process
        folder.mkdir(parents=True)
    paths = [folder / str(i) if folder else None for i in range(len(sites))]
    collectors = {s.key: _Collector(s, counts[s.key], cuts[s.key], seed, path) for s, path in zip(sites, paths)}
    record(model, batches(data), sites, lambda f: collectors[f.site.key].add(f), progress=progress, label="samples")
    if folder is None:
        return {k: c.result() for k, c in collectors.items()}
    entries = {key: collector.entry() for key, collector in collectors.items()}
    atomic_write(folder / _INDEX, json_text(*_FORMAT, {"samples": entries}) + "\n")
    return SampleFiles(folder)


def _tokens(model: nn.Module, sites: Sequence[FFNSite], n_tokens: int) -> dict[str, int]:
    """Site key -> tokens to sample; for an expert twice the mean, as some are chosen more often, and at least 256."""
    shares = chosen_shares(getattr(model, "config", None), sites)
    wanted = {s.key: max(256, math.ceil(2 * shares.get(s.experts, 1.0) * n_tokens)) for s in sites}
    return {key: min(n_tokens, count) for key, count in wanted.items()}


def samples_bytes(model: nn.Module, sites: Sequence[FFNSite], n_tokens: int) -> int:
    """Memory of :func:`collect_samples` without a folder."""
    tokens = _tokens(model, sites, n_tokens)
    rows = {s.key: s.hidden * model.get_parameter(s.up.weight).element_size() + -(-s.intermediate // 8) for s in sites}
    return sum(tokens[key] * row for key, row in rows.items())
