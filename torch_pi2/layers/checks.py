"""What a layer may be made of and be given, and the dtype of its result."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from torch_pi2.base.dtypes import DTYPES, dtype_name
from torch_pi2.base.hooks import refuse_global_hooks
from torch_pi2.errors import ConfigError, DtypeError, GradientError, ShapeError
from torch_pi2.types.method import METHODS
from torch_pi2.types.plan import LayerPlan
from torch_pi2.types.site import FFNSite, FFNWeights


def check_ffn_input(site: FFNSite, training: bool, x: torch.Tensor, weights: torch.dtype) -> None:
    """Raises on a wrong hidden size, dtypes that no kernel has (of ``x`` or of the ``weights``), where a dense layer
    would record a gradient, and on hooks of all modules.
    """
    if not torch.compiler.is_compiling():
        refuse_global_hooks(site.key)
        _refuse_tangent(site, x)
    for what, dtype in (("input", x.dtype), ("weights", weights)):
        if dtype not in DTYPES.values():
            raise DtypeError(
                f"{what} of {site.key}",
                expected="float32, bfloat16 or float16",
                found=dtype_name(dtype),
                fix="Convert the model with model.float(), or call torch_pi2.restore(model) for other dtypes.",
            )
    if x.shape[-1] != site.hidden:
        raise ShapeError(
            f"hidden size of the input of {site.key}",
            expected=str(site.hidden),
            found=f"{x.shape[-1]} (shape {tuple(x.shape)})",
            fix="Pass activations of the model that this layer was made from.",
        )
    if torch.is_grad_enabled() and (x.requires_grad or training):
        raise GradientError(
            f"gradients through {site.key}",
            expected="inference, without gradients",
            found="an input that requires grad" if x.requires_grad else "a model in training mode",
            fix="Call it under torch.no_grad() after model.eval(), or torch_pi2.restore(model) to train.",
        )


def refuse_vmap(site: FFNSite, x: torch.Tensor) -> None:
    """Raise ConfigError within ``torch.vmap``, for layers that compute what it has no rule for."""
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(x):
        raise ConfigError(
            f"input of {site.key}",
            expected="a tensor outside of torch.vmap",
            found="one within it",
            fix="Call the model with a batch instead, or torch_pi2.restore(model) first.",
        )


def _refuse_tangent(site: FFNSite, x: torch.Tensor) -> None:
    """Forward-mode AD (``torch.func.jvp``) takes an operator that it does not know for a constant."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise GradientError(
            f"gradients through {site.key}",
            expected="inference, without gradients",
            found="an input with a tangent (torch.func.jvp or forward_ad)",
            fix="Call torch_pi2.restore(model) first.",
        )


def needs_eval(site: FFNSite) -> ConfigError:
    return ConfigError(
        f"mode of {site.key}",
        expected="evaluation mode: in training mode the original drops neurons at random, and this would not",
        found="training mode",
        fix="Call model.eval(), or torch_pi2.restore(model) to have dropout.",
    )


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype of a linear layer's result on ``x``: that of ``torch.autocast`` where it is on."""
    kind = x.device.type
    if x.dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def check_shape(what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ShapeError, with ``what`` it is, unless ``tensor`` has this shape."""
    if tuple(tensor.shape) != shape:
        raise ShapeError(
            what, expected=str(shape), found=str(tuple(tensor.shape)), fix="It was made for another layer."
        )


def check_plan(site: FFNSite, weights: FFNWeights | None, layer_plan: LayerPlan) -> None:
    """Raises ShapeError or ConfigError unless plan and weights (None: not seen here) are of a layer at ``site``."""
    hidden, intermediate = site.hidden, site.intermediate
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("gate", "up"), (intermediate, hidden))
    shapes["down"] = (hidden, intermediate)
    shapes |= {"bias_gate": (intermediate,), "bias_up": (intermediate,), "bias_down": (hidden,)}
    for name, tensor in ({} if weights is None else weights._asdict()).items():
        if tensor is not None:
            check_shape(f"{name} of {site.key}", tensor, shapes[name])
    check_shape(f"neuron order of {site.key}", layer_plan.order, (intermediate,))
    if layer_plan.method not in METHODS:
        raise ConfigError(
            f"method of {site.key}",
            expected=f"one of {', '.join(METHODS)}",
            found=repr(layer_plan.method),
            fix="Correct the plan.",
        )
    if layer_plan.thresholds is not None:
        check_shape(f"thresholds of {site.key}", layer_plan.thresholds, (intermediate,))
        if site.experts is not None:
            raise ConfigError(
                f"thresholds of {site.key}",
                expected="one for an expert: the operator of mixtures knows no others",
                found="one for each neuron",
                fix="Choose score='gate'.",
            )
    seen = torch.zeros(intermediate, dtype=torch.bool)
    inside = (layer_plan.order >= 0) & (layer_plan.order < intermediate)
    seen[layer_plan.order[inside].long()] = True
    if not (0 <= layer_plan.n_hot <= intermediate and bool(seen.all())):
        raise ConfigError(
            f"plan of {site.key}",
            expected=f"an order of all {intermediate} neurons and 0 to {intermediate} hot ones",
            found=f"{int(seen.sum())} different neurons and {layer_plan.n_hot} hot ones",
            fix="Make the plan again.",
        )
