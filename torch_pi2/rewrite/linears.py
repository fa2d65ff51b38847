"""Replacing the linear layers outside the FFNs (attention, output layer) by quantised ones, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_pi2.base.dtypes import stands_for_another
from torch_pi2.base.modules import evaluating, own_forward, share_hooks
from torch_pi2.base.offloaded import free_storage
from torch_pi2.base.progress import bar
from torch_pi2.errors import NoFFNFoundError
from torch_pi2.graph.capture import capture, example_inputs
from torch_pi2.graph.experts import all_experts, without_experts
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.ops.quantized import check_importance, check_quantizable
from torch_pi2.profiling.data import Batch
from torch_pi2.profiling.run import InputStats
from torch_pi2.rewrite.install import replace_modules
from torch_pi2.types.site import FFNSite

_log = logging.getLogger("torch_pi2")

#: A group has 32 columns: fewer inputs than that are not worth a scale.
MIN_INPUTS = 32
#: Smaller ones are routers of mixtures of experts and classifiers: few bytes, and errors there are expensive.
MIN_OUTPUTS = 64


@dataclass(frozen=True)
class LayerError:
    """What quantisation did to one layer.

    Attributes:
        weight: ``|W' - W| / |W|`` over all its weights (Frobenius norms).
        output: the same of its output on calibration tokens, rounded activations included; None without calibration.
    """

    weight: float
    output: float | None = None


@dataclass(frozen=True)
class Storage:
    """How weights are to be stored.

    Attributes:
        weights: ``float``, ``int4`` or ``int8``. int8_activations: see :class:`torch_pi2.types.config.Config`.
        inputs: name of a linear or key of a site -> its inputs on calibration text.
        weighted: whether ``inputs`` say how much an error counts, or only how large it is.
        rows: what is to be taken as it is, under the keys of :mod:`torch_pi2.fitting.gptq_model`.
    """

    weights: str = "float"
    int8_activations: bool = False
    inputs: Mapping[str, InputStats] = field(default_factory=dict)
    weighted: bool = False
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        return self.weights != "float"

    def importance(self, name: str) -> torch.Tensor | None:
        """``[K]`` for a linear or site, or None: all columns count the same."""
        stats = self.inputs.get(name)
        return stats.importance if stats is not None and self.weighted else None

    def sample(self, name: str) -> torch.Tensor | None:
        """``[T, K]`` inputs of a linear or site, or None."""
        stats = self.inputs.get(name)
        return None if stats is None else stats.sample_TK


def find_linears(
    model: nn.Module, sites: Sequence[FFNSite], example: Batch | None = None, *, on_meta: bool = False
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Linear layers of the dense ``model`` to quantise beside its FFNs, and those left out with the reason.

    The one place where this is decided, for models in memory and for checkpoints on disk alike. ``example`` is run
    once, to see which are called: the weight of one that is not may be read by other code.

    Args:
        on_meta: the model is on ``meta`` as a whole, and of Hugging Face: it needs no example.

    Raises:
        CalibrationError, UnsupportedModelError: it does not run there.
    """
    of_sites = {id(model.get_parameter(ref.weight)) for site in sites for ref in site.refs.values()}
    linears: dict[str, nn.Linear] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or id(module.weight) in of_sites:
            continue
        if type(module) is not nn.Linear:
            skipped[name] = f"a {type(module).__name__}"
        elif reason := stands_for_another(module.weight):
            skipped[name] = reason
        elif own_forward({name: module}):
            skipped[name] = "a forward of its own (accelerate, or a patch)"
        elif module.in_features < MIN_INPUTS or module.out_features < MIN_OUTPUTS:
            skipped[name] = f"small ({module.in_features} -> {module.out_features})"
        else:
            linears[name] = module
    called: set[str] = set()
    hooks = [m.register_forward_hook(lambda *_, n=name: called.add(n)) for name, m in linears.items()]
    try:
        _run(model, example, on_meta)
    finally:
        for hook in hooks:
            hook.remove()
    for name in [name for name in linears if name not in called]:
        skipped[name] = "not called as a module"
        del linears[name]
    for name, reason in skipped.items():
        _log.info("%s stays float: %s", name, reason)
    return linears, skipped


