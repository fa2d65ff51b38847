"""Plan, predictors and statistics of a folder, inside its store or in files beside the weights.

In a store, each part is a text (U8 tensor ``pi2.PART``) with tensors ``pi2.PART.NAME``. The plan has the text of
plan.json and the tensors of plan.safetensors; the others have the metadata of their file as JSON, and its tensors
(docs/FORMATS.md). Statistics may also be in a file beside a store that has none, as nothing computes with them.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.fields import Field
from torch_pi2.base.reading import Closing, parse, read_bytes
from torch_pi2.base.tensorfile import Spec, TensorReader
from torch_pi2.errors import ArtifactError
from torch_pi2.predict import AnyPredictor
from torch_pi2.predict.file import PREDICTORS_FILE, FittedPredictors, each_predictor, predictors_of
from torch_pi2.store.storefile import STORE_FILE, StoreReader, part_of
from torch_pi2.types.method import PREDICTED, Method
from torch_pi2.types.plan import Plan
from torch_pi2.types.shard import Shard
from torch_pi2.types.stats import STATS_FILE, ActivationStats, check_stats_artifact

#: Part -> its main file, and the file with its tensors.
_FILES = {"plan": ("plan.json", "plan.safetensors")}
_FILES |= {"predictors": (PREDICTORS_FILE, PREDICTORS_FILE), "stats": (STATS_FILE, STATS_FILE)}
#: The part that may be in a file beside a store.
_ALSO_BESIDE = "stats"


class Parts(Closing):
    """The parts of a folder ``pi2/``, in its store or in files, read on demand."""

    def __init__(self, pi2: str | Path) -> None:
        self._pi2 = Path(pi2)
        self._store: StoreReader | None = None
        if os.path.lexists(self._pi2 / STORE_FILE):
            self._store = StoreReader(self._pi2 / STORE_FILE)
            for part, (file, _) in _FILES.items():  # which of them would count?
                if os.path.lexists(self._pi2 / file) and (self._in_store(part) or part != _ALSO_BESIDE):
                    self.close()
                    what = f"{self._pi2 / file} beside {STORE_FILE}"
                    expected = "no such file: a store has plan, predictors and statistics inside"
                    fix = "Remove it, or pack the folder that it belongs to anew."
                    raise ArtifactError(what, expected=expected, found="one", fix=fix)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    @property
    def inside(self) -> bool:
        return self._store is not None

    @property
    def shard(self) -> Shard | None:
        """The store's shard, if it is one of several machines'."""
        return None if self._store is None else self._store.shard

    def has(self, part: str) -> bool:
        """Whether there is a ``plan``, ``predictors`` or ``stats``."""
        if self._in_store(part) is not None:
            return True
        return (self._store is None or part == _ALSO_BESIDE) and os.path.lexists(self._pi2 / _FILES[part][0])

    def plan(self) -> Plan:
        """Raises ArtifactError, StaleArtifactError: as :meth:`Plan.load`."""
        if self._store is None:
            return Plan.load(self._pi2)
        plan = Plan.from_json(self._store.text("plan"), self._store.part("plan"), self._where("plan"))
        self._store.check_plan(plan)
        return plan

    def predictors(self, model_hash: str | None = None) -> FittedPredictors:
        """All predictors, possibly none. Raises as :func:`torch_pi2.predict.file.load_predictors`."""
        if not self.has("predictors"):
            return FittedPredictors()
        with self._open("predictors") as (where, meta, tensor):
            return predictors_of(meta, tensor, where, self._wanted(model_hash))

    def each_predictor(self, model_hash: str | None = None) -> Iterator[tuple[str, AnyPredictor]]:
        """Like :meth:`predictors`, one at a time."""
        if self.has("predictors"):
            with self._open("predictors") as (where, meta, tensor):
                yield from each_predictor(meta, tensor, where, self._wanted(model_hash))

    def stats(self, model_hash: str | None = None) -> ActivationStats | None:
        """The statistics, or None. Raises as :meth:`ActivationStats.load`."""
        if not self.has("stats"):
            return None
        store, wanted = self._in_store("stats"), self._wanted(model_hash)
        if store is None:
            return ActivationStats.load(self._pi2, model_hash=wanted)
        with self._open("stats") as (where, meta, _):
            return ActivationStats.from_tensors(store.part("stats"), meta, where, model_hash=wanted)

    def check_stats(self, model_hash: str) -> None:
        """Check the metadata of :meth:`stats` alone, which may be much less to read."""
        if self.has("stats"):
            with self._open("stats") as (where, meta, _):
                check_stats_artifact(where, meta, model_hash)

    @contextmanager
    def _open(self, part: str) -> Iterator[tuple[Path | str, Mapping[str, str], Callable[[str], torch.Tensor | None]]]:
        """Location, metadata and tensor reader (None: no such tensor) of predictors or statistics."""
        store = self._in_store(part)
        if store is not None:
            where, fix = self._where(part), "Pack the folder again."
            found = Field(parse(store.text(part), where, fix=fix), where, fix)
            meta = {name: value.text(empty=True) for name, value in found.each().items()}
            yield where, meta, _reader(store, f"pi2.{part}.")
            return
        with TensorReader(self._pi2 / _FILES[part][1]) as file:
            yield file.path, file.metadata, _reader(file)

    def _in_store(self, part: str) -> StoreReader | None:
        return self._store if self._store is not None and f"pi2.{part}" in self._store.specs else None

    def _wanted(self, model_hash: str | None) -> str | None:
        """The weights' hash that parts must have: ``model_hash``, or the store's."""
        return model_hash or (None if self._store is None else self._store.model_hash)

    def _where(self, part: str) -> str:
        return f"{self._pi2 / STORE_FILE}, its {part}"


def _reader(file: TensorReader, prefix: str = "") -> Callable[[str], torch.Tensor | None]:
    return lambda name: file.read(prefix + name) if prefix + name in file.specs else None


class PartFiles(Closing):
    """The files of a folder ``pi2/`` (``parts``: some of ``PARTS``) as the tensors that a store has of them."""

    def __init__(self, pi2: Path, parts: Iterable[str] | None = None) -> None:
        self.specs: dict[str, Spec] = {}
        self.paths: list[Path] = []
        self._texts: dict[str, torch.Tensor] = {}
        self._readers: dict[str, TensorReader] = {}
        with self.opening():
            for part in _FILES if parts is None else parts:
                if os.path.lexists(pi2 / _FILES[part][0]):
                    self._add(part, *(pi2 / file for file in _FILES[part]))

    def _add(self, part: str, first: Path, tensors: Path) -> None:
        reader = self._readers[part] = TensorReader(tensors)
        text = read_bytes(first) if first != tensors else json.dumps(reader.metadata, sort_keys=True).encode()
        data = torch.empty(0, dtype=torch.uint8)
        if text:  # frombuffer refuses empty buffers
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._texts[f"pi2.{part}"] = data
        self.specs[f"pi2.{part}"] = Spec.of(data)
        self.specs |= {f"pi2.{part}.{name}": spec for name, spec in reader.specs.items()}
        self.paths += dict.fromkeys((first, tensors))

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes ``[start, stop)`` of a tensor, uint8."""
        if name in self._texts:
            return self._texts[name][start:stop]
        part = part_of(name)
        assert part is not None
        return self._readers[part].read_bytes(name.removeprefix(f"pi2.{part}."), start, stop)


