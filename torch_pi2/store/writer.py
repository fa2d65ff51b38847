"""The writer of neuron stores: contents, order and offsets (docs/STORE.md)."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.crc32c import block_checks, check_bytes, crc32c
from torch_pi2.base.reading import PIECE
from torch_pi2.base.tensorfile import Spec, TensorWriter, in_file_order
from torch_pi2.errors import ArtifactError
from torch_pi2.formats import formats_of, neuron_shape, row_bytes
from torch_pi2.store import superblock as superblocks
from torch_pi2.store.storefile import SHARD, STORE_FORMAT, SUPERBLOCK, format_fields, store_version
from torch_pi2.store.weights import BLOCKS
from torch_pi2.types.method import PREDICTED
from torch_pi2.types.plan import Plan
from torch_pi2.types.shard import Shard
from torch_pi2.types.site import FFNSite

#: Largest slot of several neurons, in bytes: devices read this size at full speed.
_CLUSTER_BYTES = 1 << 18


@dataclass(frozen=True)
class StoreLayer:
    """A layer of a store that is being written. ``n_hot``: number of leading neurons that are computed densely.
    ``format``: such as ``int4``, or a pair such as ``q4_k+int8``. ``read``: first, last -> neurons in plan order, ``[n,
    ...]`` of any dtype.
    """

    site: FFNSite
    n_hot: int
    format: str
    read: Callable[[int, int], torch.Tensor]
    #: Whether the first rows of its neurons lie apart from their slots: what fires is known from them.
    apart: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of its tensors: slots, checksums, and gates that lie apart."""
        names = ("bundles", "checks", "gates") if self.apart else ("bundles", "checks")
        return tuple(f"{self.site.key}.{name}" for name in names)

    @property
    def gate_bytes(self) -> int:
        """Bytes of a neuron's first row that lies apart."""
        return row_bytes(formats_of(self.format)[0], self.site.hidden) if self.apart else 0


