"""``Plan``: which neurons are hot, in what order they lie, and how cold ones are chosen (plan.json).

A plan is small and readable; the neuron orders go beside it in ``plan.safetensors``. Both carry the hash of
the weights they were made from, so a plan for another model is an error and never a wrong answer.

``HardwarePlan``, a part of it, is how the planned model runs on one machine, by the number of sequences that are
decoded together. PowerInfer-2's offline planner (arXiv 2406.06282, section 5) makes a *neuron plan*, which neurons are
hot, and a *hardware plan*: threads, cache sizes, I/O patterns, and a graph for each batch size. The second has the part
of the first that depends on the batch, too. docs/PLAN.md has the format.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import Field, Limits, from_json, limited, to_json
from torch_pi2.base.files import atomic_folder_files, parse_json, read_text
from torch_pi2.base.memory import let_go
from torch_pi2.base.tensorfile import read_tensors
from torch_pi2.errors import ArtifactError, ConfigError, StaleArtifactError
from torch_pi2.types.method import METHODS, PREDICTED
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.site import FFNSite

#: 1 had no ``hardware`` part and is read, too. Plans in which neurons have thresholds of their own are of 3.
PLAN_VERSION, _WITH_THRESHOLDS = 2, 3
_VERSIONS = (1, _WITH_THRESHOLDS, PLAN_VERSION)

_FIX = "Make the plan again."


@dataclass
class LayerPlan:
    """The plan of one FFN.

    Attributes:
        site: the FFN.
        method: the text of a :class:`~torch_pi2.types.method.Method`.
        n_hot: the first ``n_hot`` neurons of ``order`` are computed densely.
        order: ``[I]`` int32, plan position -> original neuron (most frequent first).
        threshold: cut on the score for ``threshold`` (0 otherwise).
        expected_active: mean share of cold neurons computed per token, measured on calibration data.
        thresholds: ``[I]`` float32 in *original* order, where the score is more than ``|act(gate)|``: what it comes to
            for each neuron's ``|act(gate)|``. None: ``threshold`` for all.
    """

    site: FFNSite
    method: str
    n_hot: int
    order: torch.Tensor
    threshold: float = 0.0
    expected_active: float = 1.0
    thresholds: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.method = str(self.method)

    @property
    def n_cold(self) -> int:
        return self.site.intermediate - self.n_hot


@dataclass
class Plan:
    """A plan for a whole model; ``layers`` in order of execution.

    Attributes:
        hardware: how it runs on one machine, by batch size; None: ``n_hot`` whatever the batch.
    """

    layers: list[LayerPlan]
    model_hash: str
    made_by: dict[str, Any] = field(default_factory=dict)
    hardware: HardwarePlan | None = None
    _bound: dict[str, weakref.ref[torch.Tensor]] | None = field(default=None, init=False, repr=False, compare=False)
    _model: weakref.ref[nn.Module] | None = field(default=None, init=False, repr=False, compare=False)

    def bind(self, model: nn.Module) -> Plan:
        """Remember (weakly) the parameters of ``model`` that the sites name; returns the plan itself.

        Raises:
            StaleArtifactError: ``model``'s FFN weights are not the plan's.
        """
        self.check_model(model)
        refs = [r for y in self.layers for r in (y.site.gate, y.site.up, y.site.down) if r is not None]
        names = dict.fromkeys(n for r in refs for n in (r.weight, r.bias) if n)
        self._bound = {name: weakref.ref(model.get_parameter(name)) for name in names}
        self._model = weakref.ref(model)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_bound": None,
            "_model": None,
        }  # weak references cannot be pickled, and would be another process's

    def parameters(self) -> dict[str, torch.Tensor]:
        """Name -> parameter of the bound model. Raises ConfigError if there is none, or it is gone."""
        found = {name: ref() for name, ref in (self._bound or {}).items()}
        alive = {name: p for name, p in found.items() if p is not None}
        if self._bound is None or len(alive) < len(found):
            raise ConfigError(
                "plan",
                expected="one that is bound to a live model",
                found="not bound" if self._bound is None else "a model that no longer exists",
                fix="Call plan.bind(model) first and keep the model.",
            )
        return alive

    def model(self) -> nn.Module | None:
        """The model it is bound to, while that exists."""
        return None if self._model is None else self._model()

    @property
    def orders_hash(self) -> str:
        """SHA-256 of :attr:`orders`: what lies in plan order belongs to plans with these alone."""
        return _orders_hash(self.orders)

    def by_key(self) -> dict[str, LayerPlan]:
        return {layer.site.key: layer for layer in self.layers}

    def check_model(self, model: nn.Module) -> None:
        """Raises StaleArtifactError if ``model``'s FFN weights are not the ones the plan was made from."""
        found = weights_hash(model, [layer.site for layer in self.layers])
        if found != self.model_hash:
            dtypes = sorted({dtype_name(layer.site.weights(model).up.dtype) for layer in self.layers})
            raise StaleArtifactError(
                "plan",
                expected=f"a model with FFN weights {self.model_hash[:12]}",
                found=f"one with {found[:12]}, in {', '.join(dtypes)}",
                fix="Load it in the dtype the plan was made in (leave dtype out), or make a new plan for this model "
                "(torch_pi2.optimize, or torch-pi2 fit and plan).",
            )

    @property
    def orders(self) -> dict[str, torch.Tensor]:
        """``KEY.order`` -> int32 ``[I]``, plan position -> original neuron, and where neurons have their own
        ``KEY.thresholds`` -> float32 ``[I]``: what :meth:`to_json` leaves out.
        """
        orders = {f"{layer.site.key}.order": layer.order.to(torch.int32) for layer in self.layers}
        return orders | {
            f"{layer.site.key}.thresholds": layer.thresholds for layer in self.layers if layer.thresholds is not None
        }

    def to_json(self) -> str:
        """The text of plan.json: everything but the orders, and their hash."""
        layers = []
        for layer in self.layers:
            layers.append(
                {
                    "site": layer.site.to_json(),
                    "method": layer.method,
                    "n_hot": layer.n_hot,
                    "threshold": layer.threshold,
                    "expected_active": layer.expected_active,
                }
            )
        own = any(layer.thresholds is not None for layer in self.layers)
        version = _WITH_THRESHOLDS if own else PLAN_VERSION
        head = {"format": "torch_pi2.plan", "version": version, "model_hash": self.model_hash}
        body: dict[str, Any] = {"orders_hash": self.orders_hash, "made_by": self.made_by, "layers": layers}
        if self.hardware is not None:
            body["hardware"] = self.hardware.to_json()
        return json.dumps(head | body, indent=1)

    def save(self, folder: str | Path) -> None:
        """Write ``plan.json`` and ``plan.safetensors`` into ``folder``, each by atomic rename."""
        orders = self.orders, {"model_hash": self.model_hash}
        atomic_folder_files(folder, {"plan.safetensors": orders, "plan.json": self.to_json()})

    @staticmethod
    def load(folder: str | Path) -> Plan:
        """Read what :meth:`save` wrote. Raises ArtifactError on anything missing, broken or mismatched.

        A neuron store has its plan inside (:mod:`torch_pi2.store.parts`), and no such files beside it.
        """
        where, beside = Path(folder) / "plan.json", f"{folder}/plan.safetensors"
        data = parse_json(read_text(where), where, "torch_pi2.plan", *_VERSIONS)
        orders, meta = read_tensors(Path(folder) / "plan.safetensors")
        plan = _read_plan(data, orders, where, beside, meta.get("model_hash"))
        if meta.get("model_hash") != plan.model_hash:
            raise StaleArtifactError(
                beside,
                expected=f"model hash {plan.model_hash[:12]} as in plan.json",
                found=str(meta.get("model_hash"))[:12],
                fix="The two files are from different plans; make the plan again.",
            )
        return plan

    @staticmethod
    def from_json(text: str, orders: dict[str, torch.Tensor], where: str) -> Plan:
        """Inverse of :meth:`to_json` and :attr:`orders`. Raises as :meth:`load`, of what is read from ``where``."""
        data = parse_json(text, where, "torch_pi2.plan", *_VERSIONS)
        return _read_plan(data, orders, where, where, data.get("model_hash"))


