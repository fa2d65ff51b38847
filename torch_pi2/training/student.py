"""The model to be trained: the dense one with another activation in its FFNs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torch_pi2.base.extras import missing_package
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.graph.find import search
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.training.drelu import Code, drelu_code
from torch_pi2.types.site import FFNSite

#: Where configurations of transformers name the activation of FFNs.
_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "activation")


def student_of(dense: Any, activation: str) -> tuple[Any, list[FFNSite], Code | None]:
    """A float32 model with the weights of ``dense``, its FFNs, and the modelling code that its folder needs.

    ``dense`` is left as it is.

    Args:
        activation: of :data:`torch_pi2.training.settings.ACTIVATIONS`.

    Raises:
        UnsupportedModelError: a layer of experts; an activation that config.json does not name; with ``drelu`` an FFN
            for which no modelling code can be written. NoFFNFoundError: there is none.
    """
    kind, config, code = type(dense), copy.deepcopy(dense.config), None
    sites = _sites(kind, config)
    if not all(exact_zeros(site.activation) for site in sites):
        if activation == "drelu":
            code = drelu_code(dense, sites)
            kind, config = code.model_class, code.config
        named = _name_relu(config)
        sites = _sites(kind, config)
        _check(sites, kind, named, activation)
    with torch.random.fork_rng(devices=[]):
        student = kind._from_config(config, dtype=torch.float32)
    student.load_state_dict(dense.state_dict())
    student.generation_config = copy.deepcopy(dense.generation_config)
    return student, sites, code


def _sites(kind: Any, config: Any) -> list[FFNSite]:
    with torch.device("meta"):
        form = kind._from_config(copy.deepcopy(config), dtype=torch.float32)
    sites = search(form, on_meta=True).sites
    experts = sorted({site.experts for site in sites if site.experts is not None})
    if experts:
        raise UnsupportedModelError(
            f"training of a {kind.__name__}",
            expected="feed-forward layers without experts",
            found=f"experts: {experts[0]}" + (f" and {len(experts) - 1} more" if len(experts) > 1 else ""),
            fix="A router chooses among their neurons already; torch_pi2.optimize takes the model as it is.",
        )
    return sites


def _name_relu(config: Any) -> list[str]:
    """Name ReLU wherever ``config`` names the activation of FFNs; the fields that do."""
    text = config.get_text_config()
    named = [name for name in _FIELDS if isinstance(getattr(text, name, None), str)]
    for name in named:
        setattr(text, name, "relu")
    return named


def _check(sites: Sequence[FFNSite], kind: Any, named: Sequence[str], activation: str) -> None:
    wrong = [s for s in sites if not exact_zeros(s.activation) or s.activation_on_up != (activation == "drelu")]
    if wrong:
        raise UnsupportedModelError(
            f"activation of {kind.__name__}",
            expected=f"an FFN that follows {' or '.join(named or _FIELDS)} of config.json",
            found=f"{wrong[0].form} in {wrong[0].key} after {', '.join(named)} became relu"
            if named
            else "no such field",
            fix="Its activation is fixed in its modelling code: change it there, and train the model as it is then.",
        )


def with_lora(student: Any, rank: int, seed: int) -> Any:
    """``student`` with adapters on all linear layers but the output, which alone are trained.

    Raises:
        LibraryMissingError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise missing_package("peft", "train", error, "an installed peft, for lora") from error
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return get_peft_model(student, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def revive(model: nn.Module, site: FFNSite, dead_I: torch.Tensor, generator: torch.Generator) -> None:
    """Draw the gate rows (of plain FFNs the up rows) of dead neurons anew, as large as those of the living.

    Sakana's recipe draws at the deviation of initialisation, which a model that others have trained does not tell.
    """
    ref = site.gate or site.up
    rows_IH = ref.take(model.get_parameter(ref.weight).detach())
    living = rows_IH[~dead_I]
    deviation = float(living.std()) if len(living) else float(rows_IH.std())
    drawn = torch.randn(int(dead_I.sum()), rows_IH.shape[1], generator=generator) * deviation
    rows_IH[dead_I] = drawn.to(rows_IH)
    if ref.bias is not None:
        ref.take_bias(model.get_parameter(ref.bias).detach())[dead_I] = 0
