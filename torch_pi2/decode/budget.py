"""Where ``budget=`` becomes bytes: the neuron cache gets what the parts that must stay in memory leave.

:func:`divide_budget` divides the budget when a model is loaded, and :func:`set_budget` changes it later.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.fields import checked
from torch_pi2.base.memory import give_back_freed_memory
from torch_pi2.base.progress import log
from torch_pi2.base.units import mebibytes, parse_bytes
from torch_pi2.errors import ConfigError
from torch_pi2.graph.routed import chosen_shares
from torch_pi2.layers.offloaded import InStore
from torch_pi2.ops.constants import chunk_neurons, constants, lists
from torch_pi2.rewrite.state import ModelState, get_state, store_and_budget, store_of
from torch_pi2.store.storefile import StoreReader
from torch_pi2.store.superblock import SECTOR, LayerEntry
from torch_pi2.types.method import PREDICTED
from torch_pi2.types.offload import PIECE_TOKENS, SLOT_BYTES, Budget, OffloadConfig
from torch_pi2.types.plan import LayerPlan, Plan

#: Bookkeeping of a neuron: its order twice (int64) and in the plan (int32), pointer, key and checksum.
_NEURON_BYTES = 2 * 8 + 4 + 8 + 4 + 4
#: Python objects, stacks of reading threads, and memory that the allocator keeps.
_OBJECT_BYTES = 8 << 20
#: Settings to lower where a budget is too small.
LESS = "context or OffloadConfig.in_flight"
#: Measured memory for compiling a step: per layer, and fixed.
_COMPILED_LAYER_BYTES, _COMPILER_BYTES = 8 << 20, 32 << 20


@checked
def set_budget(model: nn.Module, budget: float | str) -> Budget:
    """Change the budget of a model over a store (:func:`torch_pi2.load` with a budget) while it is in use.

    Only the size of the neuron cache changes; results keep their bits. Memory of evicted neurons goes back to the
    system. A cache that grows is filled with the most frequent neurons if the model was loaded with
    ``OffloadConfig.preload``. Calls in other threads finish their layer first. The cache of a model that follows a plan
    (:func:`torch_pi2.follow`) is never larger than planned. Copies of a model (``copy.deepcopy``) share its store and
    budget.

    Args:
        budget: bytes, or text such as ``"2.5GiB"``; at most the budget with which the model was loaded, unless all
            neurons fit in that.

    Returns:
        How it is divided, as in :func:`torch_pi2.stats`.

    Raises:
        ConfigError: the model has no store, or its engine is ``mmap``; the budget is too small, or larger than at
            loading. The model is unchanged.
        ArtifactError: the neurons that fill the cache cannot be read, or the store has been closed.
    """
    store, parts = store_and_budget(model)
    total, plan = parse_bytes(budget), get_state(model).plan
    made = parts
    if any(layer.gate_decides for layer in plan.layers):
        with StoreReader(store.path) as reader:
            made = with_gates(replace(parts, total=total), reader, plan, model.config, store.config)
    made = made.with_total(total, store.path.parent.parent)
    if made.cache > store.opened_bytes:
        most = parts.smallest + parts.in_slots(store.opened_bytes)
        what, expected = f"budget for {store.path.parent.parent}", f"at most {mebibytes(most)}, as it was loaded"
        fix = "Load the model with the largest budget that it is going to have."
        raise ConfigError(what, expected=expected, found=mebibytes(made.total, up=True), fix=fix)
    if made.gates < parts.gates:
        place_gates(model, store.path, plan, made.gates)
    store.resize(made.cache)
    if made.gates > parts.gates:
        place_gates(model, store.path, plan, made.gates)
    store.budget, store.limited = made, True
    handle = ModelState.of(model)
    if handle is not None and handle.controller is not None:
        handle.controller.refresh()
    if made.cache > parts.cache and store.config.preload:
        store.preload()
    if made.cache < min(made.token, made.neurons):
        _warn_below_cliff(made, store.path.parent.parent)
    return made


class Stats(dict[str, Any]):
    """The result of :func:`stats`: a dictionary that prints as a readable line."""

    @property
    def generated(self) -> bool:
        """Whether anything was computed since the last reset; otherwise rates are None."""
        return bool(self["wanted"])

    def __str__(self) -> str:
        size = f"{self['cache_bytes'] / 2**20:.1f} MiB of cache"
        if not self.generated:
            return f"nothing generated yet ({size})"
        waited = "" if self["wait_share"] is None else f", {self['wait_share']:.1%} of the time waiting for them"
        if self["hit_rate"] is None:
            text = f"{self['wanted']} neurons were read where the system has the file (mmap)"
        else:
            text = f"{self['hit_rate']:.1%} of {self['wanted']} neurons were in the cache{waited} ({size})"
        missed = ((self["left_out"], "neurons"), (self["experts_left_out"], "choices of an expert"))
        left_out = [f"{count} {of} were left out (lossy)" for count, of in missed if count]
        return "; ".join([text, *left_out])


@checked
def stats(model: nn.Module, *, reset: bool = False) -> Stats:
    """Statistics of a model over a store (:func:`torch_pi2.load` with a budget) since the last reset.

    Returns:
        :meth:`Store.stats`, and:
        ``hit_rate``: share of the wanted neurons that were in the cache (None for the engine ``mmap``, which has none);
        ``wait_share``: share of compute threads' time in layers that was spent waiting for neurons;
        ``budget``: a :class:`~torch_pi2.types.offload.Budget`; ``store``: the :class:`Store`;
        ``simulated``: whether reads are as slow as a described device's (``late`` of them took longer).

    Raises:
        ConfigError: the model has no store.
    """
    store, budget = store_and_budget(model)
    found: dict[str, Any] = store.stats(reset=reset)
    return Stats(
        found,
        hit_rate=found["hits"] / found["wanted"] if found["wanted"] and store.config.engine != "mmap" else None,
        wait_share=found["wait_ns"] / found["busy_ns"] if found["busy_ns"] else None,
        budget=budget,
        store=store,
        simulated=store.device is not None,
    )


def divide_budget(
    budget_bytes: int,
    store: StoreReader,
    plan: Plan,
    predictors: Mapping[str, Any],
    model_config: Any,
    *,
    config: OffloadConfig,
    context: int,
    dtype: torch.dtype,
) -> Budget:
    """Divide ``budget_bytes`` among the parts of a model over a store. ``predictors``: by the key of the site, with
    ``tensors()``. ``model_config``: of Hugging Face. ``context``: tokens whose keys and values the budget includes.
    ``dtype``: of keys, values and float weights. Raises ConfigError: too small; the message has the smallest that is
    enough.
    """
    if context < 0:
        raise ConfigError("context", expected="0 or more tokens", found=str(context), fix="Correct it.")
    neuron_rows = {f"{key}.{what}" for key in store.keys for what in ("bundles", "gates")}
    ours = ("pi2.", *(f"{key}.checks" for key in store.keys))
    sizes = {
        name: (dtype.itemsize if spec.dtype.is_floating_point else 1) * (spec.nbytes // spec.dtype.itemsize)
        for name, spec in store.specs.items()
        if name not in neuron_rows and not name.startswith(ours)
    }
    kv = kv_bytes(model_config, context, dtype)
    if store.shard is not None:  # which has keys and values of its own blocks
        blocks: int = model_config.get_text_config().num_hidden_layers
        kv = kv * len(store.shard.blocks(blocks)) // blocks
    slot = place_bytes(store.entries, config)
    count = sum(entry.slots_in_file for entry in store.entries)
    staging, tables, _ = engine_bytes(store.entries, config)
    if config.engine != "mmap":  # gates that are read for a call
        several = (constants().gate_buffers if layer.site.experts else 1 for layer in plan.layers)
        staging += max(entry.gate_bytes * count for entry, count in zip(store.entries, several))
    parts = {
        "fixed": sum(sizes.values()),
        "predictors": sum(predictor_bytes(predictors.get(layer.site.key)) for layer in plan.layers),
        "kv": kv,
        "staging": staging,
        "activations": activation_bytes(store.entries, activation_sizes(model_config, dtype), context),
        "neuron_tables": tables + sum(y.thresholds.nbytes for y in plan.layers if y.thresholds is not None),
    }
    if budget_bytes < sum(parts.values()):
        needed = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in parts.items())
        what = f"budget for {store.path.parent.parent}"
        expected = f"at least {mebibytes(sum(parts.values()), up=True)} ({needed})"
        raise ConfigError(what, expected=expected, found=mebibytes(budget_bytes), fix=f"Give it more, or lower {LESS}.")
    found = {"cache": 0, "neurons": count * slot, "token": 0, "slot": slot}
    made = Budget(total=budget_bytes, **parts, **found, context=context, piece_tokens=piece_tokens(context))
    made = with_gates(made, store, plan, model_config, config)
    if made.cache < min(made.token, made.neurons) and config.engine != "mmap":
        _warn_below_cliff(made, Path(store.path).parent.parent)
    return made


def with_gates(budget: Budget, store: StoreReader, plan: Plan, model_config: Any, config: OffloadConfig) -> Budget:
    """``budget`` with the gates that pay, the cache that they leave, and what a token then wants of it."""
    left, whole = budget.total - budget.smallest + budget.gates, budget.in_slots(budget.neurons)
    chosen = chosen_shares(model_config, [layer.site for layer in plan.layers])

    def wanted(gates: Mapping[int, int]) -> float:
        return sum(
            chosen.get(layer.site.experts, 1.0)
            * -(-wanted_neurons(layer, entry.gates > 0 or index in gates) // entry.cluster)
            for index, (layer, entry) in enumerate(zip(plan.layers, store.entries))
        )

    apart = any(entry.gates for entry in store.entries)  # they are read in any case

    gates: dict[int, int] = {}
    if store.shard is None and (apart or left < whole) and config.engine != "mmap":
        gates = kept_gates(store.entries, plan, left, beside=True)
        # with gates fewer neurons are wanted, but fewer are in memory
        if not apart and wanted(gates) * (whole - left + sum(gates.values())) >= wanted({}) * (whole - left):
            gates = {}
    made = replace(budget, gates=sum(gates.values()), token=budget.slot * math.ceil(wanted(gates)))
    return made.with_total(budget.total, Path(store.path).parent.parent)


def kept_gates(entries: Sequence[LayerEntry], plan: Plan, room: int, beside: bool = False) -> dict[int, int]:
    """Number -> bytes of the layers whose gates are kept in ``room`` bytes: those that every token needs come first.
    ``beside``: the other rows of these layers, which more tokens want than an expert's gates, need the room, too.
    """
    gates: dict[int, int] = {}
    sizes = [gate_bytes(entry, layer) for entry, layer in zip(entries, plan.layers)]
    routed = [layer.site.experts is not None for layer in plan.layers]
    slots = sum((e.slot_bytes + SLOT_BYTES) * e.slots_in_file for e, expert in zip(entries, routed) if not expert)
    slots *= beside
    for index in sorted(range(len(entries)), key=routed.__getitem__):
        if 0 < sizes[index] <= room - slots * routed[index]:
            gates[index] = sizes[index]
            room -= sizes[index]
    return gates


def place_gates(model: nn.Module, path: Path, plan: Plan, gates: int) -> None:
    """Let the layers of ``model`` over the store at ``path`` keep ``gates`` bytes of gate rows, as :func:`with_gates`
    has divided them, and no others.
    """
    homes = {module.site.key: module for module in model.modules() if isinstance(module, InStore)}
    with StoreReader(path) as store:
        kept = kept_gates(store.entries, plan, gates)
        places = [layer.site.experts or layer.site.key for layer in plan.layers]
        for key, module in homes.items():
            module.keep_gates([index for index in kept if places[index] == key], store)


def gate_bytes(entry: LayerEntry, layer: LayerPlan) -> int:
    """Bytes of the rows that say exactly which neurons of a layer fire; 0: keeping them in memory would not pay."""
    decides = entry.gates or (layer.gate_decides and entry.cluster == 1)
    return entry.neurons * entry.row_bytes if decides else 0


def _warn_below_cliff(budget: Budget, folder: Path) -> None:
    cache, token, enough = mebibytes(budget.cache), mebibytes(budget.token), mebibytes(budget.cliff, up=True)
    log.warning(
        "%s: the cache of %s holds less than the %s of neurons that a token wants on average; much of it comes from "
        "flash for each token. From a budget of %s on it would not.",
        *(folder, cache, token, enough),
    )


def place_bytes(entries: Sequence[LayerEntry], config: OffloadConfig) -> int:
    """Size of a cache slot, the largest of all layers, rounded as in the core (direct reads fill whole sectors)."""
    unit = SECTOR if config.direct else 64
    return max(-(-entry.cluster * entry.neuron_bytes // unit) * unit for entry in entries)


def engine_bytes(entries: Sequence[LayerEntry], config: OffloadConfig) -> tuple[int, int, int]:
    """Bytes of a store's engine beside its cache: staging for neurons that a full cache cannot take, bookkeeping of all
    neurons, and bookkeeping of slots if the cache holds all neurons.
    """
    core = constants()

    def slots(neurons: Callable[[LayerEntry], int]) -> int:
        return max(-(-min(entry.neurons, neurons(entry)) // entry.cluster) for entry in entries)

    chunk = slots(lambda entry: entry.chunk or chunk_neurons(entry.neurons))
    spares = max(min(config.in_flight, core.chunks) * chunk, slots(lambda _: core.prompt_neurons))
    neurons = sum(entry.neurons for entry in entries)
    return (
        0 if config.engine == "mmap" else spares * max(entry.slot_bytes for entry in entries),
        neurons * (_NEURON_BYTES + lists().policies[config.policy]),
        sum(entry.slots_in_file for entry in entries) * SLOT_BYTES,
    )


def predictor_bytes(predictor: Any) -> int:
    if predictor is None:
        return 0
    tensors = predictor.tensors() if hasattr(predictor, "tensors") else predictor
    return sum(t.nbytes for t in tensors.values() if isinstance(t, torch.Tensor))


def kv_bytes(model_config: Any, context: int, dtype: torch.dtype) -> int:
    """Keys and values of ``context`` tokens of one sequence, in all layers."""
    if hasattr(model_config, "get_text_config"):
        model_config = model_config.get_text_config()
    layers = model_config.num_hidden_layers
    heads = getattr(model_config, "num_key_value_heads", None) or getattr(model_config, "num_kv_heads", None)
    of_queries = getattr(model_config, "num_attention_heads", 1)  # RWKV has none, and less than keys and values
    heads = 1 if getattr(model_config, "multi_query", False) else heads or of_queries
    width = getattr(model_config, "head_dim", None) or model_config.hidden_size // of_queries
    return int(2 * layers * heads * width * context * dtype.itemsize)


def piece_tokens(context: int) -> int:
    """Maximum tokens of a chunk of a prompt, for a model with ``context`` tokens."""
    return max(constants().pass_tokens, min(PIECE_TOKENS, context))


def wanted_neurons(layer: LayerPlan, decided: bool = False) -> int:
    """Mean number of neurons that a token reads in a layer: all of them if no predictor or gate in memory decides."""
    if layer.method not in PREDICTED and not decided:
        return layer.site.intermediate
    return layer.n_hot + round(layer.n_cold * layer.expected_active)


def activation_sizes(model_config: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Peak bytes of PyTorch's layers (without feed-forward layers). Per token: three hidden states, and the largest of
    a norm in float32, attention's queries, keys, values and results, and the experts' inputs and results in float32.
    Per pair of token and key: the mask, and with a soft cap, for which PyTorch has no fused attention, the scores.
    """
    if hasattr(model_config, "get_text_config"):
        model_config = model_config.get_text_config()
    hidden, size = model_config.hidden_size, dtype.itemsize
    heads = getattr(model_config, "num_attention_heads", 1)
    queries = heads * (getattr(model_config, "head_dim", None) or hidden // heads)
    keys = kv_bytes(model_config, 1, dtype) // (2 * model_config.num_hidden_layers)
    norm, attention = 8 * max(hidden, queries) + size * queries, 6 * size * queries + 4 * keys
    chosen = getattr(model_config, "num_experts_per_tok", None) or 0
    experts = 4 * hidden * (2 * chosen + 2) + size * hidden if chosen else 0
    scores = heads * (4 + size) if getattr(model_config, "attn_logit_softcapping", None) else 0
    return int(3 * size * hidden + max(norm, attention, experts)), 3 + size + scores


def activation_bytes(entries: Sequence[LayerEntry], sizes: tuple[int, int], context: int) -> int:
    """Memory of a prompt of ``context`` tokens without keys and values; ``sizes``: of :func:`activation_sizes`."""
    tokens = piece_tokens(context)
    hidden_states = tokens * (sizes[0] + sizes[1] * max(context, tokens))
    return hidden_states + max(scratch_bytes(entry, tokens) for entry in entries) + _OBJECT_BYTES


def scratch_bytes(entry: LayerEntry, tokens: int) -> int:
    """Memory of a layer's call (csrc/ffn: sparse_ffn.cc, panels.cc, predicted_ffn.cc): inputs, sums, ids and marks."""
    core = constants()
    tokens = min(tokens, core.prompt_tokens)
    tile, neurons = min(tokens, core.pass_tokens), core.prompt_neurons
    sums = max(core.chunks * tile * entry.hidden, (tokens + neurons) * entry.hidden + tile * neurons)
    ids = (2 * (tokens // tile + 1) + 1) * entry.neurons
    return 4 * (2 * tokens * entry.hidden + sums) + 8 * ids + min(core.mask_bytes, tokens * entry.neurons)


@contextmanager
def room_for_compiling(model: nn.Module) -> Iterator[None]:
    """While this is entered, shrink the neuron cache of a model over a store by the memory that compiling a step takes,
    and warn if that is not enough; then fill it again. Does nothing for a model in memory or without a budget.
    """
    in_use = store_of(model)
    if in_use is None or in_use.config.engine == "mmap" or not in_use.limited:
        yield
        return
    store, budget = store_and_budget(model)
    config: Any = model.config
    needed = _COMPILER_BYTES + _COMPILED_LAYER_BYTES * config.get_text_config().num_hidden_layers
    size = store.stats()["cache_bytes"]
    left = max(0, size - max(0, needed - (budget.total - budget.smallest - budget.in_slots(size))))
    missing = needed - (budget.total - budget.smallest - budget.in_slots(left))
    if missing > 0:
        store.warn_once(
            f"compiling a step may take {missing / 2**20:.0f} MiB more than the budget has room for, until it is done.",
            "compiling",
        )
    if left == size:
        yield
        return
    store.resize(left // budget.slot * budget.slot)
    try:
        yield
    finally:
        gc.collect()
        give_back_freed_memory()
        store.resize(size)
        if store.config.preload:
            store.preload()
