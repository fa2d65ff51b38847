"""The model to train: the dense one with another activation in its FFNs; for dReLU with new modelling code."""

import copy
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.graph.find import search
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.types.site import FFNSite

#: Fields of transformers' configurations that name the activation of FFNs.
_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "activation")


def student_of(dense: Any, activation: str) -> "tuple[Any, list[FFNSite], Code | None]":
    """A float32 copy of ``dense`` with ``activation``, its FFNs, and the modelling code that its folder needs. Raises
    UnsupportedModelError: a layer of experts; an activation that config.json does not name; with ``drelu`` an FFN for
    which no modelling code can be written. NoFFNFoundError: there is no FFN.
    """
    kind, config, code = type(dense), copy.deepcopy(dense.config), None
    sites = _sites(kind, config)
    if not all(exact_zeros(site.activation) for site in sites):
        if activation == "drelu":
            code = drelu_code(dense, sites)
            kind, config = code.model_class, code.config
        text = config.get_text_config()
        named = [name for name in _ACTIVATION_FIELDS if isinstance(getattr(text, name, None), str)]
        for name in named:
            setattr(text, name, "relu")
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
        what = f"training of a {kind.__name__}"
        found = f"experts: {experts[0]}" + (f" and {len(experts) - 1} more" if len(experts) > 1 else "")
        fix = "A router chooses among their neurons already; torch_pi2.optimize takes the model as it is."
        raise UnsupportedModelError(what, expected="feed-forward layers without experts", found=found, fix=fix)
    return sites


def _check(sites: Sequence[FFNSite], kind: Any, named: Sequence[str], activation: str) -> None:
    wrong = [s for s in sites if not exact_zeros(s.activation) or s.activation_on_up != (activation == "drelu")]
    if wrong:
        expected = f"an FFN that follows {' or '.join(named or _ACTIVATION_FIELDS)} of config.json"
        found = f"{wrong[0].form} in {wrong[0].key} after {', '.join(named)} became relu" if named else "no such field"
        fix = "Its activation is fixed in its modelling code: change it there, and train the model as it is then."
        raise UnsupportedModelError(f"activation of {kind.__name__}", expected=expected, found=found, fix=fix)


_MODULE = "modeling_drelu"
_TEMPLATE = Path(__file__).with_name(f"{_MODULE}.py.template")


@dataclass(frozen=True)
class Code:
    """Modelling code to write beside the weights, the class that it defines, and its configuration."""

    file_name: str
    text: str
    model_class: Any
    config: Any


def drelu_code(dense: Any, sites: Sequence[FFNSite]) -> Code:
    """Modelling code for ``dense`` with dReLU in the FFNs ``sites``. Raises UnsupportedModelError: its class is not
    part of transformers, or an FFN has other linear layers than gate_proj, up_proj and down_proj.
    """
    kind, config_kind = type(dense), type(dense.config)
    owners = {type(dense.get_submodule(site.owner)) for site in sites}
    for site in sites:
        if reason := _unsupported_part(dense, site):
            raise _refused(kind, f"{site.form} in {site.key} ({site.owner_class}): {reason}")
    of_transformers = all(c.__module__.startswith("transformers.models.") for c in (kind, config_kind, *owners))
    if len(owners) != 1 or not of_transformers:
        raise _refused(kind, f"classes {', '.join(sorted(c.__module__ for c in (kind, *owners)))}")
    (owner,) = owners
    names = {"model": kind.__name__, "model_module": kind.__module__, "ffn": owner.__name__}
    names |= {"config": config_kind.__name__, "config_module": config_kind.__module__}
    text = _TEMPLATE.read_text().format(**names, model_type=config_kind.model_type)
    module = _module(text)
    model_class: Any = getattr(module, f"DReLU{kind.__name__}")
    values = dense.config.to_dict()
    for name in ("model_type", "architectures", "auto_map"):
        values.pop(name, None)
    config = model_class.config_class(**values)
    config.architectures = [model_class.__name__]
    classes = {"AutoConfig": model_class.config_class, "AutoModelForCausalLM": model_class}
    config.auto_map = {auto: f"{_MODULE}.{kind.__name__}" for auto, kind in classes.items()}
    return Code(f"{_MODULE}.py", text, model_class, config)


def _unsupported_part(dense: Any, site: FFNSite) -> str:
    if not site.gated or site.gate is None:
        return "no gate"
    if site.drops or "[" in site.activation or not site.owner_runs:
        return "more than the three matmuls and an activation"
    names = {f"{site.owner}.{name}_proj.weight" for name in ("gate", "up", "down")}
    if {site.gate.weight, site.up.weight, site.down.weight} != names:
        return "other names than gate_proj, up_proj, down_proj"
    projections = [name for name, m in dense.get_submodule(site.owner).named_children() if isinstance(m, nn.Linear)]
    return "" if len(projections) == 3 else "other linear layers beside these"


def _refused(kind: type, found: str) -> UnsupportedModelError:
    expected = "a model of transformers whose FFNs are act(gate_proj(x)) * up_proj(x), as Llama's or Qwen's"
    fix = "Use activation='relu-gate', which needs no modelling code."
    return UnsupportedModelError(f"drelu in {kind.__name__}", expected=expected, found=found, fix=fix)


def _module(text: str) -> Any:
    """Run ``text`` as a module from a file, because transformers reads its models' source."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{_MODULE}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"torch_pi2_{_MODULE}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
