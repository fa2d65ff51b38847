"""What a neuron store has in it, in which order, and where (docs/FORMATS.md): whoever writes one writes it by this."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch

from torch_pi2.base.tensorfile import Spec, TensorWriter, in_file_order
from torch_pi2.formats import neuron_shape
from torch_pi2.store.slots import cluster_size, layer_entry
from torch_pi2.store.storefile import SHARD, STORE_FORMAT, SUPERBLOCK, metadata_check, store_version
from torch_pi2.store.superblock import PAGE, Superblock, hash_bytes, slot_bytes, superblock_bytes
from torch_pi2.types.plan import Plan
from torch_pi2.types.shard import Shard
from torch_pi2.types.site import FFNSite

#: Stands in the header until all is written.
_NO_CHECK = "0" * 8


class Layout:
    """Tensors in the order of the file, with padding so that the neurons of a layer, and each group, begin on pages.

    Args:
        plan: of the model. layers: of the store, how many neurons of each are computed densely, and in which format
            (or which two) they are. groups: tensors that are copied as they are: plan, predictors and statistics,
            then weights. cluster, align: as in :func:`torch_pi2.pack`; None: what suits the plan, and the neurons.
        shard: which neurons ``layers`` are of those of ``plan``; None: all.

    Attributes:
        specs: all tensors. others: the names of those in ``groups``. slots: by layer, bytes from one to the next.
        neuron_bytes: by layer.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[tuple[FFNSite, int, str]],
        groups: Sequence[Mapping[str, Spec]],
        cluster: int | None = None,
        align: int | None = None,
        shard: Shard | None = None,
    ) -> None:
        self._plan, self._layers, self._shard = plan, layers, shard
        sites = [site for site, *_ in layers]
        self.neuron_bytes = {
            site.key: math.prod(neuron_shape(kind, site.rows_per_neuron, site.hidden)) for site, _, kind in layers
        }
        self.cluster = cluster or cluster_size(plan, max(self.neuron_bytes.values()))
        self.slots = {key: slot_bytes(self.cluster * size, align) for key, size in self.neuron_bytes.items()}
        self.specs: dict[str, Spec] = {}
        self.others: list[str] = []
        self._paddings: list[str] = []
        self._end = 0
        self._add(SUPERBLOCK, superblock_bytes(len(sites)))
        for site in sites:
            self._to_page()
            self._add(f"{site.key}.bundles", -(-site.intermediate // self.cluster), self.slots[site.key])
        for site in sites:
            self._add(f"{site.key}.checks", 4 * site.intermediate)
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
        if self._end % PAGE:
            self._paddings.append(f"pi2.padding.{len(self._paddings)}")
            self._add(self._paddings[-1], -self._end % PAGE)

    def metadata(self, weights: Mapping[str, str], provenance: str) -> dict[str, str]:
        """Of the store, from that of a file of ``weights``; the checksums of ``others`` come when they are written."""
        found = dict(weights) | {
            "pi2_format": STORE_FORMAT,
            "pi2_version": store_version(weights),
            "layers": json.dumps([site.key for site, *_ in self._layers]),
            "orders_hash": self._plan.orders_hash,
            "checks": json.dumps(dict.fromkeys(self.others, _NO_CHECK)),
            "provenance": provenance,
        }
        found.pop(SHARD, None)
        if self._shard is not None:
            found[SHARD] = self._shard.to_json()
        return found | {"metadata_check": metadata_check(found)}

    def superblock(self, out: TensorWriter) -> Superblock:
        """Of the file, now that ``out`` knows where everything is. Raises ValueError for a model hash that is none."""
        entries = (
            layer_entry(site, hot, kind, self.cluster, self.slots[site.key], self._chunk(site.key), out)
            for site, hot, kind in self._layers
        )
        return Superblock(out.file_bytes, hash_bytes(self._plan.model_hash), tuple(entries))

    def _chunk(self, key: str) -> int:
        return 0 if self._shard is None else self._shard.layers[key].chunk

    def begin(self, out: TensorWriter, superblock: bytes) -> None:
        """Write ``superblock``, and zeros where there is nothing."""
        out.write(SUPERBLOCK, torch.frombuffer(bytearray(superblock), dtype=torch.uint8))
        for name in self._paddings:
            out.write(name, torch.zeros(self.specs[name].shape, dtype=torch.uint8))
