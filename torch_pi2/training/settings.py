"""Settings of ``sparsify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from torch_pi2.base.fields import argument, check_fields, limited

#: ``relu-gate``: ``relu(gate) * up``, or ``relu(up)`` of plain FFNs; ``drelu``: ``relu(gate) * relu(up)``.
ACTIVATIONS = ("relu-gate", "drelu")
#: Steps between two changes of the weight of the penalty.
STEER_EVERY = 10

_ARGUMENT = "sparsify({}=...)"


@dataclass(frozen=True)
class SparsifySettings:
    """Settings of :func:`torch_pi2.sparsify`, which takes them as keywords.

    Attributes:
        activation: ``relu-gate``: ReLU in place of the activation (ReLU Strikes Back, arXiv 2310.04564), by the name
            in config.json; ``drelu``: also on the up projection (TurboSparse, arXiv 2406.05955), which needs modelling
            code in the folder. FFNs that have exact zeros already stay as they are.
        target_sparsity: share of exact zeros, mean over layers, that the penalty is steered to.
        steps: of the optimiser; 0: one pass over the text.
        batch: windows a step, over all processes. window: its tokens. accumulate: forward passes a step.
        learning_rate: the highest; a cosine decays to a tenth of it (TurboSparse's 5e-5 to 5e-6).
        lora: rank of LoRA adapters on all linear layers (package peft), merged at the end; 0: all weights are trained.
        distill: share of the loss that is the divergence from the dense model's predictions; the rest is the loss on
            the text. 0: the dense model is not kept.
        revive: reinitialise the gate rows of neurons that never fired between two checkpoints.
        bf16: compute in bfloat16 (autocast; weights and optimiser stay float32).
        save_every: steps between checkpoints, a multiple of 10; 0: ten in all, or as many as there can be.
        seed: of every random choice.
    """

    activation: str = limited(choices=ACTIVATIONS, default="relu-gate")
    target_sparsity: float = limited(0, 1, above=True, below=True, default=0.95)
    steps: int = limited(default=0)
    batch: int = limited(1, default=16)
    window: int = limited(2, default=512)
    accumulate: int = limited(1, default=1)
    learning_rate: float = limited(0, 1, above=True, default=5e-5)
    lora: int = limited(default=0)
    distill: float = limited(0, 1, default=0.0)
    revive: bool = False
    bf16: bool = True
    save_every: int = limited(default=0)
    seed: int = limited(0, (1 << 32) - 1, default=0)

    def __post_init__(self) -> None:
        check_fields(self, _ARGUMENT)
        checks = (
            ("batch", self.batch % self.accumulate == 0, f"a multiple of accumulate ({self.accumulate})"),
            ("revive", not (self.revive and self.lora), "False with lora, which does not train the rows"),
            ("save_every", self.save_every % STEER_EVERY == 0, f"a multiple of {STEER_EVERY}"),
        )
        for name, good, expected in checks:
            if not good:
                argument(getattr(self, name), _ARGUMENT.format(name)).wrong(expected)


class SparsifyFields(TypedDict, total=False):
    """The fields of :class:`SparsifySettings`, as keywords."""

    activation: str
    target_sparsity: float
    steps: int
    batch: int
    window: int
    accumulate: int
    learning_rate: float
    lora: int
    distill: float
    revive: bool
    bf16: bool
    save_every: int
    seed: int
