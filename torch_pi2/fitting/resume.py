"""Intermediate results of a fit, in memory or in a work folder from which it resumes after a kill."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import MOST, Field, shown
from torch_pi2.base.files import atomic_write, entries, json_text, locked, read_json, writing
from torch_pi2.base.tensorfile import packed, read_tensors
from torch_pi2.errors import ArtifactError, StaleArtifactError
from torch_pi2.predict.file import read_threshold_and_card
from torch_pi2.predict.lowrank import LowRankRows

_FORMAT = ("torch_pi2.fitting", 1)
#: Inputs of the fit in a work folder.
_SETTINGS_FILE = "begun.json"


class PredictorCache:
    """Predictors of one layer in memory, by rank, steps, and recall (None: not calibrated)."""

    def __init__(self) -> None:
        self._predictors: dict[tuple[int, int, float | None], LowRankRows] = {}

    def find(self, rank: int, steps: int, recall: float | None) -> LowRankRows | None:
        return self._predictors.get((rank, steps, recall))

    def put(self, predictor: LowRankRows, steps: int, recall: float | None) -> LowRankRows:
        self._predictors[predictor.rank, steps, recall] = predictor
        return predictor


class PredictorFiles(PredictorCache):
    """Predictors of a layer of width ``hidden`` in files: matrices, and thresholds and cards by recall."""

    def __init__(self, folder: Path, hidden: int) -> None:
        super().__init__()
        self._folder, self._hidden = folder, hidden

    def find(self, rank: int, steps: int, recall: float | None) -> LowRankRows | None:
        path, calibration = (self._folder / _name(rank, steps, found) for found in (None, recall))
        if not path.exists() or not calibration.exists():
            return None
        threshold, card = 0.0, None
        if recall is not None:
            fields = Field(read_json(calibration, *_FORMAT), str(calibration), "Fit again.")
            threshold, card = read_threshold_and_card(fields)
        tensors, _ = read_tensors(path)
        return LowRankRows.from_rows(tensors, "int4", self._hidden, threshold, card)

    def put(self, predictor: LowRankRows, steps: int, recall: float | None) -> LowRankRows:
        name = _name(predictor.rank, steps, recall)
        if recall is None:
            atomic_write(self._folder / name, packed(predictor.tensors(), {}))
        else:
            assert predictor.card is not None
            _write(self._folder / name, threshold=predictor.threshold, card=predictor.card.to_json())
        return predictor


class Losses:
    """Losses of the model in the order of the search. Those in ``folder`` are not measured again."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / "losses.json"
        self._next, self._losses = 0, list[tuple[float, float]]()
        if self._path is not None and self._path.exists():
            fields = Field(read_json(self._path, *_FORMAT), str(self._path), "Remove it.")
            for pair in fields.at("losses").items():
                loss, share = pair.items(2, 2)
                self._losses.append((loss.number(-MOST), math.nan if share.value is None else share.number()))

    def next(self, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        """The next loss, and the share of skipped pairs (nan if unknown)."""
        if self._next == len(self._losses):
            self._losses.append(measure())
            if self._path is not None:
                losses = [(loss, None if math.isnan(share) else share) for loss, share in self._losses]
                _write(self._path, losses=losses)
        self._next += 1
        return self._losses[self._next - 1]


def _name(rank: int, steps: int, recall: float | None) -> str:
    name = f"{rank}-{steps}-int4"
    return f"{name}.safetensors" if recall is None else f"{name}-{recall!r}.json"


def _write(path: Path, **fields: Any) -> None:
    atomic_write(path, json_text(*_FORMAT, fields, indent=None) + "\n")


@contextmanager
def work_folder(folder: Path | None, made_from: Mapping[str, Any]) -> Iterator[None]:
    """Lock ``folder``, if there is one, for a fit with the inputs ``made_from``: name -> digest or setting. Raises
    StaleArtifactError: the folder belongs to another fit. ArtifactError: another process fits there, or damage.
    """
    if folder is None:
        yield
        return
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, 0.0):
        _check_same_fit(folder, json.loads(json.dumps(dict(made_from))))
        yield


def _check_same_fit(folder: Path, made_from: dict[str, Any]) -> None:
    path = folder / _SETTINGS_FILE
    if not path.exists():
        if entries(folder):
            fix = "Choose another."
            raise ArtifactError(str(folder), expected="an empty folder, or one of a fit", found="other files", fix=fix)
        _write(path, made_from=made_from)
        return
    before = read_json(path, *_FORMAT).get("made_from")
    before = before if isinstance(before, dict) else {}
    others = {name: now for name, now in made_from.items() if before.get(name) != now}
    changed = [f"{name} ({shown(before.get(name))}, now {shown(now)})" for name, now in others.items()]
    if changed:
        what, expected = f"fit begun in {folder}", "the same model, text and settings, to resume"
        fix = "Repeat the command that started this fit, or remove the folder."
        raise StaleArtifactError(what, expected=expected, found=f"another {', another '.join(changed)}", fix=fix)
