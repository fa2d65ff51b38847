"""What a fit has made so far: in memory, or in a folder, from which the same fit goes on after a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import MOST, Field, shown
from torch_pi2.base.files import atomic_folder_files, atomic_write, locked, not_written, parse_json, read_text
from torch_pi2.base.tensorfile import read_tensors
from torch_pi2.distributed.ranks import Ranks
from torch_pi2.errors import ArtifactError, StaleArtifactError
from torch_pi2.predict.file import card_of
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.predict.lowrank_rows import LowRankRows
from torch_pi2.profiling.data import digest

_FORMAT = ("torch_pi2.fitting", 1)
_BEGUN = "begun.json"


class Kept:
    """Predictors of one layer that were trained, by rank, steps and format, and those calibrated, by recall too.

    In memory.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, str, float | None], LowRank] = {}

    def find(self, rank: int, steps: int, weights: str, recall: float | None) -> LowRank | None:
        """The one that was kept; recall None: not calibrated."""
        return self._found.get((rank, steps, weights, recall))

    def keep(self, predictor: LowRank, steps: int, recall: float | None) -> LowRank:
        """Raises ArtifactError: it cannot be written."""
        self._found[predictor.rank, steps, predictor.weights, recall] = predictor
        return predictor


class KeptFiles(Kept):
    """The same in files of ``folder``, so that they take no memory: matrices, and what calibration makes of them.

    Args:
        hidden: H of the layer.
    """

    def __init__(self, folder: Path, hidden: int) -> None:
        super().__init__()
        self._folder, self._hidden = folder, hidden

    def find(self, rank: int, steps: int, weights: str, recall: float | None) -> LowRank | None:
        """Raises ArtifactError: a file is damaged."""
        path = self._folder / _name(rank, steps, weights)
        said = self._folder / _name(rank, steps, weights, recall)
        if not path.exists() or not said.exists():
            return None
        found = (0.0, None) if recall is None else card_of(parse_json(read_text(said), said, *_FORMAT), said)
        tensors, _ = read_tensors(path)
        if weights == LowRank.weights:
            return LowRank.from_tensors(tensors, *found)
        return LowRankRows.from_rows(tensors, weights, self._hidden, *found)

    def keep(self, predictor: LowRank, steps: int, recall: float | None) -> LowRank:
        name = _name(predictor.rank, steps, predictor.weights, recall)
        if recall is None:
            atomic_folder_files(self._folder, {name: (predictor.tensors(), {})})
            return predictor
        assert predictor.card is not None
        about = {"threshold": predictor.threshold, "card": predictor.card.to_json()}
        text = json.dumps({"format": _FORMAT[0], "version": _FORMAT[1], **about})
        atomic_write(self._folder / name, text + "\n")
        return predictor


class Losses:
    """Losses of the model in the order in which a search asks for them: those in ``folder`` are not taken again."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / "losses.json"
        self._next, self._found = 0, list[tuple[float, float]]()
        if self._path is not None and self._path.exists():
            said = Field(parse_json(read_text(self._path), self._path, *_FORMAT), str(self._path), "Remove it.")
            for pair in said.at("losses").items():
                loss, share = pair.items(2, 2)
                self._found.append((loss.number(-MOST), math.nan if share.value is None else share.number()))

    def take(self, measure: Callable[[], tuple[float, float]], ranks: Ranks) -> tuple[float, float]:
        """A loss and the share of pairs that were skipped (nan if unknown)."""
        if self._next == len(self._found):
            self._found.append(measure())
            if self._path is not None and not ranks.rank:
                known = [(loss, None if math.isnan(skipped) else skipped) for loss, skipped in self._found]
                about = {"format": _FORMAT[0], "version": _FORMAT[1], "losses": known}
                atomic_write(self._path, json.dumps(about) + "\n")
        self._next += 1
        return self._found[self._next - 1]


def _name(rank: int, steps: int, weights: str, recall: float | None = None) -> str:
    what = f"{rank}-{steps}-{weights}"
    return f"{what}.safetensors" if recall is None else f"{what}-{recall!r}.json"


@contextmanager
def begun(folder: Path | None, made_from: Mapping[str, Any], ranks: Ranks) -> Iterator[None]:
    """Take ``folder``, if there is one, for a fit of what is ``made_from``: name -> digest or setting.

    Raises:
        StaleArtifactError: another fit was begun there. ArtifactError: another process fits there, or it is damaged.
        ConfigError: processes have other models, text or settings than each other. In all processes.
    """
    if folder is None:
        yield
        return
    ranks.check_same("model, text or settings", lambda: digest(dict(made_from)))
    with ExitStack() as held:
        ranks.first(lambda: _take(folder, made_from, held))  # the first process has the lock
        yield


def _take(folder: Path, made_from: Mapping[str, Any], held: ExitStack) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(folder, error) from error
    held.enter_context(locked(folder, 0.0))
    _check_begun(folder, json.loads(json.dumps(dict(made_from))))


def _check_begun(folder: Path, made_from: dict[str, Any]) -> None:
    path = folder / _BEGUN
    if not path.exists():
        if any(folder.iterdir()):
            raise ArtifactError(
                str(folder), expected="an empty folder, or one of a fit", found="other files", fix="Choose another."
            )
        about = {"format": _FORMAT[0], "version": _FORMAT[1], "made_from": made_from}
        atomic_write(path, json.dumps(about, indent=1) + "\n")
        return
    was = parse_json(read_text(path), path, *_FORMAT).get("made_from")
    was = was if isinstance(was, dict) else {}
    other = [
        f"{name} ({shown(was.get(name))}, now {shown(now)})" for name, now in made_from.items() if was.get(name) != now
    ]
    if other:
        raise StaleArtifactError(
            f"fit begun in {folder}",
            expected="the same model, text and settings, to go on with",
            found=f"another {', another '.join(other)}",
            fix="Use the command that it was begun with, or remove that folder.",
        )
