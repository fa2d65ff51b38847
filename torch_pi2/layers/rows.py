"""Rows of neurons, float or quantised: made from a layer's matrices, and turned back into them (``DenseForm``)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_pi2.base.lookups import Lookups
from torch_pi2.base.memory import new_tensor
from torch_pi2.base.progress import log_once
from torch_pi2.errors import ConfigError
from torch_pi2.formats import row_bytes
from torch_pi2.ops.predictors import NO_PREDICTOR
from torch_pi2.ops.quantized import RelativeError, quantize
from torch_pi2.ops.rows import row_of_neurons
from torch_pi2.types.method import LOSSY
from torch_pi2.types.site import FFNSite, FFNWeights

#: Size in float32 of the rows quantised at a time.
_CHUNK_BYTES = 32 << 20


def make_rows(weights: FFNWeights, order: torch.Tensor) -> torch.Tensor:
    """``[I, R, H]`` contiguous: gate row, up row and down column of each neuron, in ``order`` (``[I]`` int64)."""
    rows = [w for w in (weights.gate, weights.up, weights.down.T) if w is not None]
    rows_IRH = new_tensor((len(order), len(rows), weights.up.shape[1]), weights.up.dtype)
    for r, row_IH in enumerate(rows):  # one matrix at a time keeps the peak at one copy
        rows_IRH[:, r] = row_IH.detach()[order]
    return rows_IRH


def make_quantized_rows(
    site: FFNSite,
    weights: FFNWeights,
    order: torch.Tensor,
    kind: str,
    given: Mapping[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, float]:
    """As :func:`make_rows`, quantised to ``int4`` or ``int8``: uint8 ``[I, R, row_bytes(H)]``; and the relative error
    of all weights. ``given``: role -> rows ``[I, row_bytes(H)]`` in the model's order, used as they are.
    """
    refs = [("gate", weights.gate, site.gate), ("up", weights.up, site.up), ("down", weights.down.T, site.down)]
    rows = [(role, w, ref) for role, w, ref in refs if w is not None and ref is not None]
    hidden = weights.up.shape[1]
    neuron_rows = new_tensor((len(order), len(rows), row_bytes(kind, hidden)), torch.uint8)
    step = max(1, _CHUNK_BYTES // (4 * hidden))
    error = RelativeError()
    for r, (role, w_IH, ref) in enumerate(rows):
        for start in range(0, len(order), step):
            part = w_IH.detach()[order[start : start + step]].contiguous()
            if given is not None and role in given:
                quantised = given[role][order[start : start + step]]
            else:
                quantised = quantize(f"{ref.weight} of {site.key}", part, kind)
            neuron_rows[start : start + step, r] = quantised
            error.add(part, torch.ops.pi2.dequantize(quantised, kind, hidden, torch.float32))
    return neuron_rows, error.relative


def row_of_each(neuron_rows: torch.Tensor, row: int, kind: str, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Row ``row`` of every neuron as ``[I, H]`` in ``dtype``: a view if stored so, else a copy."""
    if kind == "float":
        return neuron_rows[:, row].to(dtype)
    rows, of = row_of_neurons(neuron_rows, row, kind, hidden)
    return torch.ops.pi2.dequantize(rows, of, hidden, dtype)


def permuted(bias: torch.Tensor | None, order: torch.Tensor) -> torch.Tensor | None:
    return None if bias is None else bias.detach()[order]


def convert(
    module: nn.Module,
    fn: Callable[..., torch.Tensor],
    recurse: bool,
    names: Sequence[str] = (),
    apply: Callable[..., nn.Module] = nn.Module._apply,
) -> None:
    """``apply`` without a change of dtype to the buffers ``names`` and to integers (``model.type`` casts them)."""
    buffers = module._buffers
    exact = {n: t for n, t in buffers.items() if t is not None and (n in names or not t.is_floating_point())}
    apply(module, fn, recurse)
    for name, tensor in exact.items():
        moved = buffers[name]
        # not moved.float(): the cast may have underflowed or overflowed
        if moved is not None and moved.dtype != tensor.dtype:
            buffers[name] = tensor.to(moved.device)


