"""``apply``: a model rewritten as its parts say, all of it: FFNs, and the linear layers beside them if quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torch_pi2.distributed.ranks import Ranks
from torch_pi2.errors import CalibrationError
from torch_pi2.fitting.gptq_model import calibrated_rows, warn_rounded
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.profiling.data import Batch
from torch_pi2.profiling.inputs import InputStats, gather_inputs
from torch_pi2.rewrite.linears import LayerError, Storage, check_linears, check_some, find_linears, quantize_linears
from torch_pi2.rewrite.rewrite import abandon, rewrite
from torch_pi2.rewrite.state import SparseState
from torch_pi2.types.config import Config


def apply(
    model: nn.Module,
    parts: SparseState,
    progress: bool,
    config: Config | None = None,
    data: list[Batch] | None = None,
    strategies: Mapping[str, str] | None = None,
    ranks: Ranks | None = None,
) -> nn.Module:
    """Rewrite ``model`` as ``parts`` and ``config`` say, and attach them to it.

    ``strategies``: see :func:`rewrite`. ``ranks``: processes that make the same call and share the work of GPTQ.
    """
    config = config or Config()
    if config.weights == "float":
        rewrite(model, parts.plan, parts.predictors, progress=progress, strategies=strategies)
    else:
        _apply_quantised(model, parts, progress, config, data, strategies, ranks)
        parts.weights = config.weights
    parts.attach(model)
    return model


def _apply_quantised(
    model: nn.Module,
    parts: SparseState,
    progress: bool,
    config: Config,
    data: list[Batch] | None,
    strategies: Mapping[str, str] | None,
    ranks: Ranks | None,
) -> None:
    sites = [layer.site for layer in parts.plan.layers]
    weighted = config.quantization == "weighted"
    if config.quantization != "rtn" and not data:
        raise CalibrationError(
            f"optimize(quantization='{config.quantization}')",
            expected="calibration data",
            found="none",
            fix="Pass calibration=..., or leave quantization out.",
        )
    linears, _ = find_linears(model, sites, data[0] if data else None)
    check_some(f"quantising {type(model).__name__}", sites, linears)
    check_linears(linears, config.weights)
    inputs: dict[str, InputStats] = {}
    if data:
        some = data if weighted else data[:1]  # the first batch is enough to measure errors of outputs
        inputs = gather_inputs(model, some, sites, linears, progress=progress)
    rows: dict[str, torch.Tensor] = {}
    if data and config.quantization == "gptq":
        how: dict[str, Any] = {"progress": progress, "ranks": ranks}
        left = calibrated_rows(model, data, sites, linears, config.weights, rows.__setitem__, **how)
        warn_rounded(left)
    storage = Storage(config.weights, config.activations == "int8", inputs, weighted, rows)
    check_linears(linears, config.weights, storage)  # what can be refused, before anything is replaced
    rewrite(model, parts.plan, parts.predictors, progress=progress, storage=storage, strategies=strategies)
    try:
        for layer in sparse_layers(model):
            parts.quantization[layer.site.key] = LayerError(layer.error, layer.output_error)
        parts.quantization |= quantize_linears(model, linears, storage, progress=progress)
    except BaseException as error:  # no memory, or interrupted
        abandon(model, error)
        raise
