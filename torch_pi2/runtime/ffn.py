"""``SparseFFN``: one feed-forward layer over neuron bundles, hot neurons first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from torch_pi2.errors import ConfigError, DtypeError, GradientError, ShapeError
from torch_pi2.graph.sites import FFNSite, FFNWeights, LinearRef, check_weights
from torch_pi2.ops import load
from torch_pi2.plan.plan import METHODS, LayerPlan
from torch_pi2.runtime.standin import StandIn

#: Tensors of a low-rank predictor, in the order in which ``torch.ops.pi2.predict_lowrank`` takes them.
PREDICTOR_TENSORS = ("a", "a_scale", "b", "b_scale", "bias")


class SparseFFN(StandIn):
    """Computes an FFN as its plan says: ``[..., H] -> [..., H]``.

    Args:
        site: the FFN.
        weights: its tensors; copied into bundles, not kept.
        layer_plan: neuron order, number of hot neurons and method.
        lowrank: for method ``lowrank`` the predictor in *original* neuron order: ``a [r, H]`` int8, ``a_scale
            [r]``, ``b [I, r]`` int8, ``b_scale [I]`` and, if it has one, ``bias [I]`` float32.
        threshold: for method ``lowrank``, cut on the predictor's logit.

    Raises:
        DeviceError, DtypeError, NonFiniteError: weights that the kernels cannot use.
        ShapeError: weights, order or predictor do not fit the site.
        ConfigError: unknown method, hot neurons out of range, or a predictor is missing.

    Buffers (none of them in ``state_dict``): ``bundles [I, R, H]`` contiguous in plan order, ``bias_gate``,
    ``bias_up [I]`` in plan order, ``bias_down [H]``, and the predictor's rows of cold neurons in plan order.
    """

    bundles: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor
    bias_gate: torch.Tensor | None
    bias_up: torch.Tensor | None
    bias_down: torch.Tensor | None
    predictor_a: torch.Tensor | None

    def __init__(
        self,
        site: FFNSite,
        weights: FFNWeights,
        layer_plan: LayerPlan,
        lowrank: Mapping[str, torch.Tensor] | None = None,
        threshold: float = 0.0,
    ) -> None:
        super().__init__()
        load()
        check_weights(site, weights)
        _check_plan(site, weights, layer_plan)
        self.site = site
        self.method = layer_plan.method
        # A dense layer is one whose neurons are all hot.
        self.n_hot = site.intermediate if self.method == "dense" else layer_plan.n_hot
        self.threshold = layer_plan.threshold if self.method == "threshold" else 0.0
        self.predictor_threshold = threshold
        order = layer_plan.order.to(torch.int64)
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("inverse", torch.argsort(order), persistent=False)
        self.register_buffer("bundles", make_bundles(weights, order), persistent=False)
        self.register_buffer("bias_gate", _permuted(weights.bias_gate, order), persistent=False)
        self.register_buffer("bias_up", _permuted(weights.bias_up, order), persistent=False)
        bias_down = None if weights.bias_down is None else weights.bias_down.detach().clone()
        self.register_buffer("bias_down", bias_down, persistent=False)
        for name, tensor in self._cold_predictor(lowrank).items():
            self.register_buffer(f"predictor_{name}", tensor, persistent=False)

    def _cold_predictor(self, lowrank: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor | None]:
        if self.method != "lowrank" or self.n_hot == self.site.intermediate:
            return dict.fromkeys(PREDICTOR_TENSORS)
        site = self.site
        missing = [name for name in PREDICTOR_TENSORS[:4] if lowrank is None or name not in lowrank]
        if lowrank is None or missing:
            raise ConfigError(
                f"predictor of {site.key}",
                expected=f"tensors {', '.join(PREDICTOR_TENSORS[:4])} (and bias), as its plan says 'lowrank'",
                found="none" if lowrank is None else f"no {', '.join(missing)}",
                fix="Fit predictors (torch_pi2.fit) and pass them, or plan without them.",
            )
        rank = lowrank["a"].shape[0]
        wanted = {
            "a": ((rank, site.hidden), torch.int8),
            "a_scale": ((rank,), torch.float32),
            "b": ((site.intermediate, rank), torch.int8),
            "b_scale": ((site.intermediate,), torch.float32),
            "bias": ((site.intermediate,), torch.float32),
        }
        cold = self.order[self.n_hot :]
        tensors: dict[str, torch.Tensor | None] = {}
        for name, (shape, dtype) in wanted.items():
            tensor = lowrank.get(name)
            if tensor is not None:
                _check_shape(f"predictor {name} of {site.key}", tensor, shape)
                if tensor.dtype != dtype:
                    raise DtypeError(
                        f"predictor {name} of {site.key}",
                        expected=str(dtype),
                        found=str(tensor.dtype),
                        fix="Use a predictor made by torch_pi2.fit.",
                    )
                tensor = (tensor[cold] if name.startswith("b") else tensor.clone()).contiguous()
            tensors[name] = tensor
        return tensors

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``x [..., H]`` in float32, bfloat16 or float16; the result has its shape and dtype.

        ``x`` may be given by the name that the forward of the original module has for it. Under
        ``torch.autocast`` the result has its dtype, as that of a linear layer; the computation has ``x``'s.

        Raises:
            ShapeError: the last dimension is not H. GradientError: a gradient would be needed.
            ConfigError: other arguments.
        """
        x = self.only_input(args, kwargs)
        self.check_input(x)
        active = None
        if self.has_predictor:
            active = torch.ops.pi2.predict_lowrank(x, *self.predictor(), self.predictor_threshold)
        return self._compute(x, active, self.n_hot, self.threshold).to(result_dtype(x))

    @property
    def has_predictor(self) -> bool:
        """Whether cold neurons are predicted (false for ``lowrank`` too if every neuron is hot)."""
        return self.predictor_a is not None

    def predictor(self) -> tuple[torch.Tensor | None, ...]:
        """The predictor's tensors for cold neurons in plan order, as ``predict_lowrank`` takes them."""
        return tuple(getattr(self, f"predictor_{name}") for name in PREDICTOR_TENSORS)

    def forward_dense(self, x: torch.Tensor) -> torch.Tensor:
        """The same FFN with every neuron computed, from the same bundles."""
        return self._compute(x, None, self.site.intermediate, 0.0)

    def _compute(self, x: torch.Tensor, active: torch.Tensor | None, n_hot: int, threshold: float) -> torch.Tensor:
        y: torch.Tensor = torch.ops.pi2.sparse_ffn(
            x,
            self.bundles,
            self.bias_gate,
            self.bias_up,
            self.bias_down,
            active,
            self.site.activation,
            self.site.activation_on_up,
            n_hot,
            threshold,
        )
        return y

    def check_input(self, x: torch.Tensor) -> None:
        """Raise on a wrong hidden size, or where the dense layer would have recorded a gradient."""
        if x.shape[-1] != self.site.hidden:
            raise ShapeError(
                f"hidden size of the input of {self.site.key}",
                expected=str(self.site.hidden),
                found=f"{x.shape[-1]} (shape {tuple(x.shape)})",
                fix="Pass activations of the model that this layer was made from.",
            )
        if torch.is_grad_enabled() and (x.requires_grad or self.training):
            raise GradientError(
                f"gradients through {self.site.key}",
                expected="inference, without gradients",
                found="an input that requires grad" if x.requires_grad else "a model in training mode",
                fix="Call it under torch.no_grad() after model.eval(), or torch_pi2.restore(model) to train.",
            )

    # --- the dense parameters, reconstructed from the bundles and written back into them ---

    def _parts(self) -> list[tuple[LinearRef, str]]:
        """The site's matmuls with their place in the bundles, gate before up."""
        gate = [] if self.site.gate is None else [(self.site.gate, "gate")]
        return [*gate, (self.site.up, "up"), (self.site.down, "down")]

    def projection(self, role: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of ``gate``, ``up`` (``[I, H]``) or ``down`` (``[H, I]``) in original neuron order."""
        if role == "down":
            return self.bundles[:, -1].index_select(0, self.inverse).T.contiguous(), self.bias_down
        row, bias = (0, self.bias_gate) if role == "gate" else (self.bundles.shape[1] - 2, self.bias_up)
        return self.bundles[:, row].index_select(0, self.inverse), _permuted(bias, self.inverse)

    def dense_values(self) -> dict[str, torch.Tensor]:
        """Copies of the site's parameters by fully-qualified name, bit-identical to the originals."""
        parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for ref, role in self._parts():
            weight, bias = self.projection(role)
            start = ref.rows[0] if ref.rows else 0
            parts.setdefault(ref.weight, []).append((start, weight))
            if ref.bias is not None and bias is not None:
                parts.setdefault(ref.bias, []).append((start, bias))
        values = {}
        for name, pieces in parts.items():
            tensors = [tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0])]
            values[name] = tensors[0].clone() if len(tensors) == 1 else torch.cat(tensors)
        return values

    def assign(self, name: str, value: torch.Tensor) -> bool:
        """Write parameter ``name`` of the site, in its original shape, into the bundles; whether it was new."""
        changed = False
        for ref, role in self._parts():
            if name not in (ref.weight, ref.bias):
                continue
            new = value if ref.rows is None else value[ref.rows[0] : ref.rows[1]]
            target: torch.Tensor | None
            if name == ref.bias:
                target = {"gate": self.bias_gate, "up": self.bias_up, "down": self.bias_down}[role]
                new = new if role == "down" else new[self.order]
            elif role == "down":
                target, new = self.bundles[:, -1], new.T[self.order]
            else:
                target = self.bundles[:, 0 if role == "gate" else self.bundles.shape[1] - 2]
                new = new[self.order]
            assert target is not None
            new = new.to(target.dtype)
            if not torch.equal(target, new):
                changed = True
                with torch.no_grad():
                    target.copy_(new)
        return changed

    def shape_of(self, name: str) -> torch.Tensor:
        """A ``meta`` tensor with shape and dtype of parameter ``name``."""
        parts = [(ref, role) for ref, role in self._parts() if name in (ref.weight, ref.bias)]
        down = parts[0][1] == "down"
        rows = self.site.hidden if down else self.site.intermediate * len(parts)
        columns = self.site.intermediate if down else self.site.hidden
        shape = (rows, columns) if name == parts[0][0].weight else (rows,)
        return torch.empty(shape, dtype=self.bundles.dtype, device="meta")

    def _apply(self, fn: Any, recurse: bool = True) -> SparseFFN:
        """``model.to(dtype)`` converts the bundles; scales and biases of the predictor stay float32."""
        names = [f"predictor_{name}" for name in ("a_scale", "b_scale", "bias")]
        exact = {name: tensor for name in names if (tensor := self._buffers[name]) is not None}
        super()._apply(fn, recurse)
        for name, tensor in exact.items():
            moved = self._buffers[name]
            # not moved.float(): a scale of 1e-9 has become 0 in float16, a bias of 1e30 infinity
            if moved is not None and moved.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(moved.device)
        return self

    def extra_repr(self) -> str:
        s = self.site
        form = (
            f"{s.activation}(gate) * {f'{s.activation}(up)' if s.activation_on_up else 'up'}"
            if s.gated
            else f"{s.activation}(up)"
        )
        return f"{s.hidden} -> {s.intermediate} -> {s.hidden}, {form}, {self.method}, {self.n_hot} hot"


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype of a linear layer's result on ``x``: that of ``torch.autocast`` where it is on."""
    kind = x.device.type
    if x.dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def make_bundles(weights: FFNWeights, order: torch.Tensor) -> torch.Tensor:
    """``[I, R, H]`` contiguous: gate row, up row and down column of each neuron, in ``order`` (``[I]`` int64)."""
    rows = [w for w in (weights.gate, weights.up, weights.down.T) if w is not None]
    bundles_IRH = torch.empty((len(order), len(rows), weights.up.shape[1]), dtype=weights.up.dtype)
    load()
    torch.ops.pi2.advise_huge_pages(bundles_IRH)
    for r, row_IH in enumerate(rows):  # one matrix at a time keeps the peak at one copy
        bundles_IRH[:, r] = row_IH.detach()[order]
    return bundles_IRH


