"""``ModelShape``: sizes, formats and firing frequencies by layer, the cost model's input."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name, format_name
from torch_pi2.decode.budget import (
    activation_bytes,
    activation_sizes,
    engine_bytes,
    kv_bytes,
    piece_tokens,
    place_bytes,
)
from torch_pi2.errors import ConfigError, check_made_from
from torch_pi2.formats import FORMATS, formats_of, has_two_formats, row_bytes
from torch_pi2.graph.routed import chosen_shares
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.rewrite.state import ModelState, SparseState
from torch_pi2.store.storefile import StoreReader, format_fields
from torch_pi2.store.superblock import LayerEntry, slot_bytes
from torch_pi2.types.method import PREDICTED, Method
from torch_pi2.types.offload import Budget, OffloadConfig
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import block_of
from torch_pi2.types.stats import ActivationStats, LayerStats

T = TypeVar("T")
L = TypeVar("L", bound="LayerShape")


def numbers(kernel: str, nbytes: float) -> float:
    """Number of weights in ``nbytes`` bytes; ``kernel``: ``weights/activations``."""
    return 8 * nbytes / FORMATS[kernel.partition("/")[0]].bits_per_weight


def kept(function: Callable[[L, float], T]) -> Callable[[L, float], T]:
    """Cache the results of a function of a layer and a number in the layer: sums over neurons are slow."""

    @wraps(function)
    def known(layer: L, number: float) -> T:
        key = function.__name__, number
        if key not in layer.known:
            layer.known[key] = function(layer, number)
        return layer.known[key]

    return known


@dataclass(frozen=True, eq=False)
class LayerShape:
    """One FFN or expert, and the attention before it. Neurons are in plan order, the most frequent first.

    Attributes:
        key: of the site. hidden, intermediate, rows: H, I, and rows per neuron (3 gated, 2 plain).
        neuron_bytes: of a neuron in memory. slot_bytes: of a cache slot with ``cluster`` neurons. stored_bytes:
            distance between slots in the file (0: as ``pack`` aligns them).
        kernel: ``weights/activations``, such as ``int4/int8``, ``bfloat16/float`` or ``q4_k+int8/float``.
        method: a :class:`torch_pi2.types.method.Method`. exact_zeros: inactive neurons add exactly zero and their down
            rows are not read (ReLU family).
        predictor: the kernel that times its matrices, or None. rank: of a low-rank predictor, else 0.
            predictor_bytes: as if no neuron were hot. recall: of firing pairs. predicted_active: mean share of the
            neurons from ``base_hot`` on that it selects for one token.
        chosen: share of tokens routed to an expert (1: no expert). experts: how many share one call.
        attention_bytes, attention_kernel: linear layers before the FFN. kv_bytes: of one token in this block. 0 if the
            FFN is not the first of its block.
        base_hot: the fewest hot neurons, ``LayerPlan.n_hot``; the predictor has no rows for them.
        frequencies: (tokens, float64 ``[I]``): share of steps of that many tokens, of different sequences (experts:
            routed to it), in which the neuron fires for at least one. Ascending from 1.
    """

    key: str
    hidden: int
    intermediate: int
    rows: int
    neuron_bytes: int
    slot_bytes: int
    kernel: str
    method: str
    predictor: str | None
    rank: int
    predictor_bytes: int
    recall: float
    predicted_active: float
    chosen: float
    attention_bytes: int
    attention_kernel: str
    kv_bytes: int
    base_hot: int
    cluster: int
    frequencies: tuple[tuple[int, np.ndarray], ...] = field(repr=False)
    stored_bytes: int = 0
    exact_zeros: bool = True
    experts: int = 1
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def weights(self) -> str:
        return self.kernel.partition("/")[0]

    @property
    def first_row_bytes(self) -> int:
        """Bytes of a gate row (in a plain layer, of an up row)."""
        if has_two_formats(self.weights):
            return row_bytes(formats_of(self.weights)[0], self.hidden)
        return self.neuron_bytes // self.rows

    @property
    def slots(self) -> int:
        return -(-self.intermediate // self.cluster)

    @property
    def file_slot_bytes(self) -> int:
        """Distance between slots in a store's file."""
        return self.stored_bytes or slot_bytes(self.cluster * self.neuron_bytes)

    def entry(self, layer: int) -> LayerEntry:
        """The layer's entry in a store's superblock (with offsets of 0)."""
        fields = format_fields(self.weights, self.hidden) | {"row_bytes": self.first_row_bytes}
        place = {"slots": 0, "checks": 0, "slot_bytes": self.file_slot_bytes, "cluster": self.cluster}
        sizes = {"neurons": self.intermediate, "hidden": self.hidden, "rows": self.rows}
        return LayerEntry(**place, **sizes, **fields, n_hot=self.base_hot, layer=layer)

    @kept
    def frequency(self, batch: float) -> np.ndarray:
        """Float64 ``[I]``: how often a neuron fires for at least one of ``batch`` tokens of different sequences.

        Interpolated in log2(batch) between measured sizes, as in :meth:`torch_pi2.types.stats.LayerStats.frequency`.
        Beyond the largest size n, groups of n tokens count as independent: ``1 - (1 - f(n)) ** (batch / n)``, an
        overestimate for similar tokens.
        """
        largest, f_I = self.frequencies[-1]
        if batch >= largest:
            return 1 - (1 - f_I) ** (batch / largest)
        upper = next(i for i, (size, _) in enumerate(self.frequencies) if size > batch)
        (low, low_I), (high, high_I) = self.frequencies[max(0, upper - 1)], self.frequencies[upper]
        return low_I + (high_I - low_I) * max(0.0, np.log2(batch / low) / np.log2(high / low))


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A whole model: its ``layers`` in plan order, and the size ``hidden`` of the residual stream. ``head_bytes``,
    ``head_kernel``: of the output projection. ``fixed_bytes``: everything but predictors, the KV cache and neurons.
    ``activations``: of a prompt, see :func:`torch_pi2.decode.budget.activation_sizes`.
    """

    layers: tuple[LayerShape, ...]
    head_bytes: int
    head_kernel: str
    fixed_bytes: int
    hidden: int
    activations: tuple[int, int] = (0, 0)

    @property
    def slots(self) -> int:
        return sum(layer.slots for layer in self.layers)

    @cached_property
    def store_bytes(self) -> int:
        """Bytes of all slots in a store's file."""
        return sum(layer.slots * layer.file_slot_bytes for layer in self.layers)

    @property
    def place_bytes(self) -> int:
        """Bytes of a cache slot; the same for all layers."""
        return max(layer.slot_bytes for layer in self.layers)

    def budget(self, cache_bytes: int, *, batch: int, context: int, config: OffloadConfig) -> Budget:
        """Memory over a store with this cache, as :mod:`torch_pi2.decode.budget` counts it; ``token`` is 0."""
        entries = [layer.entry(0) for layer in self.layers]
        staging, tables, _ = engine_bytes(entries, config)
        place = self.place_bytes
        made = Budget(
            total=0,
            fixed=self.fixed_bytes,
            predictors=sum(layer.predictor_bytes for layer in self.layers),
            neuron_tables=tables,
            kv=batch * context * sum(layer.kv_bytes for layer in self.layers),
            staging=staging,
            activations=activation_bytes(entries, self.activations, context) if any(self.activations) else 0,
            cache=min(self.slots, cache_bytes // place) * place,
            neurons=self.slots * place,
            token=0,
            slot=place,
            context=batch * context,
            piece_tokens=piece_tokens(context),
        )
        return replace(made, total=made.smallest + made.in_slots(made.cache))

    @staticmethod
    def of(model: nn.Module, stats: ActivationStats, plan: Plan) -> "ModelShape":
        """The shape of an optimised model, in memory or over a store.

        Linear layers other than FFNs and the head are divided evenly among its blocks. ``plan``: the model's own.
        Raises ConfigError: the model is dense or has another plan, or a layer has no statistics. StaleArtifactError:
        statistics of other weights.
        """
        ours, theirs, fix = stats.model_hash, plan.model_hash, "Profile this model."
        check_made_from("statistics to plan with", ours, theirs, "those of FFN weights", fix)
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        linears = [m for m in model.modules() if isinstance(m, QuantLinear | nn.Linear) and m is not head]
        config: Any = getattr(model, "config", None)
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        firsts: dict[str, str] = {}
        for layer in plan.layers:
            firsts.setdefault(block_of(layer.site.key), layer.site.key)
        layers, state = _layers(model, stats, plan), ModelState.of(model)
        kernels = Counter[str]()
        for module in linears:
            kernels[_kernel(module)] += _weight(module).nbytes
        before: dict[str, Any] = {
            "attention_bytes": sum(kernels.values()) // len(firsts),
            "attention_kernel": max(kernels, key=lambda name: kernels[name], default=layers[0].kernel),
            "kv_bytes": 0 if config is None else kv_bytes(config, 1, dtype) // len(firsts),
        }
        shapes = tuple(replace(layer, **before) if layer.key in firsts.values() else layer for layer in layers)
        of_head = (0, layers[0].kernel) if head is None else (_weight(head).nbytes, _kernel(head))
        fixed = state.budget.fixed if state and state.budget else _fixed_bytes(model)
        activations = (0, 0) if config is None else activation_sizes(config, dtype)
        return ModelShape(shapes, *of_head, fixed, plan.layers[0].site.hidden, activations)


def _fixed_bytes(model: nn.Module) -> int:
    """Bytes of all tensors except neurons, orders and predictors; shared storage counts once."""
    seen: dict[int, int] = {}
    for module in model.modules():
        sparse = isinstance(module, SparseFFN | SparseExperts)
        for name, tensor in {**module._parameters, **module._buffers}.items():
            ours = sparse and (name in ("neuron_rows", "order", "inverse") or name.startswith("predictor_"))
            if tensor is not None and not ours and not tensor.is_meta:
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(seen.values())


def _layers(model: nn.Module, stats: ActivationStats, plan: Plan) -> list[LayerShape]:
    """The FFNs without attention. Raises ConfigError: ``model`` has other layers than ``plan``."""
    parts = {part.site.key: part for part in sparse_layers(model)}
    missing = [layer.site.key for layer in plan.layers if layer.site.key not in parts]
    if missing or len(parts) != len(plan.layers):
        expected = f"a model with the {len(plan.layers)} layers of its plan"
        found = f"none of {missing[0]}" if missing else f"{len(parts)} layers"
        fix = "Pass the model that torch_pi2.optimize or torch_pi2.load gave, with its own plan."
        raise ConfigError(f"the shape of a {type(model).__name__}", expected=expected, found=found, fix=fix)
    state, entries, config = ModelState.of(model), dict[str, LayerEntry](), OffloadConfig()
    predictors = state.predictors if isinstance(state, SparseState) else {}
    if state is not None and state.store is not None:
        config = state.store.config
        with StoreReader(state.store.path) as reader:
            entries = dict(zip(reader.keys, reader.entries, strict=True))
    sites = [layer.site for layer in plan.layers]
    chosen = chosen_shares(getattr(model, "config", None), sites)
    experts = Counter(site.experts for site in sites)
    layers = []
    for layer, site in zip(plan.layers, sites):
        part, entry = parts[site.key], entries.get(site.key)
        in_memory = 0 if part.neuron_rows.is_meta else part.neuron_rows[0].nbytes
        predicted = layer.method in PREDICTED and part.has_predictor
        card = getattr(predictors.get(site.key), "card", None) if predicted else None
        # frequencies counted while a predictor ran do not include its misses
        recall = 1.0 if card is None else float(card.recall)
        made = LayerShape(
            key=site.key,
            hidden=site.hidden,
            intermediate=site.intermediate,
            rows=site.rows_per_neuron,
            neuron_bytes=entry.neuron_bytes if entry else in_memory,
            slot_bytes=0,
            kernel=f"{format_name(part.weights, part.dtype)}/{'int8' if part.int8_activations else 'float'}",
            method=layer.method,
            predictor=_predictor_kernel(part) if predicted else None,
            rank=0 if part.predictor_a is None else len(part.predictor_a),
            predictor_bytes=_predictor_bytes(part) if predicted else 0,
            recall=recall,
            predicted_active=layer.expected_active,
            chosen=chosen.get(site.experts, 1.0),
            attention_bytes=0,
            attention_kernel="float32/float",
            kv_bytes=0,
            base_hot=site.intermediate if layer.method == Method.DENSE else layer.n_hot,
            cluster=entry.cluster if entry else 1,
            frequencies=_frequencies(stats[site.key], layer),
            stored_bytes=entry.slot_bytes if entry else 0,
            exact_zeros=exact_zeros(site.activation),
            experts=1 if site.experts is None else experts[site.experts],
        )
        layers.append(replace(made, slot_bytes=place_bytes([made.entry(0)], config)))
    return layers


def _frequencies(stats: LayerStats, layer: LayerPlan) -> tuple[tuple[int, np.ndarray], ...]:
    """By number of tokens, in plan order."""
    order = layer.order.long()
    by_size = zip(stats.batch_sizes, stats.batch_fired, stats.batch_groups.tolist())
    found = [(size, (fired.double() / n)[order].numpy()) for size, fired, n in by_size if n > 0]
    if not found or found[0][0] != 1:
        one = stats.fired.double() / stats.tokens if stats.tokens else torch.full(order.shape, layer.expected_active)
        found.insert(0, (1, one.double()[order].numpy()))
    # more tokens never make a neuron fire less often; measurements of few groups are noisy
    rising = accumulate((f_I for _, f_I in found), np.maximum)
    return tuple((size, f_I) for (size, _), f_I in zip(found, rising))


def _weight(module: Any) -> torch.Tensor:
    return module.rows if isinstance(module, QuantLinear) else module.weight


def _kernel(module: Any) -> str:
    if isinstance(module, QuantLinear):
        return f"{module.weights}/{'int8' if module.int8_activations else 'float'}"
    return f"{dtype_name(module.weight.dtype)}/float"


def _predictor_kernel(part: SparseFFN) -> str:
    if part.predictor_signs is not None:
        return "int4/int8"
    rounded = part.int8_activations and part.predictor_weights
    return f"{part.predictor_weights or 'int8'}/{'int8' if rounded else 'float'}"


def _predictor_bytes(part: SparseFFN) -> int:
    """As if no neuron were hot: predictors have rows for cold neurons only."""
    total, size = 0, part.site.intermediate
    for name, tensor in part._buffers.items():
        if tensor is None or not name.startswith("predictor_"):
            continue
        by_neuron = name not in ("predictor_a", "predictor_a_scale")
        total += tensor.nbytes // len(tensor) * size if by_neuron else tensor.nbytes  # blocks may be padded
    return total
