"""How a model is trained to be sparse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from torch_pi2.base.arguments import check_fields, check_values

#: ``relu-gate``: ``relu(gate) * up``, or ``relu(up)`` of plain FFNs; ``drelu``: ``relu(gate) * relu(up)``.
ACTIVATIONS = ("relu-gate", "drelu")


@dataclass(frozen=True)
class SparsifySettings:
    """Settings of :func:`torch_pi2.sparsify`, which takes them as keywords.

    Attributes:
        activation: ``relu-gate``: ReLU in place of the activation (ReLU Strikes Back, arXiv 2310.04564), by the name
            in config.json; ``drelu``: of the up projection as well (TurboSparse, arXiv 2406.05955), which needs
            modelling code of its own in the folder. FFNs that have exact zeros already stay as they are.
        target_sparsity: share of exact zeros, mean over layers, that the weight of the penalty is steered to.
        steps: of the optimiser; 0: one pass over the text.
        batch: windows a step, over all processes. window: tokens of one. accumulate: forward passes a step.
        learning_rate: its highest value; a cosine leads down to a tenth of it (TurboSparse's 5e-5 to 5e-6).
        lora: rank of LoRA adapters on all linear layers (package peft), merged at the end; 0: all weights are trained.
        distill: share of the loss that is the divergence from the dense model's predictions, the rest being that of
            the text. 0: the dense model is not kept.
        revive: gate rows of neurons that never fired between two checkpoints are drawn anew.
        bf16: compute in bfloat16 (autocast; weights and optimiser stay float32).
        save_every: steps between checkpoints, a multiple of 10; 0: ten in all, or as many as there can be.
        seed: of every random choice.
    """

    activation: str = "relu-gate"
    target_sparsity: float = 0.95
    steps: int = 0
    batch: int = 16
    window: int = 512
    accumulate: int = 1
    learning_rate: float = 5e-5
    lora: int = 0
    distill: float = 0.0
    revive: bool = False
    bf16: bool = True
    save_every: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        checks = (
            ("activation", self.activation in ACTIVATIONS, " or ".join(ACTIVATIONS)),
            ("target_sparsity", 0 < self.target_sparsity < 1, "between 0 and 1"),
            ("steps", self.steps >= 0, "0 (one pass over the text) or more"),
            ("batch", self.batch >= 1, "at least 1"),
            ("window", self.window >= 2, "at least 2"),
            ("accumulate", self.accumulate >= 1, "at least 1"),
            ("batch", self.batch % self.accumulate == 0, f"a multiple of accumulate ({self.accumulate})"),
            ("learning_rate", 0 < self.learning_rate <= 1, "more than 0, at most 1"),
            ("lora", self.lora >= 0, "0 (none) or a rank"),
            ("distill", 0 <= self.distill <= 1, "from 0 to 1"),
            ("revive", not (self.revive and self.lora), "False with lora, which does not train the rows"),
            ("save_every", self.save_every >= 0 and self.save_every % STEER_EVERY == 0, "a multiple of 10"),
            ("seed", 0 <= self.seed < 1 << 32, "from 0 to below 2^32"),
        )
        check_values(self, checks, "sparsify({}=...)", "Correct it.")


#: Steps between two looks at the zeros, after which the weight of the penalty changes.
STEER_EVERY = 10


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
