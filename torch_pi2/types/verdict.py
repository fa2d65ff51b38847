"""``Verdict``: speed, size and quality of a model compared with its dense form (verdict.json), an indication from one
run on one machine. Unmeasured values are None, with the reason in ``not_measured``.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import from_json, limited, to_json
from torch_pi2.base.files import atomic_write, json_text, read_json
from torch_pi2.base.units import size
from torch_pi2.errors import check_made_from

FORMAT = "torch_pi2.verdict"
VERSION = 1
#: In ``pi2/`` of a model folder.
VERDICT_FILE = "verdict.json"
_FIX = "Remove it, or make the folder again; docs/FORMATS.md has its format."


@dataclass(frozen=True)
class Speed:
    """Decoding speed in tokens per second: medians of alternating rounds. ``dense`` None: there was no dense model to
    run. ``ratio``: sparse over dense; of the medians, and the lowest and highest of a round. ``how``: the workload, in
    words.
    """

    sparse: float = limited(above=True)
    dense: float | None = limited(above=True, default=None)
    ratio: float | None = limited(above=True, default=None)
    ratio_low: float | None = limited(above=True, default=None)
    ratio_high: float | None = limited(above=True, default=None)
    how: str = ""


@dataclass(frozen=True)
class Loss:
    """``change`` of the loss per token relative to the dense model (0.01: 1 %), on ``tokens`` of ``text``."""

    change: float = limited(-1.0)
    tokens: int = limited(1)
    text: str = ""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one model folder.

    Attributes:
        model_hash: hash of the FFN weights, as in its plan.
        lossy: lossy settings, in words; empty: the model computes what the dense one computes.
        made: the steps that made the folder, in order.
        sparse_bytes: weights and predictors in the folder. dense_bytes: weights of the dense model; None: unknown.
        speed, loss: None: not measured. not_measured: reasons, by item (``dense``, ``speed``, ``loss``).
        date: UTC, ISO 8601. machine, versions: in words.
    """

    model_hash: str
    lossy: tuple[str, ...]
    made: tuple[str, ...]
    sparse_bytes: int
    dense_bytes: int | None
    speed: Speed | None
    loss: Loss | None
    not_measured: Mapping[str, str]
    date: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """With ``format`` and ``version`` first."""
        return {"format": FORMAT, "version": VERSION, **to_json(self)}

    def save(self, folder: str | Path) -> None:
        """Write ``verdict.json`` into ``folder``. Raises ArtifactError: it cannot be written."""
        atomic_write(Path(folder) / VERDICT_FILE, json_text(FORMAT, VERSION, to_json(self)) + "\n")

    @classmethod
    def load(cls, folder: str | Path, model_hash: str | None = None) -> "Verdict":
        """Inverse of :meth:`save`. Raises ArtifactError: missing or damaged. StaleArtifactError: of other weights."""
        path = Path(folder) / VERDICT_FILE
        data = read_json(path, FORMAT, VERSION)
        fields = {name: value for name, value in data.items() if name not in ("format", "version")}
        found = from_json(cls, fields, str(path), _FIX)
        if model_hash is not None:
            fix = "Remove it: it is of another model."
            check_made_from(str(path), found.model_hash, model_hash, "a verdict on FFN weights", fix)
        return found

    @classmethod
    def find(cls, folder: str | Path, model_hash: str | None = None) -> "Verdict | None":
        """Like :meth:`load`, but None if there is no such file."""
        return cls.load(folder, model_hash) if os.path.lexists(Path(folder) / VERDICT_FILE) else None

    def lines(self) -> dict[str, str]:
        """In words, the most important first, for terminal, report and model card."""
        words = ", ".join(f"{name} {value}" for name, value in self.versions.items())
        sizes = (size(self.sparse_bytes), "not known" if self.dense_bytes is None else size(self.dense_bytes))
        found = {"speed": self._speed(), "size": "{}, dense {}".format(*sizes), "quality": self._quality()}
        measured = f"{self.date} on {', '.join(self.machine.values())}"
        return found | {"made by": "; ".join(self.made) or "not known", "measured": measured, "versions": words}

    def _speed(self) -> str:
        if self.speed is None:
            return f"not measured ({self.not_measured.get('speed', 'nobody did')})"
        dense, ratio = self.speed.dense, self.speed.ratio
        sparse = f"{self.speed.sparse:.1f} tokens/s"
        if dense is None or ratio is None:
            return f"{sparse}, dense not measured ({self.not_measured.get('dense', 'nobody did')}); {self.speed.how}"
        low, high = self.speed.ratio_low or ratio, self.speed.ratio_high or ratio
        spread = f"({low:.2f} to {high:.2f} in rounds that alternate)"
        return f"{sparse}, dense {dense:.1f}: {ratio:.2f} times as fast {spread}; {self.speed.how}"

    def _quality(self) -> str:
        kind = f"lossy ({', '.join(self.lossy)})" if self.lossy else "lossless"
        if self.loss is None:
            return f"{kind}; change of the loss not measured ({self.not_measured.get('loss', 'nobody did')})"
        return f"{kind}; loss {self.loss.change:+z.2%} on {self.loss.tokens:,} tokens of {self.loss.text}"
