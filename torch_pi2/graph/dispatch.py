"""Dispatch modes that mask neurons of an *unmodified* model, for research and for measuring predictors.

Below autograd there are no module names, and a model may slice, fuse or transpose its weights. Weights are therefore
recognised by their storage: an operand that begins inside a site's parameter and has its strides is a range of its rows
(:class:`MatmulIndex`, which the profiler uses as well).

* :class:`PredictedMaskMode` computes every neuron and zeroes, before ``down``, those that predictors and thresholds
  would skip. It sizes predictors before there is a plan.
* :class:`NeuronClusterMode` does so by a plan, and counts what a sparse layer would compute.

Semantics are those of ``torch_pi2.ops.ffn.sparse_ffn``: a cold neuron counts for a token iff it is predicted and
``|act(gate)| > threshold``; a hot one always counts.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_pi2.base.fields import argument, checked
from torch_pi2.base.modules import fresh_settings, has_hooks, has_sparse_layers
from torch_pi2.errors import ConfigError, GradientError
from torch_pi2.graph.find import find_sites
from torch_pi2.graph.routed import masked
from torch_pi2.ops.activations import ACTIVATIONS, cuts, norm
from torch_pi2.types.method import INPUTS, LOSSY, PREDICTED, Method, Predictor
from torch_pi2.types.plan import Plan
from torch_pi2.types.site import FFNSite

aten = torch.ops.aten


class Member(NamedTuple):
    """A site's use of a parameter: ``role`` is ``"gate"``, ``"up"`` or ``"down"``; rows ``[start, stop)``."""

    site: FFNSite
    role: str
    start: int
    stop: int


@dataclass(frozen=True)
class Matmul:
    """One intercepted ``x @ W[start:stop].T (+ bias)`` of the parameter ``weight``, ``x [..., in]``. ``bias``: added by
    the same operation, or None. ``members``: sites that own these rows, in row order; all lie within ``[start, stop)``.
    """

    x: torch.Tensor
    weight: str
    start: int
    stop: int
    bias: torch.Tensor | None
    members: tuple[Member, ...]


def _operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, torch.Tensor, Any] | None:
    """``(x, weight as [out, in], bias)`` of a matmul; None if ``func`` is no matmul."""
    if func is aten.mm.default:
        return args[0], args[1].t(), None
    if func is aten.linear.default:
        return args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
    if func is aten.addmm.default:
        plain = kwargs.get("beta", 1) == 1 and kwargs.get("alpha", 1) == 1
        return (args[1], args[2].t(), args[0]) if plain and args[0].dim() == 1 else None
    if func is aten.matmul.default and args[1].dim() == 2 and args[0].dim() >= 1:
        return args[0], args[1].t(), None
    if func is aten.bmm.default:
        w_Bio = args[1]
        shared = w_Bio.shape[0] == 1 or w_Bio.stride(0) == 0  # one weight, expanded over the batch
        return (args[0], w_Bio[0].t(), None) if shared else None
    if func is aten.mv.default:
        return args[1], args[0], None
    return None


