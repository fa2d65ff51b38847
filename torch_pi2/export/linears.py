"""Layers outside FFNs: converted to float32, or linear layers to XNNPACK's int8 or int4."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from torch_pi2.base.extras import missing_package
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.errors import ConfigError
from torch_pi2.layers.linear import QuantEmbedding, QuantLinear

#: Columns that share a scale.
_GROUP = 32


class FloatEmbedding(nn.Module):
    """An embedding whose table stays in 16 bit, as the checkpoint has it; its rows come out in float32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input, self.weight).float()


def linears_of(model: nn.Module, asked: str) -> str:
    """The format in which the linear layers of ``model`` are exported.

    Raises:
        ConfigError: ``asked`` is not the format in which they are quantised already.
    """
    kinds = dict.fromkeys(module.weights for module in model.modules() if isinstance(module, QuantLinear))
    if not kinds:
        return asked
    kind = ", ".join(kinds)
    if asked not in ("float32", kind):
        raise ConfigError(
            "export(linears=...)",
            expected=f"nothing, as those of the model are in {kind}",
            found=repr(asked),
            fix="Leave it out, or export the float model.",
        )
    return kind


def prepare_rest(model: nn.Module, linears: str) -> None:
    """Convert ``model`` to float32 in place, and quantise its linear layers. Tables of 16-bit embeddings stay.

    Raises:
        LibraryMissingError: torchao is not installed, and ``linears`` is not ``float32``.
    """
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.leave_blocks()  # the kernels of this CPU are not those of a phone
        if isinstance(module, QuantEmbedding):
            module.dtype = torch.float32
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is nn.Embedding and child.weight.dtype in (torch.bfloat16, torch.float16):
                parent._modules[name] = FloatEmbedding(child)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, FloatEmbedding)}
    for parameter in model.parameters():
        offloaded = isinstance(parameter, OffloadedParameter)
        if id(parameter) not in tables and parameter.is_floating_point() and not offloaded:
            parameter.data = parameter.data.float()  # in place, so that tied ones stay tied
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.float()
    if linears != "float32" and not any(isinstance(m, QuantLinear) for m in model.modules()):
        _quantize(model, linears)


def _quantize(model: nn.Module, linears: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
            from torchao.quantization.granularity import PerAxis, PerGroup
    except ImportError as error:
        raise missing_package("torchao", "export", error, "it, to quantise linear layers") from error
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in tables:  # tied: the table stays as it is
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    dtypes: Any = {"int4": torch.int4, "int8": torch.int8}  # type: ignore[attr-defined]
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=dtypes[linears],
        weight_granularity=PerGroup(_GROUP) if linears == "int4" else PerAxis(0),
    )
    quantize_(model, config, lambda module, _: type(module) is nn.Linear and module.in_features % _GROUP == 0)
