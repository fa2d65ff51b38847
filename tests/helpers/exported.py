"""Models, bundles and programs for tests of the exporter: one layer each, as lowering takes seconds per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import shared_folder
from tiny_experts import build
from tiny_models import _LLAMA, _hf, drelu_module, randomise
from torch import nn

import torch_pi2
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.export.decoder import Lanes, method_names, method_spec

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


def decoder_methods(lanes: Lanes, batches: Sequence[int], prompts: Sequence[int] = ()) -> dict[str, nn.Module]:
    """The modules of all methods of ``lanes``, by name."""
    return {name: method_spec(name, lanes, lanes.max_tokens - 1).module for name in method_names(batches, prompts)}


# --- programs in ExecuTorch's own ways of lowering --------------------------------------------------------------------

IDS = torch.tensor([[5, 9, 40, 11, 33, 7, 21, 60]])


def edge_config() -> Any:
    from executorch.exir import EdgeCompileConfig

    return EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)


class Logits(nn.Module):
    """A user's module around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(ids, use_cache=False).logits
        return logits


class Small(nn.Module):
    """Linear layers around a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(24, 24), nn.Linear(24, 8)
        self.mlp = nn.Sequential(nn.Linear(24, 70), nn.ReLU(), nn.Linear(70, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.after(self.mlp(torch.sigmoid(self.before(x))))
        return y


def dense() -> nn.Module:
    torch.manual_seed(0)
    return _hf("Llama", hidden_act="relu", num_hidden_layers=1).eval()


def exact() -> nn.Module:
    return torch_pi2.optimize(dense(), method="exact")


def quantised() -> nn.Module:
    """What XNNPACK knows of its linears, another list of operators to preserve would decompose, without an error."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_

    model = exact()
    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8)
    quantize_(model, config, lambda m, _: type(m) is nn.Linear and not isinstance(m.weight, OffloadedParameter))
    return model


def int4() -> nn.Module:
    return torch_pi2.optimize(dense(), method="exact", weights="int4", activations="int8")


def signbit() -> nn.Module:
    text = torch.randint(3, 60, (32, 24), generator=torch.Generator().manual_seed(0))
    config = torch_pi2.Config(method="signbit", target_recall=0.9, calibration_tokens=700)
    return torch_pi2.optimize(dense(), text, config)


def exported_program(model: nn.Module) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(Logits(model).eval(), (IDS,), strict=False)


def backends(edge: Any) -> list[str]:
    module = edge.exported_program().graph_module
    calls = [n.args[0].target for n in module.graph.nodes if "executorch_call_delegate" in str(n.target)]
    return [getattr(module, name).backend_id for name in calls]


def experts() -> nn.Module:
    return torch_pi2.optimize(build("Mixtral", num_hidden_layers=1), method="exact")
