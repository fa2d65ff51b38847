"""Loading a model whose neurons stay in its store, under a memory budget."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.base.memory import give_back_freed_memory
from torch_pi2.base.progress import log
from torch_pi2.checkpoint.sparse import DEFAULT_CONTEXT, LoadSettings, load_sparse, weights_of
from torch_pi2.decode.budget import divide_budget, place_gates
from torch_pi2.distributed.group import of_each
from torch_pi2.distributed.join import Membership, join
from torch_pi2.distributed.tensor_parallel import ShardedExperts, ShardedFFN
from torch_pi2.errors import ConfigError
from torch_pi2.graph.routed import find_router
from torch_pi2.layers.experts import OffloadedExperts, SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import called_modules, homes
from torch_pi2.layers.offloaded import OffloadedFFN, Store
from torch_pi2.predict import PER_NEURON
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.rewrite.rewrite import predictor_tensors
from torch_pi2.rewrite.skeleton import model_config
from torch_pi2.rewrite.state import SparseState
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.storefile import STORE_FILE, StoreReader
from torch_pi2.store.weights import QuantizedWeights
from torch_pi2.types.method import PREDICTED, Method
from torch_pi2.types.offload import Budget, OffloadConfig
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.shard import GroupConfig, Shard

#: More than any budget.
_ALL = 1 << 62


def load_offloaded(folder: Path, plan: Plan, predictors: dict[str, Any], settings: LoadSettings) -> nn.Module:
    """The model of ``folder`` within the budget of ``settings``, with an empty cache; see :func:`torch_pi2.load`.

    A shard without a budget takes what it needs. ``predictors`` is emptied: layers hold their own copies, and both
    copies together must not exist when the cache is filled.
    """
    path = folder / PI2_FOLDER / STORE_FILE
    offload, budget_bytes = settings.offload or offload_of(plan), settings.budget_bytes
    context = settings.context or DEFAULT_CONTEXT
    if offload.lossy:
        _check_lossy(plan, offload)
    together: Membership | None = None
    here = plan
    with StoreReader(path) as reader:
        reader.check_activations(settings.int8_activations)
        reader.check_plan(plan)
        hf = settings.config or model_config(folder, trust_remote_code=settings.trust_remote_code)
        kind = settings.dtype or hf.dtype or reader.float_dtype or torch.float32
        if reader.shard is not None:
            same = {"activations": settings.activations, "dtype": kind, "context": context}
            together = join(reader, plan, hf, settings.group or GroupConfig(), same)
            here, own = reader.shard.plan(plan), own_predictors(reader.shard, plan, predictors)
            predictors.clear()
            predictors = own
        sizes: dict[str, Any] = {"config": offload, "context": context, "dtype": kind}
        most = _ALL if budget_bytes is None else budget_bytes

        def divided() -> Budget:
            return divide_budget(most, reader, here, predictors, hf, **sizes)

        # all processes refuse a budget that is too small; otherwise the others would wait for this one
        budget = divided() if together is None else of_each(divided)[together.group.rank]
        if budget_bytes is None:
            budget = budget.with_total(budget.whole, folder)
        index_of = {key: i for i, key in enumerate(reader.keys)}
    # without gates, which a smaller budget gives up, there would be more room for neurons
    room = min(budget.neurons, budget.cache + budget.gates // budget.slot * budget.slot)
    store = Store(path, room, offload, token_bytes=budget.token)
    if room > budget.cache:
        store.resize(budget.cache)
    store.budget, store.limited = budget, budget_bytes is not None
    dividing = None if together is None or together.own.by_layers else together
    make = _OverStore(store, index_of, predictors, settings.int8_activations, dividing)
    give_back_freed_memory()
    model = load_sparse(folder, plan, predictors, settings, make_layer=make.layer, make_experts=make.experts)
    if budget.gates:
        place_gates(model, path, here, budget.gates)
    give_back_freed_memory()  # needed for loading only; before the cache is filled
    if offload.lookahead:
        for module in model.modules():
            if isinstance(module, OffloadedFFN):
                module.announce()
        _route_early(model)
    if together is not None:
        together.connect(model)
    # without predictors: the layers hold them
    group = None if together is None else together.group
    made = SparseState(here, FittedPredictors(), None, weights=weights_of(model), store=store, group=group)
    made.attach(model)
    return model


def offload_of(plan: Plan) -> OffloadConfig:
    """Settings of ``plan`` for reading and caching neurons. Raises ConfigError if they are invalid."""
    return OffloadConfig() if plan.hardware is None else OffloadConfig(**plan.hardware.offload)


@dataclass
class _OverStore:
    """Makes layers whose neurons stay in ``store`` (``index_of``: layer key -> its number there); each takes its
    predictor out of ``predictors``. ``dividing``: the group whose processes divide its neurons.
    """

    store: Store
    index_of: Mapping[str, int]
    predictors: dict[str, Any]
    int8_activations: bool
    dividing: Membership | None

    def layer(self, layer: LayerPlan, weights: QuantizedWeights, kind: torch.dtype) -> SparseFFN:
        """See :data:`torch_pi2.checkpoint.sparse.MakeLayer`."""
        key = layer.site.key
        tensors, threshold = predictor_tensors(self.predictors.pop(key, None))
        where, operand = (self.store, self.index_of[key], layer.site, layer), weights.operand_of(key)
        how: Any = {"int8_activations": self.int8_activations, "dtype": DTYPES.get(weights.kind, kind)}
        made_by = OffloadedFFN if self.dividing is None else ShardedFFN
        made = made_by.over(*where, operand, lowrank=tensors, threshold=threshold, **how)
        if self.dividing is not None and isinstance(made, ShardedFFN):
            made.share = self.dividing.share(key)
        return made

    def experts(self, parts: Iterable[SparseFFN], group: Sequence[LayerPlan]) -> SparseExperts:
        """See :data:`torch_pi2.checkpoint.sparse.MakeExperts`."""

        def copied() -> Iterator[SparseFFN]:
            for layer, part in zip(group, parts, strict=True):
                self.predictors.pop(layer.site.key, None)
                yield part

        key = group[0].site.key
        if self.dividing is None:
            return OffloadedExperts(copied(), len(group), self.store, self.index_of[key])
        made = ShardedExperts(copied(), len(group), self.store, self.index_of[key])
        made.share = self.dividing.share(key)
        return made


def _check_lossy(plan: Plan, offload: OffloadConfig) -> None:
    """Warn that results are lossy. Raises ConfigError: no layer can leave out neurons, or the engine cannot do so."""
    predicted = sum(y.method == Method.LOWRANK and y.site.experts is None for y in plan.layers)
    mixtures = len({layer.site.experts for layer in plan.layers} - {None})
    for setting, layers, those in (
        ("miss_margin", predicted, "layers with low-rank predictors (method='lowrank'; not experts)"),
        ("drop_experts", mixtures, "mixtures of experts"),
    ):
        value = getattr(offload, setting)
        if value <= 0:
            continue
        methods = ", ".join(sorted({layer.method for layer in plan.layers}))
        expected, found, fix = "", "", "Leave it out, or load another store."
        if layers == 0:
            expected, found = those, f"methods {methods} and {mixtures} mixtures"
        elif offload.engine == "mmap":
            expected, found = "engine io_uring, pread or auto", "mmap, where only the system knows what is in memory"
        if expected:
            raise ConfigError(f"OffloadConfig.{setting}", expected=expected, found=found, fix=fix)
        log.warning(
            "lossy: %d %s leave out what matters least of what is not in memory (OffloadConfig.%s=%g); "
            "torch-pi2 eval measures what that costs",
            *(layers, those, setting, value),
        )


def _route_early(model: nn.Module) -> None:
    """Evaluate each mixture's router during the previous mixture, if it is a single linear layer."""
    unknown, before, called = [], None, called_modules(model)
    for experts in homes(model):
        if not isinstance(experts, OffloadedExperts):
            continue
        name = experts.site.key
        if before is not None and before.site.hidden == experts.site.hidden:
            block = model.get_submodule(name.rpartition(".")[0])
            beside = [called[m] for m in block.modules() if isinstance(m, OffloadedFFN)]
            router = find_router(block, called[experts], len(experts.sites), beside)
            if router is None:
                unknown.append(name)
            else:
                experts.announce(router, before)
        before = experts
    if unknown:
        log.warning(
            "OffloadConfig(lookahead=True): no early routing of %s: expected a router that is one linear layer with a "
            "top k of its scores, found another. Their experts are read when they are reached.",
            ", ".join(unknown),
        )


def own_predictors(shard: Shard, plan: Plan, predictors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of the ``predictors``, in the model's neuron order, that the layers of ``shard`` need, by name."""
    found: dict[str, Any] = {}
    for layer in plan.layers:
        tensors, threshold = predictor_tensors(predictors.get(layer.site.key))
        if tensors is None or not shard.layers[layer.site.key].chunks:
            continue
        here = layer.order.long()[shard.layers[layer.site.key].positions()]
        if layer.method not in PREDICTED:  # a SparseMethod, of which only ``bias_H`` is used
            found[layer.site.key] = tensors
            continue
        own = {name: tensor[here] if name in PER_NEURON else tensor for name, tensor in tensors.items()}
        found[layer.site.key] = {**own, "threshold": threshold}
    return found
