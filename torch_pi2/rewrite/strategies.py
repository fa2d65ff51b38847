"""Choosing how an FFN of a model is replaced, without changing anything.

The first strategy *seen* to compute the same on random input is chosen, if the code that it replaces does nothing
before its first matmul and after its last one, at any length (:func:`_follow`):

* **module**: the module that owns the FFN computes nothing else; its ``forward`` is replaced (Llama's ``mlp``).
* **sequential**: the FFN is a sequence of modules inside a bigger block; the first linear computes all of it, the
  others pass the result on (OPT's ``fc1, activation_fn, fc2``).
* **lazy**: part of the FFN is code of the block; its linears exchange a lazy tensor (:mod:`torch_pi2.layers.lazy`).
  This is also for FFNs with hooks inside, which the other strategies would silence (:mod:`torch_pi2.base.modules`).

Experts are replaced together, by the ``forward`` of the module that holds them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_pi2.base.modules import evaluating, has_hooks, hooks_inside, own_forward
from torch_pi2.base.progress import log
from torch_pi2.errors import StaleArtifactError, UnsupportedModelError
from torch_pi2.graph.experts import probe_experts
from torch_pi2.graph.find import named
from torch_pi2.graph.operations import BranchCoverage, same_tokens, token_magnitudes
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.lazy import LazyDown, LazySource
from torch_pi2.layers.sequence import FusedIdentity
from torch_pi2.ops.activations import of_all
from torch_pi2.rewrite.install import Override
from torch_pi2.types.plan import LayerPlan
from torch_pi2.types.site import FFNSite, FFNWeights, Formula, apply_formula, dense_reference

#: Batches and tokens of probes: several of each, to notice code that picks some out, and one alone.
_PROBE_SHAPES = ((3, 17), (2, 5), (1, 1))
#: Batches and tokens at which code is followed without numbers, to notice code for long or many sequences.
_LENGTHS = ((3, 17), (1, 1), (2, 5040), (1, 8191), (300, 2))
_MATMULS = frozenset(["mm", "addmm", "bmm", "mv", "addmv", "linear", "matmul"])
#: Operations that change no number.
_MOVES = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "alias", "detach"}
_MOVES |= {"clone", "empty", "lift_fresh"}
#: End of a reason: the strategy would silence a hook.
_SILENT = "which would not run"
#: An input ``[B, T, H]`` and the dense layer's result.
Probe = tuple[torch.Tensor, torch.Tensor]


def find_strategy(
    model: nn.Module,
    group: Sequence[LayerPlan],
    sparse: Any,
    strategies: Iterable[str] = ("module", "sequential", "lazy"),
    *,
    tried: int | None = None,
) -> tuple[str, list[Override]]:
    """The first of ``strategies`` that computes the same as a layer, or all experts of one module (``group``: their
    plans); and its overrides. ``sparse``: the layer, possibly empty; or None, which the lazy strategy does not accept.
    ``tried``: 0: the strategy is known and not tried; else the number of experts to try (None: all), which need their
    weights. Raises UnsupportedModelError: none works. StaleArtifactError: the module has another number of experts.
    """
    site = group[0].site
    if site.experts is not None:
        return "module", [_by_experts(model, group, sparse, tried)]
    probes = [] if tried == 0 else _probes_of(site, site.weights(model))
    reasons: list[str] = []
    for strategy in strategies:
        overrides = _TRY[strategy](model, site, sparse, probes)
        if not isinstance(overrides, str):
            if any(reason.endswith(_SILENT) for reason in reasons):
                log.warning("%s runs through lazy tensors, which is slower: %s", site.key, "; ".join(reasons))
            return strategy, overrides
        reasons.append(overrides)
    raise no_strategy(site, reasons)


def plain_reason(reasons: Sequence[str]) -> str:
    """The most useful reason: a hook, or else why the last and most general strategy failed."""
    return next((r for r in reasons if r.endswith(_SILENT)), reasons[-1]).partition(": ")[2]


def log_skipped(refused: Mapping[str, UnsupportedModelError], others: bool) -> dict[str, str]:
    """Log why layers cannot be replaced, and return the reasons. Raises the first error if there are no ``others``."""
    if refused and not others:
        raise next(iter(refused.values()))
    left = {key: plain_reason(error.found.split("; ")) for key, error in refused.items()}
    if left:
        log.warning("left dense: %s", named(left))
    return left


def _by_experts(model: nn.Module, group: Sequence[LayerPlan], sparse: Any, tried: int | None) -> Override:
    """The override that replaces the module of experts of ``group`` by ``sparse``."""
    first = group[0].site
    module = model.get_submodule(str(first.experts))
    experts = len(model.get_parameter(first.up.weight))
    if experts != len(group):
        expected = f"{experts} experts, as {type(module).__name__} has"
        fix = "Make a new plan for this model."
        raise StaleArtifactError(f"plan of {first.experts}", expected=expected, found=str(len(group)), fix=fix)
    problem = _more_than(first, model, {str(first.experts): module})
    reason = f"module: it also holds {problem}" if problem else ""
    if tried != 0 and not reason:
        arguments, result = probe_experts(model, [layer.site for layer in group[:tried]])
        with evaluating(module):
            problem = _runs_to(lambda x: module.forward(x, *arguments[1:])[: len(result)], [(arguments[0], result)])
        reason = f"module: {first.experts} {problem}" if problem else ""
    if not reason and (hooks := hooks_inside(str(first.experts), module)):
        reason = f"module: {hooks}, {_SILENT}"
    if reason:
        raise no_strategy(first, [reason])
    return Override(module, getattr(sparse, "forward", None))


def _probes_of(site: FFNSite, weights: FFNWeights) -> list[Probe]:
    generator = torch.Generator().manual_seed(site.layer)
    probes: list[Probe] = []
    for number, shape in enumerate(_PROBE_SHAPES):
        x_BTH = torch.randn((*shape, site.hidden), generator=generator)
        if number == 1:
            x_BTH *= token_magnitudes(weights.up.dtype, shape)
        x_BTH[0, 3:4] = 0.0  # as padding may be
        x_BTH = x_BTH.to(weights.up.dtype)
        probes.append((x_BTH, dense_reference(site, weights, x_BTH)))
    return probes


def _by_module(model: nn.Module, site: FFNSite, ffn: Any, probes: Sequence[Probe]) -> list[Override] | str:
    if not site.owner:
        return "module: it is the whole model"
    owner = model.get_submodule(site.owner)
    if not site.owner_runs:
        return f"module: code outside {site.owner} calls its parts"
    more = _more_than(site, model, {site.owner: owner})
    if more:
        return f"module: it also holds {more}"
    if hooks := hooks_inside(site.owner, owner):
        return f"module: {hooks}, {_SILENT}"
    with evaluating(owner):
        problem = _tried(owner.forward, probes, owner) or _follow(owner.forward, probes, site, owner)
    return f"module: {site.owner} {problem}" if problem else [Override(owner, getattr(ffn, "forward", None))]


def _by_sequence(model: nn.Module, site: FFNSite, ffn: SparseFFN, probes: Sequence[Probe]) -> list[Override] | str:
    if not site.inner:
        return "sequential: part of it is code of its owner"
    sources = {_module_name(ref.weight) for ref in (site.gate, site.up) if ref is not None}
    if len(sources) != 1:
        return "sequential: gate and up are separate"
    names = [*sources, *site.inner, _module_name(site.down.weight)]
    modules = [model.get_submodule(name) for name in names]
    if shared := [name for name in names if len(_holders(model, name)) > 1]:
        return f"sequential: {shared[0]} is a part of other modules, too"
    more = _more_than(site, model, dict(zip(names, modules)))
    if more:
        return f"sequential: it also holds {more}"
    inside = dict(zip(names, modules))
    hooks = own_forward(inside)
    for position, (name, module) in enumerate(inside.items()):
        if has_hooks(module, pre=position > 0, post=position < len(names) - 1) or hooks_inside(name, module):
            hooks = f"{name} has a hook"
    if hooks:
        return f"sequential: {hooks}, {_SILENT}"

    def run(h: torch.Tensor) -> Any:
        for module in modules:
            h = module.forward(h)
        return h

    with evaluating(*modules):
        problem = _tried(run, probes, *modules) or _follow(run, probes, site, *modules)
    if problem:
        return f"sequential: {' -> '.join(names)} {problem}"
    last = len(modules) - 1
    others = [Override(m, FusedIdentity(site, i, i == last).forward) for i, m in enumerate(modules[1:], 1)]
    return [Override(modules[0], getattr(ffn, "forward_fused", None)), *others]


def _by_lazy_tensors(model: nn.Module, site: FFNSite, ffn: SparseFFN, probes: Sequence[Probe]) -> list[Override] | str:
    if of_all(site.activation):
        return "lazy: its cut or norm is of all neurons together"
    by_module = {_module_name(ref.weight): ref for ref in site.refs.values()}
    if shared := [name for name in by_module if len(set(_holders(model, name))) > 1]:
        return f"lazy: {shared[0]} is a part of other modules, too"
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
        more = [*(parameters.keys() - {"weight", "bias"}), *(local for local, _ in module.named_buffers())]
        if more:
            kind = type(module).__name__
            if len({ref.weight for ref in site.refs.values() if _module_name(ref.weight) == name}) > 1:
                return f"lazy: its weights are no linear layers', but parameters of {kind}, which computes more"
            return f"lazy: {kind} holds more than one matmul ({min(more)})"
        w_OI = by_module[name].matrix(parameters["weight"])
        if not probes:
            continue
        probe = torch.randn((1, 11, w_OI.shape[1]), generator=torch.Generator().manual_seed(1))
        probe = (probe * token_magnitudes(w_OI.dtype, (1, 11))).to(w_OI.dtype)
        wanted = nn.functional.linear(probe, w_OI, parameters.get("bias"))
        with evaluating(module):
            tried = [(probe, wanted)]
            problem = _tried(module.forward, tried, module) or _follow(module.forward, tried, site, module)
        if problem:
            return f"lazy: {type(module).__name__} is not a plain linear layer ({problem})"
    roles = [role for members in sources.values() for role in members]
    gate = roles.index("gate") if site.gated else None
    formula = Formula(site.activation, site.activation_on_up, gate, roles.index("up"))
    lazy = [LazySource(ffn, members, stream) for stream, members in enumerate(sources.values())]
    down = LazyDown(ffn, formula)
    with evaluating(ffn):
        x_BTH = torch.zeros((*_PROBE_SHAPES[0], site.hidden), dtype=site.weights(model).up.dtype)
        outputs = [source.forward(x_BTH) for source in lazy]
        streams = list(outputs[0].chunk(len(roles), -1)) if len(lazy) < len(roles) else outputs
        if down._input_of(apply_formula(formula, streams)) is None:  # type: ignore[arg-type]
            return "lazy: its own formula is not recognised"
    first = [Override(modules[name], source.forward) for name, source in zip(sources, lazy)]
    return [*first, Override(modules[down_name], down.forward)]


_TRY: dict[str, Callable[[nn.Module, FFNSite, Any, Sequence[Probe]], list[Override] | str]] = {
    "module": _by_module,
    "sequential": _by_sequence,
    "lazy": _by_lazy_tensors,
}


def _module_name(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def no_strategy(site: FFNSite, reasons: Sequence[str]) -> UnsupportedModelError:
    what = f"rewriting {site.key or 'the FFN'} ({site.owner_class})"
    expected = "modules that compute the FFN, or linears that can be replaced"
    fix = "Move the FFN into a module of its own." if site.owner else "Pass a module around it: nn.Sequential(model)."
    return UnsupportedModelError(what, expected=expected, found="; ".join(reasons), fix=fix)


def _holders(model: nn.Module, name: str) -> list[nn.Module]:
    """Modules that hold the module ``name``, which has only one forward, once for each of its names there."""
    module = model.get_submodule(name)
    return [parent for parent in model.modules() for child in parent._modules.values() if child is module]


def _runs_to(call: Any, probes: Sequence[Probe]) -> str | None:
    """What ``call(x)`` does instead of giving ``y`` on all probes, or does where no probe reaches; None if nothing."""
    coverage = BranchCoverage()
    for x, y in probes:
        try:
            with coverage:
                found = call(x.clone())
        except Exception as error:  # e.g. a block with more arguments, or a container without forward
            return f"raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if not same_tokens(found, y):
            return "computes something else as well"
    missed = coverage.missed()
    return f"computes something else as well, where no probe comes ({missed})" if missed else None


def _tried(call: Any, probes: Sequence[Probe], *modules: nn.Module) -> str | None:
    """As :func:`_runs_to`, also checking that ``modules`` keep nothing of a call; their attributes are restored."""
    with as_it_was(*modules) as changed:
        problem = _runs_to(call, probes)
    return f"keeps something of each call ({changed[0]})" if changed and not problem else problem


class _Operations(TorchDispatchMode):
    """Lists the operations of code, without moves: name, numbers, and whether it adds a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        whole = name == "slice" and result.shape == args[0].shape
        wider = name == "_to_copy" and result.is_floating_point() and result.dtype.itemsize > args[0].dtype.itemsize
        if name not in _MOVES and not whole and not wider:
            bias = name == "add" and isinstance(args[1], nn.Parameter)
            self.found.append((name, bias, *(arg for arg in args if isinstance(arg, int | float))))
        return result

    def around(self) -> list[str]:
        """Operations before the first matmul and after the last, but for biases and products with a number."""
        at = [index for index, (name, *_) in enumerate(self.found) if name in _MATMULS]
        outer = [*self.found[: at[0]], *self.found[at[-1] + 1 :]] if at else self.found
        return [name for name, bias, *numbers in outer if not bias and not (name == "mul" and numbers)]