class StoreAssembly:
    """A neuron store ready to be written: its tensors in file order, metadata and superblock.

    Args:
        plan: of the complete model. layers: of the store, in plan order.
        groups: tensors that are copied unchanged: plan, predictors and statistics, then weights. Each group is
            page-aligned.
        source: tensor name -> object with ``read_bytes(name, start, stop)``.
        weights: metadata of a weights file or store. provenance: origin of the store, as JSON.
        cluster: neurons per slot; None: chosen by plan and neuron size. shard: the neurons to write; None: all.

    Attributes:
        specs: all tensors. metadata: of the file.
        others: names of the tensors in ``groups``. slots: layer key -> distance between slots in bytes.
        neuron_bytes: layer key -> bytes per neuron in its slot.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[StoreLayer],
        groups: Sequence[Mapping[str, Spec]],
        source: Callable[[str], Any],
        weights: Mapping[str, str],
        provenance: str,
        *,
        cluster: int | None = None,
        shard: Shard | None = None,
    ) -> None:
        self._plan, self.layers, self._source, self._shard = plan, layers, source, shard
        self.neuron_bytes = {
            layer.site.key: math.prod(neuron_shape(layer.format, layer.site.rows_per_neuron, layer.site.hidden))
            - layer.gate_bytes
            for layer in layers
        }
        self.cluster = cluster or self._default_cluster()
        self.slots = {key: superblocks.slot_bytes(self.cluster * size) for key, size in self.neuron_bytes.items()}
        self.specs: dict[str, Spec] = {}
        self.others: list[str] = []
        self._paddings: list[str] = []
        self._end = 0
        self._place(groups)
        self.metadata = {name: text for name, text in weights.items() if name not in (SHARD, BLOCKS)} | {
            "pi2_format": STORE_FORMAT,
            "pi2_version": store_version(weights, any(layer.apart for layer in layers)),
            "layers": json.dumps([layer.site.key for layer in layers]),
            "orders_hash": plan.orders_hash,
            "provenance": provenance,
        }
        if shard is not None:
            self.metadata[SHARD] = shard.to_json()

    def _default_cluster(self) -> int:
        """One size for all layers, because a cache entry has to fit any slot."""
        if any(layer.method in PREDICTED for layer in self._plan.layers):
            return 1
        most = max(1, min(superblocks.MOST_CLUSTER, _CLUSTER_BYTES // max(self.neuron_bytes.values())))
        return 1 << (most.bit_length() - 1)

    def _place(self, groups: Sequence[Mapping[str, Spec]]) -> None:
        self._add(SUPERBLOCK, superblocks.superblock_bytes(len(self.layers)))
        for layer in self.layers:
            self._to_page()
            self._add(layer.tensors[0], -(-layer.site.intermediate // self.cluster), self.slots[layer.site.key])
            if layer.apart:
                self._to_page()
                self._add(layer.tensors[2], layer.site.intermediate, layer.gate_bytes)
        if self.layers[-1].apart:
            self._to_page()
        for layer in self.layers:
            pages = -(-layer.site.intermediate * layer.gate_bytes // superblocks.PAGE)
            self._add(layer.tensors[1], 4 * (layer.site.intermediate + pages))
        for group in groups:
            names = in_file_order(group)
            if names:
                self._to_page()
            for name in names:
                self._put(name, group[name])
            self.others += names

    def _put(self, name: str, spec: Spec) -> None:
        self.specs[name] = spec
        self._end += spec.nbytes

    def _add(self, name: str, *shape: int) -> None:
        self._put(name, Spec(shape, torch.uint8))

    def _to_page(self) -> None:
        if self._end % superblocks.PAGE:
            self._paddings.append(f"pi2.padding.{len(self._paddings)}")
            self._add(self._paddings[-1], -self._end % superblocks.PAGE)

    def writer(self, path: Path, *, progress: bool) -> TensorWriter:
        """The file ``path``, for :meth:`write`."""
        order = list(self.specs)
        return TensorWriter(path, self.specs, self.metadata, progress=progress, order=order, checked=self.others)

    def superblock(self, out: TensorWriter) -> superblocks.Superblock:
        """The superblock of the file ``out``, which has all offsets."""
        entries = []
        for layer in self.layers:
            site, (slots, checks, *gates) = layer.site, layer.tensors
            entries.append(
                superblocks.LayerEntry(
                    slots=out.offset(slots),
                    checks=out.offset(checks),
                    neurons=site.intermediate,
                    hidden=site.hidden,
                    rows=site.rows_per_neuron,
                    slot_bytes=self.slots[site.key],
                    n_hot=layer.n_hot,
                    layer=site.layer,
                    cluster=self.cluster,
                    chunk=0 if self._shard is None else self._shard.layers[site.key].chunk,
                    gates=out.offset(gates[0]) if gates else 0,
                    **format_fields(layer.format, site.hidden),
                )
            )
        try:
            model_hash = superblocks.hash_bytes(self._plan.model_hash)
        except ValueError as error:
            fix = "Make the folder again."
            expected, found = "a hexadecimal model_hash", repr(self._plan.model_hash)
            raise ArtifactError("the plan of a store", expected=expected, found=found, fix=fix) from error
        return superblocks.Superblock(out.file_bytes, model_hash, tuple(entries))

    def write(self, out: TensorWriter, superblock: superblocks.Superblock) -> None:
        """Write everything into ``out``, from :meth:`writer`, a few MB at a time."""
        out.write(SUPERBLOCK, torch.frombuffer(bytearray(superblock.pack()), dtype=torch.uint8))
        for name in self._paddings:
            out.write(name, torch.zeros(self.specs[name].shape, dtype=torch.uint8))
        for layer in self.layers:
            self._write_slots(layer, out)
        for name in self.others:
            out.copy_from(self._source(name), name)

    def _write_slots(self, layer: StoreLayer, out: TensorWriter) -> None:
        slots_name, checks_name, *gates_name = layer.tensors
        n_slots, per_slot = self.specs[slots_name].shape
        step = max(1, PIECE // per_slot)
        checks, gates = [], list[torch.Tensor]()
        for slot in range(0, n_slots, step):
            count = min(step, n_slots - slot)
            first, last = slot * self.cluster, min((slot + count) * self.cluster, layer.site.intermediate)
            neuron_rows = layer.read(first, last).flatten(1).contiguous().view(torch.uint8)
            if layer.apart:
                gates.append(neuron_rows[:, : layer.gate_bytes].clone())
                neuron_rows = neuron_rows[:, layer.gate_bytes :].contiguous()
            checks.append(crc32c(neuron_rows))
            slots = torch.zeros((count, per_slot), dtype=torch.uint8)
            whole, size = (last - first) // self.cluster, neuron_rows.shape[1]
            slots[:whole, : self.cluster * size] = neuron_rows[: whole * self.cluster].reshape(
                whole, self.cluster * size
            )
            if whole < count:  # the layer's last slot has fewer neurons
                rest = neuron_rows[whole * self.cluster :].flatten()
                slots[whole, : len(rest)] = rest
            out.write(slots_name, slots, row=slot)
        if layer.apart:
            out.write(gates_name[0], rows := torch.cat(gates))
            checks.append(block_checks(rows.flatten()))
        out.write(checks_name, check_bytes(torch.cat(checks)))
