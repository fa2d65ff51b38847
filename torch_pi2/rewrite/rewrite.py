"""Put sparse layers into an eager model, and take them out again.

Per FFN one of three ways is taken, the first that is *seen* to compute the same on random input:

* **owner**: the module that owns the FFN computes nothing else; it is replaced (Llama's ``mlp``).
* **chain**: the FFN is a chain of modules inside a bigger block; the first linear becomes the sparse layer, the
  rest pass through (OPT's ``fc1, activation_fn, fc2``).
* **lazy**: some of the FFN is code of the block; its linears exchange a lazy tensor (:mod:`torch_pi2.layers.lazy`).
  So do the linears of an FFN with hooks inside, which the other ways would silence (:mod:`torch_pi2.base.hooks`).

Experts are replaced together, by the first way: the module that holds them.

``restore`` needs no record: every stand-in keeps what it stands for.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torch_pi2.base.evaluating import evaluating, fresh_settings
from torch_pi2.base.hooks import has_hooks, hooks_inside, own_forward, refuse_global_hooks, share_hooks
from torch_pi2.errors import ConfigError, StaleArtifactError, UnsupportedModelError
from torch_pi2.graph.experts import probe_experts
from torch_pi2.graph.reach import Reach, same_tokens, token_magnitudes
from torch_pi2.layers.experts import SparseExperts, expert_groups
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.lazy import LazyDown, LazySource
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import is_optimized, sparse_layers, stand_ins
from torch_pi2.layers.standin import Absorbed, StandIn
from torch_pi2.ops import reference
from torch_pi2.ops.quantized import check_quantizable
from torch_pi2.rewrite.linears import Storage, relative
from torch_pi2.spec.formula import Formula, apply_formula, dense_reference
from torch_pi2.spec.plan import LayerPlan, Plan
from torch_pi2.spec.site import FFNSite, FFNWeights, check_weights

_log = logging.getLogger("torch_pi2")

#: Batches and tokens to probe with: several of each, so that code which takes some of them out is seen, and one alone.
_PROBE_SHAPES = ((3, 17), (2, 5), (1, 1))
#: Ends the reason why a way of rewriting would silence a hook.
_SILENT = "which would not run"
#: An input ``[B, T, H]`` and what the dense layer makes of it.
Probe = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Swap:
    """``original`` gives way to ``stand_in`` wherever it is registered, or only at ``at`` if given."""

    original: nn.Module
    stand_in: StandIn
    at: str | None = None


@fresh_settings()
def rewrite(
    model: nn.Module,
    plan: Plan,
    predictors: Mapping[str, Any] | None = None,
    *,
    check_hash: bool = True,
    progress: bool = False,
    storage: Storage | None = None,
) -> nn.Module:
    """Replace every FFN of ``plan`` in ``model`` by its sparse form, in place; returns ``model``.

    The memory of the dense weights is given back layer by layer. If any layer fails, the model is restored.

    Args:
        predictors: site key -> low-rank predictor in original neuron order: an object with ``tensors()`` and
            ``threshold`` or a mapping of tensors (see :class:`~torch_pi2.layers.ffn.SparseFFN`). Needed for
            layers whose method is ``lowrank``.
        check_hash: verify that the plan was made from these weights (reads them all once).
        progress: a progress bar on standard error if it is a terminal.
        storage: how the weights are to be stored (None: float). Quantised layers cannot be restored; what can be
            refused is refused before the first of them is made. Should one fail all the same, the model is put
            together again from what its rows stand for, and the error says so.

    Raises:
        StaleArtifactError: the plan is for other weights. ConfigError: already rewritten, predictors missing, or there
            are hooks on all modules.
        UnsupportedModelError: no way of rewriting a layer computes the same; the message names it.
        DeviceError, DtypeError, NonFiniteError, ShapeError: weights that cannot be used.
    """
    from tqdm import tqdm

    if is_optimized(model):
        raise ConfigError(
            type(model).__name__,
            expected="a dense model",
            found="one that torch_pi2 has already rewritten",
            fix="Call torch_pi2.restore(model) first.",
        )
    refuse_global_hooks("torch_pi2.optimize")
    _check_names(model, plan)
    if check_hash:
        plan.check_model(model)
    storage, groups = storage or Storage(), expert_groups(plan.layers)
    if storage.quantised:
        for group in groups:
            _check_group(model, group, predictors or {}, storage)
    try:
        for group in tqdm(groups, "rewrite", disable=not (progress and sys.stderr.isatty())):
            if group[0].site.experts is not None:
                _rewrite_experts(model, group, predictors or {}, storage)
            else:
                _rewrite_layer(model, group[0], (predictors or {}).get(group[0].site.key), storage)
    except BaseException as error:
        abandon(model, error)
        raise
    return model


def abandon(model: nn.Module, error: BaseException) -> None:
    """Put the dense modules back after ``error``, which gets a note where their numbers are not what they were."""
    if any(layer.weights != "float" for layer in sparse_layers(model)):
        error.add_note("Layers quantised before have their dequantised weights now: load the checkpoint again.")
    _put_back(model, lossy=True)


@fresh_settings()
def restore(model: nn.Module) -> nn.Module:
    """Put the original modules and parameters back, bit for bit; the same objects. Returns ``model``.

    Raises:
        ConfigError: something is quantised, which cannot be undone; nothing is changed then.
    """
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            raise ConfigError(
                f"restoring {type(model).__name__}",
                expected="float weights",
                found=f"{module.weights} in {name}, which is lossy: the original numbers are gone",
                fix="Load the checkpoint again (from_pretrained, or torch_pi2.load) instead.",
            )
    return _put_back(model)


def _put_back(model: nn.Module, lossy: bool = False) -> nn.Module:
    """:func:`restore`; if ``lossy``, quantised layers get the numbers that their rows stand for."""
    places = list(stand_ins(model))
    ours = dict.fromkeys(s for _, _, s in places)
    for stand_in in () if lossy else ours:
        stand_in.check_refill()
    for stand_in in ours:
        stand_in.refill(lossy=lossy)
    for parent, name, stand_in in places:
        parent._modules[name] = stand_in.original
        stand_in.unsilence()
    return model


def _check_names(model: nn.Module, plan: Plan) -> None:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for layer in plan.layers:
        for ref in (layer.site.gate, layer.site.up, layer.site.down):
            for name in (ref.weight, ref.bias) if ref else ():
                if name is not None and name not in names:
                    raise StaleArtifactError(
                        "plan",
                        expected=f"a model with a parameter {name}",
                        found=f"{type(model).__name__} without one",
                        fix="Make a new plan for this model.",
                    )


def predictor_tensors(predictor: Any) -> tuple[Mapping[str, torch.Tensor] | None, float]:
    """Tensors and threshold of a predictor in either of its forms; ``(None, 0)`` of None."""
    if predictor is None:
        return None, 0.0
    if isinstance(predictor, Mapping):
        return predictor, float(predictor.get("threshold", 0.0))
    return predictor.tensors(), float(predictor.threshold)


def _make_layer(model: nn.Module, layer: LayerPlan, predictor: Any, storage: Storage) -> SparseFFN:
    lowrank, threshold = predictor_tensors(predictor)
    site, weights = layer.site, layer.site.weights(model)
    ffn = SparseFFN(
        site,
        weights,
        layer,
        lowrank,
        threshold,
        kind=storage.weights,
        int8_activations=storage.int8_activations,
        importance=storage.importance(site.key),
    )
    x_TH = storage.sample(site.key) if storage.quantised else None
    if x_TH is not None:
        ffn.output_error = relative(ffn.forward_dense(x_TH), dense_reference(site, weights, x_TH))
    return ffn


def _rewrite_experts(
    model: nn.Module, group: Sequence[LayerPlan], predictors: Mapping[str, Any], storage: Storage
) -> None:
    parts = (_make_layer(model, layer, predictors.get(layer.site.key), storage) for layer in group)
    with torch.no_grad():
        sparse = SparseExperts(parts, len(group)).eval()
        swap = experts_way(model, group, sparse)
        if storage.quantised:
            x_TH = torch.randn((8, sparse.site.hidden), generator=torch.Generator().manual_seed(0))
            _check_quantised(sparse.expert(0), x_TH)
        elif all(layer.method == "exact" for layer in group):
            arguments, wanted = probe_experts(model, sparse.sites)
            if not same_tokens(sparse(*arguments), wanted):
                raise _no_way(sparse.site, ["the sparse operator does not reproduce the experts (a damaged build?)"])
        _install(model, sparse.site, sparse, [swap])


def experts_way(
    model: nn.Module, group: Sequence[LayerPlan], sparse: SparseExperts | None, tried: int | None = None
) -> Any:
    """The swap that puts ``sparse`` in the place of the module of experts that ``group`` names.

    Args:
        tried: of so many experts (None: all) see first that its forward computes what their sites say; these need
            their weights for that.

    Raises:
        StaleArtifactError: it has another number of experts, or sizes. UnsupportedModelError: it computes something
            else as well.
    """
    first = group[0].site
    module = model.get_submodule(str(first.experts))
    shapes = [tuple(model.get_parameter(ref.weight).shape) for ref in (first.up, first.down)]
    wanted = [
        (len(group), 2 * first.intermediate, first.hidden),
        (len(group), first.hidden, first.intermediate),
    ]
    if shapes != wanted:
        raise StaleArtifactError(
            f"plan of {first.experts}",
            expected=f"experts of sizes {wanted[0]} and {wanted[1]}",
            found=f"{type(module).__name__} with {shapes[0]} and {shapes[1]}",
            fix="Make a new plan for this model.",
        )
    problem = _more_than(first, model, {str(first.experts): module})
    reason = f"owner: it also holds {problem}" if problem else ""
    if tried != 0 and not reason:
        arguments, result = probe_experts(model, [layer.site for layer in group[:tried]])
        with evaluating(module):
            problem = _runs_to(lambda x: module.forward(x, *arguments[1:]), [(arguments[0], result)])
        reason = f"owner: {first.experts} {problem}" if problem else ""
    if not reason and (hooks := hooks_inside(str(first.experts), module)):
        reason = f"owner: {hooks}, {_SILENT}"
    if reason:
        raise _no_way(first, [reason])
    return None if sparse is None else Swap(module, sparse)


def _rewrite_layer(model: nn.Module, layer: LayerPlan, predictor: Any, storage: Storage) -> None:
    site = layer.site
    with torch.no_grad():
        ffn = _make_layer(model, layer, predictor, storage)
        probes = _probes(site, site.weights(model))
        if storage.quantised:
            _check_quantised(ffn, probes[0][0])
        elif not all(same_tokens(ffn.forward_dense(x), y) for x, y in probes):
            raise _no_way(site, ["the sparse operator does not reproduce the layer (a damaged build?)"])
        swaps = _find_way(model, site, ffn, probes)
        if swaps[0].stand_in is ffn and _varies_in_training(swaps, probes[0]):
            layer.site = ffn.site = replace(site, drops="inside")
        _install(model, ffn.site, ffn, swaps)


def _varies_in_training(swaps: Sequence[Swap], probe: Probe) -> bool:
    """Whether modules that are to be replaced do something else in training mode, as dropout does."""
    modules = [swap.original for swap in swaps]
    with evaluating(*modules), torch.random.fork_rng(devices=[]):
        for module in modules:
            module.train()
        h = probe[0].clone()
        for module in modules:
            h = module.forward(h)
    return not same_tokens(h, probe[1])


def _find_way(model: nn.Module, site: FFNSite, ffn: SparseFFN, probes: Sequence[Probe]) -> list[Swap]:
    reasons: list[str] = []
    for way in (_owner_way, _chain_way, _lazy_way):
        swaps = way(model, site, ffn, probes)
        if not isinstance(swaps, str):
            if any(reason.endswith(_SILENT) for reason in reasons):
                _log.warning("%s runs through lazy tensors, which is slower: %s", site.key, "; ".join(reasons))
            return swaps
        reasons.append(swaps)
    raise _no_way(site, reasons)


def _check_group(model: nn.Module, group: Sequence[LayerPlan], predictors: Mapping[str, Any], storage: Storage) -> None:
    """Refuse what rewriting would refuse, without changing anything."""
    empty = [_check_layer(model, layer, predictors.get(layer.site.key), storage) for layer in group]
    with torch.no_grad():
        if group[0].site.experts is not None:
            SparseExperts(empty, len(group))
            experts_way(model, group, None)
        else:
            _find_way(model, group[0].site, empty[0], _probes(group[0].site, group[0].site.weights(model)))


def _check_layer(model: nn.Module, layer: LayerPlan, predictor: Any, storage: Storage) -> SparseFFN:
    """An empty layer, if one can be made of the weights and the predictor."""
    site = layer.site
    weights = site.weights(model)
    check_weights(site, weights)
    for ref, w in ((site.gate, weights.gate), (site.up, weights.up), (site.down, weights.down)):
        if ref is not None and w is not None:
            check_quantizable(f"{ref.weight} of {site.key}", w, storage.weights)
    lowrank, threshold = predictor_tensors(predictor)
    return SparseFFN.empty(site, layer, storage.weights, lowrank, threshold)


def _check_quantised(ffn: SparseFFN, x: torch.Tensor) -> None:
    """The operator against its reference on some neurons: that the rows are near the weights is measured elsewhere."""
    some = slice(0, 64)
    biases = [None if b is None else b[some] for b in (ffn.bias_gate, ffn.bias_up)]
    settings = (None, ffn.site.activation, ffn.site.activation_on_up, 0, 0.0, ffn.weights, ffn.int8_activations)
    args: Any = (x.float(), ffn.bundles[some].contiguous(), *biases, ffn.bias_down, *settings)
    if not same_tokens(torch.ops.pi2.sparse_ffn(*args), reference.sparse_ffn(*args)):
        raise _no_way(ffn.site, ["the sparse operator does not reproduce the layer (a damaged build?)"])


def _probes(site: FFNSite, weights: FFNWeights) -> list[Probe]:
    """Random inputs of a layer and what it makes of them."""
    generator = torch.Generator().manual_seed(site.layer)
    probes: list[Probe] = []
    for number, shape in enumerate(_PROBE_SHAPES):
        x_BTH = torch.randn((*shape, site.hidden), generator=generator)
        if number == 1:
            x_BTH *= token_magnitudes(weights.up.dtype, shape)
        x_BTH = x_BTH.to(weights.up.dtype)
        probes.append((x_BTH, dense_reference(site, weights, x_BTH)))
    return probes


def _no_way(site: FFNSite, reasons: Sequence[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"rewriting {site.key or 'the FFN'} ({site.owner_class})",
        expected="modules that compute the FFN, or linears that can be swapped",
        found="; ".join(reasons),
        fix="Move the FFN into a module of its own, or use torch.compile(model, backend='torch_pi2').",
    )


def _runs_to(call: Any, probes: Sequence[Probe]) -> str | None:
    """None if ``call(x)`` gives ``y`` for all probes, and these reach all that it does; else what happened instead."""
    reach = Reach()
    for x, y in probes:
        try:
            with reach:
                found = call(x.clone())
        except Exception as error:  # a block that wants more arguments, a container without forward, ...
            return f"raises {type(error).__name__}"
        if not same_tokens(found, y):
            return "computes something else as well"
    missed = reach.missed()
    return f"computes something else as well, where no probe comes ({missed})" if missed else None


@contextmanager
def _as_it_was(*roots: nn.Module) -> Iterator[list[str]]:
    """What the code within it does to attributes of modules is undone, and named in the list: it would not be done."""
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    before = {module: dict(vars(module)) for module in modules}
    inside = {(module, name): copy.copy(v) for module in modules for name, v in vars(module).items() if _holds(v)}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for module, attributes in before.items():
            now = vars(module)
            changed += [name for name in {**attributes, **now} if attributes.get(name, now) is not now.get(name, now)]
            now.clear()
            now.update(attributes)
        for (module, name), was in inside.items():
            holder = vars(module)[name]
            if [*map(id, _inside(holder))] != [*map(id, _inside(was))]:
                changed.append(name)
                holder.clear()
                (holder.update if isinstance(holder, dict | set) else holder.extend)(was)


def _holds(value: Any) -> bool:
    return type(value) in (list, dict, set, deque)


def _inside(holder: Any) -> list[Any]:
    return [*holder, *holder.values()] if isinstance(holder, dict) else [*holder]


def _more_than(site: FFNSite, model: nn.Module, modules: Mapping[str, nn.Module]) -> str | None:
    """Name of a tensor in ``modules`` that is none of the FFN's.

    An adapter or layer scale may have no effect with its present value, and yet be trained or loaded later.
    """
    refs = [ref for ref in (site.gate, site.up, site.down) if ref is not None]
    own = {id(model.get_parameter(name)) for ref in refs for name in (ref.weight, ref.bias) if name}
    for prefix, module in modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in own:
                return f"{prefix}.{name}"
    return None


# --- the three ways: each returns its swaps, or why it cannot be taken ---


def _owner_way(model: nn.Module, site: FFNSite, ffn: SparseFFN, probes: Sequence[Probe]) -> list[Swap] | str:
    if not site.owner:
        return "owner: it is the whole model"
    owner = model.get_submodule(site.owner)
    if not site.owner_runs:
        return f"owner: code outside {site.owner} calls its parts"
    more = _more_than(site, model, {site.owner: owner})
    if more:
        return f"owner: it also holds {more}"
    if hooks := hooks_inside(site.owner, owner):
        return f"owner: {hooks}, {_SILENT}"
    with evaluating(owner), _as_it_was(owner) as changed:
        problem = _runs_to(owner.forward, probes)
    if changed and not problem:
        problem = f"keeps something of each call ({changed[0]})"
    return f"owner: {site.owner} {problem}" if problem else [Swap(owner, ffn)]


def _chain_way(model: nn.Module, site: FFNSite, ffn: SparseFFN, probes: Sequence[Probe]) -> list[Swap] | str:
    if not site.inner:
        return "chain: part of it is code of its owner"
    sources = {_module_name(ref.weight) for ref in (site.gate, site.up) if ref is not None}
    if len(sources) != 1:
        return "chain: gate and up are separate"
    names = [*sources, *site.inner, _module_name(site.down.weight)]
    modules = [model.get_submodule(name) for name in names]

    more = _more_than(site, model, dict(zip(names, modules)))
    if more:
        return f"chain: it also holds {more}"
    inside = dict(zip(names, modules))
    hooks = own_forward(inside)
    for position, (name, module) in enumerate(inside.items()):
        if has_hooks(module, pre=position > 0, post=position < len(names) - 1) or hooks_inside(name, module):
            hooks = f"{name} has a hook"
    if hooks:
        return f"chain: {hooks}, {_SILENT}"

    def run(h: torch.Tensor) -> Any:
        for module in modules:
            h = module.forward(h)
        return h

    with evaluating(*modules), _as_it_was(*modules) as changed:
        problem = _runs_to(run, probes)
    if changed and not problem:
        problem = f"keep something of each call ({changed[0]})"
    if problem:
        return f"chain: {' -> '.join(names)} {problem}"
    swaps = [Swap(modules[0], ffn)]
    for position, (module, name) in enumerate(zip(modules[1:], names[1:]), 1):
        stand_in = Absorbed()
        stand_in.position, stand_in.last = position, position == len(modules) - 1
        swaps.append(Swap(module, stand_in, None if stand_in.last else name))
    return swaps


def _lazy_way(model: nn.Module, site: FFNSite, ffn: SparseFFN, probes: Sequence[Probe]) -> list[Swap] | str:
    sources: dict[str, list[str]] = {}
    refs = [("gate", site.gate), ("up", site.up)]
    for role, ref in sorted(refs, key=lambda item: item[1].rows or (0, 0) if item[1] else (0, 0)):
        if ref is not None:
            sources.setdefault(_module_name(ref.weight), []).append(role)
    down_name = _module_name(site.down.weight)
    modules = {name: model.get_submodule(name) for name in (*sources, down_name)}
    if patched := own_forward(modules):
        return f"lazy: {patched}"
    for name, module in modules.items():
        parameters = {local: p.detach() for local, p in module.named_parameters()}
        if not parameters.keys() <= {"weight", "bias"} or any(True for _ in module.buffers()):
            return f"lazy: {name or 'the model'} holds more than one matmul"
        probe = torch.randn((1, 11, parameters["weight"].shape[1]), generator=torch.Generator().manual_seed(1))
        probe = (probe * token_magnitudes(parameters["weight"].dtype, (1, 11))).to(parameters["weight"].dtype)
        wanted = nn.functional.linear(probe, parameters["weight"], parameters.get("bias"))
        with evaluating(module), _as_it_was(module) as changed:
            problem = _runs_to(module.forward, [(probe, wanted)])
        if changed and not problem:
            problem = f"keeps something of each call ({changed[0]})"
        if problem:
            return f"lazy: {name} is not a plain linear layer ({problem})"
    roles = [role for members in sources.values() for role in members]
    formula = Formula(
        site.activation, site.activation_on_up, roles.index("gate") if site.gated else None, roles.index("up")
    )
    lazy = [LazySource(members, stream) for stream, members in enumerate(sources.values())]
    down = LazyDown(ffn, formula)
    for stand_in in (*lazy, down):
        stand_in.stand_for(nn.Identity(), ffn, {})
    with evaluating(ffn):
        outputs = [source(probes[0][0]) for source in lazy]
        streams = list(outputs[0].chunk(len(roles), -1)) if len(lazy) < len(roles) else outputs
        if down._input_of(apply_formula(formula, streams)) is None:  # type: ignore[arg-type]
            return "lazy: its own formula is not recognised"
    return [Swap(modules[name], s) for name, s in zip(sources, lazy)] + [Swap(modules[down_name], down)]


def _module_name(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _install(model: nn.Module, site: FFNSite, ffn: SparseFFN | SparseExperts, swaps: Sequence[Swap]) -> None:
    """Register the stand-ins, then give back the memory of parameters that nothing else uses."""
    wanted = {name for ref in (site.gate, site.up, site.down) if ref for name in (ref.weight, ref.bias) if name}
    site_name = {id(model.get_parameter(name)): name for name in wanted}
    # a layer rewritten before may share a weight with this one: what it stands for counts as in use, too
    earlier = {id(p) for _, _, s in stand_ins(model) for p in s.original.parameters()}
    places = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    targets: list[tuple[nn.Module, str, Swap]] = []
    for swap in swaps:
        if swap.at is None:
            targets += [(parent, name, swap) for parent, name, child in places if child is swap.original]
        else:
            parent_name, _, name = swap.at.rpartition(".")
            targets.append((model.get_submodule(parent_name), name, swap))
    for swap in swaps:
        parameters = dict(swap.original.named_parameters(remove_duplicate=False))
        names = {local: site_name[id(p)] for local, p in parameters.items() if id(p) in site_name}
        swap.stand_in.stand_for(swap.original, ffn, names)
    for swap in swaps:
        share_hooks(swap.original, swap.stand_in)
    ffn.training = swaps[0].original.training
    if isinstance(ffn, SparseFFN):
        ffn.passes_on = swaps[0].stand_in is ffn and len(swaps) > 1
    if isinstance(ffn, SparseFFN) and swaps[0].stand_in is ffn:
        ffn.only_in_eval = ffn.site.drops == "inside" or (len(swaps) == 1 and bool(ffn.site.drops))
    for parent, name, swap in targets:
        parent._modules[name] = swap.stand_in
    in_use = earlier | {id(p) for p in model.parameters()}
    running = {id(module) for module in model.modules()}
    for swap in swaps:
        swap.stand_in.silence(module for module in swap.original.modules() if id(module) not in running)
        held = {local: swap.original.get_parameter(local) for local in swap.stand_in._names}
        swap.stand_in.release(tuple(local for local, p in held.items() if id(p) not in in_use))
