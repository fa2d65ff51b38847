"""What belongs to the weights of a folder: plan, predictors and statistics, inside its store or in files beside them.

In a store a part is a text (U8 tensor ``pi2.PART``) and tensors ``pi2.PART.NAME``: of the plan the text of plan.json
and the tensors of plan.safetensors, of the others the metadata of their file as JSON and its tensors (docs/FORMATS.md).
A store without statistics may get some beside it: they are no part of what the model computes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from torch_pi2.base.fields import Field
from torch_pi2.base.files import read_text
from torch_pi2.base.reading import parse
from torch_pi2.base.tensorfile import Spec, TensorReader
from torch_pi2.errors import ArtifactError
from torch_pi2.predict.file import (
    PREDICTORS_FILE,
    AnyPredictor,
    FittedPredictors,
    each_predictor,
    load_predictors,
    predictors_of,
)
from torch_pi2.store.storefile import PIECE, STORE_FILE, StoreReader, block_checks, part_of, tensor_check
from torch_pi2.types.method import PREDICTED, Method
from torch_pi2.types.plan import Plan
from torch_pi2.types.shard import Shard
from torch_pi2.types.stats import STATS_FILE, ActivationStats, check_stats_artifact, parse_layers

#: Part -> the file without which it is not there, and the file of its tensors.
_FILES = {
    "plan": ("plan.json", "plan.safetensors"),
    "predictors": (PREDICTORS_FILE, PREDICTORS_FILE),
    "stats": (STATS_FILE, STATS_FILE),
}
#: What may be beside a store that has none inside.
_ALSO_BESIDE = "stats"


class Parts:
    """The parts of a folder ``pi2/``, wherever they are, read when they are asked for. Use it as a context manager.

    Raises:
        ArtifactError: the store is damaged, or there are files beside it that are not what it has inside.
    """

    def __init__(self, pi2: str | Path) -> None:
        self._pi2 = Path(pi2)
        self._store: StoreReader | None = None
        if os.path.lexists(self._pi2 / STORE_FILE):
            store = StoreReader(self._pi2 / STORE_FILE)
            try:
                if store.has_parts:
                    _check_beside(self._pi2, store)
            except BaseException:
                store.close()
                raise
            if store.has_parts:
                self._store = store
            else:  # packed before stores had them
                store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._store.close()

    @property
    def inside(self) -> bool:
        """Whether they are in a store."""
        return self._store is not None

    @property
    def shard(self) -> Shard | None:
        """Which neurons are in the store, if it is one of several machines'."""
        return None if self._store is None else self._store.shard

    def has(self, part: str) -> bool:
        """Whether there is a ``plan``, ``predictors`` or ``stats``."""
        if self._store is not None and f"pi2.{part}" in self._store.specs:
            return True
        return (self._store is None or part == _ALSO_BESIDE) and os.path.lexists(self._pi2 / _FILES[part][0])

    def plan(self) -> Plan:
        """Raises ArtifactError, StaleArtifactError: as :meth:`Plan.load`."""
        if self._store is None:
            return Plan.load(self._pi2)
        plan = Plan.from_json(self._store.text("plan"), self._store.part("plan"), self._where("plan"))
        self._store.check_own_plan(plan)
        return plan

    def predictors(self, model_hash: str | None = None) -> FittedPredictors:
        """All of them; none if there are none. Raises as :func:`torch_pi2.predict.file.load_predictors`."""
        if not self.has("predictors"):
            return FittedPredictors()
        if self._store is None:
            return load_predictors(self._pi2, model_hash=model_hash)
        return predictors_of(self._meta("predictors"), self._predictor_tensor, *self._belongs("predictors", model_hash))

    def each_predictor(self, model_hash: str | None = None) -> Iterator[tuple[str, AnyPredictor]]:
        """As :meth:`predictors`, one after the other."""
        if self._store is None and self.has("predictors"):
            path = self._pi2 / PREDICTORS_FILE
            with TensorReader(path) as file:
                named = {name: partial(file.read, name) for name in file.specs}
                yield from each_predictor(file.metadata, lambda n: named[n]() if n in named else None, path, model_hash)
        elif self.has("predictors"):
            about = self._belongs("predictors", model_hash)
            yield from each_predictor(self._meta("predictors"), self._predictor_tensor, *about)

    def stats(self, model_hash: str | None = None) -> ActivationStats | None:
        """None if there are none. Raises as :meth:`ActivationStats.load`."""
        if not self.has("stats"):
            return None
        if not self.stats_inside:
            return ActivationStats.load(self._pi2, model_hash=self._hash_beside(model_hash))
        assert self._store is not None
        where, wanted = self._belongs("stats", model_hash)
        return ActivationStats.from_tensors(self._store.part("stats"), self._meta("stats"), where, model_hash=wanted)

    @property
    def stats_inside(self) -> bool:
        """Whether statistics are in a store."""
        return self._store is not None and "pi2.stats" in self._store.specs

    def thresholds(self, model_hash: str | None = None) -> dict[str, float]:
        """Those of :meth:`stats` by key, without their tensors; none if there are no statistics. Raises as that."""
        where, meta, wanted = self._stats_meta(model_hash)
        if meta is None:
            return {}
        check_stats_artifact(where, meta, wanted)
        rows = parse_layers(meta, where).items()
        return {row.at("key").text(empty=True): row.at("threshold").number() for row in rows}

    def check_stats(self, model_hash: str) -> None:
        """As :meth:`stats`, as far as their metadata tells, which may be much less to read."""
        where, meta, wanted = self._stats_meta(model_hash)
        if meta is not None:
            check_stats_artifact(where, meta, wanted)

    def _stats_meta(self, model_hash: str | None) -> tuple[Path | str, Mapping[str, str] | None, str | None]:
        """Where statistics are, their metadata (None: there are none), and the hash that they must have."""
        if self.stats_inside:
            where, wanted = self._belongs("stats", model_hash)
            return where, self._meta("stats"), wanted
        if not self.has("stats"):
            return self._pi2, None, None
        with TensorReader(self._pi2 / STATS_FILE) as file:
            return file.path, file.metadata, self._hash_beside(model_hash)

    def _hash_beside(self, model_hash: str | None) -> str | None:
        return model_hash or (None if self._store is None else self._store.model_hash)

    def _predictor_tensor(self, name: str) -> torch.Tensor | None:
        assert self._store is not None
        whole = f"pi2.predictors.{name}"
        return self._store.read(whole) if whole in self._store.specs else None

    def _belongs(self, part: str, model_hash: str | None) -> tuple[str, str]:
        """Where a part in the store is, and of which weights it must be: the store's, if nobody says more."""
        assert self._store is not None
        return self._where(part), model_hash or self._store.model_hash

    def _where(self, part: str) -> str:
        return f"{self._pi2 / STORE_FILE}, its {part}"

    def _meta(self, part: str) -> dict[str, str]:
        assert self._store is not None
        where, fix = self._where(part), "Pack the folder again."
        found = Field(parse(self._store.text(part), where, fix=fix), where, fix)
        return {name: value.text(empty=True) for name, value in found.each().items()}