def _follow(call: Any, probes: Sequence[Probe], site: FFNSite, *modules: nn.Module) -> str | None:
    """What ``call(x)`` does besides a feed-forward layer (or one matmul), which probes may miss; None: nothing.

    Its operations, on ``meta``, must be the same for all lengths, and in training mode unless there is dropout.
    """
    if not probes:
        return None
    x = probes[0][0]
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    kept = {part: (part._parameters, part.training) for part in parts}
    some: list[_Operations] = []
    try:
        for part in parts:
            held = {name: p for name, p in part._parameters.items() if p is not None}
            shapes = {name: nn.Parameter(p.detach().to("meta"), False) for name, p in held.items()}
            part.__dict__["_parameters"] = {**part._parameters, **shapes}
        for shape in (*_LENGTHS, *([] if site.drops else _LENGTHS[:1])):
            some.append(_Operations())
            for part in parts:
                part.training = len(some) > len(_LENGTHS)
            with some[-1]:
                call(torch.empty((*shape, x.shape[-1]), dtype=x.dtype, device="meta"))
    except Exception as error:  # Python code that asks for numbers
        return f"raises {type(error).__name__} where numbers are unknown"
    finally:
        for part, (parameters, training) in kept.items():
            part.__dict__["_parameters"], part.training = parameters, training
    if around := some[0].around():
        return f"also computes {', '.join(dict.fromkeys(around))}"
    if any(one.found != some[0].found for one in some[1:]):
        return "computes something else at another length or in training mode"
    return None


@contextmanager
def as_it_was(*roots: nn.Module) -> Iterator[list[str]]:
    """Context that undoes assignments to modules' attributes, and collects their names in its list."""
    before = {module: dict(vars(module)) for root in roots for module in root.modules()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for module, attributes in before.items():
            now = vars(module)
            changed += [name for name in {**attributes, **now} if attributes.get(name, now) is not now.get(name, now)]
            now.clear()
            now.update(attributes)


def _more_than(site: FFNSite, model: nn.Module, modules: Mapping[str, nn.Module]) -> str | None:
    """A tensor in ``modules`` that is not the FFN's, as adapters' are, which may be trained or loaded later."""
    own = {id(model.get_parameter(name)) for name in site.parameter_names}
    for prefix, module in modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in own:
                return f"{prefix}.{name}"
    return None
