"""Mixtures of experts: modules that hold all experts of a block in two 3-D parameters, and their sites.

They are recognised by structure, not by class: parameters ``gate_up_proj [E, 2I, H]`` (or ``up_proj [E, I, H]``) and
``down_proj [E, H, I]``, or both transposed, optionally biases of both, and no others; a formula known to
:mod:`.activation`; and ``forward(hidden_states, top_k_index, top_k_weights)`` as in transformers, or
``forward(hidden_states)`` with rows sorted by expert (Llama 4). Before a module is replaced, its forward is compared
with this form on random input (:mod:`torch_pi2.rewrite.rewrite`).
"""

import copy
import inspect
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_pi2.base.modules import fresh_settings, has_sparse_layers, other_forwards
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.graph.activation import identify
from torch_pi2.graph.operations import BranchCoverage, same_tokens, token_magnitudes
from torch_pi2.ops.activations import cuts
from torch_pi2.types.site import ExpertsForm, FFNSite, Formula, LinearRef, dense_reference

_GATE_UP, _UP, _DOWN = "gate_up_proj", "up_proj", "down_proj"
#: Accepted names of each argument of experts.
ARGUMENTS = (("hidden_states",), ("top_k_index", "router_indices"), ("top_k_weights", "routing_weights"))
_ABOUT_EXPERTS = re.compile("expert|moe|top_k|router|routing", re.IGNORECASE)
#: Tokens to probe with, and experts per token.
_PROBE_TOKENS, _PROBE_CHOICES = 24, 2
#: Further numbers of tokens with which the code of experts is tried.
_LENGTHS = (1, 2, 17, 257, 5040)
#: Sizes with which the code of experts is tried, and how many experts.
_SMALL_H, _SMALL_I, _SMALL_EXPERTS = 16, 24, 4


def looks_like_experts(module: nn.Module) -> bool:
    """Whether ``module`` may be of experts, by 3-D parameters and names, since attention heads have such ones, too."""
    own = dict(module.named_parameters(recurse=False))
    several = any(p.dim() == 3 and p.shape[0] > 1 for p in own.values())
    arguments = _arguments(module)
    names = (type(module).__name__, *own, *arguments)
    if {_GATE_UP, _DOWN} <= set(own) or (several and any(_ABOUT_EXPERTS.search(name) for name in names)):
        return True
    within = [p for p in module.parameters() if p.dim() > 1]
    linears = any(isinstance(m, nn.Linear) for m in module.modules())
    return not own and _is_routed(arguments) and len(within) > 1 and not linears


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def _is_routed(arguments: Sequence[str]) -> bool:
    return len(arguments) == len(ARGUMENTS) and all(a in names for a, names in zip(arguments, ARGUMENTS))


def experts_form(module: nn.Module, tried: dict[Any, str] | None = None) -> ExpertsForm | str:
    """The form of ``module`` (see :func:`looks_like_experts`), or why it is unknown; ``tried``: results so far."""
    own = dict(module.named_parameters(recurse=False))
    first_name = _GATE_UP if _GATE_UP in own else _UP
    biases = {f"{first_name}_bias", f"{_DOWN}_bias"}
    if not {first_name, _DOWN} <= set(own) <= {first_name, _DOWN} | biases or len(biases & set(own)) == 1:
        return f"parameters {', '.join(sorted(own or dict(module.named_parameters())))}"
    more = [n for n, _ in (*module.named_parameters(), *module.named_buffers()) if n not in own]
    if more:
        return f"{more[0]} besides the experts"
    shapes, gated, has_biases = {name: tuple(p.shape) for name, p in own.items()}, first_name == _GATE_UP, len(own) == 4
    form = None
    for transposed in (False, True) if len(shapes[_DOWN]) == 3 else ():
        experts, *sizes = shapes[_DOWN]
        intermediate, hidden = sizes if transposed else reversed(sizes)
        some = ExpertsForm(experts, intermediate, hidden, "", False, gated, False, transposed, has_biases)
        form = form or (some if parameter_shapes(some) == shapes else None)
    if form is None:
        return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) + ", which do not fit each other"
    arguments = _arguments(module)
    if not _is_routed(arguments) and (arguments != ("hidden_states",) or has_biases or not gated):
        return f"forward({', '.join(arguments)})"
    found = _formula(module, gated)
    if found is None or cuts(found[0].activation):
        return f"activation {getattr(module, 'act_fn', None)!r}"
    formula, interleaved = found
    form = replace(form, activation=formula.activation, on_up=formula.on_up, interleaved=interleaved)
    tried, settings = {} if tried is None else tried, (form, _settings(module))
    if settings not in tried:
        tried[settings] = _more_than(module, form)
    return tried[settings] or form