def dense_reference(site: FFNSite, weights: FFNWeights, x: torch.Tensor) -> torch.Tensor:
    """What the original layer computes on ``x [..., H]``, in the dtype of its weights."""
    from torch_pi2.graph.activation import Formula, apply_formula

    up = F.linear(x, weights.up, weights.bias_up)
    streams = [up] if weights.gate is None else [F.linear(x, weights.gate, weights.bias_gate), up]
    formula = Formula(site.activation, site.activation_on_up, 0 if site.gated else None, len(streams) - 1)
    return F.linear(apply_formula(formula, streams), weights.down, weights.bias_down)


def _permuted(bias: torch.Tensor | None, order: torch.Tensor) -> torch.Tensor | None:
    return None if bias is None else bias.detach()[order]


def _check_shape(what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(
            what, expected=str(shape), found=str(tuple(tensor.shape)), fix="It was made for another layer."
        )


def _check_plan(site: FFNSite, weights: FFNWeights, layer_plan: LayerPlan) -> None:
    hidden, intermediate = site.hidden, site.intermediate
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("gate", "up"), (intermediate, hidden))
    shapes["down"] = (hidden, intermediate)
    shapes |= {"bias_gate": (intermediate,), "bias_up": (intermediate,), "bias_down": (hidden,)}
    for name, tensor in weights._asdict().items():
        if tensor is not None:
            _check_shape(f"{name} of {site.key}", tensor, shapes[name])
    _check_shape(f"neuron order of {site.key}", layer_plan.order, (intermediate,))
    if layer_plan.method not in METHODS:
        raise ConfigError(
            f"method of {site.key}",
            expected=f"one of {', '.join(METHODS)}",
            found=repr(layer_plan.method),
            fix="Correct the plan.",
        )
    seen = torch.zeros(intermediate, dtype=torch.bool)
    inside = (layer_plan.order >= 0) & (layer_plan.order < intermediate)
    seen[layer_plan.order[inside].long()] = True
    if not (0 <= layer_plan.n_hot <= intermediate and bool(seen.all())):
        raise ConfigError(
            f"plan of {site.key}",
            expected=f"an order of all {intermediate} neurons and 0 to {intermediate} hot ones",
            found=f"{int(seen.sum())} different neurons and {layer_plan.n_hot} hot ones",
            fix="Make the plan again.",
        )
