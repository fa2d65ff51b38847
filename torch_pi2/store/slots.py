"""Neurons as the slots of a store, with their checksums (docs/FORMATS.md)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_pi2.base.crc32c import crc32c
from torch_pi2.base.tensorfile import TensorWriter
from torch_pi2.store.storefile import PIECE, check_bytes, format_fields
from torch_pi2.store.superblock import MOST_CLUSTER, LayerEntry
from torch_pi2.types.method import PREDICTED
from torch_pi2.types.plan import Plan
from torch_pi2.types.site import FFNSite

#: Of a slot of clusters, at most: from here on devices read at full speed.
_CLUSTER_BYTES = 1 << 18


def cluster_size(plan: Plan, neuron_bytes: int) -> int:
    """Neurons of a slot. One size for all layers: a place in the cache has to fit any slot."""
    if any(layer.method in PREDICTED for layer in plan.layers):
        return 1
    return largest_cluster(neuron_bytes)


def largest_cluster(neuron_bytes: int) -> int:
    """Neurons of a slot where all are wanted together."""
    most = max(1, min(MOST_CLUSTER, _CLUSTER_BYTES // neuron_bytes))
    return 1 << (most.bit_length() - 1)


def layer_entry(
    site: FFNSite, n_hot: int, kind: str, cluster: int, slot: int, chunk: int, out: TensorWriter
) -> LayerEntry:
    """The superblock's entry of a layer, whose slots of ``slot`` bytes and checksums ``out`` declares."""
    return LayerEntry(
        slots=out.offset(f"{site.key}.bundles"),
        checks=out.offset(f"{site.key}.checks"),
        neurons=site.intermediate,
        hidden=site.hidden,
        rows=site.rows_per_neuron,
        slot_bytes=slot,
        n_hot=n_hot,
        layer=site.layer,
        cluster=cluster,
        chunk=chunk,
        **format_fields(kind, site.hidden),
    )


def write_slots(
    key: str, neurons: int, read: Callable[[int, int], torch.Tensor], out: TensorWriter, cluster: int
) -> None:
    """Write ``KEY.bundles`` and ``KEY.checks``, as ``out`` declares them.

    Args:
        read: first, last -> the rows of neurons ``[first, last)`` in plan order, ``[n, ...]`` of any dtype.
    """
    n_slots, per_slot = out.specs[f"{key}.bundles"].shape
    step = max(1, PIECE // per_slot)
    checks = []
    for slot in range(0, n_slots, step):
        count = min(step, n_slots - slot)
        first, last = slot * cluster, min((slot + count) * cluster, neurons)
        neuron_rows = read(first, last).flatten(1).contiguous().view(torch.uint8)
        checks.append(crc32c(neuron_rows))
        slots = torch.zeros((count, per_slot), dtype=torch.uint8)
        whole, size = (last - first) // cluster, neuron_rows.shape[1]
        slots[:whole, : cluster * size] = neuron_rows[: whole * cluster].reshape(whole, cluster * size)
        if whole < count:  # the layer's last, of fewer neurons
            rest = neuron_rows[whole * cluster :].flatten()
            slots[whole, : len(rest)] = rest
        out.write(f"{key}.bundles", slots, row=slot)
    out.write(f"{key}.checks", check_bytes(torch.cat(checks)))
