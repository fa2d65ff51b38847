"""Models and bundles for tests of the exporter: one layer each, as lowering takes seconds a layer and method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import shared_folder
from tiny_models import _LLAMA, _hf, drelu_module, randomise
from torch import nn

import torch_pi2

#: Neurons: two chunks of an accelerator, and some more.
NEURONS, HIDDEN, VOCAB, ROOM = 1100, 64, 256, 48


def one_layer(seed: int = 0, **config: Any) -> nn.Module:
    """A dReLU decoder, random, whose FFN has nine tenths of the weights; it never ends a text."""
    module = drelu_module()
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": NEURONS,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "eos_token_id": None,
        "pad_token_id": None,
        "hidden_act": "relu",
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    model = module.DReLULlamaForCausalLM(module.DReLULlamaConfig(**(_LLAMA | settings | config))).eval()
    return randomise(model)


def bundle_of(
    factory: pytest.TempPathFactory, name: str, make: Callable[[], nn.Module], **settings: Any
) -> tuple[nn.Module, Path]:
    """What ``make`` gives, optimised, and its bundle, which is exported once for all workers of a test run."""
    model = make()
    return model, shared_folder(
        factory, f"exported-{name}", lambda folder: torch_pi2.export(model, folder, max_tokens=ROOM, **settings)
    )


def drawn_model(name: str, seed: int = 1, **config: Any) -> nn.Module:
    """Large random weights: attention is far from a mean, and what it does wrong shows."""
    torch.manual_seed(seed)
    model = _hf(name, **{"eos_token_id": None} | config).eval()
    for parameter in (p for p in model.parameters() if p.dim() > 1):
        nn.init.normal_(parameter, 0, 0.3)
    return model