def parameter_shapes(form: ExpertsForm) -> dict[str, tuple[int, ...]]:
    """Local name -> shape of the parameters of a module of experts."""
    first, rows = _GATE_UP if form.gated else _UP, (1 + form.gated) * form.intermediate
    found: dict[str, tuple[int, ...]] = {}
    for name, n_out, n_in in ((first, rows, form.hidden), (_DOWN, form.hidden, form.intermediate)):
        found[name] = (form.experts, n_in, n_out) if form.transposed else (form.experts, n_out, n_in)
        if form.biases:
            found[f"{name}_bias"] = (form.experts, n_out)
    return found


def _settings(module: nn.Module) -> Any:
    """Everything that may make the code of ``module`` differ from that of another module."""
    plain = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_modules", "training")}
    plain = {k: v for k, v in plain.items() if v not in ({}, set())}
    simple = [(k, v if isinstance(v, int | float | str | None) else id(v)) for k, v in plain.items()]
    return type(module), tuple(simple), repr(module)


def _formula(module: nn.Module, gated: bool) -> tuple[Formula, bool] | None:
    """The formula between gate, up and down, and whether gate and up are interleaved; None if unknown."""
    act_fn: Any = getattr(module, "act_fn", None)
    gate: Any = getattr(module, "_apply_gate", None)
    if not gated:
        found = identify(lambda probes: act_fn(probes[0]), [(8, 64)], 64) if callable(act_fn) else "unknown"
        return (found, False) if isinstance(found, Formula) else None
    for interleaved in (False, True) if callable(gate) else ():

        def fused(probes: Sequence[torch.Tensor], interleaved: bool = interleaved) -> torch.Tensor:
            whole = torch.stack(list(probes), -1).flatten(-2) if interleaved else torch.cat(list(probes), -1)
            return gate(whole)

        found = identify(fused, [(8, 64), (8, 64)], 64)
        if isinstance(found, Formula) and found.gate == 0:
            return found, interleaved
    if not callable(act_fn):
        return None
    found = identify(lambda probes: act_fn(probes[0]) * probes[1], [(8, 64), (8, 64)], 64)
    return (found, False) if isinstance(found, Formula) and found.gate == 0 else None