class PartFiles:
    """The files of a folder ``pi2/`` as the tensors that a store has of them.

    Args:
        parts: some of ``PARTS`` (default: those that there are files of).

    Attributes:
        specs: by their names in a store. paths: the files.

    Raises:
        ArtifactError: a file is damaged.
    """

    def __init__(self, pi2: Path, parts: Iterable[str] | None = None) -> None:
        self.specs: dict[str, Spec] = {}
        self.paths: list[Path] = []
        self._texts: dict[str, torch.Tensor] = {}
        self._readers: dict[str, TensorReader] = {}
        try:
            for part in _FILES if parts is None else parts:
                if os.path.lexists(pi2 / _FILES[part][0]):
                    self._add(part, *(pi2 / file for file in _FILES[part]))
        except BaseException:
            self.close()
            raise

    def _add(self, part: str, first: Path, tensors: Path) -> None:
        reader = self._readers[part] = TensorReader(tensors)
        text = read_text(first) if first != tensors else json.dumps(reader.metadata, sort_keys=True)
        data = torch.empty(0, dtype=torch.uint8)
        if text:  # frombuffer takes no empty ones
            data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self._texts[f"pi2.{part}"] = data
        self.specs[f"pi2.{part}"] = Spec.of(data)
        self.specs |= {f"pi2.{part}.{name}": spec for name, spec in reader.specs.items()}
        self.paths += dict.fromkeys((first, tensors))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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


def _check_beside(pi2: Path, store: StoreReader) -> None:
    """Raises ArtifactError if a file beside ``store`` is not what it has inside: which of them counts?"""
    either = {_ALSO_BESIDE} - {part_of(name) for name in store.specs}
    with PartFiles(pi2, [part for part in _FILES if part not in either]) as files:
        for name, spec in files.specs.items():
            if store.specs.get(name) == spec:
                starts = range(0, spec.nbytes, PIECE)
                blocks = [block_checks(files.read_bytes(name, i, min(i + PIECE, spec.nbytes))) for i in starts]
                if tensor_check(name, spec, blocks) == store.checks[name]:
                    continue
            beside = _FILES[part_of(name) or "plan"][0]
            raise ArtifactError(
                f"{pi2 / beside} beside {STORE_FILE}",
                expected=f"what the store has inside, where {beside} belongs, or no such file",
                found=f"another {name}",
                fix="Remove it, or pack the folder that it belongs to anew.",
            )


def check_predictors(plan: Plan, found: Iterator[tuple[str, AnyPredictor]], where: str | Path) -> None:
    """Raises ArtifactError unless every layer that wants a predictor has one of its kind and sizes in ``found``."""
    missing = {layer.site.key: layer for layer in plan.layers if layer.method in PREDICTED}
    for key, predictor in found:
        layer = missing.pop(key, None)
        if layer is None:
            continue
        rows = predictor.tensors().get("signs", predictor.tensors().get("b"))
        kind = getattr(predictor, "kind", Method.LOWRANK)
        hidden = getattr(predictor, "hidden", None) or predictor.tensors()["a"].shape[1]
        neurons = 0 if rows is None else len(rows)
        if (kind, neurons, hidden) != (layer.method, layer.site.intermediate, layer.site.hidden):
            _mismatched(where, layer.method, layer.site, f"{kind} of {neurons} neurons and {hidden} inputs")
    for layer in missing.values():
        _mismatched(where, layer.method, layer.site, "none")


def _mismatched(where: str | Path, method: str, site: Any, found: str) -> None:
    raise ArtifactError(
        f"predictors of {where}",
        expected=f"a {method} predictor of {site.key} with {site.intermediate} neurons and {site.hidden} inputs",
        found=found,
        fix="Fit predictors to this model (torch_pi2.fit), and plan with them.",
    )