def _run(model: nn.Module, example: Batch | None, on_meta: bool) -> None:
    with evaluating(model):
        if example is not None:
            example.call(model)
        elif not on_meta:
            model(**example_inputs(model))
        else:
            inputs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in example_inputs(model).items()}
            with without_experts(model, all_experts(model)[0]):
                try:
                    with FakeTensorMode(allow_non_fake_inputs=True):  # transformers looks at values of other tensors
                        model(**inputs, use_cache=False)
                except Exception:  # code that looks at values, which Dynamo does not run
                    capture(model, on_meta=True)


def check_some(what: str, layers: Collection[object], linears: Mapping[str, nn.Linear]) -> None:
    """Raises NoFFNFoundError: a model with neither feed-forward ``layers`` nor ``linears`` to quantise; says which."""
    if not layers and not linears:
        raise NoFFNFoundError(
            what,
            expected=f"feed-forward layers, or linear layers of at least {MIN_INPUTS} inputs and {MIN_OUTPUTS} outputs",
            found="neither",
            fix="Keep the float weights.",
        )
    if not layers:
        _log.warning("%s: no feed-forward layer becomes neurons, %d linear layers are quantised", what, len(linears))


def check_linears(linears: Mapping[str, nn.Linear], weights: str, storage: Storage | None = None) -> None:
    """Raise on a weight, or its importance in ``storage``, that cannot be quantised, before anything is changed.

    Raises:
        DeviceError, DtypeError, NonFiniteError, ShapeError, ConfigError: see ``torch_pi2.ops.quantized``.
    """
    for name, linear in linears.items():
        check_quantizable(f"{name}.weight", linear.weight.detach(), weights)
        importance = None if storage is None else storage.importance(name)
        if importance is not None:
            check_importance(f"{name}.weight", importance, linear.in_features)


def quantize_linears(
    model: nn.Module, linears: dict[str, nn.Linear], storage: Storage, *, progress: bool = False
) -> dict[str, LayerError]:
    """Replace ``linears`` (emptied) in ``model`` and give their memory back; their errors.

    All rows are made before the first layer is replaced, and float weights go last: on an error ``model`` has its own
    modules and numbers. The rows take a quarter to a half of the float weights for this long; where FFNs were
    quantised before, that is less than they have given back.

    An output layer tied to the embedding gets rows of its own, the embedding stays float, and the model's configuration
    says that the two are not tied any more.

    Raises:
        DeviceError, DtypeError, NonFiniteError, ShapeError, ConfigError: see :func:`check_linears`.
    """
    errors: dict[str, LayerError] = {}
    made: dict[str, QuantLinear] = {}
    for name in bar(list(linears), "quantise linear layers", progress):
        linear = linears[name]
        made[name] = QuantLinear.from_linear(
            linear,
            storage.weights,
            storage.int8_activations,
            storage.importance(name),
            name=name,
            rows=storage.rows.get(f"{name}.weight"),
        )
        error = made[name].relative_error(linear.weight)
        errors[name] = LayerError(error, _output_error(linear, made[name], storage.sample(name)))
        _log.info("%s: %s, relative error of its weights %.4f", name, storage.weights, errors[name].weight)
        share_hooks(linear, made[name])
        made[name].use_blocks()  # in place, before it is anyone's: interrupted, its rows would mean other numbers
    replace_modules(model, {linears[name]: quantised for name, quantised in made.items()})
    in_use = {id(parameter) for parameter in model.parameters()}
    config, tied = getattr(model, "config", None), any(id(linear.weight) in in_use for linear in linears.values())
    if tied and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False  # type: ignore[union-attr]
    for name, linear in linears.items():
        # a captured graph or a variable of the caller may keep parameters, but not their memory
        for local, parameter in linear.named_parameters():
            if id(parameter) not in in_use:
                free_storage(parameter, f"{name}.{local}", parameter)
    linears.clear()
    return errors


def _output_error(linear: nn.Linear, made: QuantLinear, x_TK: torch.Tensor | None) -> float | None:
    if x_TK is None:
        return None
    with torch.no_grad():
        wanted = F.linear(x_TK, linear.weight, linear.bias).float()
        return relative(torch.ops.pi2.linear(x_TK, made.rows, made.bias, made.weights, made.int8_activations), wanted)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """``|found - wanted| / |wanted|``, 0 where ``wanted`` is 0."""
    size = float(wanted.float().norm())
    return float((found.float() - wanted.float()).norm()) / size if size else 0.0