class SparseModule(nn.Module):
    """What a sparse layer and a module of sparse experts have in common."""

    is_sparse_layer = True
    #: Whether all neurons are in memory.
    in_memory = True
    #: The part on a GPU, if there is one.
    split: Any = None
    #: What the code that it replaces looks up; None: it still runs.
    lookups: Lookups | None = None
    site: FFNSite
    method: str
    weights: str
    neuron_rows: torch.Tensor
    order: torch.Tensor
    _dtype: torch.dtype
    dense_value: Callable[[str], torch.Tensor]
    assign: Callable[[str, torch.Tensor], bool]
    shape_of: Callable[[str], torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the float parameters; if quantised, of those that were replaced."""
        return self.neuron_rows.dtype if self.weights == "float" else self._dtype

    def dense_values(self) -> dict[str, torch.Tensor]:
        return {name: self.dense_value(name) for name in dict.fromkeys(self.site.parameter_names)}

    def load_value(self, name: str, value: torch.Tensor) -> None:
        """``assign``, also to neurons on a GPU, with a warning if a lossy plan was made from other weights."""
        if not self.assign(name, value):
            return
        if self.split is not None:
            self.split.refresh(self)
        if self.method in LOSSY:
            what = f"{self.site.key} got other weights, but keeps a {self.method} plan made from the old ones"
            log_once(f"{what}: optimise the model again")

    def end_split(self) -> None:
        """Compute everything on the CPU again."""
        self.split = None


class DenseForm(SparseModule):
    """The weights of a sparse layer under the names and in the shapes of the dense model. ``neuron_rows [I, R, H]``, in
    the format ``weights``, and ``bias_gate``, ``bias_up [I]`` in plan order (``order``; ``inverse``); ``bias_down
    [H]``.
    """

    inverse: torch.Tensor
    bias_gate: torch.Tensor | None
    bias_up: torch.Tensor | None
    bias_down: torch.Tensor | None
    in_row_order: Callable[[], torch.Tensor]
    # How it is computed, which prompts read (layers/prompt.py and layers/choices.py, below the layer).
    int8_activations: bool
    has_tiles: bool
    n_hot: int
    expected_share: float
    threshold: float
    thresholds: torch.Tensor | None
    by_batch: tuple[tuple[int, int], ...] = ()
    dense_from: int | None = None
    #: The ``SparseMethod`` that is asked for a mask, or None.
    custom: Any = None
    #: The operators' name of the predictor.
    predictor_kind: str
    bias_out: Callable[[bool], torch.Tensor | None]
    tensors: Callable[[], tuple[torch.Tensor | None, ...]]
    settings: Callable[[int, float], tuple[Any, ...]]

    @property
    def has_predictor(self) -> bool:
        """Whether cold neurons are predicted; false for every method if all neurons are hot."""
        return self.predictor_kind != NO_PREDICTOR

    def projection(self, role: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of ``gate``, ``up`` (``[I, H]``) or ``down`` (``[H, I]``) in original neuron order."""
        rows = self.site.rows_per_neuron
        row = {"gate": 0, "up": rows - 2, "down": rows - 1}[role]
        w_IH = row_of_each(self.in_row_order(), row, self.weights, self.site.hidden, self.dtype)
        w_IH = w_IH.index_select(0, self.inverse)
        if role == "down":
            return w_IH.T.contiguous(), None if self.bias_down is None else self.bias_down.to(self.dtype)
        bias = permuted(self.bias_gate if role == "gate" else self.bias_up, self.inverse)
        return w_IH, None if bias is None else bias.to(self.dtype)

    def dense_value(self, name: str) -> torch.Tensor:
        """A copy of the site's parameter ``name``, bit for bit; dequantised if the layer is quantised."""
        value: torch.Tensor | None = None
        for role, ref in self.site.refs.items():
            if name in (ref.weight, ref.bias):
                weight, bias = self.projection(role)
                own = replace(ref, expert=None)  # this layer is one expert
                part, take = (weight, own.take) if name == ref.weight else (bias, own.take_bias)
                assert part is not None
                if value is None:
                    value = torch.empty_like(self.shape_of(name), device=part.device)
                take(value).copy_(part)
        assert value is not None
        return value

    def assign(self, name: str, value: torch.Tensor) -> bool:
        """Write parameter ``name``, in its original shape, into the neurons; returns whether it changed any."""
        self.check_float(f"other weights for {self.site.key}")
        changed = False
        for role, ref in self.site.refs.items():
            if name not in (ref.weight, ref.bias):
                continue
            own = replace(ref, expert=None)
            new = own.take_bias(value) if name == ref.bias else own.take(value)
            if name == ref.bias:
                target = {"gate": self.bias_gate, "up": self.bias_up, "down": self.bias_down}[role]
                new = new if role == "down" else new[self.order]
            elif role == "down":
                target, new = self.neuron_rows[:, -1], new.T[self.order]
            else:
                target = self.neuron_rows[:, 0 if role == "gate" else self.neuron_rows.shape[1] - 2]
                new = new[self.order]
            assert target is not None
            new = new.to(target.dtype)
            if not torch.equal(target, new):
                changed = True
                with torch.no_grad():
                    target.copy_(new)
        return changed

    def shape_of(self, name: str) -> torch.Tensor:
        """A ``meta`` tensor with the shape and dtype of parameter ``name``."""
        parts = [(ref, role) for role, ref in self.site.refs.items() if name in (ref.weight, ref.bias)]
        ref, role = parts[0]
        firsts = sum(of != "down" for _, of in parts)  # tied weights include the down matrix
        rows = self.site.intermediate * firsts or self.site.hidden
        columns = self.site.intermediate if role == "down" else self.site.hidden
        matrix = (columns, rows) if ref.transposed else (rows, columns)
        return torch.empty(matrix if name == ref.weight else (rows,), dtype=self.dtype, device="meta")

    def check_float(self, what: str) -> None:
        """Raises ConfigError if the layer is quantised; ``what``: the request, for the message."""
        if self.weights != "float":
            found = f"{self.weights}, which is lossy: the original numbers are gone"
            fix = "Load the checkpoint again (from_pretrained, or torch_pi2.load) instead."
            raise ConfigError(what, expected="a layer with float weights", found=found, fix=fix)
