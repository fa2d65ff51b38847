"""Bytes of weights and KV cache that one decoded token reads; and the memory roofline: plain reads of as many."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops import load

#: Larger than any cache.
BYTES = 1 << 30


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def fixed_bytes(model: nn.Module, head: nn.Module | None) -> dict[str, int]:
    """Bytes that every token reads: ``attention`` (all linears but ``head``), ``head``, ``predictor``, ``embedding``.

    Norms and biases count where they are; an embedding counts one row, a mixture the experts of a token.
    """
    parts = dict.fromkeys(("attention", "head", "predictor", "embedding"), 0)
    for module in model.modules():
        tensors = _tensors(module)
        if isinstance(module, SparseFFN | SparseExperts):
            predictor = sum(t.nbytes for name, t in tensors.items() if name.startswith("predictor_"))
            parts["predictor"] += round(predictor * _chosen_share(model, module))
        elif isinstance(module, nn.Embedding):
            parts["embedding"] += module.weight[0].nbytes
        else:
            parts["head" if module is head else "attention"] += sum(t.nbytes for t in tensors.values())
    return parts


def _chosen_share(model: Any, module: SparseFFN | SparseExperts) -> float:
    """Share of its experts that a token goes through."""
    if not isinstance(module, SparseExperts):
        return 1.0
    chosen = getattr(model.config, "num_experts_per_tok", None)
    return (chosen or len(module.sites)) / len(module.sites)


def ffn_row_bytes(model: nn.Module) -> float:
    """Mean bytes of one gate row, up row or down column over the sparse layers, weighted by their neurons."""
    layers = sparse_layers(model)
    rows = sum(layer.neuron_rows.shape[0] * layer.site.rows_per_neuron for layer in layers)
    return sum(layer.neuron_rows.nbytes for layer in layers) / rows if rows else 0.0


def ffn_rows(counters: Mapping[str, int]) -> int:
    """Matrix rows and columns that were used, by the counters."""
    return counters["gate_rows"] + counters["up_rows"] + counters["down_rows"]


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values of a static cache, and of recurrent states."""
    kept = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    kept += [t for layer in cache.layers for t in getattr(layer, "bound", {}).values()]
    return sum(t.nbytes for t in kept if t is not None)


class Memory:
    """A buffer of at least ``size`` bytes as neurons of ``neuron_bytes``, read by plain loads on torch's threads.

    Args:
        share: of the neurons that a gathered read takes, in ascending order, drawn anew each time.
    """

    def __init__(self, neuron_bytes: int, share: float, *, size: int = BYTES, seed: int = 0) -> None:
        load()
        self._neuron_rows = torch.empty((-(-size // neuron_bytes), neuron_bytes), dtype=torch.uint8)
        torch.ops.pi2.advise_huge_pages(self._neuron_rows)
        self._neuron_rows.fill_(1)  # a page never written is one page of zeros, read from cache
        self._generator = torch.Generator().manual_seed(seed)
        self._count = max(1, round(len(self._neuron_rows) * share))

    def read_gb_per_s(self) -> float:
        """One pass over everything."""
        started = time.perf_counter()
        torch.ops.pi2.plain_read(self._neuron_rows, None)
        return self._neuron_rows.nbytes / (time.perf_counter() - started) / 1e9

    def gather_gb_per_s(self) -> float:
        """A random set of neurons, after the pass above: nothing of it is in a cache."""
        ids = torch.randperm(len(self._neuron_rows), generator=self._generator)[: self._count].sort().values
        started = time.perf_counter()
        torch.ops.pi2.plain_read(self._neuron_rows, ids)
        return self._count * self._neuron_rows.shape[1] / (time.perf_counter() - started) / 1e9
