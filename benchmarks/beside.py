"""A real model in floats, and the predictions of other forms of it beside its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.arguments import TRAINED


def floats(args: argparse.Namespace) -> tuple[Callable[[], Any], Any]:
    """A function that loads the model of ``--folder`` in float32, anew each time; and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trust = args.trust_remote_code or args.folder == TRAINED  # our own model brings its code

    def make() -> Any:
        return AutoModelForCausalLM.from_pretrained(args.folder, trust_remote_code=trust, dtype=torch.float32).eval()

    return make, AutoTokenizer.from_pretrained(args.folder, trust_remote_code=trust)


@dataclass
class Beside:
    """Sums over tokens.

    Attributes:
        dense_nats, nats: losses. divergence: of the next token's distribution from the dense model's. same: tokens of
            which the most likely next one is the same.
    """

    dense_nats: float = 0.0
    nats: float = 0.0
    divergence: float = 0.0
    same: float = 0.0
    tokens: int = 0

    def add(self, dense_BTV: torch.Tensor, logits_BTV: torch.Tensor, ids_BT: torch.Tensor) -> None:
        """``dense_BTV``: logarithms of the dense model's probabilities, float32; ``logits_BTV`` for the same tokens."""
        found_BTV = F.log_softmax(logits_BTV.float(), -1)
        self.dense_nats += _nats(dense_BTV, ids_BT)
        self.nats += _nats(found_BTV, ids_BT)
        self.divergence += float((dense_BTV.exp() * (dense_BTV - found_BTV)).sum())
        self.same += float((dense_BTV.argmax(-1) == found_BTV.argmax(-1)).sum())
        self.tokens += ids_BT.numel()

    def to_json(self) -> dict[str, float]:
        """``loss``: relative increase; ``kl``: in nats per token; ``agreement``: share of tokens."""
        return {
            "loss": self.nats / self.dense_nats - 1,
            "kl": self.divergence / self.tokens,
            "agreement": self.same / self.tokens,
        }


def _nats(logs_BTV: torch.Tensor, ids_BT: torch.Tensor) -> float:
    """Negative log likelihood of every token but the first of each row."""
    return -float(logs_BTV[:, :-1].gather(-1, ids_BT[:, 1:, None]).sum())
