"""``FFNSite``: the description of one feed-forward layer (design D4), from which ``optimize`` and export rewrite.

A site holds *names*, never tensors, so it can be written to ``plan.json``.

Shape suffixes in the whole package: ``T`` tokens, ``H`` hidden size, ``I`` intermediate size (neurons), ``R`` rows per
neuron (3 gated: gate, up, down; 2 plain: up, down), ``C`` cold neurons, ``r`` predictor rank.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F

from torch_pi2.base.dtypes import check_finite, check_on_cpu, dtype_name
from torch_pi2.base.fields import Field, Limits, limited, optional, to_json
from torch_pi2.errors import DtypeError, ShapeError, UnsupportedModelError
from torch_pi2.formats import FLOATS
from torch_pi2.ops.activations import ACTIVATIONS, norm, on_up, second, swapped

#: Largest number of neurons, hidden states or experts: int32, as in the core.
MOST_SIZE = (1 << 31) - 1
#: Values of :attr:`FFNSite.drops`.
DROPS = ("", "inside", "owner")


def block_of(key: str) -> str:
    """The decoder block of a site: its name up to the first number (``model.layers.3`` of ``model.layers.3.mlp``)."""
    match = re.match(r".*?\.\d+(?=[.:]|$)", key)
    return match.group() if match else key


def row_of_blocks(keys: Iterable[str]) -> list[int] | None:
    """Block numbers of ``keys``; None: not ascending numbers in one list such as ``model.layers``."""
    parts = [block_of(key).rpartition(".") for key in keys]
    numbers = [int(number) if number.isdecimal() else -1 for *_, number in parts]
    one_row = len({prefix for prefix, *_ in parts}) == 1
    return numbers if one_row and numbers[0] >= 0 and numbers == sorted(numbers) else None


@dataclass(frozen=True)
class LinearRef:
    """One matmul of a site: fully-qualified parameter names, and the rows used when several are fused.

    Attributes:
        weight: name of the weight, stored ``[out, in]`` as in ``nn.Linear``. bias: name of the bias or None.
        rows: ``(start, stop)`` output rows of the weight that belong to this matmul (fused ``gate_up``), or ``(start,
            stop, step)`` (gate and up interleaved); None for all of them.
        expert: index into a weight ``[experts, out, in]``; None: the weight is a matrix.
        transposed: the weight is stored ``[in, out]`` (GPT-2's ``Conv1D``), that of an expert ``[experts, in, out]``.
    """

    weight: str
    bias: str | None = optional(None)
    rows: tuple[int, ...] | None = limited(0, MOST_SIZE, optional=True, default=None)
    expert: int | None = limited(0, MOST_SIZE, optional=True, default=None)
    transposed: bool = optional(False)

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """The view ``[out, in]`` of the parameter ``weight``, for an expert of its matrix."""
        matrix = weight if self.expert is None else weight[self.expert]
        return matrix.T if self.transposed else matrix

    def take(self, weight: torch.Tensor) -> torch.Tensor:
        """The view ``[out, in]`` of this matmul's part of ``weight``."""
        return self._own(self.matrix(weight))

    def take_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """The view ``[out]`` of this matmul's part of ``bias``."""
        return self._own(bias if self.expert is None else bias[self.expert])

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.rows is None else tensor[slice(*self.rows)]


class FFNWeights(NamedTuple):
    """Views (no copies) of a site's tensors: ``gate`` and ``up`` are ``[I, H]``, ``down`` is ``[H, I]``."""

    gate: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor
    bias_gate: torch.Tensor | None
    bias_up: torch.Tensor | None
    bias_down: torch.Tensor | None


@dataclass(frozen=True)
class FFNSite:
    """One feed-forward layer ``down(act(gate(x)) * up(x))`` or ``down(act(up(x)))``.

    With ``rms`` in the activation an RMSNorm stands before ``down``; ``up.bias`` names its weights.

    Attributes:
        key: unique name, the fully-qualified name of ``owner`` (with ``:n`` appended if it owns several).
        layer: 0-based index in order of execution.
        activation: a name in :data:`torch_pi2.ops.ACTIVATIONS`. activation_on_up: applied to up as well (dReLU).
        gate: the gate matmul, None for a plain FFN; where :attr:`up_first`, the model's up. up, down: the other two.
        hidden, intermediate: H and I.
        owner: fully-qualified name of the deepest module that contains all of the site's parameters; for an expert in
            stacked parameters, that name and the expert's number. owner_class: its class name, for messages.
        inner: modules that alone compute everything between the projections (OPT's ``activation_fn``), in order of
            execution, so that they can be replaced one by one; empty where the owner's code computes some of it.
        owner_runs: the owner's own forward computes the FFN. False where outside code calls the owner's parts
            (``self.mlp.down(act(self.mlp.up(x)))``), so that replacing the owner would not work.
        drops: location of behaviour specific to training mode (dropout): ``inside``, between the projections;
            ``owner``, elsewhere in the owner; or empty.
    """

    key: str
    layer: int
    activation: Annotated[str, Limits(choices=ACTIVATIONS)]
    activation_on_up: bool
    gate: LinearRef | None
    up: LinearRef
    down: LinearRef
    hidden: Annotated[int, Limits(1, MOST_SIZE)]
    intermediate: Annotated[int, Limits(1, MOST_SIZE)]
    owner: str
    owner_class: str = limited(optional=True, default="", compare=False)
    inner: tuple[str, ...] = limited(optional=True, default=(), compare=False)
    owner_runs: bool = limited(optional=True, default=True, compare=False)
    drops: str = limited(choices=DROPS, optional=True, default="", compare=False)

    @property
    def gated(self) -> bool:
        return self.gate is not None

    @property
    def refs(self) -> dict[str, LinearRef]:
        """Matmuls by role: gate, if present, up and down."""
        gate = {} if self.gate is None else {"gate": self.gate}
        return gate | {"up": self.up, "down": self.down}

    @property
    def parameter_names(self) -> list[str]:
        return [name for ref in self.refs.values() for name in (ref.weight, ref.bias) if name is not None]

    @property
    def experts(self) -> str | None:
        """Name of the module that holds this expert among others; None for other layers."""
        return None if self.up.expert is None else self.up.weight.rpartition(".")[0]

    @property
    def form(self) -> str:
        """The formula between the matmuls, such as ``silu(gate)*up``, in the model's names."""
        if not self.gated:
            return f"{self.activation}(up)"
        if self.up_first:
            return f"up*{swapped(self.activation)}(gate)"
        return f"{self.activation}(gate)*{f'{self.activation}(up)' if self.activation_on_up else 'up'}"

    @property
    def up_first(self) -> bool:
        """Whether up is computed first, and decides for each neuron whether gate and down are computed."""
        return second(self.activation)

    def swapped(self) -> "FFNSite":
        """The same layer with gate and up exchanged. The activation must not need all gates at once."""
        assert self.gate is not None
        return replace(self, gate=self.up, up=self.gate, activation=swapped(self.activation))

    @property
    def rows_per_neuron(self) -> int:
        """R: matrix rows per neuron."""
        return 3 if self.gated else 2

    def weights(self, model: Any) -> FFNWeights:
        """The site's tensors as views into ``model``'s parameters."""

        def take(ref: LinearRef | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            if ref is None:
                return None, None
            try:
                weight = ref.take(model.get_parameter(ref.weight).detach())
                bias = ref.take_bias(model.get_parameter(ref.bias).detach()) if ref.bias else None
            except AttributeError as error:
                what = f"weights of {self.key or 'the FFN'} ({self.owner_class})"
                found = "none: another layer that shares its module was made sparse"
                fix = "Give each layer linear modules of its own; they may share parameters."
                raise UnsupportedModelError(what, expected=f"a parameter {ref.weight}", found=found, fix=fix) from error
            return weight, bias

        gate, bias_gate = take(self.gate)
        up, bias_up = take(self.up)
        down, bias_down = take(self.down)
        assert up is not None
        assert down is not None
        return FFNWeights(gate, up, down, bias_gate, bias_up, bias_down)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = to_json(self)
        for role in self.refs:
            if not data[role]["transposed"]:
                del data[role]["transposed"]  # as in files written before there was such a field
        return data

    @staticmethod
    def from_json(data: Any, where: str = "site") -> "FFNSite":
        """Inverse of :meth:`to_json`. Raises ArtifactError, naming ``where``, for invalid data."""
        site = Field(data, where, "Make the plan again.")
        made: FFNSite = site.take(FFNSite)
        for name, ref in made.refs.items():
            site.at(name).at("weight").text()  # not empty
            if ref.bias is not None:
                site.at(name).at("bias").text()
            rows = (0, 1) if ref.rows is None else ref.rows
            if len(rows) not in (2, 3) or rows[0] >= rows[1] or 0 in rows[2:]:
                expected = "the first of some rows and the one after the last, and the step between them if it is not 1"
                site.at(name).at("rows").wrong(expected)
        if made.up_first and (not made.gated or made.activation_on_up or made.experts is not None):
            site.at("activation").wrong("one of the second of two matrices only where the first has none, in no expert")
        return made


def check_weights(site: FFNSite, weights: FFNWeights) -> None:
    """Refuse weights that kernels do not support. Raises DeviceError: not on the CPU. NonFiniteError: NaN or infinity,
    with the parameter's name. DtypeError: mixed dtypes, or one that is not float32, bfloat16 or float16. ShapeError:
    they are not of the site's sizes.
    """
    named = {k: v for k, v in weights._asdict().items() if v is not None}
    i_h, h_i = [site.intermediate, site.hidden], [site.hidden, site.intermediate]
    for name, size in (("gate", i_h), ("up", i_h), ("down", h_i)):
        if name in named and (found := list(named[name].shape)) != size:
            fix = "Correct the site: its sizes, and rows and transposed of its matmuls."
            raise ShapeError(f"{name} of {site.key}", expected=str(size), found=str(found), fix=fix)
    for name, tensor in named.items():
        check_on_cpu(f"device of {site.key} {name}", tensor.device)
    dtypes = {dtype_name(v.dtype) for v in named.values()}
    if len(dtypes) != 1 or not dtypes <= {*FLOATS}:
        fix = "Convert the model with model.to(torch.bfloat16) (or float32) first."
        expected = f"one of {', '.join(FLOATS)} for all its weights and biases"
        Field(dtypes, f"dtypes of {site.key}", fix, DtypeError).wrong(expected, ", ".join(sorted(dtypes)))
    for name, tensor in named.items():
        check_finite(f"{site.key} {name}", tensor)


@dataclass(frozen=True)
class ExpertsForm:
    """A module of experts: their number E, I neurons each, H; ``activation`` and ``on_up`` as in an ``FFNSite``.
    ``gated``: gates are in one parameter with up, first or ``interleaved`` by rows. ``transposed``: matrices are stored
    ``[in, out]``. ``biases``: all matrices have them.
    """

    experts: int
    intermediate: int
    hidden: int
    activation: str
    on_up: bool
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    biases: bool = False


@dataclass(frozen=True)
class Formula:
    """The function between the projections of an FFN: ``activation``, on both streams if ``on_up`` (dReLU). ``gate``:
    index of the gate stream, None for a plain FFN; ``up``: index of the other.
    """

    activation: str
    on_up: bool
    gate: int | None
    up: int


def apply_formula(formula: Formula, streams: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result ``[T, I]`` of the formula on streams ``[T, I]``."""
    act = ACTIVATIONS[formula.activation]
    up = streams[formula.up]
    if formula.gate is None:
        return act(up)
    return act(streams[formula.gate]) * on_up(formula.activation, formula.on_up)(up)


def dense_reference(site: FFNSite, weights: FFNWeights, x: torch.Tensor) -> torch.Tensor:
    """The original layer on ``x [..., H]``, in the dtype of its weights."""

    eps = norm(site.activation)
    up = F.linear(x, weights.up, None if eps else weights.bias_up)
    streams = [up] if weights.gate is None else [F.linear(x, weights.gate, weights.bias_gate), up]
    formula = Formula(site.activation, site.activation_on_up, 0 if site.gated else None, len(streams) - 1)
    h = apply_formula(formula, streams)
    h = F.rms_norm(h, (site.intermediate,), weights.bias_up, eps) if eps else h
    return F.linear(h, weights.down, weights.bias_down)


def products(weights: FFNWeights, x_TH: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the gate and up matmuls of an expert make ``[T, I]``, by role, in the dtype of its weights."""
    up = {"up": F.linear(x_TH, weights.up, weights.bias_up)}
    return up if weights.gate is None else {"gate": F.linear(x_TH, weights.gate, weights.bias_gate)} | up


def first_products(site: FFNSite, weights: FFNWeights, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gate ``[T, I]`` float32 of an expert (up, if it has none), and up if the activation is applied to it as well."""
    if weights.gate is None:
        return F.linear(x_TH, weights.up, weights.bias_up).float(), None
    gate_TI = F.linear(x_TH, weights.gate, weights.bias_gate).float()
    return gate_TI, F.linear(x_TH, weights.up, weights.bias_up).float() if site.activation_on_up else None


def fired_scores(site: FFNSite, weights: FFNWeights, x_TH: torch.Tensor) -> torch.Tensor:
    """``[T, I]`` float32 magnitudes that decide whether a neuron fires, as for other layers."""
    gate_TI, up_TI = first_products(site, weights, x_TH)
    act = ACTIVATIONS[site.activation]
    score_TI = act(gate_TI)
    return (score_TI if up_TI is None else score_TI * act(up_TI)).abs()


def intermediate(site: FFNSite, weights: FFNWeights, x_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert's gate as in :func:`first_products`, and the input of its down matrix: ``[N, I]`` float32."""
    gate_NI, up_NI = first_products(site, weights, x_NH)
    h_NI = ACTIVATIONS[site.activation](gate_NI)
    if site.gated:
        up_NI = F.linear(x_NH, weights.up, weights.bias_up).float() if up_NI is None else up_NI
        h_NI = h_NI * on_up(site.activation, site.activation_on_up)(up_NI)
    return gate_NI, h_NI