def lossy_methods(plan: Plan) -> dict[str, int]:
    """Method -> number of layers in which it leaves out neurons that may not be zero."""
    layers = [y.method for y in plan.layers if y.n_cold and (y.method in PREDICTED or y.threshold > 0)]
    return dict(Counter(layers))


class HasParameters(Protocol):
    """A module, or anything that gives parameters by name."""

    def get_parameter(self, name: str, /) -> torch.Tensor: ...


def _orders_hash(orders: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names and orders, so that plan.json knows its plan.safetensors."""
    digest = hashlib.sha256()
    for name in sorted(orders):
        digest.update(name.encode() + orders[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _read_plan(
    data: dict[str, Any], orders: dict[str, torch.Tensor], where: Path | str, beside: str, orders_of: str | None
) -> Plan:
    """The plan of ``data``, from ``where``, with ``orders``, from ``beside``, of the model ``orders_of``."""
    found = Field(data, str(where), _FIX)
    model_hash, made_by = found.at("model_hash").text(), found.at("made_by").names(allowed=None)
    layers = [_read_layer(entry, orders, beside) for entry in found.at("layers").items()]
    if len({layer.site.key for layer in layers}) < len(layers):
        found.at("layers").wrong("layers of different keys", "one twice")
    if orders_of == model_hash and data.get("orders_hash") != _orders_hash(orders):
        raise StaleArtifactError(
            beside,
            expected=f"neuron orders {str(data.get('orders_hash'))[:12]} as in plan.json",
            found=f"{_orders_hash(orders)[:12]}",
            fix="The two files are from different plans; make the plan again.",
        )
    sizes = [(layer.site.key, layer.n_hot, layer.site.intermediate) for layer in layers]
    hardware = data.get("hardware")
    read = None if hardware is None else HardwarePlan.from_json(hardware, sizes, str(where))
    return Plan(layers, model_hash, made_by, read)


def _read_layer(entry: Field, orders: dict[str, torch.Tensor], beside: str) -> LayerPlan:
    """One entry of plan.json. Raises ArtifactError for anything but what ``save`` writes."""
    site = FFNSite.from_json(entry.at("site").value, entry.at("site").path)
    return LayerPlan(
        site,
        entry.at("method").text(METHODS),
        entry.at("n_hot").whole(0, site.intermediate),
        _order(site, orders, beside),
        entry.at("threshold").number(),
        entry.at("expected_active").number(0, 1),
        _thresholds(site, orders, beside),
    )


def _thresholds(site: FFNSite, orders: dict[str, torch.Tensor], beside: str) -> torch.Tensor | None:
    """The per-neuron thresholds of a layer, if it has them. Raises ArtifactError: they are invalid."""
    found = orders.get(f"{site.key}.thresholds")
    if found is None:
        return None
    right = found.dtype == torch.float32 and tuple(found.shape) == (site.intermediate,)
    if not right or not bool(((found >= 0) & (found < math.inf)).all()):
        raise ArtifactError(
            beside,
            expected=f"thresholds of {site.key}, {site.intermediate} finite numbers of 0 or more in float32",
            found=f"others in {dtype_name(found.dtype)} {list(found.shape)}",
            fix=_FIX,
        )
    return found


def _order(site: FFNSite, orders: dict[str, torch.Tensor], beside: str) -> torch.Tensor:
    """The order of a layer's neurons. Raises ArtifactError: there is none, or it is no permutation of them."""
    order = orders.get(f"{site.key}.order")
    if order is None or order.dtype != torch.int32 or tuple(order.shape) != (site.intermediate,):
        found = "none" if order is None else f"{dtype_name(order.dtype)} {list(order.shape)}"
    else:
        if is_permutation(order, site.intermediate):
            return order
        found = "numbers that occur twice, or are none of theirs"
    raise ArtifactError(
        beside,
        expected=f"the order of {site.key}, {site.key}.order, a permutation of {site.intermediate} neurons in int32",
        found=found,
        fix=_FIX,
    )


def is_permutation(order: torch.Tensor, count: int) -> bool:
    """Whether ``order`` has each of the numbers from 0 to ``count`` - 1 once."""
    if len(order) != count:
        return False
    seen = torch.zeros(count, dtype=torch.bool)
    least, most = (int(n) for n in order.aminmax())
    if least >= 0 and most < count:
        for some in order.split(1 << 20):  # indices take eight bytes each
            seen[some.long()] = True
    return bool(seen.all())


def weights_hash(model: HasParameters, sites: list[FFNSite]) -> str:
    """SHA-256 over the FFN weights of ``sites``, in the order of a neuron's rows, whatever the file format."""
    digest = hashlib.sha256()
    for site in sites:
        for tensor in site.weights(model):
            if tensor is not None:
                digest.update(str(tuple(tensor.shape)).encode() + str(tensor.dtype).encode())
                digest.update(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)
                let_go(model, [tensor])
    return digest.hexdigest()


#: An accelerator computes a multiple of this many neurons of a layer, or all of them.
ACCELERATOR_CHUNK = 512
#: Settings of :class:`torch_pi2.OffloadConfig` that a plan may choose; all are lossless.
OFFLOAD_SETTINGS = ("policy", "io_threads", "in_flight", "run_bytes", "gap_bytes", "lookahead")
#: What threads are for.
THREAD_ROLES = ("compute", "io")


@dataclass(frozen=True)
class Bucket:
    """How a model runs with up to ``batch`` sequences.

    Attributes:
        batch: the largest number of tokens of a decoding step.
        hot: by layer, how many neurons, the first in plan order, are computed without asking a predictor; if all, the
            layer is dense. At least the ``n_hot`` of its :class:`~torch_pi2.types.plan.LayerPlan`.
        accelerator: by layer, how many of them an accelerator computes: a multiple of 512, or all neurons.
        resident: by layer, how many neurons, the first in plan order, never leave the cache of a store.
        cache_bytes: size of a store's neuron cache; 0 if all neurons are in memory, or if the budget leaves none.
        ms: predicted milliseconds of a step, by part (:data:`torch_pi2.planner.cost.PARTS`); empty: no prediction.
    """

    batch: Annotated[int, Limits(1)]
    hot: tuple[int, ...]
    accelerator: tuple[int, ...]
    resident: tuple[int, ...]
    cache_bytes: int = 0
    ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_ms(self) -> float:
        """Milliseconds of a step."""
        return math.fsum(self.ms.values())


@dataclass(frozen=True)
class PromptPlan:
    """How prompts are read.

    Attributes:
        dense_from: by layer, from how many tokens in one call on every neuron is computed; 0: never. Calls of no more
            tokens than the largest bucket has sequences are steps, whatever it says.
        chunk_tokens: not read any more; files of earlier versions have it.
    """

    dense_from: tuple[int, ...]
    chunk_tokens: int = limited(1, default=512)


@dataclass(frozen=True)
class HardwarePlan:
    """How a planned model runs on one machine, see the module.

    Attributes:
        made_for: ``hardware`` (a name), ``hash`` (of the profile), ``source`` (``measured``, ``published``) and the
            planner's settings.
        budget_bytes: memory for everything; None: everything is in memory. accelerator_bytes: for hot neurons there.
        context: tokens of each sequence that the budget includes.
        buckets: ascending by ``batch``, at least one.
        prompt: for prompts.
        offload: settings of :class:`torch_pi2.OffloadConfig`, of ``OFFLOAD_SETTINGS``.
        threads: by role, of ``THREAD_ROLES``.
        cluster: neurons in a slot of the store, as it is or should be packed.
    """

    made_for: Mapping[str, Any]
    budget_bytes: int | None
    accelerator_bytes: int
    context: int
    buckets: tuple[Bucket, ...]
    prompt: PromptPlan
    offload: Mapping[str, Any] = field(default_factory=dict)
    threads: Mapping[str, int] = field(default_factory=dict)
    cluster: int = limited(1, default=1)

    def bucket(self, batch: int) -> Bucket:
        """The smallest for at least so many sequences; the largest if none is."""
        return next((b for b in self.buckets if b.batch >= batch), self.buckets[-1])

    def layer_hot(self, layer: int) -> tuple[tuple[int, int], ...]:
        """(batch, hot neurons) of one layer, ascending by batch."""
        return tuple((b.batch, b.hot[layer]) for b in self.buckets)

    def to_json(self) -> dict[str, Any]:
        """For plan.json: the same numbers give the same text."""
        data: dict[str, Any] = to_json(self)
        for bucket in data["buckets"]:
            bucket["ms"] = {part: round(ms, 4) for part, ms in bucket["ms"].items()}
        for name in ("made_for", "offload", "threads"):
            data[name] = dict(sorted(data[name].items()))
        return data

    @staticmethod
    def from_json(data: Any, layers: Sequence[tuple[str, int, int]], where: str) -> HardwarePlan:
        """Inverse of :meth:`to_json`.

        Args:
            layers: the key, the ``n_hot`` and the number of neurons of each layer.

        Raises:
            ArtifactError: a field is missing or wrong, or a layer cannot do what the plan says.
        """
        if isinstance(data, dict):
            data = {name: value for name, value in data.items() if name != "passes"}  # older plans have it
        plan = from_json(HardwarePlan, data, f"{where}, hardware", _FIX)
        _check(plan, Field(data, f"{where}, hardware", _FIX), layers)
        return plan


#: Key, least and most neurons of a layer.
Bounds = Sequence[tuple[str, int, int]]


def _check(plan: HardwarePlan, data: Field, layers: Bounds) -> None:
    """Raises ArtifactError for what types and limits of single fields do not say."""
    buckets = data.at("buckets")
    buckets.items(1)
    batches = [bucket.batch for bucket in plan.buckets]
    if sorted(set(batches)) != batches:
        buckets.wrong("ascending batch sizes", batches)
    for bucket, fields in zip(plan.buckets, buckets.items(), strict=True):
        most = [(key, 0, n) for (key, _, _), n in zip(layers, bucket.hot)]
        _check_counts(fields.at("hot"), layers)
        _check_counts(fields.at("accelerator"), most)
        _check_counts(fields.at("resident"), [(key, 0, n) for key, _, n in layers])
        for count, (key, _, size) in zip(bucket.accelerator, layers, strict=True):
            if count % ACCELERATOR_CHUNK and count != size:
                _of_layer(fields.at("accelerator"), key).wrong(f"a multiple of {ACCELERATOR_CHUNK}, or {size}", count)
        if any(bucket.resident) and plan.budget_bytes is None and not bucket.cache_bytes:
            fields.at("resident").wrong("0 where everything is in memory", sum(bucket.resident))
    _check_counts(data.at("prompt").at("dense_from"), [(key, 0, 1 << 30) for key, _, _ in layers])
    data.at("threads").names((), THREAD_ROLES)
    settings = data.at("offload")
    try:
        OffloadConfig(**settings.names((), OFFLOAD_SETTINGS))
    except ConfigError as error:
        setting = settings.at(error.what.removeprefix("OffloadConfig."))
        raise ArtifactError(setting.path, expected=error.expected, found=error.found, fix=setting.fix) from error


def _check_counts(counts: Field, bounds: Bounds) -> None:
    """Raises ArtifactError unless there is a number for each layer, within its bounds."""
    if len(counts.value) != len(bounds):
        counts.wrong(f"{len(bounds)} numbers, one for each layer", f"{len(counts.value)}")
    for count, (key, least, most) in zip(counts.value, bounds, strict=True):
        if not least <= count <= most:
            _of_layer(counts, key).wrong(f"{least} to {most}", count)


def _of_layer(counts: Field, key: str) -> Field:
    return Field(counts.value, f"{counts.path} of {key}", counts.fix)
