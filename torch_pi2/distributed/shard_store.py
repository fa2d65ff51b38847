"""Folders of shards: ``rank-0-of-2`` and so on, each the store of one machine, and the whole store seen through them.

A shard is a store whose metadata and superblock say which chunks of each layer it has (docs/FORMATS.md). Its plan,
predictors and statistics are those of the whole model. A shard of whole layers has no weights of other blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.tensorfile import Spec
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.ops.constants import chunk_neurons
from torch_pi2.store.folder import PI2_FOLDER, SHARD_NAME
from torch_pi2.store.storefile import SHARD, STORE_FILE, StoreReader
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


def _resized(specs: Mapping[str, Spec], neurons: Mapping[str, int]) -> dict[str, Spec]:
    """``specs`` with this many ``neurons`` in each layer, by key."""
    resized = dict(specs)
    for key, count in neurons.items():
        for name in (f"{key}.{what}" for what in _BY_NEURON):
            if name in resized:
                resized[name] = Spec((count,), resized[name].dtype)
    return resized


class ShardView:
    """The weights of ``reader``, which has all, as ``shard`` has them: to be written as a store of its own."""

    def __init__(self, reader: QuantizedWeights, plan: Plan, shard: Shard) -> None:
        self._whole, self._shard = reader, shard
        self._sites = {layer.site.key: layer.site for layer in plan.layers}
        here = {name: spec for name, spec in reader.specs.items() if shard.has(name)}
        self.specs = _resized(here, {key: mine.neurons for key, mine in shard.layers.items()})

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


class JoinedShards:
    """The whole store, read from its shards. Use it as a context manager.

    Args:
        folders: of the shards, by rank.

    Raises:
        ArtifactError: a shard is missing or damaged, or they are not of one model.
    """

    def __init__(self, folder: Path, folders: dict[int, Path]) -> None:
        self._readers: list[StoreReader] = []
        ranks = ranks_of(next(iter(folders.values())))
        if missing := [rank for rank in range(ranks) if rank not in folders]:
            raise ArtifactError(
                str(folder),
                expected=f"all {ranks} shards of a model",
                found=f"no {shard_name(missing[0], ranks)}",
                fix="Bring them together first.",
            )
        try:
            for rank in range(ranks):
                self._readers.append(StoreReader(folders[rank] / PI2_FOLDER / STORE_FILE))
            shards = self._check(folder)
        except BaseException:
            self.close()
            raise
        self._shards = shards
        #: By layer and chunk: the rank that has it, and its first neuron there.
        self._places = {
            (key, chunk): (rank, i * mine.chunk)
            for rank, shard in enumerate(shards)
            for key, mine in shard.layers.items()
            for i, chunk in enumerate(mine.chunks)
        }
        first = self._readers[0]
        specs = {name: spec for reader in reversed(self._readers) for name, spec in reader.specs.items()}
        self.specs = _resized(specs, {key: mine.whole for key, mine in shards[0].layers.items()})
        first.metadata = {name: text for name, text in first.metadata.items() if name != SHARD}
        for what in _BY_MODULE & first.metadata.keys():
            named = [json.loads(reader.metadata[what]) for reader in self._readers]
            first.metadata[what] = json.dumps({name: value for part in named for name, value in part.items()})
        first.reread()  # everything else comes from its metadata, which now have all modules

    def __getattr__(self, name: str) -> Any:
        return getattr(self._readers[0], name)

    def __enter__(self) -> JoinedShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    @property
    def sources(self) -> list[Path]:
        """The files."""
        return [reader.path for reader in self._readers]

    def _check(self, folder: Path) -> list[Shard]:
        shards = list[Shard]()
        for rank, reader in enumerate(self._readers):
            shard, size = reader.shard, len(self._readers)
            first = self._readers[0]
            if shard is None or (shard.rank, shard.ranks) != (rank, size) or _model(reader) != _model(first):
                raise _mismatch(str(reader.path), f"shard {rank} of {size} of the model of {first.path}")
            shards.append(shard)
        check_complete(shards, str(folder))
        return shards

    def read_neurons(self, site: FFNSite, rows: tuple[int, int]) -> torch.Tensor:
        """Neurons ``[first, last)`` in plan order of a layer of the whole model."""
        key, size, parts = site.key, self._shards[0].layers[site.key].chunk, list[torch.Tensor]()
        for chunk in range(rows[0] // size, -(-rows[1] // size)):
            rank, at = self._places[key, chunk]
            start, stop = max(rows[0] - chunk * size, 0), min(rows[1] - chunk * size, size)
            if start < stop:
                parts.append(self._read(self._readers[rank], key, at + start, at + stop))
        if not parts:
            parts.append(self._read(next(reader for reader in self._readers if key in reader.keys), key, 0, 0))
        return torch.cat(parts)

    @staticmethod
    def _read(reader: StoreReader, key: str, first: int, last: int) -> torch.Tensor:
        return reader.read_layer(reader.keys.index(key), (first, last))

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes ``[start, stop)`` of a tensor of :attr:`specs`."""
        if (owner := self._owner(name)) is not None:
            return owner.read_bytes(name, start, stop)
        values = torch.empty(self.specs[name].shape, dtype=self.specs[name].dtype)
        for reader, shard in zip(self._readers, self._shards, strict=True):
            values[shard.layers[name.rpartition(".")[0]].positions()] = reader.read(name)
        return values.view(torch.uint8)[start:stop]

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor of :attr:`specs`."""
        spec = self.specs[name]
        return self.read_bytes(name, 0, spec.nbytes).view(spec.dtype).view(spec.shape)

    def compare(self, name: str, blocks: list[torch.Tensor]) -> None:
        """See :meth:`StoreReader.compare`, for tensors that are copied unchanged."""
        if (owner := self._owner(name)) is not None:
            owner.compare(name, blocks)

    def _owner(self, name: str) -> StoreReader | None:
        """A reader that has the whole tensor."""
        return next((reader for reader in self._readers if reader.specs.get(name) == self.specs[name]), None)


def _model(reader: StoreReader) -> tuple[object, ...]:
    """What shards of one model have in common."""
    keys = reader.keys if reader.shard is None else [*reader.shard.layers]
    return reader.model_hash, reader.metadata.get("orders_hash"), keys, common_hash(reader)


def refuse_shard(reader: QuantizedWeights) -> None:
    """Raises ConfigError if ``reader`` has only a part of the neurons."""
    shard = getattr(reader, "shard", None)
    if shard is not None:
        raise ConfigError(
            str(reader.path),
            expected="a store with all neurons",
            found=f"shard {shard.rank} of {shard.ranks}",
            fix="Name the folder that has all shards in it; torch-pi2 pack FOLDER OUT makes one store of them.",
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
        raise _mismatch(where, "shards that together have each chunk of each layer once")


def _mismatch(where: str, expected: str) -> ArtifactError:
    fix = "Make them again: torch-pi2 pack FOLDER OUT --ranks N."
    return ArtifactError(where, expected=expected, found="others", fix=fix)
