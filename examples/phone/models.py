"""What is on its way to the phone: the trained model of ``make demo``, and two small ones that it does not stand for.

The small ones have random weights, and say words alone: tokens that are read as they were said when their text comes
back in a talk.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import torch_pi2

#: Fewer tokens than any prompt has.
WINDOW = 8
PROMPTS = (
    'def read_config(path):\n    """Read a configuration file',
    "import os\n\nclass Cache:\n    def __init__(self",
    "for name in sorted(os.listdir(folder)):\n    path = ",
    'class Error(Exception):\n    """Raised when',
)
#: What is asked in a talk.
QUESTIONS = ("open a file", "and close it")
#: The models know none.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}# {{ message['content'] }}:"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Case:
    """A model: ``make(tokenizer)`` returns it, optimised. Answers have ``tokens`` tokens, of a talk ``talk_tokens``."""

    name: str
    make: Callable[[Any], Any]
    tokens: int
    talk_tokens: int


def cases(folder: Path, tokens: int) -> tuple[Case, ...]:
    """``folder``: of the trained model, whose answers have ``tokens`` tokens."""
    # Its neurons are predicted, but not in prompts of 32 tokens or more: PyTorch reads the whole talk as a shorter one.
    return (
        Case("trained", lambda _: torch_pi2.load(folder, trust_remote_code=True), tokens, 8),
        Case("mixture", partial(_random, "Mixtral", num_local_experts=4, num_experts_per_tok=2), 12, 8),
        Case("window", partial(_random, "Mistral", sliding_window=WINDOW), 12, 8),
    )


def _random(kind: str, tokenizer: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        hidden_act="relu",
        bos_token_id=None,
        eos_token_id=None,
        **more,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    others = [token for token, piece in enumerate(pieces) if not re.fullmatch("\u0120[a-z]+", piece)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
        model.lm_head.weight[others] = 0
    return torch_pi2.optimize(model, method="exact")
