"""Quantised graphs for Qualcomm's NPU: run on its x86 emulator (extra ``qnn``), or with quantised weights only."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Emulated(nn.Module):
    """A compiled module as the emulator computes it, for inputs of the shapes of ``example``.

    ``method``: the name of its graph. It must be compiled without weight sharing: the emulator loads no other.
    """

    def __init__(self, module: nn.Module, example: tuple[torch.Tensor, ...], method: str = "forward") -> None:
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
        from executorch.runtime import Runtime

        from torch_pi2.export.qnn import sdk

        super().__init__()
        sdk.load(sdk.find())
        config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
        programs = {method: torch.export.export(module, example)}
        self._program = bytes(to_edge_transform_and_lower(programs, compile_config=config).to_executorch().buffer)
        self._method: Any = Runtime.get().load_program(self._program).load_method(method)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: Sequence[torch.Tensor] = self._method.execute([x.contiguous() for x in inputs])
        return tuple(y.clone() for y in found)  # the next call writes into the same memory


def relative(got: torch.Tensor, right: torch.Tensor) -> float:
    """L2."""
    return float((got - right).norm() / right.norm())


def weights_alone(quantized: nn.Module) -> nn.Module:
    """A copy of ``quantized`` with its weights, and activations in float32."""
    made: Any = copy.deepcopy(quantized)
    for node in made.graph.nodes:
        if "dequantize_per_tensor" in str(node.target) and "quantize_per_tensor" in str(node.args[0].target):
            node.replace_all_uses_with(node.args[0].args[0])
    made.graph.eliminate_dead_code()
    made.recompile()
    whole: nn.Module = made
    return whole
