"""What parts of a model over a store take of a memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_pi2.ops.constants import chunk_neurons, constants
from torch_pi2.store.superblock import SECTOR, LayerEntry
from torch_pi2.types.budget import PIECE_TOKENS, SLOT_BYTES
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import LayerPlan

#: Bookkeeping per neuron: its order twice (int64) and in the plan (int32), pointer, key and checksum.
_NEURON_BYTES = 2 * 8 + 4 + 8 + 4 + 4
#: What a policy remembers of a neuron, in the cache or not.
_POLICY_BYTES = {"s3-fifo": 4, "lfu": 1}


def place_bytes(entries: Sequence[LayerEntry], config: OffloadConfig) -> int:
    """What a slot of a store takes in the cache, the largest of all layers.

    As the core rounds it: what is read past the page cache goes straight to its place, in whole sectors.
    """
    unit = SECTOR if config.direct else 64
    return max(-(-entry.cluster * entry.neuron_bytes // unit) * unit for entry in entries)


def engine_bytes(entries: Sequence[LayerEntry], config: OffloadConfig) -> tuple[int, int, int]:
    """What the engine of a store has beside its cache, in bytes.

    Returns:
        Staging, where neurons go that a full cache has no room for; bookkeeping of all neurons; and of all slots, if
        the cache holds them all.
    """
    spares = max(
        min(config.in_flight, constants().chunks) * max(map(_chunk_slots, entries)), max(map(_prompt_slots, entries))
    )
    neurons = sum(entry.neurons for entry in entries)
    return (
        0 if config.engine == "mmap" else spares * max(entry.slot_bytes for entry in entries),
        neurons * (_NEURON_BYTES + _POLICY_BYTES.get(config.policy, 0)),
        sum(entry.slots_in_file for entry in entries) * SLOT_BYTES,
    )


def _chunk_slots(entry: LayerEntry) -> int:
    """Slots of a chunk of neurons."""
    return -(-min(entry.neurons, entry.chunk or chunk_neurons(entry.neurons)) // entry.cluster)


def _prompt_slots(entry: LayerEntry) -> int:
    """Slots of a prompt's chunk."""
    return -(-min(entry.neurons, constants().prompt_neurons) // entry.cluster)


def predictor_bytes(predictor: Any, layer: LayerPlan) -> int:
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
    heads = 1 if getattr(model_config, "multi_query", False) else heads or model_config.num_attention_heads
    width = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
    return int(2 * layers * heads * width * context * dtype.itemsize)


def piece_tokens(context: int) -> int:
    """Tokens of a prompt that are read at a time by a model with room for ``context`` tokens."""
    return max(constants().pass_tokens, min(PIECE_TOKENS, context))
