"""``ResumeInfo``: which model, text and settings the checkpoints of a training belong to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torch_pi2.base.fields import from_json, to_json
from torch_pi2.base.files import atomic_write, parse_json, read_text, writing
from torch_pi2.errors import StaleArtifactError
from torch_pi2.training.settings import SparsifySettings
from torch_pi2.training.zeros import Measured

FORMAT, VERSION = "torch_pi2.sparsify.begun", 1
RESUME_FILE = "begun.json"
_FIX = "Remove that folder; the training starts again."


@dataclass(frozen=True)
class ResumeInfo:
    """What a training was started with: settings, hashes of FFN weights and token ids, and measurements before it."""

    settings: SparsifySettings
    model: str
    text: str
    before: Measured
    changed: Measured

    def save(self, folder: Path) -> None:
        """Write it into ``folder``. Raises ArtifactError: it cannot be written."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        about = {"format": FORMAT, "version": VERSION, **to_json(self)}
        atomic_write(folder / RESUME_FILE, json.dumps(about, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> ResumeInfo | None:
        """That of ``folder``; None: no training was started there. Raises ArtifactError: it is damaged."""
        path = folder / RESUME_FILE
        if not path.exists():
            return None
        data = parse_json(read_text(path), path, FORMAT, VERSION)
        fields = {name: value for name, value in data.items() if name not in ("format", "version")}
        return from_json(cls, fields, str(path), _FIX)

    def check(self, settings: SparsifySettings, model: str, text: str, folder: Path) -> None:
        """Raises StaleArtifactError: the checkpoints are of another model, text or settings."""
        ours, theirs = asdict(self.settings), asdict(settings)
        other = [name for name, now in (("model", model), ("text", text)) if getattr(self, name) != now]
        other += [f"{name} ({ours[name]}, now {now})" for name, now in theirs.items() if ours[name] != now]
        if other:
            raise StaleArtifactError(
                f"training begun in {folder}",
                expected="the same model, text and settings as before",
                found=f"another {', another '.join(other)}",
                fix="Use the command that it was started with, or remove that folder.",
            )
