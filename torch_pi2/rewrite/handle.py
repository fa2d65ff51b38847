"""``model.torch_pi2``: what a model was optimised with."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from torch_pi2.errors import CalibrationError, ConfigError
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.profiling.data import Batch
from torch_pi2.profiling.inputs import InputStats, gather_inputs
from torch_pi2.rewrite.linears import LayerError, Storage, check_linears, find_linears, quantize_linears
from torch_pi2.rewrite.rewrite import abandon, rewrite
from torch_pi2.spec.config import Config
from torch_pi2.spec.plan import Plan, lossy_methods
from torch_pi2.spec.stats import ActivationStats


@dataclass
class Optimized:
    """What an optimised model was made with; attached to it as ``model.torch_pi2``.

    ``quantization``: name of a linear layer or key of an FFN -> what quantising did to it; empty for float weights.
    ``weights``: "float", or the kind of the quantised ones.
    """

    plan: Plan
    predictors: FittedPredictors
    stats: ActivationStats | None
    quantization: dict[str, LayerError] = field(default_factory=dict)
    weights: str = "float"

    @property
    def left(self) -> dict[str, str]:
        """Layers that look feed-forward and stay dense: name -> reason."""
        chosen = {y.site.key: "choosing neurons would not pay" for y in self.plan.layers if y.method == "dense"}
        return chosen | dict(self.plan.made_by.get("left", {}))

    @property
    def lossy(self) -> bool:
        """Whether other numbers come out than those of the dense model with the weights it was made from."""
        return self.weights != "float" or bool(lossy_methods(self.plan))

    @property
    def loss_change(self) -> float | None:
        """How much larger the loss was than that of the dense model on held-out calibration data, 0.01: 1 %.

        0 if nothing is lossy; None: not measured, as of thresholds and of quantised weights.
        """
        if not self.lossy:
            return 0.0
        return None if self.weights != "float" else self.plan.made_by.get("loss_change")


def apply(
    model: nn.Module,
    parts: Optimized,
    progress: bool,
    config: Config | None = None,
    data: list[Batch] | None = None,
) -> nn.Module:
    """Rewrite ``model`` as ``parts`` and ``config`` say, and attach them to it."""
    config = config or Config()
    if config.weights == "float":
        rewrite(model, parts.plan, parts.predictors, progress=progress)
    else:
        _apply_quantised(model, parts, progress, config, data)
        parts.weights = config.weights
    # A plain attribute: nn.Module would refuse nothing here, but state_dict and parameters() must not see it.
    object.__setattr__(model, "torch_pi2", parts)
    return model


def _apply_quantised(
    model: nn.Module, parts: Optimized, progress: bool, config: Config, data: list[Batch] | None
) -> None:
    sites = [layer.site for layer in parts.plan.layers]
    weighted = config.quantization == "weighted"
    if weighted and not data:
        raise CalibrationError(
            "optimize(quantization='weighted')",
            expected="calibration data",
            found="none",
            fix="Pass calibration=..., or leave quantization out.",
        )
    linears, _ = find_linears(model, sites, data[0] if data else None)
    check_linears(linears, config.weights)
    inputs: dict[str, InputStats] = {}
    if data:
        some = data if weighted else data[:1]  # the first batch is enough to measure errors of outputs
        inputs = gather_inputs(model, some, sites, linears, progress=progress)
    storage = Storage(config.weights, config.activations == "int8", inputs, weighted)
    check_linears(linears, config.weights, storage)  # what can be refused, before anything is replaced
    rewrite(model, parts.plan, parts.predictors, progress=progress, storage=storage)
    try:
        for layer in sparse_layers(model):
            parts.quantization[layer.site.key] = LayerError(layer.error, layer.output_error)
        parts.quantization |= quantize_linears(model, linears, storage, progress=progress)
    except BaseException as error:  # no memory, or interrupted
        abandon(model, error)
        raise


def parts_of(model: nn.Module) -> Optimized:
    """Plan, predictors and statistics of an optimised model. Raises ConfigError if it is not one."""
    parts = getattr(model, "torch_pi2", None)
    if not isinstance(parts, Optimized):
        raise ConfigError(
            type(model).__name__,
            expected="a model that torch_pi2.optimize has rewritten",
            found="a dense model",
            fix="Call torch_pi2.optimize(model, ...) first.",
        )
    return parts
