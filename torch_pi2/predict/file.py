"""``predictors.safetensors``: fitted predictors on disk."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from torch_pi2.base.fields import MOST, Field, Limits
from torch_pi2.base.files import atomic_write, check_artifact
from torch_pi2.base.reading import parse
from torch_pi2.base.tensorfile import packed, read_tensors
from torch_pi2.errors import ConfigError, check_made_from
from torch_pi2.predict import PREDICTORS, AnyPredictor, check_all_known
from torch_pi2.types.method import PredictorCard

PREDICTORS_VERSION = 1
PREDICTORS_FILE = "predictors.safetensors"
#: Tensor name -> tensor, or None if there is none.
ReadTensor = Callable[[str], torch.Tensor | None]
_FIX = "Fit them again."


@dataclass
class FitReport:
    """How ``fit`` sized predictors.

    Attributes:
        dense_loss, loss: mean per token on the evaluation sequences, without and with predictors.
        change: ``loss / dense_loss - 1``; tolerance: the requested bound; met: whether it was reached.
        skipped: share of (token, cold neuron) pairs not computed on the evaluation sequences.
        rounds: per evaluation of the whole model ``{"step", "change", "skipped"}``.
        layers: per site ``{"key", "cold", "rank", "target_recall", "weights"}`` and the card's fields.
        tokens: ``{"fit", "calibrate", "evaluate"}``, disjoint sets of sequences.
    """

    dense_loss: float
    loss: float
    change: Annotated[float, Limits(-MOST)]
    tolerance: float
    met: bool
    skipped: float
    rounds: tuple[Mapping[str, Any], ...]
    layers: tuple[Mapping[str, Any], ...]
    tokens: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class FittedPredictors(dict[str, AnyPredictor]):
    """Site key -> predictor, for sites with cold neurons; ``report``: how sized; ``model_hash``: of weights or ""."""

    report: FitReport | None = None
    model_hash: str = ""

    def check_hash(self, model_hash: str) -> None:
        """Raises StaleArtifactError if they were fitted to other weights."""
        if self and self.model_hash:
            fix = "Fit them to this model with these statistics: up or gate is first, as their score says."
            check_made_from("predictors", self.model_hash, model_hash, "ones fitted to FFN weights", fix)


def save_predictors(folder: str | Path, predictors: Mapping[str, AnyPredictor], model_hash: str) -> Path:
    """Write ``predictors.safetensors`` into ``folder`` by atomic rename; ``predictors``: site key -> calibrated
    predictor; ``model_hash``: ``weights_hash`` of the model they were fitted to. Raises ArtifactError: the folder
    cannot be written. ConfigError: a predictor has no card (not calibrated), or is of another kind.
    """
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, Any] = {}
    check_all_known(predictors)
    for key, p in predictors.items():
        if p.card is None:
            expected = "one with a threshold and a card"
            fix = "Call torch_pi2.fitting.train.calibrate with held-back samples first."
            raise ConfigError(f"predictor of {key}", expected=expected, found="one that was not calibrated", fix=fix)
        entries[key] = {"kind": p.kind, "threshold": p.threshold, "card": p.card.to_json(), **p.fields()}
        tensors.update({f"{key}.{name}": t for name, t in p.tensors().items()})
    report = getattr(predictors, "report", None)
    meta = {"format": "torch_pi2.predictors", "version": str(PREDICTORS_VERSION), "model_hash": model_hash}
    meta |= {"predictors": json.dumps(entries), "report": json.dumps(None if report is None else report.to_json())}
    atomic_write(path := Path(folder) / PREDICTORS_FILE, packed(tensors, meta))
    return path


def load_predictors(folder: str | Path, *, model_hash: str | None = None) -> FittedPredictors:
    """Read what :func:`save_predictors` wrote. Raises ArtifactError: damage; StaleArtifactError: other weights."""
    path = Path(folder) / PREDICTORS_FILE if Path(folder).suffix != ".safetensors" else Path(folder)
    tensors, meta = read_tensors(path)
    return predictors_of(meta, tensors.get, path, model_hash)


def predictors_of(meta: Mapping, tensor: ReadTensor, where: Path | str, model_hash: str | None) -> FittedPredictors:
    """Predictors from the metadata and tensors of the file ``where``; raises as :func:`load_predictors`."""
    result = FittedPredictors(each_predictor(meta, tensor, where, model_hash))
    result.model_hash = meta["model_hash"]
    report = _json(meta, "report", where)
    result.report = None if report.value is None else report.take(FitReport)
    return result


def each_predictor(
    meta: Mapping[str, str], tensor: ReadTensor, where: Path | str, model_hash: str | None
) -> Iterator[tuple[str, AnyPredictor]]:
    """As :func:`predictors_of`, one site key and predictor at a time: all may not fit in memory."""
    check_artifact(where, meta, "torch_pi2.predictors", PREDICTORS_VERSION, model_hash)
    for key, entry in _json(meta, "predictors", where).each().items():
        kind = PREDICTORS[entry.at("kind").text(PREDICTORS)]
        names = kind.tensor_names or [name.text() for name in entry.at("tensors").items()]
        tensors = {name: tensor(f"{key}.{name}") for name in names}
        present = {name: t for name, t in tensors.items() if t is not None}
        yield key, kind.read(present, entry, *read_threshold_and_card(entry))


def read_threshold_and_card(entry: Field) -> tuple[float, PredictorCard]:
    return entry.at("threshold").number(-MOST), entry.at("card").take(PredictorCard)


def _json(meta: Mapping[str, str], name: str, where: Path | str) -> Field:
    return Field(parse(meta.get(name, ""), f"{where}, {name}", fix=_FIX), f"{where}, {name}", _FIX)
