"""GPTQ for all linear layers of a model, each with the inputs that the quantised layers before it compute.

The model runs once, on all tokens in one call. The batch has every sequence twice: the first half is computed with
float weights, the second with quantised ones. Each layer is quantised (:mod:`torch_pi2.fitting.gptq`) at its first
call, and uses the quantised rows for the second half.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.modules import evaluating
from torch_pi2.base.progress import bar, log
from torch_pi2.errors import CalibrationError, UnsupportedModelError
from torch_pi2.fitting.gptq import Moments, Solver
from torch_pi2.graph.routed import Routed, modules_of
from torch_pi2.profiling.data import MIN_TOKENS, Batch
from torch_pi2.types.site import FFNSite, FFNWeights, intermediate

#: Maximum bytes of activations; sequences beyond that are left out.
_MOST_BYTES = 2 << 30
#: Tensors of a layer's width that are alive together: gate, up, their product and its factors.
_AT_A_TIME = 4


#: A site's matrices.
ROLES = ("gate", "up", "down")


def neuron_key(site: FFNSite, role: str) -> str:
    """Key of a site's ``gate``, ``up`` or ``down`` rows, one per neuron in model order."""
    return f"{site.key}.{role}"


@dataclass(frozen=True)
class _Slice:
    """Rows of a weight to quantise under ``key``; ``down``: a down matrix, quantised by column."""

    key: str
    rows: slice
    down: bool


class _DoneError(Exception):
    """Every layer is quantised: stops the model."""


def calibrated_rows(
    model: nn.Module,
    data: Sequence[Batch],
    sites: Sequence[FFNSite],
    linears: Collection[str],
    weights: str,
    keep: Callable[[str, torch.Tensor], None],
    *,
    progress: bool = False,
) -> dict[str, str]:
    """Pass the rows of ``sites`` (:func:`neuron_key`) and ``linears`` (names of modules; ``NAME.weight``) to ``keep``,
    by key; returns key -> reason of matrices that cannot be calibrated.

    The model does not change. Sequences of ``data`` whose activations would take more than 2 GiB are left out, with a
    warning. A module that is called more than once is quantised for the inputs of its first call.

    Raises:
        CalibrationError: batches without token ids. NonFiniteError: inputs of a layer with NaN or infinity.
            UnsupportedModelError: the model mixes the sequences of a batch.
    """
    slices, uncalibrated = _slices(model, sites, linears)
    experts = modules_of(sites)
    if not slices and not experts:
        return uncalibrated
    ids_BT, mask_BT = _one_batch(model, data, slices)
    total = len(slices) + len(experts)
    with bar(None, "GPTQ", progress, total=total) as shown, evaluating(model), ExitStack() as hooks:
        run = _Run(mask_BT, slices, experts, weights, keep, uncalibrated, shown.update)
        watched = {name: (run.before(name), run.after(name)) for name in slices}
        watched |= {k: (run.before_experts(k, own, model), run.after_experts(k)) for k, own in experts.items()}
        for name, (before, after) in watched.items():
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after))
        with suppress(_DoneError):
            Batch(ids_BT.repeat(2, 1), mask_BT.repeat(2, 1)).call(model)
    uncalibrated |= {part.key: "not called as a module" for name in run.waiting for part in slices.get(name, ())}
    return uncalibrated


def _slices(
    model: nn.Module, sites: Sequence[FFNSite], linears: Collection[str]
) -> tuple[dict[str, list[_Slice]], dict[str, str]]:
    """Module -> slices of its weight to quantise; key -> reason, for matrices that no module computes alone."""
    slices = {name: [_Slice(f"{name}.weight", slice(None), False)] for name in linears}
    uncalibrated: dict[str, str] = {}
    for site in sites:
        for role, ref in zip(ROLES, (site.gate, site.up, site.down)):
            if ref is None:
                continue
            name, _, local = ref.weight.rpartition(".")
            kind = type(model.get_submodule(name)).__name__
            if ref.expert is not None:
                uncalibrated[neuron_key(site, role)] = "experts that were not called"
            elif local != "weight" or kind not in ("Linear", "Conv1D"):
                uncalibrated[neuron_key(site, role)] = f"computed by a {kind}"
            else:
                part = _Slice(neuron_key(site, role), slice(*(ref.rows or (None,))), role == "down")
                slices.setdefault(name, []).append(part)
    return slices, uncalibrated