class MatmulIndex:
    """Finds the site of an operation by addresses in ``model``, read once: build a new index if weights move."""

    def __init__(self, sites: Sequence[FFNSite], model: nn.Module) -> None:
        self._model = model
        self.members: dict[str, list[Member]] = defaultdict(list)
        matrices: dict[str, torch.Tensor] = {}
        for site in sites:
            for role, ref in site.refs.items():
                matrices[ref.weight] = ref.matrix(model.get_parameter(ref.weight).detach())
                start, stop = ref.rows[:2] if ref.rows else (0, len(matrices[ref.weight]))
                self.members[ref.weight].append(Member(site, role, start, stop))
        # a storage may hold several parameters (a flat buffer)
        self._by_storage: dict[int, list[tuple[str, int, torch.Size, tuple[int, ...], int]]] = defaultdict(list)
        for name, p in matrices.items():
            self.members[name].sort(key=lambda m: m.start)
            entry = (name, p.data_ptr(), p.shape, p.stride(), p.element_size())
            self._by_storage[p.untyped_storage().data_ptr()].append(entry)

    def find(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Matmul | None:
        """The site matmul that ``func(*args, **kwargs)`` is, or None."""
        operands = _operands(func, args, kwargs)
        if operands is None:
            return None
        x, w_OI, bias = operands
        if type(w_OI) not in (torch.Tensor, torch.nn.Parameter) or w_OI.dim() != 2:
            return None
        for name, base, shape, stride, item in self._by_storage.get(w_OI.untyped_storage().data_ptr(), ()):
            start, rest = divmod(w_OI.data_ptr() - base, stride[0] * item)
            stop = start + w_OI.shape[0]
            if rest or start < 0 or stop > shape[0] or w_OI.shape[1] != shape[1] or w_OI.stride() != stride:
                continue
            inside = tuple(m for m in self.members[name] if start <= m.start and m.stop <= stop)
            if inside:
                return Matmul(x, name, start, stop, bias, inside)
        return None

    def result(self, hit: Matmul, member: Member, out: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``[T, I]``: the rows of ``member`` in ``out``, in ``dtype`` if given, with a bias that is added later."""
        y_TI = out.reshape(-1, out.shape[-1])[:, member.start - hit.start : member.stop - hit.start]
        y_TI = y_TI if dtype is None else y_TI.to(dtype)
        ref = member.site.refs[member.role]
        if hit.bias is None and ref.bias and not (member.role == "up" and norm(member.site.activation)):
            y_TI = y_TI + ref.take_bias(self._model.get_parameter(ref.bias).detach())
        return y_TI


class PredictedMaskMode(TorchDispatchMode):
    """Zeroes, before ``down``, every cold neuron that is not predicted, or below its threshold.

    :func:`torch_pi2.graph.routed.masked` computes modules of experts meanwhile, those without a predictor in full.

    Args:
        sites: all FFNs of ``model``, including every expert of a module; those without an entry in ``predictors`` stay
            dense.
        predictors: site key -> predictor; None: the layer only has a threshold. cold: site key -> indices of its cold
            neurons; None: all are cold. thresholds: site key -> cut on ``|act(gate)|`` of cold neurons, one or ``[I]``;
            None: 0 everywhere. methods: site key -> what may have a ``bias_H``, which is added to the output.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[FFNSite],
        predictors: Mapping[str, Predictor | None],
        cold: Mapping[str, torch.Tensor] | None = None,
        thresholds: Mapping[str, float | torch.Tensor] | None = None,
        methods: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._biases = {k: getattr(method, "bias_H", None) for k, method in (methods or {}).items()}
        modules = {s.experts for s in sites if s.experts is not None and s.key in predictors}
        self._model, self._experts = model, [s for s in sites if s.experts in modules]
        self._inside: list[AbstractContextManager[None]] = []
        sites = [s for s in sites if s.key in predictors]
        self._hot: dict[str, torch.Tensor] = {}
        for s in sites:
            self._hot[s.key] = torch.ones(s.intermediate, dtype=torch.bool, device="cpu")
            self._hot[s.key][slice(None) if cold is None else cold[s.key]] = False
        dense = [s for s in sites if s.experts is None]
        self._index = MatmulIndex(dense, model)
        self._thresholds = {k: v for k, v in (thresholds or {}).items() if isinstance(v, torch.Tensor) or v > 0}
        self._predictors = predictors
        #: By site, in the current call: neurons predicted or hot, and those that also fire.
        self._wanted: dict[str, torch.Tensor] = {}
        self._keep: dict[str, torch.Tensor] = {}
        #: Pairs of a token and a cold neuron so far: computed ones, and all.
        self.pairs = (0, 0)

    @property
    def cold_share(self) -> float:
        """Share of (token, cold neuron) pairs that were computed so far."""
        return self.pairs[0] / max(1, self.pairs[1])

    def __enter__(self) -> Self:
        self._keep.clear()  # left by a call that raised
        inside = masked(self._model, self._experts, self._keep_of_expert)
        inside.__enter__()
        self._inside.append(inside)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inside.pop().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hit = self._index.find(func, args, kwargs)
        if hit is None:
            return func(*args, **kwargs)
        self._check(hit)
        for member in hit.members:
            key = member.site.key
            if member.role == "down" and key in self._keep:
                keep_TI = self._keep.pop(key)
                self._count(member.site, self._wanted.pop(key), keep_TI)
                h = torch.where(keep_TI.view(hit.x.shape), hit.x, 0)
                made = func(*[h if a is hit.x else a for a in args], **kwargs)
                bias_H = self._biases.get(key)
                return made if bias_H is None else made + bias_H.to(made)
        out = func(*args, **kwargs)
        for member in hit.members:
            site, role = member.site, member.role
            if role == "down":
                continue
            if site.key not in self._keep:
                self._wanted[site.key] = self._predict(site, hit.x.reshape(-1, hit.x.shape[-1]))
                self._keep[site.key] = self._wanted[site.key].clone()
            if role == ("gate" if site.gated else "up") and self._decides(site):
                self._keep[site.key] &= self._fires(site, self._index.result(hit, member, out))
        return out

    def _check(self, hit: Matmul) -> None:
        """Hook before a matmul of a site."""

    def _decides(self, site: FFNSite) -> bool:
        """Whether the gate is compared with a threshold."""
        return site.key in self._thresholds

    def _fires(self, site: FFNSite, first_TI: torch.Tensor) -> torch.Tensor:
        fires_TI = ACTIVATIONS[site.activation](first_TI.float()).abs() > self._thresholds.get(site.key, 0.0)
        return fires_TI | self._hot[site.key]

    def _keep_of_expert(self, site: FFNSite, x_NH: torch.Tensor, gate_NI: torch.Tensor) -> torch.Tensor:
        if site.key not in self._predictors:
            return torch.ones_like(gate_NI, dtype=torch.bool)
        wanted_NI = self._predict(site, x_NH)
        keep_NI = wanted_NI & self._fires(site, gate_NI) if self._decides(site) else wanted_NI
        self._count(site, wanted_NI, keep_NI)
        return keep_NI

    def _predict(self, site: FFNSite, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, I]`` bool: hot, or predicted (without a predictor: all)."""
        predictor, hot_I = self._predictors[site.key], self._hot[site.key]
        if predictor is None:
            return torch.ones((len(x_TH), len(hot_I)), dtype=torch.bool)
        return (predictor.scores(x_TH) >= predictor.threshold) | hot_I

    def _count(self, site: FFNSite, wanted_TI: torch.Tensor, keep_TI: torch.Tensor) -> None:
        kept, pairs = self.pairs
        cold_I = ~self._hot[site.key]
        self.pairs = (kept + int((keep_TI & cold_I).sum()), pairs + len(keep_TI) * int(cold_I.sum()))


@checked
def trying(model: nn.Module, methods: Any) -> AbstractContextManager[Any]:
    """A context in which the dense ``model`` leaves out, before ``down``, the neurons that ``methods`` do not choose::

        methods = torch_pi2.fit(model, text, stats=stats, method=Mine(share=0.3))
        with torch.no_grad(), torch_pi2.trying(model, methods):
            model(ids)

    Every neuron is computed, so nothing is faster, and the gates of all are computed before ``cut_I`` skips any.

    Args:
        model: dense, in eager mode.
        methods: site key -> :class:`torch_pi2.SparseMethod` (or another predictor), or one method that needs no fit and
            whose copies all layers get. Layers without one stay dense. Or name of a linear layer ->
            :class:`torch_pi2.InputMethod`, as :func:`torch_pi2.fit` gives them.

    Raises:
        ConfigError: the model has sparse layers, or a key is no layer of it.
    """
    several = methods if isinstance(methods, Mapping) else {"": methods}
    if any(getattr(method, "kind", "") == INPUTS for method in several.values()):
        return _masked_inputs(model, several)
    if has_sparse_layers(model):
        dense = argument(model, "trying", "Call torch_pi2.restore(model) first.")
        dense.wrong("a dense model", "one that torch_pi2 has rewritten")
    sites = find_sites(model)
    chosen = methods if isinstance(methods, Mapping) else {site.key: methods.copy() for site in sites}
    if unknown := sorted(chosen.keys() - {site.key for site in sites}):
        raise ConfigError("trying", expected="keys of find_sites(model)", found=unknown[0], fix="Correct the key.")
    if prompts := [key for key, method in chosen.items() if getattr(method, "scope", "token") == "prompt"]:
        fix = "Use torch_pi2.optimize(model, text, method=...)."
        raise ConfigError(f"trying, method of {prompts[0]}", expected="scope 'token'", found="scope 'prompt'", fix=fix)
    cut_I = {key: method.cut_I for key, method in chosen.items() if getattr(method, "cut_I", None) is not None}
    predictors = {key: None if key in cut_I else method for key, method in chosen.items()}
    return PredictedMaskMode(model, sites, predictors, None, cut_I, chosen)


@contextmanager
def _masked_inputs(model: nn.Module, methods: Mapping[str, Any]) -> Iterator[None]:
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if unknown := sorted(methods.keys() - linears.keys()):
        expected, fix = "names of linear layers of the dense model", "Pass torch_pi2.fit(model, text, method=...)."
        found = unknown[0] or "one method for all"
        raise ConfigError("trying an InputMethod", expected=expected, found=found, fix=fix)

    def mask(method: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return torch.where(method.kept(args[0]), args[0], 0), *args[1:]

    with ExitStack() as hooks:
        for name, method in methods.items():
            hook = linears[name].register_forward_pre_hook(lambda _, args, method=method: mask(method, args))
            hooks.enter_context(hook)
        yield


class NeuronClusterMode(PredictedMaskMode):
    """Gives, inside ``with``, the results of a plan on an unmodified eager model, and counts the computation it needs.

    Every neuron is computed, and those that the plan skips are zeroed before ``down``. The counts say what a sparse
    layer would compute; :func:`torch_pi2.optimize` makes it fast. Layers with method ``"dense"``, and experts, are left
    alone. ``generate`` works inside the block.

        plan.bind(model)
        with torch.no_grad(), NeuronClusterMode(plan, predictors) as mode:
            model(ids)
        print(mode.computed_share())

    Args:
        plan: bound to the model by ``plan.bind(model)``.
        predictors: site key -> predictor, for layers planned as ``"lowrank"`` or ``"signbit"``: any object with
            ``scores`` and ``threshold``.

    Attributes:
        lossy: whether results may differ from those of the dense model: a layer has a threshold or a predictor.

    Raises:
        ConfigError: the plan is not bound, or a layer's predictor is missing.
        GradientError: (inside) a gradient would be needed through a masked matmul. ConfigError: (on entering) hooks
            between the matmuls of a layer, which could change what fires.
    """

    @checked
    @fresh_settings()
    def __init__(self, plan: Plan, predictors: Mapping[str, Any] | None = None) -> None:
        predictors, model = predictors or {}, plan.model()
        if has_sparse_layers(model):
            dense = argument(model, "NeuronClusterMode", "Call torch_pi2.restore(model) first.")
            dense.wrong("a dense model", "one that torch_pi2 has rewritten")
        layers = [y for y in plan.layers if y.method != Method.DENSE and y.n_cold and y.site.experts is None]
        layers = [y for y in layers if not cuts(y.site.activation)]  # cuts need every gate between the matmuls
        for layer in layers:
            predictor = predictors.get(layer.site.key)
            if layer.method in PREDICTED and not (hasattr(predictor, "scores") and hasattr(predictor, "threshold")):
                expected = f"one with scores and threshold for every layer planned as '{layer.method}'"
                found = f"predictors for {', '.join(list(predictors)[:4]) or 'no layer'}"
                found = found if predictor is None else f"a {type(predictor).__name__}"
                fix = "Pass predictors=torch_pi2.fit(...) or load_predictors(folder)."
                raise ConfigError(f"predictor of {layer.site.key}", expected=expected, found=found, fix=fix)
        self._sites, self.lossy = [y.site for y in layers], any(y.method in LOSSY for y in layers)
        chosen = {y.site.key: predictors[y.site.key] if y.method in PREDICTED else None for y in layers}
        cold = {y.site.key: y.order[y.n_hot :].long() for y in layers}
        cuts_of = {y.site.key: y.threshold if y.thresholds is None else y.thresholds for y in layers}
        super().__init__(model, self._sites, chosen, cold, cuts_of, predictors)
        #: per site: ``tokens`` seen, multiply-adds ``computed`` and those of a ``dense`` layer.
        self.counters = {site.key: dict.fromkeys(("tokens", "computed", "dense"), 0) for site in self._sites}

    def __enter__(self) -> Self:
        if torch.is_autocast_enabled("cpu"):
            expected = "to be entered without torch.autocast, which gives matmuls copies of the weights"
            fix = "Turn it off, or use torch_pi2.optimize, which works with it."
            raise ConfigError("NeuronClusterMode", expected=expected, found="autocast", fix=fix)
        for site in self._sites:
            _refuse_hooks(self._model, site)
        return super().__enter__()

    def computed_share(self, key: str | None = None) -> float:
        """Multiply-adds over those of the dense FFNs, or of site ``key`` (a call's tokens share a union of neurons)."""
        counters = [self.counters[key]] if key is not None else list(self.counters.values())
        return sum(c["computed"] for c in counters) / max(1, sum(c["dense"] for c in counters))

    def _decides(self, site: FFNSite) -> bool:
        return True

    def _check(self, hit: Matmul) -> None:
        if torch.is_grad_enabled() and (hit.x.requires_grad or self._model.get_parameter(hit.weight).requires_grad):
            found, fix = "grad mode on and tensors that require gradients", "Wrap the call in torch.no_grad()."
            what = f"NeuronClusterMode at {hit.members[0].site.key}"
            raise GradientError(what, expected="inference", found=found, fix=fix)

    def _count(self, site: FFNSite, wanted_TI: torch.Tensor, keep_TI: torch.Tensor) -> None:
        super()._count(site, wanted_TI, keep_TI)
        tokens, counters = len(keep_TI), self.counters[site.key]
        later = int(keep_TI.any(0).sum()) * (site.rows_per_neuron - 1)
        counters["tokens"] += tokens
        counters["computed"] += tokens * site.hidden * (int(wanted_TI.any(0).sum()) + later)
        counters["dense"] += tokens * site.hidden * site.rows_per_neuron * site.intermediate


def _refuse_hooks(model: nn.Module, site: FFNSite) -> None:
    *firsts, down = (ref.weight.rpartition(".")[0] for ref in site.refs.values())
    between = [(name, False, True) for name in firsts] + [(name, True, True) for name in site.inner]
    for name, pre, post in [*between, (down, True, False)]:
        if has_hooks(model.get_submodule(name), pre=pre, post=post):
            fix = "Remove it meanwhile, or plan this layer as 'dense'."
            what = argument(site, f"NeuronClusterMode at {site.key}", fix)
            what.wrong("nothing between its matmuls that could change what fires", f"a hook on {name}")
