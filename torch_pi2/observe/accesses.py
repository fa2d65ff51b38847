"""Records the neurons that each call of a model over a store needs, for replays (docs/TRACES.md).

:class:`record_accesses` records in the C++ core, one bit per neuron and call; :class:`Accesses` reads the file.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import nn

from torch_pi2.base.fields import Field, argument, checked
from torch_pi2.base.files import atomic_write, check_writable
from torch_pi2.base.progress import log
from torch_pi2.base.reading import parse
from torch_pi2.base.tensorfile import packed, read_tensors
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.layers.offloaded import Store, explained
from torch_pi2.observe.trace import Recording
from torch_pi2.ops import load
from torch_pi2.rewrite.state import store_and_budget
from torch_pi2.store.storefile import StoreReader
from torch_pi2.store.superblock import SECTOR

FORMAT = "torch_pi2.accesses"
VERSION = "1"
#: Default bytes of recorded bits: some 4700 tokens of a 7B model.
CAPACITY = 256 << 20
_FIX = "Record it again, with torch_pi2.record_accesses."
_DTYPES = {"layers": torch.int32, "streamed": torch.uint8, "wanted": torch.uint8}


@dataclass(frozen=True)
class StoredLayer:
    """A layer of a store, which reads ``cluster`` neurons together as ``read_bytes`` bytes."""

    key: str
    neurons: int
    cluster: int
    read_bytes: int

    @property
    def slots(self) -> int:
        return -(-self.neurons // self.cluster)


@dataclass(frozen=True)
class Accesses:
    """The neurons that calls needed from a store.

    Attributes:
        stored: the store's layers. model_hash: of its weights. place_bytes: bytes of a slot in the cache.
        run: how the model ran: ``policy``, ``slots`` (of the cache), ``hot_share``, ``preload``, ``window``,
            ``resident`` (by layer, neurons that were never evicted; None: by ``hot_share``) and ``engine``; ``wanted``
            and ``hits`` of the recorded calls; ``lost`` calls; ``whole``: the recording began with the model's first
            call and only calls changed the cache, so a replay has the same hits.
        layers: int32 ``[calls]``. streamed: uint8 ``[calls]``. wanted: uint8, rows of bits (docs/TRACES.md).
    """

    stored: tuple[StoredLayer, ...]
    model_hash: str
    place_bytes: int
    run: dict[str, Any]
    layers: torch.Tensor
    streamed: torch.Tensor
    wanted: torch.Tensor

    @cached_property
    def slots(self) -> int:
        """Slots of a cache that holds the whole store."""
        return sum(layer.slots for layer in self.stored)

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first arguments of ``torch.ops.pi2.replay`` and similar operators."""
        about = torch.tensor([(layer.neurons, layer.cluster) for layer in self.stored], dtype=torch.int64)
        return self.layers, self.streamed, self.wanted, about.reshape(-1, 2)

    @cached_property
    def passes(self) -> int:
        """Forward passes (decoding steps and prompts): how often calls began again at an earlier layer."""
        if len(self.stored) == 1:
            return len(self.layers)
        return int((self.layers[1:] < self.layers[:-1]).sum()) + (len(self.layers) > 0)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file by atomic rename. Raises ArtifactError."""
        metadata = {"format": FORMAT, "version": VERSION, "model_hash": self.model_hash, "run": json.dumps(self.run)}
        stored = json.dumps([[s.key, s.neurons, s.cluster, s.read_bytes] for s in self.stored])
        metadata |= {"place_bytes": str(self.place_bytes), "stored": stored}
        atomic_write(path, packed({name: getattr(self, name) for name in _DTYPES}, metadata))

    @classmethod
    def load(cls, path: str | Path) -> "Accesses":
        """Read what :meth:`save` wrote. Raises ArtifactError: missing, damage, another version, or impossible calls."""
        load()
        tensors, metadata = read_tensors(path)
        found = tuple(metadata.get(name) for name in ("format", "version"))
        if found != (FORMAT, VERSION):
            Field(path, str(path), _FIX).wrong(f"{FORMAT} version {VERSION}", f"{found[0]} version {found[1]}")
        accesses = cls._parsed(tensors, metadata, path)
        for name, dtype in _DTYPES.items():
            tensor = getattr(accesses, name)
            if tensor.dtype != dtype or tensor.dim() != 1:
                _damaged(path, f"{name}: {tensor.dtype}, {tensor.dim()} dimensions")
        try:
            torch.ops.pi2.replay_check(*accesses.arguments)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].partition("pi2: accesses: ")[2].removesuffix(". Record them again.")
            _damaged(path, reason, error)
        return accesses

    @classmethod
    def _parsed(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, str], path: str | Path) -> "Accesses":
        def said(name: str) -> Field:
            return Field(parse(metadata.get(name, ""), f"{path}, {name}", fix=_FIX), f"{path}, {name}", _FIX)

        stored = tuple(_layer(row) for row in said("stored").items(1))
        run = said("run")
        run.at("policy").text()
        for name in ("slots", "window", "wanted", "hits", "lost"):
            run.at(name).whole()
        run.at("hot_share").number(0, 1)
        for name in ("preload", "whole"):
            run.at(name).flag()
        resident = run.at("resident", None)  # older files have none
        if resident.value is not None:
            for count, layer in zip(resident.items(len(stored), len(stored)), stored, strict=True):
                count.whole(0, layer.neurons)
        if missing := [name for name in _DTYPES if name not in tensors]:
            _damaged(path, f"no tensor {missing[0]}")
        place_bytes = said("place_bytes").whole(1, 1 << 40)
        if "model_hash" not in metadata:
            _damaged(path, "no model_hash")
        return cls(stored, metadata["model_hash"], place_bytes, run.value, **{name: tensors[name] for name in _DTYPES})


def _layer(row: Field) -> StoredLayer:
    key, *numbers = row.items(4, 4)
    return StoredLayer(key.text(empty=True), *(number.whole(1, 1 << 40) for number in numbers))


def _damaged(path: str | Path, reason: str, error: Exception | None = None) -> NoReturn:
    expected = "a recording of a store's accesses"
    raise ArtifactError(str(path), expected=expected, found=f"damage ({reason})", fix=_FIX) from error


class record_accesses(Recording):
    """Record which neurons every call of a model over a store needs, and write the file when the block ends.

    ::

        model = torch_pi2.load(folder, budget="2GiB")
        with torch_pi2.record_accesses(model, "accesses.safetensors"):
            model.generate(...)

    Then ``torch-pi2 replay accesses.safetensors`` prints the hit rates of other budgets and policies. A replay with the
    settings of the run has exactly its hits if recording begins before the first call.

    Args:
        model: loaded with a budget; calls of copies that share its store are recorded too.
        path: of the file; an existing one is replaced.
        capacity: bytes of memory for recorded bits, one per neuron and call. Later calls are lost, with a warning.

    Attributes:
        accesses: an :class:`Accesses`, after the end.

    Raises:
        ConfigError: the model has no store or is already being recorded, or ``capacity`` is out of range.
        ArtifactError: ``path`` cannot be written (raised at once where possible), or the store has been closed.
    """

    @checked
    def __init__(self, model: nn.Module, path: str | Path, *, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            argument(capacity, "capacity", f"Leave it at {CAPACITY}.").wrong("1 byte or more")
        self.path, self.capacity = Path(path), capacity
        self.accesses: Accesses | None = None
        self._store: Store = store_and_budget(model)[0]
        self._before: dict[str, int] | None = None
        check_writable(self.path)

    def start(self) -> Self:
        with explained(str(self._store.path)):
            problem = torch.ops.pi2.store_record(self._store.number, self.capacity)
        if problem:
            argument(self.path, f"recording accesses to {self._store.path}", "Stop that one first.").wrong(
                "one recording at a time, in the process that opened the store", problem
            )
        self._before = self._store.stats()
        return self

    def stop(self) -> Path:
        before, store = self._before, self._store
        if before is None:
            expected, fix = "one that was started", "Call start()."
            raise ConfigError(f"recording {self.path}", expected=expected, found="one that was not", fix=fix)
        self._before = None
        with explained(str(store.path)):
            layers, streamed, bits, counts = torch.ops.pi2.store_recorded(store.number)
        wanted, hits, lost, whole = counts.tolist()
        if lost:
            log.warning(
                "%s: %d calls were lost: they need more than %d bytes; record less, or pass a larger capacity",
                self.path, lost, self.capacity,
            )  # fmt: skip
        resident = None if store.resident is None else list(store.resident)
        run = {name: getattr(store.config, name) for name in ("policy", "preload", "window")}
        run |= {"slots": before["slots"], "hot_share": float(store.hot_share), "resident": resident}
        run |= {"engine": store.describe(), "wanted": wanted, "hits": hits, "lost": lost, "whole": bool(whole)}
        unit = SECTOR if "direct" in store.describe() else 1
        with StoreReader(store.path) as reader:
            stored = tuple(
                StoredLayer(key, e.neurons, e.cluster, -(-e.cluster * e.neuron_bytes // unit) * unit)
                for key, e in zip(reader.keys, reader.entries, strict=True)
            )
        place_bytes = max(-(-layer.read_bytes // 64) * 64 for layer in stored)
        if before["slots"] > 0:  # the actual size on this machine
            place_bytes = before["cache_bytes"] // before["slots"]
        self.accesses = Accesses(stored, reader.model_hash, place_bytes, run, layers, streamed, bits)
        self.accesses.save(self.path)
        return self.path