def _more_than(module: nn.Module, form: ExpertsForm) -> str:
    """How ``module`` deviates from ``form`` with small random weights, in both modes; empty: in nothing known."""
    small = copy.copy(module)
    small._parameters = {}
    generator = torch.Generator().manual_seed(form.experts)
    small_form = replace(form, intermediate=_SMALL_I, hidden=_SMALL_H)
    for name, shape in parameter_shapes(small_form).items():
        weight = torch.randn(shape, generator=generator, dtype=torch.float32) / _SMALL_H**0.5
        small._parameters[name] = nn.Parameter(weight, requires_grad=False)
    sizes = {form.hidden: _SMALL_H, form.intermediate: _SMALL_I}
    for name, value in vars(module).items():  # sizes that the code may read
        if isinstance(value, int) and not isinstance(value, bool) and value in sizes and value != form.experts:
            small.__dict__[name] = sizes[value]
    sites = expert_sites("", small_form, "")
    tried = sites[:_SMALL_EXPERTS]
    with fresh_settings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        coverage = BranchCoverage()
        for training, tokens in ((False, _PROBE_TOKENS), (True, _PROBE_TOKENS), *((False, n) for n in _LENGTHS)):
            (x_TH, *routing), wanted_TH = probe_experts(small, tried, tokens)
            small.training = training
            try:
                with coverage:
                    found_TH = type(module).forward(small, x_TH.clone(), *routing)[: len(wanted_TH)]
            except Exception:  # it depends on the real sizes, and is tried with the real weights when it is replaced
                return ""
            if not same_tokens(found_TH, wanted_TH):
                beside = coverage.missed() or ", ".join(f"{c:g}" for c in sorted(coverage.constants)[:3])
                what = "in training mode" if training else f"(compares with {beside})" if beside else ""
                return f"a forward that computes something else as well {what}".rstrip()
    missed = coverage.missed()
    return f"a forward that computes something else as well ({missed})" if missed else ""


def all_experts(model: nn.Module) -> tuple[dict[str, ExpertsForm], dict[str, str]]:
    """Modules of experts in order of registration: name -> form, and name -> reason for unknown ones."""
    known: dict[str, ExpertsForm] = {}
    unknown: dict[str, str] = {}
    tried: dict[Any, str] = {}
    for name, module in model.named_modules():
        if looks_like_experts(module) and not has_sparse_layers(module):
            form = experts_form(module, tried)
            if isinstance(form, str):
                unknown[name] = f"{type(module).__name__}: experts of an unknown form; {form}"
            elif name:
                known[name] = form
    return known, unknown


