"""The modelling code of a dReLU model: a few lines over the class of transformers that the dense model is of."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.types.site import FFNSite

_NAME = "modeling_drelu"
_TEMPLATE = '''\
"""{model} whose feed-forward layers are dReLU (TurboSparse, arXiv 2406.05955): relu(x Wg) * relu(x Wu).

Written by torch-pi2 sparsify. transformers runs it with trust_remote_code=True; it knows nothing of torch_pi2.
"""

import torch
from {config_module} import {config}
from {model_module} import {ffn}, {model}


class DReLU{config}({config}):
    model_type = "drelu_{model_type}"


class DReLU{ffn}({ffn}):
    def forward(self, x):
        return self.down_proj(torch.relu(self.gate_proj(x)) * torch.relu(self.up_proj(x)))


class DReLU{model}({model}):
    config_class = DReLU{config}

    def __init__(self, config):
        super().__init__(config)
        for module in self.modules():
            if type(module) is {ffn}:
                module.__class__ = DReLU{ffn}
'''


@dataclass(frozen=True)
class Code:
    """Modelling code and what it defines: a file to be written beside the weights, the class, a configuration of it."""

    file_name: str
    text: str
    model_class: Any
    config: Any


def drelu_code(dense: Any, sites: Sequence[FFNSite]) -> Code:
    """Modelling code for the model ``dense`` with dReLU in the FFNs ``sites``.

    Raises:
        UnsupportedModelError: its class is not of transformers, or an FFN is not of three linear layers gate_proj,
            up_proj and down_proj and nothing else.
    """
    kind, config_kind = type(dense), type(dense.config)
    owners = {type(dense.get_submodule(site.owner)) for site in sites}
    for site in sites:
        if reason := _unfit(dense, site):
            raise _refused(kind, f"{site.form} in {site.key} ({site.owner_class}): {reason}")
    of_transformers = all(c.__module__.startswith("transformers.models.") for c in (kind, config_kind, *owners))
    if len(owners) != 1 or not of_transformers:
        raise _refused(kind, f"classes {', '.join(sorted(c.__module__ for c in (kind, *owners)))}")
    (owner,) = owners
    text = _TEMPLATE.format(
        model=kind.__name__,
        model_module=kind.__module__,
        config=config_kind.__name__,
        config_module=config_kind.__module__,
        ffn=owner.__name__,
        model_type=config_kind.model_type,
    )
    module = _module(text)
    made: Any = getattr(module, f"DReLU{kind.__name__}")
    said = dense.config.to_dict()
    own = {name: value for name, value in said.items() if name not in ("model_type", "architectures", "auto_map")}
    config = made.config_class(**own)
    config.architectures = [made.__name__]
    config.auto_map = {
        "AutoConfig": f"{_NAME}.{made.config_class.__name__}",
        "AutoModelForCausalLM": f"{_NAME}.{made.__name__}",
    }
    return Code(f"{_NAME}.py", text, made, config)


def _unfit(dense: Any, site: FFNSite) -> str:
    if not site.gated or site.gate is None:
        return "no gate"
    if site.drops or "[" in site.activation or not site.owner_runs:
        return "more than the three matmuls and an activation"
    names = {f"{site.owner}.{name}_proj.weight" for name in ("gate", "up", "down")}
    if {site.gate.weight, site.up.weight, site.down.weight} != names:
        return "other names than gate_proj, up_proj, down_proj"
    projections = [name for name, m in dense.get_submodule(site.owner).named_children() if isinstance(m, nn.Linear)]
    return "" if len(projections) == 3 else "other linear layers beside these"


def _refused(kind: type, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"drelu in {kind.__name__}",
        expected="a model of transformers whose FFNs are act(gate_proj(x)) * up_proj(x), as Llama's or Qwen's",
        found=found,
        fix="Use activation='relu-gate', which needs no modelling code.",
    )


def _module(text: str) -> Any:
    """``text`` run as a module, from a file, since transformers reads the source of its models."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{_NAME}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"torch_pi2_{_NAME}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
