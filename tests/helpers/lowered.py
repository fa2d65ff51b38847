"""Optimised models, a user's module around them, and what lowering made of it: for tests of ExecuTorch's own ways."""

from __future__ import annotations

from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from tiny_experts import build
from tiny_models import _hf
from torch import nn

import torch_pi2

IDS = torch.tensor([[5, 9, 40, 11, 33, 7, 21, 60]])
CONFIG = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)


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
    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8))
    return model


def int4() -> nn.Module:
    return torch_pi2.optimize(dense(), method="exact", weights="int4", activations="int8")


def signbit() -> nn.Module:
    text = torch.randint(3, 60, (32, 24), generator=torch.Generator().manual_seed(0))
    config = torch_pi2.Config(method="signbit", target_recall=0.9, calibration_tokens=700)
    return torch_pi2.optimize(dense(), text, config)


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(Logits(model).eval(), (IDS,), strict=False)


def backends(edge: Any) -> list[str]:
    module = edge.exported_program().graph_module
    calls = [n.args[0].target for n in module.graph.nodes if "executorch_call_delegate" in str(n.target)]
    return [getattr(module, name).backend_id for name in calls]


def experts() -> nn.Module:
    return torch_pi2.optimize(build("Mixtral", num_hidden_layers=1), method="exact")