def expert_lists(model: nn.Module) -> dict[str, list[str]]:
    """Name -> children of containers that call modules of one form by their router's choice (Switch, NLLB-MoE)."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        arguments = _arguments(module) if isinstance(module, nn.ModuleDict | nn.ModuleList) else ()
        if not name or len(arguments) != len(ARGUMENTS) or arguments[0] not in ARGUMENTS[0]:
            continue
        children = dict(module.named_children())
        forms = {(type(m), tuple((n, p.shape) for n, p in m.named_parameters())) for m in children.values()}
        if len(children) > 1 == len(forms) and any(isinstance(m, nn.Linear) for m in module.modules()):
            found[name] = list(children)
    return found


def check_known_experts(what: str, model: nn.Module) -> None:
    """Raises UnsupportedModelError if a module of experts in ``model`` has an unknown form."""
    reasons: dict[str, None] = {}
    for name, reason in all_experts(model)[1].items():
        if sum(p.dim() == 3 for p in model.get_submodule(name).parameters(recurse=False)) > 1:
            reasons[reason] = None  # the module itself computes several matmuls of each expert
    if reasons:
        forms = f"{_GATE_UP} [experts, 2 I, H], {_DOWN} [experts, H, I], or both transposed"
        expected, found = f"experts with {forms}, and a known activation", "; ".join(reasons)
        fix = "Such experts are not supported yet; keep the float weights."
        raise UnsupportedModelError(what, expected=expected, found=found, fix=fix)


def expert_sites(name: str, form: ExpertsForm, owner_class: str, layer: int = 0) -> list[FFNSite]:
    """The sites of the module of experts ``name``, numbered from ``layer`` on."""
    n, prefix = form.intermediate, f"{name}." if name else ""
    first = _GATE_UP if form.gated else _UP

    def ref(local: str, expert: int, rows: tuple[int, ...] | None = None) -> LinearRef:
        bias = f"{prefix}{local}_bias" if form.biases else None
        return LinearRef(f"{prefix}{local}", bias, rows, expert, form.transposed)

    of_gate, of_up = ((0, 2 * n, 2), (1, 2 * n, 2)) if form.interleaved else ((0, n), (n, 2 * n))
    sites, how = [], {"activation": form.activation, "activation_on_up": form.on_up, "owner_class": owner_class}
    for expert in range(form.experts):
        gate = ref(first, expert, of_gate) if form.gated else None
        up = ref(first, expert, of_up if form.gated else None)
        own: Any = {**how, "gate": gate, "up": up, "down": ref(_DOWN, expert), "hidden": form.hidden, "intermediate": n}
        sites.append(FFNSite(key=f"{name}.{expert}", layer=layer + expert, owner=f"{name}.{expert}", **own))
    return sites


def without_experts(model: nn.Module, names: Iterable[str]) -> AbstractContextManager[None]:
    """Context in which modules of experts pass their input on: their code cannot be captured, and needs values."""
    return other_forwards({model.get_submodule(name): _pass_on for name in names})


def _pass_on(hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return hidden_states.clone()


#: Arguments of a module of experts, and its result.
ExpertsProbe = tuple[tuple[torch.Tensor, ...], torch.Tensor]


def probe_experts(model: Any, sites: Sequence[FFNSite], tokens: int | None = None) -> ExpertsProbe:
    """Random tokens and routing weights for the experts of one module, and the result according to ``sites``. If it
    takes rows sorted by expert, rows of experts without a site are zeros, and not in the result.
    """
    first = sites[0]
    module = model.get_submodule(str(first.experts))
    if _arguments(module) == ("hidden_states",):
        experts = module.get_parameter(first.up.weight.rpartition(".")[2]).shape[0]
        return _probe_sorted(model, sites, experts, 5 if tokens is None else tokens)
    count, dtype = len(sites), first.weights(model).up.dtype
    choices = min(_PROBE_CHOICES, count)
    generator = torch.Generator().manual_seed(first.layer)
    tokens = tokens or max(_PROBE_TOKENS, -(-count // choices))
    x_TH = (torch.randn((tokens, first.hidden), generator=generator) * token_magnitudes(dtype, (tokens,))).to(dtype)
    x_TH[2:3] = 0.0  # as padding may be
    # every expert is used by enough tokens, and no token uses one twice
    mixed = torch.randperm(count, generator=generator)
    index_TK = mixed[torch.arange(tokens * choices).reshape(tokens, choices) % count]
    routing_TK = (torch.rand((tokens, choices), generator=generator) + 0.1).to(dtype)
    y_TH = dense_experts(sites, (site.weights(model) for site in sites), x_TH, index_TK, routing_TK)
    return (x_TH, index_TK, routing_TK), y_TH.to(dtype)


def dense_experts(
    sites: Sequence[FFNSite], weights: Iterable, x_TH: torch.Tensor, index_TK: torch.Tensor, routing_TK: torch.Tensor
) -> torch.Tensor:
    """float32 ``[T, H]``: the result of a module of experts, from the weights of each."""
    y_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for expert, (site, own) in enumerate(zip(sites, weights, strict=True)):
        where_T, which_T = torch.where(index_TK == expert)
        if len(where_T):
            made = dense_reference(site, own, x_TH[where_T]).float()
            y_TH.index_add_(0, where_T, made * routing_TK[where_T, which_T, None].float())
    return y_TH


def _probe_sorted(model: Any, sites: Sequence[FFNSite], experts: int, rows: int) -> ExpertsProbe:
    first = sites[0]
    dtype = first.weights(model).up.dtype
    x_ERH = torch.zeros((experts, rows, first.hidden), dtype=dtype)
    wanted = []
    for expert, site in enumerate(sites):
        generator = torch.Generator().manual_seed(site.layer)
        x_RH = torch.randn((rows, first.hidden), generator=generator) * token_magnitudes(dtype, (rows,))
        x_RH[2:3] = 0.0
        x_ERH[expert] = x_RH.to(dtype)
        wanted.append(dense_reference(site, site.weights(model), x_ERH[expert]))
    return (x_ERH.flatten(0, 1),), torch.cat(wanted)
