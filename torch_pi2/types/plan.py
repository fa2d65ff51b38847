"""``Plan``: which neurons are hot, their order, and how cold ones are chosen (plan.json).

A plan is small and readable; neuron orders are beside it in ``plan.safetensors``. Both carry the hash of their weights,
so a plan for another model is an error and never a wrong answer.

``HardwarePlan``, a part of it, says how the planned model runs on one machine, by the number of sequences that are
decoded together. PowerInfer-2's offline planner (arXiv 2406.06282, section 5) makes a *neuron plan*, the hot neurons,
and a *hardware plan*: threads, cache sizes, I/O patterns, and a graph per batch size. Ours also has the hot neurons by
batch size. docs/PLAN.md has the format.
"""

import hashlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import Field, Limits, argument, from_json, limited, to_json
from torch_pi2.base.files import atomic_write, json_text, parse_json
from torch_pi2.base.memory import let_go
from torch_pi2.base.reading import read_bytes
from torch_pi2.base.tensorfile import Spec, packed, read_tensors
from torch_pi2.errors import ArtifactError, ConfigError, StaleArtifactError, check_made_from
from torch_pi2.ops.activations import cuts, exact_zeros
from torch_pi2.types.method import METHODS, PREDICTED, Method
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.site import FFNSite

#: Version 1, without ``hardware``, is supported too. Version 3: with a threshold for each neuron.
PLAN_VERSION, _WITH_THRESHOLDS = 2, 3
_VERSIONS = (1, _WITH_THRESHOLDS, PLAN_VERSION)

_FIX, _OTHER = "Make the plan again.", "The two files are from different plans; make the plan again."


