"""Shapes without data (fake kernels) of the operators for mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_pi2.errors import ShapeError
from torch_pi2.ops.fakes_ffn import ffn_output


def _experts_ffn(
    x: torch.Tensor,
    index: torch.Tensor,
    routing: torch.Tensor,
    bundles: torch.Tensor,
    predictor: list[torch.Tensor],
    kind: str,
    cuts: list[float],
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    thresholds: list[float],
    weights: str,
    int8_activations: bool = False,
) -> torch.Tensor:
    if bundles.dim() != 4:
        raise ShapeError(
            "bundles",
            expected="[experts, neurons, 3 or 2, hidden]",
            found=str(tuple(bundles.shape)),
            fix="Stack the bundles of all experts.",
        )
    _check_routed(x, index, routing)
    return ffn_output(x, bundles.flatten(0, 1), weights)


def _stored_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    routing: torch.Tensor,
    store: int,
    first_layer: int,
    experts: int,
    predictor: list[torch.Tensor],
    kind: str,
    cuts: list[float],
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    thresholds: list[float],
    int8_activations: bool = False,
) -> torch.Tensor:
    _check_routed(x, index, routing)
    return x.new_empty(x.shape)


def _check_routed(x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor) -> None:
    for name, tensor in (("index", index), ("routing", routing)):
        if x.dim() != 2 or tensor.dim() != 2 or tensor.shape[0] != x.shape[0] or tensor.shape != index.shape:
            raise ShapeError(
                name,
                expected="[tokens, slots], both alike, for x [tokens, hidden]",
                found=f"{tuple(tensor.shape)} for x {tuple(x.shape)}",
                fix="Pass the router's top k of these tokens.",
            )


#: Operator -> fake.
FAKES: dict[str, Callable[..., Any]] = {"experts_ffn": _experts_ffn, "stored_experts": _stored_experts}
