"""Checks of a layer's input, mode and plan, and the dtype of its result."""

from typing import Any

import torch

from torch_pi2.base.dtypes import DTYPES, dtype_name
from torch_pi2.base.modules import refuse_global_hooks
from torch_pi2.errors import ConfigError, DtypeError, GradientError, ShapeError, check_choice
from torch_pi2.types.method import METHODS
from torch_pi2.types.plan import LayerPlan, is_permutation
from torch_pi2.types.site import FFNSite


def check_ffn_input(site: FFNSite, training: bool, x: torch.Tensor, weights: torch.dtype, lookups: Any = None) -> None:
    """Checks sizes, dtypes (of ``x`` and ``weights``) and ``lookups``; refuses gradients and global module hooks."""
    if not torch.compiler.is_compiling():
        refuse_global_hooks(site.key)
        if lookups is not None:
            lookups.check(site.key)
    for what, dtype in (("input", x.dtype), ("weights", weights)):
        if dtype not in DTYPES.values():
            fix = "Convert the model with model.float(), or call torch_pi2.restore(model) for other dtypes."
            expected = "float32, bfloat16 or float16"
            raise DtypeError(f"{what} of {site.key}", expected=expected, found=dtype_name(dtype), fix=fix)
    if x.shape[-1] != site.hidden:
        found = f"{x.shape[-1]} (shape {tuple(x.shape)})"
        fix = "Pass activations of the model that this layer was made from."
        raise ShapeError(f"hidden size of the input of {site.key}", expected=str(site.hidden), found=found, fix=fix)
    if torch.is_grad_enabled() and (x.requires_grad or training):
        expected = "inference, without gradients"
        found = "an input that requires grad" if x.requires_grad else "a model in training mode"
        fix = "Call it under torch.no_grad() after model.eval(), or torch_pi2.restore(model) to train."
        raise GradientError(f"gradients through {site.key}", expected=expected, found=found, fix=fix)


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype of a linear layer's result on ``x``: autocast's dtype where autocast is on, else that of ``x``."""
    kind = x.device.type
    if x.dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def check_method(site: FFNSite, layer_plan: LayerPlan) -> None:
    """Raises ConfigError unless a layer at ``site`` can compute ``layer_plan``, which was not read from a file."""
    check_choice(f"method of {site.key}", layer_plan.method, METHODS, "Correct the plan.")
    if layer_plan.thresholds is not None and site.experts is not None:
        expected, fix = "one for an expert: the operator of mixtures knows no others", "Choose score='gate'."
        raise ConfigError(f"thresholds of {site.key}", expected=expected, found="one for each neuron", fix=fix)
    order = layer_plan.order
    if not is_permutation(order, site.intermediate) or not 0 <= layer_plan.n_hot <= site.intermediate:
        expected = f"an order of {site.intermediate} different neurons and 0 to {site.intermediate} hot ones"
        found = f"{len(order.unique())} different neurons from {len(order)}, and {layer_plan.n_hot} hot ones"
        raise ConfigError(f"plan of {site.key}", expected=expected, found=found, fix="Make the plan again.")
