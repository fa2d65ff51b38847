"""Records which neurons fire while a model runs: a dispatch mode for plain FFNs, hooks for mixtures of experts.

The model is neither changed nor traced. Matmuls are recognised by their weight
(:class:`torch_pi2.graph.dispatch.MatmulIndex`). A sink gets one FFN call at a time, so memory stays bounded.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_pi2.base.fields import argument
from torch_pi2.base.memory import let_go, letting_go
from torch_pi2.base.modules import evaluating
from torch_pi2.base.progress import bar
from torch_pi2.errors import CalibrationError, ConfigError, NonFiniteError, UnsupportedModelError
from torch_pi2.graph.dispatch import MatmulIndex
from torch_pi2.graph.routed import Routed, modules_of
from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.profiling.data import MIN_TOKENS, Batch, check_ids
from torch_pi2.types.site import FFNSite, check_weights, fired_scores, intermediate, products
from torch_pi2.types.stats import Reservoir


@dataclass
class Firing:
    """One call of the FFN ``site``: its input ``x_TH`` in the model's dtype; ``score_TI`` float32, ``|act(gate)|`` if
    only the gate is activated, else ``|h|``; ``h`` gives the input ``[T, I]`` of down; ``real_T`` bool, False for
    padding. ``grid``: ``(B, T)`` of the rows, row-major; None if unknown, as for experts. ``borrowed``: the router gave
    the rows to other experts of the block. ``streams`` gives what the gate and up matmuls made ``[T, I]``, by role
    (only if :func:`record` was asked for them). ``tokens``: of an expert, the numbers of its rows among the batch's
    real tokens, int64 ``[T]``.
    """

    site: FFNSite
    x_TH: torch.Tensor
    score_TI: torch.Tensor
    h: Callable[[], torch.Tensor]
    real_T: torch.Tensor
    grid: tuple[int, int] | None
    borrowed: bool = False
    streams: Callable[[], dict[str, torch.Tensor]] = dict
    tokens: torch.Tensor | None = None


Sink = Callable[[Firing], None]


def real_tokens(key: str, batch: Batch | None, rows: int) -> tuple[torch.Tensor, tuple[int, int] | None]:
    """Mask ``[rows]`` of a module's rows, False: padding; and their grid. Raises UnsupportedModelError: unclear."""
    mask_BT = None if batch is None else batch.mask_BT
    if mask_BT is None or mask_BT.numel() != rows:
        if mask_BT is not None and not bool(mask_BT.all()):
            expected = f"{mask_BT.numel()}, one per token of the batch (padding included)"
            fix = "Calibrate with sequences of one length, so that there is no padding to tell apart."
            raise UnsupportedModelError(f"rows seen by {key}", expected=expected, found=str(rows), fix=fix)
        return torch.ones(rows, dtype=torch.bool), None
    return mask_BT.flatten(), (mask_BT.shape[0], mask_BT.shape[1])


def _check_finite(what: str, values_TK: torch.Tensor, real_T: torch.Tensor) -> None:
    broken_T = ~torch.isfinite(values_TK).all(-1) & real_T
    if bool(broken_T.any()):
        found = f"NaN or infinity for {int(broken_T.sum())} of {int(real_T.sum())} tokens"
        fix = "Check the checkpoint and the dtype (float16 overflows at 65504: try bfloat16)."
        raise NonFiniteError(what, expected="finite numbers", found=found, fix=fix)


#: Tokens sampled from each module of experts, for experts with fewer than ``MIN_TOKENS``.
_SAMPLED = 256


class _ExpertBlock:
    """One module of experts: the token count of each, and a sample of the module's tokens."""

    def __init__(self, name: str, sites: Sequence[FFNSite]) -> None:
        self.name, self.sites = name, sites
        self.calls = 0
        self.counts = dict.fromkeys((site.key for site in sites), 0)
        self._reservoir = Reservoir(_SAMPLED, 0)
        self._x: torch.Tensor | None = None  # [N, H], as soon as there is a token
        self._index: torch.Tensor | None = None

    def sample(self, routed: Routed) -> None:
        rows, slots = self._reservoir.place(len(routed.x_TH))
        if self._x is None or self._index is None:
            self._x = routed.x_TH.new_zeros((_SAMPLED, routed.x_TH.shape[-1]))
            self._index = routed.index_TK.new_full((_SAMPLED, routed.index_TK.shape[-1]), -1)
        self._x[slots], self._index[slots] = routed.x_TH[rows], routed.index_TK[rows]

    def other_tokens(self, site: FFNSite) -> torch.Tensor:
        """``[N, H]``: the sampled tokens that did not go to ``site``."""
        assert self._x is not None
        assert self._index is not None
        count = min(self._reservoir.seen, _SAMPLED)
        return self._x[:count][~self._index[:count].eq(site.up.expert or 0).any(-1)]