@dataclass
class LayerPlan:
    """The plan of one FFN.

    Attributes:
        site: the FFN. method: the text of a :class:`~torch_pi2.types.method.Method`.
        n_hot: the first ``n_hot`` neurons of ``order`` are computed densely.
        order: ``[I]`` int32, plan position -> original neuron (most frequent first).
        threshold: cut on the score for ``threshold`` (0 otherwise).
        expected_active: mean share of cold neurons computed per token, measured on calibration data.
        thresholds: ``[I]`` float32 in *original* order, for scores other than ``|act(gate)|``: each neuron's equivalent
            cut on ``|act(gate)|``. None: ``threshold`` for all.
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

    @property
    def gate_decides(self) -> bool:
        """Whether gates in memory save most reads from a store: cold neurons are known to fire less than half of the
        time. Not where a cut needs every neuron's gate anyway.
        """
        gated = self.method in (Method.EXACT, Method.THRESHOLD) and not cuts(self.site.activation)
        return gated and self.expected_active < 0.5


@dataclass
class Plan:
    """A plan for a whole model; ``layers`` in order of execution. ``hardware``: how it runs on one machine, by batch
    size; None: ``n_hot`` for any batch.
    """

    layers: list[LayerPlan]
    model_hash: str
    made_by: dict[str, Any] = field(default_factory=dict)
    hardware: "HardwarePlan | None" = None
    _model: weakref.ref[nn.Module] | None = field(default=None, init=False, repr=False, compare=False)

    def bind(self, model: nn.Module) -> "Plan":
        """Remember ``model`` (weakly); returns itself. Raises StaleArtifactError: ``model`` has other FFN weights."""
        self.check_model(model)
        self._model = weakref.ref(model)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_model": None}  # weak references cannot be pickled

    def model(self) -> nn.Module:
        """The bound model. Raises ConfigError: there is none, or it was garbage-collected."""
        model = None if self._model is None else self._model()
        if model is None:
            argument(model, "plan", "Call plan.bind(model) first and keep the model.").wrong(
                "one that is bound to a live model",
                "not bound" if self._model is None else "a model that no longer exists",
            )
        return model

    @property
    def activations(self) -> str:
        """``int8``: inputs of quantised layers are rounded, as when the model was saved, or by a file's own engine."""
        config = self.made_by.get("config")
        told = config.get("activations") if isinstance(config, dict) else None
        return "int8" if self.made_by.get("activations", told) == "int8" else "float"

    @property
    def orders_hash(self) -> str:
        """SHA-256 of :attr:`orders`, which identifies data in plan order."""
        return _orders_hash(self.orders)

    def check_model(self, model: nn.Module) -> None:
        """Raises StaleArtifactError: ``model`` has other FFN weights than the plan."""
        found = weights_hash(model, [layer.site for layer in self.layers])
        if found != self.model_hash:
            dtypes = sorted({dtype_name(layer.site.weights(model).up.dtype) for layer in self.layers})
            raise StaleArtifactError(
                "plan",
                expected=f"a model with FFN weights {self.model_hash[:12]}",
                found=f"one with {found[:12]}, in {', '.join(dtypes)}",
                fix="Load it in the dtype the plan was made in (leave dtype out, and config.json as it was), or make a "
                "new plan for this model (torch_pi2.optimize, or torch-pi2 fit and plan).",
            )

    @property
    def orders(self) -> dict[str, torch.Tensor]:
        """``KEY.order`` -> int32 ``[I]``, plan position -> original neuron, and ``KEY.thresholds`` -> float32 ``[I]``
        of layers that have them: the data that :meth:`to_json` leaves out.
        """
        orders = {f"{layer.site.key}.order": layer.order.to(torch.int32) for layer in self.layers}
        own = ((layer.site.key, layer.thresholds) for layer in self.layers)
        return orders | {f"{key}.thresholds": cuts for key, cuts in own if cuts is not None}

    def to_json(self) -> str:
        """The text of plan.json: everything but the orders, and their hash."""
        named = ("method", "n_hot", "threshold", "expected_active")
        layers = [{"site": y.site.to_json(), **{name: getattr(y, name) for name in named}} for y in self.layers]
        own = any(layer.thresholds is not None for layer in self.layers)
        version = _WITH_THRESHOLDS if own else PLAN_VERSION
        head = {"model_hash": self.model_hash, "orders_hash": self.orders_hash}
        body: dict[str, Any] = {"made_by": self.made_by, "layers": layers}
        if self.hardware is not None:
            body["hardware"] = self.hardware.to_json()
        return json_text("torch_pi2.plan", version, head | body)

    def save(self, folder: str | Path) -> None:
        """Write ``plan.json`` and ``plan.safetensors`` into ``folder``, each by atomic rename."""
        orders = packed(self.orders, {"model_hash": self.model_hash})
        for name, content in (("plan.safetensors", orders), ("plan.json", self.to_json())):
            atomic_write(Path(folder) / name, content)

    @staticmethod
    def load(folder: str | Path) -> "Plan":
        """Read what :meth:`save` wrote. Raises ArtifactError: missing, damaged or mismatched files.

        A neuron store has its plan inside (:mod:`torch_pi2.store.parts`), without such files.
        """
        where, beside = Path(folder) / "plan.json", f"{folder}/plan.safetensors"
        text = read_bytes(where)
        orders, meta = read_tensors(Path(folder) / "plan.safetensors")
        plan = Plan.from_json(text, orders, str(where), beside)
        check_made_from(beside, str(meta.get("model_hash")), plan.model_hash, "model hash", _OTHER)
        return plan

    @staticmethod
    def from_json(text: str | bytes, orders: dict[str, torch.Tensor], where: str, beside: str = "") -> "Plan":
        """Inverse of :meth:`to_json` and :attr:`orders`, from ``where`` and ``beside``. Raises as :meth:`load`."""
        beside = beside or where
        found = Field(parse_json(text, where, "torch_pi2.plan", *_VERSIONS), where, _FIX)
        model_hash, made_by = found.at("model_hash").text(), found.at("made_by").names(allowed=None)
        layers = [_read_layer(entry, orders, beside) for entry in found.at("layers").items()]
        if len({layer.site.key for layer in layers}) < len(layers):
            found.at("layers").wrong("layers of different keys", "one twice")
        wanted = found.at("orders_hash").text()
        check_made_from(beside, _orders_hash(orders), wanted, "neuron orders", _OTHER)
        hardware = found.at("hardware", None).value
        sizes = [(layer.site.key, layer.n_hot, layer.site.intermediate) for layer in layers]
        read = None if hardware is None else HardwarePlan.from_json(hardware, sizes, where)
        return Plan(layers, model_hash, made_by, read)


