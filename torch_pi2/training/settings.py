"""Settings of ``sparsify``, and the record of the model, text and settings that checkpoints belong to."""

from dataclasses import asdict, dataclass
from pathlib import Path

from torch_pi2.base.fields import Field, argument, check_fields, from_json, limited, to_json
from torch_pi2.base.files import atomic_write, json_text, read_json, writing
from torch_pi2.errors import StaleArtifactError
from torch_pi2.training.zeros import Measured

#: ``relu-gate``: ``relu(gate) * up``, or ``relu(up)`` of plain FFNs; ``drelu``: ``relu(gate) * relu(up)``.
ACTIVATIONS = ("relu-gate", "drelu")
#: Steps between two changes of the weight of the penalty.
STEER_EVERY = 10

_ARGUMENT = "sparsify({}=...)"
_FORMAT, _VERSION = "torch_pi2.sparsify.begun", 1
_RESUME_FILE = "begun.json"
_FIX = "Remove that folder; the training starts again."


@dataclass(frozen=True)
class SparsifySettings:
    """Settings of :func:`torch_pi2.sparsify`, which takes them as keywords.

    Attributes:
        activation: ``relu-gate``: ReLU in place of the activation (ReLU Strikes Back, arXiv 2310.04564), by its name in
            config.json; ``drelu``: also on the up projection (TurboSparse, arXiv 2406.05955), which needs modelling
            code in the folder. FFNs that have exact zeros are not changed.
        target_sparsity: target share of exact zeros, mean over layers.
        steps: of the optimiser; 0: one pass over the text.
        batch: windows per step, over all processes. window: tokens per window. accumulate: forward passes per step.
        learning_rate: the peak; a cosine decays to a tenth of it (TurboSparse's 5e-5 to 5e-6).
        distill: weight of the divergence from the dense model's predictions in the loss; the rest is the loss on the
            text. 0: the dense model is not kept.
        bf16: compute in bfloat16 (autocast; weights and optimiser stay float32).
        save_every: steps between checkpoints, a multiple of 10; 0: about ten checkpoints.
        seed: of every random choice.
    """

    activation: str = limited(choices=ACTIVATIONS, default="relu-gate")
    target_sparsity: float = limited(0, 1, above=True, below=True, default=0.95)
    steps: int = limited(default=0)
    batch: int = limited(1, default=16)
    window: int = limited(2, default=512)
    accumulate: int = limited(1, default=1)
    learning_rate: float = limited(0, 1, above=True, default=5e-5)
    distill: float = limited(0, 1, default=0.0)
    bf16: bool = True
    save_every: int = limited(default=0)
    seed: int = limited(0, (1 << 32) - 1, default=0)

    def __post_init__(self) -> None:
        check_fields(self, _ARGUMENT)
        checks = (
            ("batch", self.batch % self.accumulate == 0, f"a multiple of accumulate ({self.accumulate})"),
            ("save_every", self.save_every % STEER_EVERY == 0, f"a multiple of {STEER_EVERY}"),
        )
        for name, good, expected in checks:
            if not good:
                argument(getattr(self, name), _ARGUMENT.format(name)).wrong(expected)


@dataclass(frozen=True)
class ResumeInfo:
    """Settings, hashes of FFN weights and token ids, and measurements, all from the start of a training."""

    settings: SparsifySettings
    model: str
    text: str
    before: Measured
    changed: Measured

    def save(self, folder: Path) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / _RESUME_FILE, json_text(_FORMAT, _VERSION, to_json(self)) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "ResumeInfo | None":
        """The one in ``folder``; None: no training was started there. Raises ArtifactError: it is damaged."""
        path = folder / _RESUME_FILE
        if not path.exists():
            return None
        data = read_json(path, _FORMAT, _VERSION)
        fields = {name: value for name, value in data.items() if name not in ("format", "version")}
        return from_json(cls, fields, str(path), _FIX)

    def check(self, settings: SparsifySettings, model: str, text: str, folder: Path) -> None:
        """Raises StaleArtifactError: the checkpoints are of another model, text or settings."""
        ours, theirs = asdict(self.settings), asdict(settings)
        other = [name for name, now in (("model", model), ("text", text)) if getattr(self, name) != now]
        other += [f"{name} ({ours[name]}, now {now})" for name, now in theirs.items() if ours[name] != now]
        if other:
            fix = "Use the command that it was started with, or remove that folder."
            expected, found = "the same model, text and settings as before", f"another {', another '.join(other)}"
            Field(settings, f"training begun in {folder}", fix, StaleArtifactError).wrong(expected, found)