class RoutedRecorder:
    """Calls ``sink`` with the firing of experts while a model runs inside ``with``. Set :attr:`batch` before each call.

    :meth:`finish` adds, for experts with fewer than ``MIN_TOKENS`` tokens, up to ``_SAMPLED`` tokens of other experts:
    they need statistics, as other text may use them. Raises as :class:`ActivationRecorder` while the model runs.
    """

    def __init__(self, model: nn.Module, sites: Sequence[FFNSite], sink: Callable[[Firing], None]) -> None:
        self._model, self._sink = model, sink
        self._blocks = [_ExpertBlock(name, own) for name, own in modules_of(sites).items()]
        self._hooks = ExitStack()
        self.batch: Batch | None = None

    def __enter__(self) -> "RoutedRecorder":
        for block in self._blocks:
            module = self._model.get_submodule(block.name)
            self._hooks.enter_context(module.register_forward_hook(self._watch(block), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @property
    def calls(self) -> dict[str, int]:
        """Module of experts -> number of calls."""
        return {block.name: block.calls for block in self._blocks}

    def _watch(self, block: _ExpertBlock) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y_TH: torch.Tensor) -> None:
            routed = Routed.of(args, kwargs, len(block.sites))
            real_T, _ = real_tokens(block.name, self.batch, len(routed.x_TH))
            _check_finite(f"output of {block.name}", y_TH, real_T)
            routed = Routed(*(tensor.detach()[real_T] for tensor in routed))
            block.calls += 1
            block.sample(routed)
            for site in block.sites:
                tokens = routed.tokens_of(site)
                block.counts[site.key] += len(tokens)
                if len(tokens):
                    self._show(site, routed.x_TH[tokens], tokens=tokens)

        return hook

    def _show(self, site: FFNSite, x_NH: torch.Tensor, *, borrowed: bool = False, tokens: Any = None) -> None:
        weights, real_N = site.weights(self._model), torch.ones(len(x_NH), dtype=torch.bool)
        score_NI, h = fired_scores(site, weights, x_NH), lambda: intermediate(site, weights, x_NH)[1]
        streams = partial(products, weights, x_NH)
        self._sink(Firing(site, x_NH, score_NI, h, real_N, None, borrowed, streams, tokens))

    def finish(self) -> None:
        """After the last batch: pass more tokens of experts with few to the sink."""
        for block in self._blocks:
            for site in block.sites if block.calls else ():
                if block.counts[site.key] < MIN_TOKENS and len(x_NH := block.other_tokens(site)):
                    self._show(site, x_NH, borrowed=True)


#: A threshold for all neurons of a layer, or ``[I]``.
Cut = TypeVar("Cut", bound=float | torch.Tensor)


class ActivationRecorder(TorchDispatchMode):
    """Calls ``sink`` once per call of an FFN that is not an expert. Set :attr:`batch` before each call of the model.
    ``streams``: with copies of what its gate and up matmuls made, since the model may change them in place.

    Raises (while the model runs):
        NonFiniteError: NaN or infinity in the activations of a real token.
        UnsupportedModelError: an FFN has other rows than the batch's tokens, so padding cannot be identified.
    """

    def __init__(self, model: nn.Module, sites: Sequence[FFNSite], sink: Sink, *, streams: bool = False) -> None:
        super().__init__()
        sites = [site for site in sites if site.experts is None]
        self._sink = sink
        self._streams: dict[str, dict[str, torch.Tensor]] | None = {} if streams else None
        self._index = MatmulIndex(sites, model)
        self._x: dict[str, torch.Tensor] = {}
        self._gate: dict[str, torch.Tensor] = {}
        self.batch: Batch | None = None
        self.calls: dict[str, int] = {s.key: 0 for s in sites}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        hit = self._index.find(func, args, kwargs)
        if hit is None:
            return out
        for member in hit.members:
            site, role = member.site, member.role
            if role == "down":
                self._emit(site, hit.x)
                continue
            self._x[site.key] = hit.x
            if role == "gate" and not site.activation_on_up:
                self._gate[site.key] = self._index.result(hit, member, out, torch.float32)
            if self._streams is not None:
                kept = self._index.result(hit, member, out).detach().clone()
                self._streams.setdefault(site.key, {})[role] = kept
        return out

    def _emit(self, site: FFNSite, h: torch.Tensor) -> None:
        h_TI = h.detach().reshape(-1, h.shape[-1])
        x, gate_TI = self._x.pop(site.key, None), self._gate.pop(site.key, None)
        streams = (self._streams or {}).pop(site.key, {})
        if x is None:
            return  # down alone: a weight that is used elsewhere, too
        real_T, grid = real_tokens(site.key, self.batch, len(h_TI))
        _check_finite(f"activations of {site.key} (layer {site.layer})", h_TI, real_T)
        if site.gated and not site.activation_on_up and gate_TI is not None:
            score_TI = ACTIVATIONS[site.activation](gate_TI).abs()
        else:
            score_TI = h_TI.float().abs()
        self.calls[site.key] += 1
        x_TH = x.detach().reshape(-1, x.shape[-1])
        self._sink(Firing(site, x_TH, score_TI, lambda: h_TI, real_T, grid, streams=lambda: streams))


def check_sites(model: nn.Module, sites: Sequence[FFNSite]) -> None:
    """Refuse an empty list of sites, and weights that cannot be used (see ``check_weights``)."""
    if not sites:
        fix = "Pass torch_pi2.graph.find_sites(model, ...)."
        raise ConfigError("FFN sites", expected="at least one", found="none", fix=fix)
    for site in sites:
        check_weights(site, weights := site.weights(model))
        let_go(model, weights)


def record(
    model: nn.Module,
    data: Iterable[Batch],
    sites: Sequence[FFNSite],
    sink: Sink,
    *,
    progress: bool = True,
    label: str = "profile",
    logits: bool = False,
    streams: bool = False,
) -> dict[str, int]:
    """Run ``model`` over ``data`` and call ``sink`` with every FFN call of ``sites`` (:class:`RoutedRecorder`); returns
    counts ``{"tokens", "sequences", "batches"}``. ``logits``: also compute those of all tokens, which take more memory
    than a small model if its vocabulary is large. ``streams``: for :attr:`Firing.streams`. Raises
    UnsupportedModelError: a site's matmuls never ran with its own weights. CalibrationError: see
    :func:`torch_pi2.profiling.data.check_ids`.
    """
    check_sites(model, sites)
    counts = {"tokens": 0, "sequences": 0, "batches": 0}
    recorder = ActivationRecorder(model, sites, sink, streams=streams)
    routed = RoutedRecorder(model, sites, sink)
    with evaluating(model), routed, letting_go(model):
        for batch in bar(data, label, progress, unit="batch"):
            check_ids(model, batch)
            recorder.batch = routed.batch = batch
            with recorder if recorder.calls else nullcontext():  # experts only: nothing to intercept
                batch.call(model, logits=logits)
            counts["batches"] += 1
            counts["tokens"] += batch.n_tokens
            counts["sequences"] += 0 if batch.mask_BT is None else batch.mask_BT.shape[0]
        routed.finish()
    if not counts["batches"]:
        fix = "Pass text, ids or batches."
        raise CalibrationError("calibration data", expected="at least one batch", found="none", fix=fix)
    silent = [key for key, n in (recorder.calls | routed.calls).items() if n == 0]
    if silent:
        raise UnsupportedModelError(
            "FFN sites that never ran",
            expected="every site's up and down matmul to use its own weights",
            found=f"none for {', '.join(silent[:4])}{', ...' if len(silent) > 4 else ''}",
            fix="Give layers that share a weight their own, and turn autocast and compiled forwards off meanwhile; or "
            f"optimise without statistics: method='exact' with fewer than {MIN_TOKENS} tokens as an example.",
        )
    return counts


def threshold_map(sites: Sequence[FFNSite], thresholds: float | Mapping[str, Cut] | None) -> dict[str, float | Cut]:
    """One firing threshold per site, from one number for all or a mapping; None: 0 (exact zeros)."""
    given: Mapping[str, float | Cut] = {}
    if isinstance(thresholds, (int, float)):
        given = {s.key: float(thresholds) for s in sites}
    elif thresholds:
        given = dict(thresholds)
    unknown = set(given) - {s.key for s in sites}
    bad = {k: v for k, v in given.items() if not all(0 <= end < math.inf for end in (torch.as_tensor(v).aminmax()))}
    if unknown or bad:
        what = argument(thresholds, "firing thresholds", "Use ActivationStats.threshold_for(key, share).")
        what.wrong("numbers >= 0 for keys of the sites", f"{sorted(unknown)[:3] or bad}")
    return {s.key: given.get(s.key, 0.0) for s in sites}