def in_own_order(sites: Sequence[FFNSite], method: str = "auto") -> list[LayerPlan]:
    """Layers without statistics: exact gate where that skips neurons, or dense; experts, without hot ones, exact."""
    layers = []
    for site in sites:
        skips = exact_zeros(site.activation) or method == Method.EXACT
        dense = (method == Method.DENSE or not skips) and site.experts is None
        kind, hot = (Method.DENSE, site.intermediate) if dense else (Method.EXACT, 0)
        layers.append(LayerPlan(site, kind, hot, torch.arange(site.intermediate, dtype=torch.int32)))
    return layers


def lossy_methods(plan: Plan) -> dict[str, int]:
    """Method -> number of its layers, for lossy methods."""
    layers = [y.method for y in plan.layers if y.n_cold and (y.method in PREDICTED or y.threshold > 0)]
    return dict(Counter(layers))


def refuse_custom(plan: Plan, what: str) -> None:
    """Raises ConfigError: a layer of ``plan`` asks a ``SparseMethod`` in Python, which ``what`` cannot."""
    for layer in plan.layers:
        if layer.method == Method.CUSTOM:
            expected, found = "methods that kernels know", f"a SparseMethod that chooses neurons of {layer.site.key}"
            fix = "Use exact, threshold, lowrank or signbit there, or a SparseMethod with cut_I."
            raise ConfigError(what, expected=expected, found=found, fix=fix)