def _one_batch(model: nn.Module, data: Sequence[Batch], names: Collection[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of as many sequences as fit in memory, and a mask that is False for padding."""
    ids: list[torch.Tensor] = []
    for batch in data:
        if batch.input_ids is None or batch.args or batch.kwargs:
            found, fix = "batches with other arguments of the model", "Pass text or ids."
            expected = "token ids, or text"
            raise CalibrationError("calibration data of quantization='gptq'", expected=expected, found=found, fix=fix)
        mask_BT = torch.ones_like(batch.input_ids) if batch.mask_BT is None else batch.mask_BT
        ids += [torch.where(mask_BT.bool(), batch.input_ids, -1)[i : i + 1] for i in range(len(mask_BT))]
    longest = max(row.shape[1] for row in ids)
    # of one token's activations in the widest layer other than the output layer
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules: list[Any] = [model.get_submodule(name) for name in names]
    sizes = [max(module.weight.shape) * module.weight.dtype.itemsize for module in modules if module is not head]
    token_bytes = _AT_A_TIME * max(sizes, default=1)
    most = max(1, _MOST_BYTES // (2 * longest * token_bytes))
    if most < len(ids):
        log.warning("GPTQ sees %d of %d sequences, to bound memory", most, len(ids))
        ids = ids[:: -(-len(ids) // most)]
    ids_BT = torch.cat([F.pad(row, (0, longest - row.shape[1]), value=-1) for row in ids])
    return ids_BT.clamp(min=0), ids_BT >= 0


class _Run:
    """Hooks that quantise layers while the model runs. ``waiting``: modules that were not called yet."""

    def __init__(
        self,
        mask_BT: torch.Tensor,
        slices: Mapping[str, list[_Slice]],
        experts: Collection[str],
        weights: str,
        keep: Callable[[str, torch.Tensor], None],
        uncalibrated: dict[str, str],
        step: Callable[[], Any],
    ) -> None:
        self._real_T = mask_BT.flatten()
        self._slices, self._weights, self._keep = slices, weights, keep
        self._uncalibrated, self._step = uncalibrated, step
        self.waiting = {*slices, *experts}
        self._values: dict[str, torch.Tensor] = {}
        self._second: dict[str, tuple[torch.Tensor, Any]] = {}
        self._expert_outputs: dict[str, torch.Tensor] = {}
        self._solvers: tuple[Any, dict[bool, Solver]] = (None, {})
        self._started = False

    def before(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = args[0] if args else next(iter(kwargs.values()))
            if name in self.waiting:
                self._solve(name, module, x)
                self._done(name)
            if name not in self._values:
                return None
            first, second = x.chunk(2)
            self._second[name] = (second, module.bias)
            return ((first, *args[1:]), kwargs) if args else (args, dict.fromkeys(kwargs, first))

        return hook

    def _done(self, name: str) -> None:
        self.waiting.remove(name)
        self._step()
        if not self.waiting:
            raise _DoneError

    def after(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, y: torch.Tensor) -> Any:
            if name not in self._second:
                return None
            (x, bias), w_NK = self._second.pop(name), self._values.pop(name)
            return torch.cat((y, F.linear(x, w_NK.to(x.dtype), bias)))

        return hook

    def before_experts(self, name: str, sites: Sequence[FFNSite], model: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            routed = Routed.of(args, kwargs, len(sites))
            if name not in self.waiting:
                return
            if len(routed.x_TH) != 2 * len(self._real_T):
                for site in sites:
                    self._skip(site, "experts that see rows sorted by expert")
                self._done(name)
                return
            self._check_same(name, *routed.x_TH.chunk(2))
            y_TH = torch.zeros(routed.x_TH.shape, dtype=torch.float32)
            for site in sites:
                tokens = routed.tokens_of(site)
                tokens = tokens[tokens >= len(self._real_T)]
                out_NH = self._solve_expert(site, site.weights(model), routed.x_TH, tokens)
                y_TH.index_add_(0, tokens, out_NH * routed.weight_of(site, tokens)[:, None])
            self._expert_outputs[name] = y_TH[len(self._real_T) :]
            self._done(name)

        return hook

    def after_experts(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, y_TH: torch.Tensor) -> Any:
            second_TH = self._expert_outputs.pop(name, None)
            return None if second_TH is None else torch.cat((y_TH[: len(second_TH)], second_TH.to(y_TH.dtype)))

        return hook

    def _skip(self, site: FFNSite, why: str) -> None:
        keys = [neuron_key(site, role) for role in ROLES]
        self._uncalibrated |= {key: why for key in keys if key in self._uncalibrated}

    def _solve_expert(
        self, site: FFNSite, weights: FFNWeights, x_TH: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Quantise an expert; returns its outputs for ``tokens`` of the second half, ``[N, H]`` float32."""
        half = len(self._real_T)
        x_NH, float_NH, real_N = x_TH[tokens], x_TH[tokens - half], self._real_T[tokens - half]
        if int(real_N.sum()) < MIN_TOKENS:
            self._skip(site, f"experts that fewer than {MIN_TOKENS} calibration tokens reach")
            _, h_NI = intermediate(site, weights, x_NH)
            return F.linear(h_NI.to(x_NH.dtype), weights.down, weights.bias_down).float()

        def solve(role: str, w_NK: torch.Tensor, solver: Solver) -> torch.Tensor:
            solved = solver.solve(w_NK)
            self._keep(neuron_key(site, role), solved.rows)
            self._uncalibrated.pop(neuron_key(site, role), None)
            return solved.values_NK.to(w_NK.dtype)

        moments = Moments(site.hidden)
        moments.add(x_NH[real_N], float_NH[real_N])
        solver = Solver(site.key, moments, self._weights)
        gate = None if weights.gate is None else solve("gate", weights.gate, solver)
        rounded = weights._replace(gate=gate, up=solve("up", weights.up, solver))
        (_, h_NI), (_, float_NI) = intermediate(site, rounded, x_NH), intermediate(site, weights, float_NH)
        moments = Moments(site.intermediate)
        moments.add(h_NI[real_N], float_NI[real_N])
        down = solve("down", weights.down, Solver(f"down of {site.key}", moments, self._weights, by_column=True))
        return F.linear(h_NI.to(x_NH.dtype), down, weights.bias_down).float()

    def _solve(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        if x.numel() != 2 * len(self._real_T) * x.shape[-1] or len(x) % 2:
            why = f"sees {x.numel() // x.shape[-1] // 2} rows, which are not the {len(self._real_T)} tokens"
            self._uncalibrated |= {part.key: why for part in self._slices[name]}
            return
        w_NK: Any = module.weight if isinstance(module, nn.Linear) else module.weight.T
        values_NK = w_NK.detach().float().clone()
        for part in self._slices[name]:
            solved = self._solver(name, x, part.down).solve(w_NK[part.rows])
            values_NK[part.rows] = solved.values_NK
            self._keep(part.key, solved.rows)
        self._values[name] = values_NK

    def _solver(self, name: str, x: torch.Tensor, by_column: bool) -> Solver:
        """Layers with the same input share a solver."""
        if self._solvers[0] is not x:
            self._solvers = (x, {})
        solvers = self._solvers[1]
        if by_column not in solvers:
            float_TK, x_TK = (half.reshape(-1, x.shape[-1])[self._real_T] for half in x.chunk(2))
            self._check_same(name, float_TK, x_TK)
            moments = Moments(x.shape[-1])
            moments.add(x_TK, float_TK)
            solvers[by_column] = Solver(name, moments, self._weights, by_column=by_column)
        return solvers[by_column]

    def _check_same(self, name: str, float_TK: torch.Tensor, x_TK: torch.Tensor) -> None:
        """Raises UnsupportedModelError: the halves differ before anything is rounded, as sequences are mixed."""
        if not self._started and bool((float_TK - x_TK).float().norm() > 1e-2 * x_TK.float().norm()):
            expected, fix = "the same for the same sequence, twice in a batch", "Use quantization='rtn'."
            raise UnsupportedModelError(f"input of {name}", expected=expected, found="different ones", fix=fix)
        self._started = True


def warn_rounded(uncalibrated: Mapping[str, str]) -> None:
    """Warn which matrices :func:`calibrated_rows` left to round-to-nearest, and why."""
    for why in dict.fromkeys(uncalibrated.values()):
        keys = [key for key, reason in uncalibrated.items() if reason == why]
        more = f" and {len(keys) - 3} others" if len(keys) > 3 else ""
        log.warning("rounded to nearest, not by GPTQ: %s%s (%s)", ", ".join(keys[:3]), more, why)