def check_predictors(plan: Plan, found: Iterator[tuple[str, AnyPredictor]], where: str | Path) -> None:
    """Raises ArtifactError: ``found`` lacks a predictor of the right kind and size for a layer of ``plan``."""
    missing = {layer.site.key: layer for layer in plan.layers if layer.method in PREDICTED}
    for key, predictor in found:
        layer = missing.pop(key, None)
        if layer is None:
            continue
        rows = predictor.tensors().get("signs", predictor.tensors().get("b"))
        kind = getattr(predictor, "kind", Method.LOWRANK)
        if kind == layer.method == Method.CUSTOM:
            continue
        hidden = getattr(predictor, "hidden", None) or predictor.tensors()["a"].shape[1]
        neurons = 0 if rows is None else len(rows)
        if (kind, neurons, hidden) != (layer.method, layer.site.intermediate, layer.site.hidden):
            _mismatched(where, layer.method, layer.site, f"{kind} of {neurons} neurons and {hidden} inputs")
    for layer in missing.values():
        _mismatched(where, layer.method, layer.site, "none")


def _mismatched(where: str | Path, method: str, site: Any, found: str) -> None:
    expected = f"a {method} predictor of {site.key} with {site.intermediate} neurons and {site.hidden} inputs"
    fix = "Fit predictors to this model (torch_pi2.fit), and plan with them."
    raise ArtifactError(f"predictors of {where}", expected=expected, found=found, fix=fix)
