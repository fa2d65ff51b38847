"""Quantising the linear layers outside the FFNs (attention, output layer)."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_pi2.base.dtypes import stands_for_another
from torch_pi2.base.modules import evaluating, own_forward, share_hooks
from torch_pi2.base.offloaded import free_storage
from torch_pi2.base.progress import bar, log
from torch_pi2.errors import NoFFNFoundError
from torch_pi2.graph.capture import capture, example_inputs
from torch_pi2.graph.experts import all_experts, expert_lists, without_experts
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.ops.quantized import check_quantizable
from torch_pi2.profiling.data import Batch
from torch_pi2.rewrite.install import replace_modules
from torch_pi2.types.site import FFNSite

#: Least inputs of a quantised layer: one group.
MIN_INPUTS = 32
#: Least outputs: smaller layers are routers and classifiers, with few bytes and costly errors.
MIN_OUTPUTS = 64


@dataclass(frozen=True)
class Storage:
    """How weights are stored.

    Attributes:
        weights: ``float``, ``int4`` or ``int8``. int8_activations: see :class:`torch_pi2.types.config.Config`.
        rows: quantised rows to use as they are, under the keys of :mod:`torch_pi2.fitting.gptq_model`.
    """

    weights: str = "float"
    int8_activations: bool = False
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        return self.weights != "float"


def find_linears(
    model: nn.Module, sites: Sequence[FFNSite], example: Batch | None = None, *, on_meta: bool = False
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Linear layers of the dense ``model`` to quantise beside its FFNs, and those left out with the reason.

    Used for models in memory and checkpoints on disk alike. ``example`` is run once to see which layers are called:
    other code may read the weight of one that is not. ``on_meta``: the whole model is on ``meta``, and of Hugging Face;
    it needs no example. Raises CalibrationError or UnsupportedModelError if the model does not run.
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
    with ExitStack() as hooks:
        for name, module in linears.items():
            hooks.enter_context(module.register_forward_hook(lambda *_, name=name: called.add(name)))
        _run(model, example, on_meta)
    for name in [name for name in linears if name not in called]:
        skipped[name] = "not called as a module"
        del linears[name]
    for name, reason in skipped.items():
        log.info("%s stays float: %s", name, reason)
    return linears, skipped


def _run(model: nn.Module, example: Batch | None, on_meta: bool) -> None:
    with evaluating(model):
        if example is not None:
            example.call(model)
        elif not on_meta:
            model(**example_inputs(model))
        else:
            inputs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in example_inputs(model).items()}
            with without_experts(model, [*all_experts(model)[0], *expert_lists(model)]):
                with suppress(Exception):  # with a whole mask, as transformers reads the values of others
                    tokens = inputs["input_ids"].shape[-1]
                    mask = torch.empty(1, 1, tokens, tokens, dtype=torch.bool, device="meta")
                    model(**inputs | {"attention_mask": mask}, use_cache=False)
                    return
                with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):  # which imports Dynamo
                    model(**inputs, use_cache=False)
                    return
                capture(model, on_meta=True)  # code that depends on values: Dynamo traces around it


def check_some(what: str, layers: Collection[object], linears: Mapping[str, nn.Linear]) -> None:
    """Raises NoFFNFoundError if there are neither feed-forward ``layers`` nor ``linears``; warns if only the latter."""
    if not layers and not linears:
        expected = f"feed-forward layers, or linear layers of at least {MIN_INPUTS} inputs and {MIN_OUTPUTS} outputs"
        raise NoFFNFoundError(what, expected=expected, found="neither", fix="Keep the float weights.")
    if not layers:
        log.warning("%s: no feed-forward layer becomes neurons, %d linear layers are quantised", what, len(linears))


def check_linears(linears: Mapping[str, nn.Linear], weights: str) -> None:
    """Check weights for quantising; raises as ``torch_pi2.ops.quantized``."""
    for name, linear in linears.items():
        check_quantizable(f"{name}.weight", linear.weight.detach(), weights)


def quantize_linears(
    model: nn.Module, linears: dict[str, nn.Linear], storage: Storage, *, progress: bool = False
) -> dict[str, float]:
    """Replace ``linears`` in ``model`` (the dict is emptied) and free their memory; returns their errors. All rows are
    made before the first layer is replaced, and float weights are freed last: after an error (:func:`check_linears`)
    ``model`` is unchanged. Until then the rows take a quarter to a half of the float weights' memory. An output layer
    tied to the embedding gets its own rows; the embedding stays float, and the configuration no longer ties the two.
    """
    errors: dict[str, float] = {}
    made: dict[str, QuantLinear] = {}
    for name in bar(list(linears), "quantise linear layers", progress):
        linear = linears[name]
        how = (storage.weights, storage.int8_activations)
        made[name] = QuantLinear.from_linear(linear, *how, name=name, rows=storage.rows.get(f"{name}.weight"))
        errors[name] = made[name].relative_error(linear.weight)
        log.info("%s: %s, relative error of its weights %.4f", name, storage.weights, errors[name])
        share_hooks(linear, made[name])
        made[name].use_blocks()  # in place, before it is installed: an interruption would leave wrong rows
    replace_modules(model, {linears[name]: quantised for name, quantised in made.items()})
    in_use = {id(parameter) for parameter in model.parameters()}
    if any(id(linear.weight) in in_use for linear in linears.values()):
        untie(getattr(model, "config", None))
    for name, linear in linears.items():
        # captured graphs and callers may hold the parameters, but not their memory
        for local, parameter in linear.named_parameters():
            if id(parameter) not in in_use:
                free_storage(parameter, f"{name}.{local}", parameter)
    linears.clear()
    return errors


def untie(config: Any) -> None:
    """The output layer has rows of its own now. Of an encoder-decoder the configuration stays, which also ties the
    embeddings to each other, and by which Switch scales what the output layer reads.
    """
    if getattr(config, "tie_word_embeddings", False) and not getattr(config, "is_encoder_decoder", False):
        config.tie_word_embeddings = False