def _orders_hash(orders: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names and orders, which links plan.json to its plan.safetensors."""
    digest = hashlib.sha256()
    for name in sorted(orders):
        digest.update(name.encode() + orders[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _read_layer(entry: Field, orders: dict[str, torch.Tensor], beside: str) -> LayerPlan:
    site = FFNSite.from_json(entry.at("site").value, entry.at("site").path)
    neurons = site.intermediate

    def own(name: str, dtype: torch.dtype, is_valid: Callable[[torch.Tensor], bool], words: str) -> torch.Tensor:
        tensor = orders.get(f"{site.key}.{name}")
        wanted = Spec((neurons,), dtype)
        if tensor is None or Spec.of(tensor) != wanted or not is_valid(tensor):
            spec = None if tensor is None else Spec.of(tensor)
            found = "other numbers" if spec == wanted else str(spec or "none")
            raise ArtifactError(beside, expected=f"{site.key}.{name}, {words}, {wanted}", found=found, fix=_FIX)
        return tensor

    order = own("order", torch.int32, lambda o: is_permutation(o, neurons), f"a permutation of {neurons} neurons")
    thresholds = None
    if f"{site.key}.thresholds" in orders:
        words = "finite numbers of 0 or more"
        thresholds = own("thresholds", torch.float32, lambda t: bool(((t >= 0) & (t < math.inf)).all()), words)
    n_hot, threshold = entry.at("n_hot").whole(0, neurons), entry.at("threshold").number()
    active = entry.at("expected_active").number(0, 1)
    return LayerPlan(site, entry.at("method").text(METHODS), n_hot, order, threshold, active, thresholds)


def is_permutation(order: torch.Tensor, count: int) -> bool:
    """Whether ``order`` has each number from 0 to ``count`` - 1 once."""
    if len(order) != count:
        return False
    seen = torch.zeros(count, dtype=torch.bool)
    least, most = (int(n) for n in order.aminmax())
    if least >= 0 and most < count:
        for some in order.split(1 << 20):  # indices take eight bytes each
            seen[some.long()] = True
    return bool(seen.all())


def weights_hash(model: Any, sites: list[FFNSite]) -> str:
    """SHA-256 over the FFN weights of ``sites``, in the row order of a neuron, independent of the file format."""
    digest = hashlib.sha256()
    for site in sites:
        for tensor in site.weights(model):
            if tensor is not None:
                digest.update(str(tuple(tensor.shape)).encode() + str(tensor.dtype).encode())
                digest.update(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)
                let_go(model, [tensor])
    return digest.hexdigest()


#: Granularity of a layer's neurons on an accelerator, unless it has all.
ACCELERATOR_CHUNK = 512
#: Settings of :class:`torch_pi2.OffloadConfig` that a plan may choose; all are lossless.
OFFLOAD_SETTINGS = ("policy", "io_threads", "in_flight", "run_bytes", "gap_bytes", "lookahead")
#: Purposes of threads.
THREAD_ROLES = ("compute", "io")


@dataclass(frozen=True)
class Bucket:
    """How a model runs with up to ``batch`` sequences.

    Attributes:
        batch: the largest number of tokens of a decoding step.
        hot: by layer, number of leading neurons in plan order that are computed without a predictor (all: dense). At
            least the ``n_hot`` of its :class:`~torch_pi2.types.plan.LayerPlan`.
        accelerator: by layer, number of these on an accelerator: a multiple of 512, or all neurons.
        resident: by layer, number of leading neurons in plan order that never leave the cache of a store.
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
        """Milliseconds per step."""
        return math.fsum(self.ms.values())


@dataclass(frozen=True)
class PromptPlan:
    """How prompts are computed.

    Attributes:
        dense_from: by layer, number of tokens per call from which every neuron is computed; 0: never. Calls of no more
            tokens than the largest bucket has sequences are steps in any case.
    """

    dense_from: tuple[int, ...]


@dataclass(frozen=True)
class HardwarePlan:
    """How a planned model runs on one machine, see the module.

    Attributes:
        made_for: ``hardware`` (a name), ``hash`` (of the profile), ``source`` (``measured``, ``published``) and the
            planner's settings.
        budget_bytes: memory for everything; None: all in memory. accelerator_bytes: for hot neurons there.
        context: tokens of each sequence that the budget includes. buckets: ascending by ``batch``, at least one.
        prompt: for prompts. offload: settings of :class:`torch_pi2.OffloadConfig`, of ``OFFLOAD_SETTINGS``.
        threads: by role, of ``THREAD_ROLES``. cluster: neurons per slot of the store, as it is or should be packed.
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
        """The smallest bucket for at least ``batch`` sequences, or the largest one."""
        return next((b for b in self.buckets if b.batch >= batch), self.buckets[-1])

    def to_json(self) -> dict[str, Any]:
        """For plan.json, deterministic."""
        data: dict[str, Any] = to_json(self)
        for bucket in data["buckets"]:
            bucket["ms"] = {part: round(ms, 4) for part, ms in bucket["ms"].items()}
        for name in ("made_for", "offload", "threads"):
            data[name] = dict(sorted(data[name].items()))
        return data

    @staticmethod
    def from_json(data: Any, layers: Sequence[tuple[str, int, int]], where: str) -> "HardwarePlan":
        """Inverse of :meth:`to_json`; ``layers``: key, ``n_hot``, neurons. Raises ArtifactError: wrong fields."""
        plan = from_json(HardwarePlan, data, f"{where}, hardware", _FIX)
        _check(plan, Field(data, f"{where}, hardware", _FIX), layers)
        return plan


#: Key, and bounds for a count of neurons, of each layer.
Bounds = Sequence[tuple[str, int, int]]


def _check(plan: HardwarePlan, data: Field, layers: Bounds) -> None:
    """Raises ArtifactError for errors across fields."""
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
                fields.at("accelerator").wrong(f"a multiple of {ACCELERATOR_CHUNK}, or {size}, for {key}", count)
    _check_counts(data.at("prompt").at("dense_from"), [(key, 0, 1 << 30) for key, _, _ in layers])
    data.at("threads").names((), THREAD_ROLES)
    settings = data.at("offload")
    try:
        OffloadConfig(**settings.names((), OFFLOAD_SETTINGS))
    except ConfigError as error:
        setting = settings.at(error.what.removeprefix("OffloadConfig."))
        raise ArtifactError(setting.path, expected=error.expected, found=error.found, fix=setting.fix) from error


def _check_counts(counts: Field, bounds: Bounds) -> None:
    """Raises ArtifactError: there is not one count per layer, within its bounds."""
    if len(counts.value) != len(bounds):
        counts.wrong(f"{len(bounds)} numbers, one for each layer", f"{len(counts.value)}")
    for count, (key, least, most) in zip(counts.value, bounds, strict=True):
        if not least <= count <= most:
            counts.wrong(f"{least} to {most} for {key}", count)
