"""Folders of shards: ``rank-0-of-2`` and so on, each the store of one machine.

A shard is a store whose metadata and superblock say which chunks of each layer it has (docs/FORMATS.md). Its plan,
predictors and statistics are those of the whole model. A shard of whole layers has no weights of other blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.tensorfile import Spec
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.ops.constants import chunk_neurons
from torch_pi2.store.folder import SHARD_NAME
from torch_pi2.store.storefile import StoreReader
from torch_pi2.store.weights import QuantizedWeights
from torch_pi2.types.plan import Plan
from torch_pi2.types.shard import Shard
from torch_pi2.types.site import FFNSite

#: Tensors with a number for each neuron.
_BY_NEURON = ("bias_gate", "bias_up")
#: Metadata with an entry for each module.
_BY_MODULE = {"linears", "formats", "sites"}


def shard_name(rank: int, ranks: int) -> str:
    """Name of the folder of a shard."""
    return f"rank-{rank}-of-{ranks}"


def shards_in(folder: Path) -> dict[int, Path]:
    """Rank -> folder of each shard in ``folder``; empty if it is no folder of shards.

    Raises:
        ArtifactError: shards of different numbers of machines.
    """
    if not folder.is_dir():
        return {}
    named = {path: match for path in sorted(folder.iterdir()) if (match := SHARD_NAME.fullmatch(path.name))}
    sizes = {int(match[2]) for match in named.values()}
    if len(sizes) > 1:
        raise ArtifactError(
            str(folder),
            expected="shards of one number of machines",
            found=f"of {' and '.join(map(str, sorted(sizes)))}",
            fix="Remove those of an earlier torch-pi2 pack --ranks.",
        )
    return {int(match[1]): path for path, match in named.items()}


def ranks_of(shard: Path) -> int:
    """How many machines there are shards for, by the name of the folder of one."""
    match = SHARD_NAME.fullmatch(shard.name)
    assert match is not None
    return int(match[2])


def common_hash(reader: StoreReader) -> str:
    """SHA-256 of what every shard has in full: plan, predictors, and weights that belong to no neuron."""
    checks = {name: check for name, check in reader.checks.items() if name.rpartition(".")[2] not in _BY_NEURON}
    if reader.shard is not None and reader.shard.by_layers:
        checks = {name: check for name, check in checks.items() if reader.shard.block(name) is None}
    return hashlib.sha256(json.dumps(sorted(checks.items())).encode()).hexdigest()


class ShardView:
    """The weights of ``reader``, which has all, as ``shard`` has them: to be written as a store of its own."""

    def __init__(self, reader: QuantizedWeights, plan: Plan, shard: Shard) -> None:
        self._whole, self._shard = reader, shard
        self._sites = {layer.site.key: layer.site for layer in plan.layers}
        self.specs = {name: spec for name, spec in reader.specs.items() if shard.has(name)}
        for key, mine in shard.layers.items():
            for name in (f"{key}.{what}" for what in _BY_NEURON):
                if name in self.specs:
                    self.specs[name] = Spec((mine.neurons,), self.specs[name].dtype)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the modules that the shard has."""
        metadata = dict(self._whole.metadata)
        for what in _BY_MODULE & metadata.keys():
            named = json.loads(metadata[what]).items()
            metadata[what] = json.dumps({name: value for name, value in named if self._shard.has(name)})
        return metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def read_neurons(self, site: FFNSite, rows: tuple[int, int]) -> torch.Tensor:
        """Neurons ``[first, last)`` of the shard's layer ``site``."""
        whole, parts, at = self._sites[site.key], list[torch.Tensor](), 0
        for first, last in self._shard.layers[site.key].ranges:
            start, stop = max(rows[0] - at, 0), min(rows[1] - at, last - first)
            if start < stop or not parts:
                parts.append(self._whole.read_neurons(whole, (first + start, first + max(start, stop))))
            at += last - first
        return torch.cat(parts)

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes ``[start, stop)`` of a tensor of :attr:`specs`."""
        if self.specs[name] == self._whole.specs[name]:
            return self._whole.read_bytes(name, start, stop)
        values = self._whole.read(name)[self._shard.layers[name.rpartition(".")[0]].positions()]
        return values.view(torch.uint8)[start:stop]

    def compare(self, name: str, blocks: list[torch.Tensor]) -> None:
        """See :meth:`StoreReader.compare`, for tensors that are copied unchanged."""
        if isinstance(self._whole, StoreReader) and self.specs[name] == self._whole.specs[name]:
            self._whole.compare(name, blocks)


def refuse_shards(folder: Path, shard: Shard | None = None) -> None:
    """Raises ConfigError: ``folder`` has shards in it, or is ``shard``."""
    if shard is not None or shards_in(folder):
        raise ConfigError(
            str(folder),
            expected="a store with all neurons",
            found="shards" if shard is None else f"shard {shard.rank} of {shard.ranks}",
            fix="Name the folder that they were packed from.",
        )


def check_complete(shards: Sequence[Shard], where: str) -> None:
    """Raises ArtifactError unless ``shards``, by rank, together have each chunk of each layer once."""
    chunks: dict[tuple[str, int], list[int]] = {}
    for shard in shards:
        for key, mine in shard.layers.items():
            chunks.setdefault((key, mine.whole), []).extend(mine.chunks)
    counts = {key: -(-whole // chunk_neurons(whole)) for key, whole in chunks}
    numbered = [shard.rank for shard in shards] == list(range(len(shards)))
    if not numbered or any(sorted(found) != list(range(counts[key])) for (key, _), found in chunks.items()):
        raise ArtifactError(
            where,
            expected="shards that together have each chunk of each layer once",
            found="others",
            fix="Make them again: torch-pi2 pack FOLDER OUT --ranks N.",
        )
