"""Reading ``pi2/model.pi2``, the neuron store: a model's weights with every neuron in a slot of its own.

It is a safetensors file that replaces ``weights.safetensors``, with the same metadata and tensors, except that neurons
are in checksummed slots that suit the device's block size, located by a superblock (docs/STORE.md). This is the Python
reader; the C++ core reads superblock and slots itself.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_pi2.base.crc32c import block_checks, crc32c
from torch_pi2.base.memory import new_tensor
from torch_pi2.base.progress import bar
from torch_pi2.base.reading import PIECE
from torch_pi2.base.tensorfile import Spec
from torch_pi2.errors import StaleArtifactError
from torch_pi2.formats import FORMATS, formats_of, has_two_formats, neuron_shape, row_bytes
from torch_pi2.store import weights as quantized
from torch_pi2.store.superblock import PAGE, SECTOR, LayerEntry, Superblock, hash_bytes
from torch_pi2.types.method import Method
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.shard import Shard
from torch_pi2.types.site import FFNSite

STORE_FILE = "model.pi2"
STORE_FORMAT = "torch_pi2.store"
#: Version 1, with plan, predictors and statistics in separate files, is no longer supported.
STORE_VERSIONS = ("2", "3", "4", "5")
#: Version of ``weights.safetensors`` -> version of a store with its metadata. 3: linear layers in several formats,
#: or a quantised embedding; 4: neurons in another format than the rest, or in two. 5: all that, and gates apart.
_STORE_VERSIONS_OF = {quantized.WEIGHTS_VERSION: "2", quantized.MIXED_VERSION: "3"}
_STORE_VERSIONS_OF |= {quantized.PAIRS_VERSION: "4", quantized.BLOCKS_VERSION: "4"}
SUPERBLOCK = "pi2.superblock"
#: Metadata key of stores with a shard.
SHARD = "shard"
PADDING = re.compile(r"pi2\.padding\.\d+")
#: Parts besides the weights: a text ``pi2.PART`` and tensors ``pi2.PART.NAME``. The plan is mandatory.
PARTS = ("plan", "predictors", "stats")
_PART = re.compile(rf"pi2\.({'|'.join(PARTS)})(?:\.|$)")


def weights_path(pi2: Path) -> Path | None:
    """The file with the quantised weights of a folder ``pi2/``, preferably its store; None: they are float."""
    return next((pi2 / name for name in (STORE_FILE, quantized.WEIGHTS_FILE) if os.path.lexists(pi2 / name)), None)


def open_weights(pi2: Path) -> quantized.QuantizedWeights:
    """Open that file. Raises ArtifactError: there is none, or it is damaged."""
    path = weights_path(pi2) or pi2 / quantized.WEIGHTS_FILE
    return StoreReader(path) if path.name == STORE_FILE else quantized.QuantizedWeights(path)


def store_version(weights: Mapping[str, str], apart: bool = False) -> str:
    """Version of a store made from a file with this metadata. ``apart``: gates lie apart from slots."""
    found = weights["pi2_version"]
    if apart:
        return STORE_VERSIONS[-1]
    return found if weights["pi2_format"] == STORE_FORMAT else _STORE_VERSIONS_OF[found]


def format_fields(kind: str, hidden: int) -> dict[str, int]:
    """The fields of a :class:`LayerEntry` for the format, or pair of formats, of its neurons."""
    first, down = formats_of(kind)
    found = {"weights": FORMATS[first].code, "row_bytes": row_bytes(first, hidden), "down": 0, "down_row_bytes": 0}
    if has_two_formats(kind):
        found |= {"down": FORMATS[down].code, "down_row_bytes": row_bytes(down, hidden)}
    return found


def hot_neurons(layer: LayerPlan) -> int:
    """Number of hot neurons for the superblock: all of them in a dense layer, as in ``SparseFFN``."""
    return layer.site.intermediate if layer.method == Method.DENSE else layer.n_hot


def part_of(name: str) -> str | None:
    """The one of ``PARTS`` that tensor ``name`` belongs to, or None."""
    match = _PART.match(name)
    return None if match is None else match.group(1)


class StoreReader(quantized.QuantizedWeights):
    """An open neuron store. All data is compared with its checksum when read, the superblock when the store is opened.
    ``keys``, ``entries``: of the layers' sites and their neurons, in plan order. ``shard``: the neurons in this store;
    None: all.
    """

    all_checked = False  # neurons have their own checksums, in tensors
    file_format, file_versions, blocks_versions = STORE_FORMAT, STORE_VERSIONS, ()
    pairs_versions = (_STORE_VERSIONS_OF[quantized.PAIRS_VERSION], STORE_VERSIONS[-1])

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        with self.opening():
            try:
                self.keys = self._names()
                self.shard = self._shard()
                self.entries = self._superblock().layers
                for key, entry in zip(self.keys, self.entries, strict=True):
                    self._check_entry(key, entry)
                self._check_parts()
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                self._damaged(f"{type(error).__name__}: {error}")

    def _names(self) -> list[str]:
        """Keys of the layers; with ours, their tensors and those of ``checks`` must be all tensors."""
        layers = self._json("layers")
        keys = [key.text(empty=True) for key in layers.items()]
        if sorted(keys) != sorted(self.strategies):
            layers.wrong("the keys of sites")
        ours = [SUPERBLOCK, *(f"{key}.{what}" for key in keys for what in ("bundles", "checks"))]
        ours += [name for name in (f"{key}.gates" for key in keys) if name in self.specs]
        named = {name for name in self.specs if not PADDING.fullmatch(name)}
        if named != {*ours, *self.checks} or len(named) != len(ours) + len(self.checks):
            odd = sorted(named.symmetric_difference({*ours, *self.checks})) or ["a name twice"]
            raise ValueError(f"tensors are not those of layers and checks, e.g. {odd[0]}")
        return keys

    def _shard(self) -> Shard | None:
        if SHARD not in self.metadata:
            return None
        found = Shard.from_json(field := self._json(SHARD))
        if [key for key, mine in found.layers.items() if mine.chunks] != self.keys:
            field.at("layers").wrong("the layers of the store, in their order", f"{len(found.layers)} others")
        return found

    def _superblock(self) -> Superblock:
        spec = self.specs[SUPERBLOCK]
        if spec.dtype != torch.uint8 or len(spec.shape) != 1 or self.offset(SUPERBLOCK) != min(self._start.values()):
            raise ValueError(f"{SUPERBLOCK} is {spec} at byte {self.offset(SUPERBLOCK)}")
        if self.offset(SUPERBLOCK) % PAGE:
            raise ValueError(f"data begins at byte {self.offset(SUPERBLOCK)}")
        block = Superblock.parse(self.read_bytes(SUPERBLOCK, 0, spec.nbytes).numpy().tobytes())
        if block.file_bytes != self.file_bytes:
            raise ValueError(f"{self.file_bytes} bytes where the superblock says {block.file_bytes}")
        if len(block.layers) != len(self.keys):
            raise ValueError(f"{len(self.keys)} layers where the superblock has {len(block.layers)}")
        if block.model_hash != hash_bytes(self.model_hash):
            raise ValueError(
                f"model_hash {self.model_hash[:12]} where the superblock has {block.model_hash.hex()[:12]}"
            )
        return block

    def _check_entry(self, key: str, entry: LayerEntry) -> None:
        """Raises KeyError or ValueError: ``entry`` is invalid or contradicts the header."""
        formats = format_fields(self.format_of(key), entry.hidden)
        mine = None if self.shard is None else self.shard.layers[key]
        chunks = (entry.neurons, 0) if mine is None else (mine.neurons, mine.chunk)
        gates = f"{key}.gates"
        spec = Spec((entry.neurons, entry.row_bytes), torch.uint8) if entry.gates else None
        wanted = {
            "rows": entry.rows in (2, 3),
            "neurons": entry.neurons >= 1 and entry.hidden >= 1,
            **{name: getattr(entry, name) == value for name, value in formats.items()},
            "slot_bytes": entry.slot_bytes >= entry.cluster * entry.neuron_bytes and entry.slot_bytes % SECTOR == 0,
            "n_hot": entry.n_hot <= entry.neurons,
            "neurons and chunks of a shard": (entry.neurons, entry.chunk) == chunks,
            "slots": entry.slots == self.offset(f"{key}.bundles") and entry.slots % PAGE == 0,
            "checks": entry.checks == self.offset(f"{key}.checks"),
            "bundles": self.specs[f"{key}.bundles"] == Spec((entry.slots_in_file, entry.slot_bytes), torch.uint8),
            "length of checks": self.specs[f"{key}.checks"] == Spec((4 * entry.checksums,), torch.uint8),
            "gates": self.specs.get(gates) == spec and entry.gates == (self.offset(gates) if spec else 0),
            "page of gates": entry.gates % PAGE == 0,
        }
        wrong = [name for name, good in wanted.items() if not good]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} of {key}: {entry}")

    def _check_parts(self) -> None:
        """Raises ValueError: a part without its text, or an unknown tensor of ours."""
        for name in self.checks:
            part = part_of(name)
            if part is None and name.startswith("pi2."):
                raise ValueError(f"a tensor {name}")
            if part is not None and f"pi2.{part}" not in self.checks:
                raise ValueError(f"{name} without pi2.{part}")
        for name in ("pi2.plan", *(f"pi2.{part}" for part in PARTS if f"pi2.{part}" in self.specs)):
            if self.specs[name].dtype != torch.uint8 or len(self.specs[name].shape) != 1:
                raise ValueError(f"{name} is {self.specs[name]}")

    def provenance(self) -> dict[str, Any]:
        """Origin of the store; empty if unknown. Raises ArtifactError: not JSON."""
        if "provenance" not in self.metadata:
            return {}
        return self._json("provenance").names(allowed=None)

    def text(self, part: str) -> str:
        """The text of a part, verified. Raises ArtifactError."""
        try:
            return self.read(f"pi2.{part}").numpy().tobytes().decode()
        except UnicodeDecodeError as error:
            self._damaged(f"pi2.{part}: {error}")

    def part(self, part: str) -> dict[str, torch.Tensor]:
        """The tensors of a part, without the prefix ``pi2.PART.``. Raises ArtifactError."""
        prefix = f"pi2.{part}."
        return {name.removeprefix(prefix): self.read(name) for name in self.specs if name.startswith(prefix)}

    def check_plan(self, plan: Plan) -> None:
        """Also raises for other layers or neuron orders; the numbers of hot neurons may differ."""
        super().check_plan(plan)
        found = self.metadata.get("orders_hash", "")
        keys = self.keys if self.shard is None else [*self.shard.layers]
        if found != plan.orders_hash or keys != [layer.site.key for layer in plan.layers]:
            what, expected = str(self.path), f"layers and neuron orders {plan.orders_hash[:12]} as in plan.json"
            fix = "The plan was made anew since; pack the folder again."
            raise StaleArtifactError(what, expected=expected, found=f"others ({found[:12] or 'none'})", fix=fix)

    def read_neurons(self, site: FFNSite, rows: tuple[int, int] | None = None) -> torch.Tensor:
        if site.key not in self.keys:
            self._refuse(f"a layer {site.key}", f"{len(self.keys)} others")
        index = self.keys.index(site.key)
        entry = self.entries[index]
        wanted = (site.intermediate, site.rows_per_neuron, site.hidden)
        if (entry.neurons, entry.rows, entry.hidden) != wanted:
            found = f"{entry.neurons}, {entry.rows} and {entry.hidden}"
            self._refuse("{} neurons of {} rows of {} in {}".format(*wanted, site.key), found)
        return self.read_layer(index, rows)

    def read_layer(self, index: int, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Neurons of layer ``index`` of the plan, or its neurons ``[start, stop)`` in plan order, verified: uint8
        ``[neurons, R, row_bytes]``, or ``[neurons, bytes]`` with two formats.
        """
        entry = self.entries[index]
        start, stop = rows or (0, entry.neurons)
        shape = neuron_shape(self.format_of(self.keys[index]), entry.rows, entry.hidden)
        out = new_tensor((stop - start, *shape), torch.uint8)
        for at, neuron_rows in self._pieces(index, start, stop):
            out[at - start : at - start + len(neuron_rows)] = neuron_rows.view(-1, *shape)
        return out

    def first_rows(self, index: int) -> torch.Tensor:
        """The first rows of all neurons of a layer, in plan order and the operators' format ``[I, ...]``."""
        entry, rows = self.entries[index], list[torch.Tensor]()
        if entry.gates:
            return self.as_computed(self._gates(index, 0, entry.neurons))
        step = max(1, PIECE // entry.neuron_bytes)
        for start in range(0, entry.neurons, step):
            part = self.read_layer(index, (start, min(start + step, entry.neurons)))
            rows.append(part.flatten(1)[:, : entry.row_bytes].clone())
        return self.as_computed(torch.cat(rows))

    def _gates(self, index: int, start: int, stop: int) -> torch.Tensor:
        """The first rows of these neurons, which lie apart, verified: uint8 ``[n, row_bytes]``."""
        entry, key = self.entries[index], self.keys[index]
        first, last = start * entry.row_bytes // PAGE, -(-stop * entry.row_bytes // PAGE)
        at = first * PAGE
        data = self.read_bytes(f"{key}.gates", at, min(last * PAGE, entry.gate_bytes))
        stored = self.read_bytes(f"{key}.checks", 4 * (entry.neurons + first), 4 * (entry.neurons + last))
        wrong = np.flatnonzero(block_checks(data).numpy() != stored.numpy().view("<u4"))
        if len(wrong):
            self._damaged(f"the gates of {key} at byte {at + int(wrong[0]) * PAGE} have another checksum")
        return data[start * entry.row_bytes - at : stop * entry.row_bytes - at].view(-1, entry.row_bytes)

    def _pieces(self, index: int, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Position of the first neuron, and verified neurons ``[n, bytes]`` with all of their rows."""
        entry, key = self.entries[index], self.keys[index]
        first, last = start // entry.cluster, -(-stop // entry.cluster)  # slots
        step = max(1, PIECE // entry.slot_bytes)
        slots = torch.empty((min(step, last - first), entry.slot_bytes), dtype=torch.uint8)
        for slot in range(first, last, step):
            part = slots[: min(step, last - slot)]
            self.read_into(f"{key}.bundles", part, row=slot)
            whole = part[:, : entry.cluster * entry.neuron_bytes].reshape(-1, entry.neuron_bytes)
            at, end = max(start, slot * entry.cluster), min(stop, (slot + len(part)) * entry.cluster)
            neuron_rows = whole[at - slot * entry.cluster : end - slot * entry.cluster].contiguous()
            stored = self.read_bytes(f"{key}.checks", 4 * at, 4 * end).numpy().view("<u4")
            found = crc32c(neuron_rows).numpy()
            wrong = np.flatnonzero(found != stored)
            if len(wrong):
                first = int(wrong[0])
                self._damaged(
                    f"neuron {at + first} of {key} has checksum {found[first]:08x}, not {stored[first]:08x}"
                    + (f", and {len(wrong) - 1} others" if len(wrong) > 1 else "")
                )
            if entry.gates:
                neuron_rows = torch.cat((self._gates(index, at, end), neuron_rows), 1)
            yield at, neuron_rows

    def verify(self, progress: bool = False) -> int:
        """Compare everything in the file with its checksum; returns the number of bytes."""
        done = self.specs[SUPERBLOCK].nbytes
        with bar(None, "verify", progress, total=self.file_bytes, unit="B", unit_scale=True, delay=2) as shown:
            for index, entry in enumerate(self.entries):
                for _, neuron_rows in self._pieces(index, 0, entry.neurons):
                    done += neuron_rows.nbytes
                    shown.update(len(neuron_rows) * entry.slot_bytes // entry.cluster)
            for name in self.checks:
                self.verify_tensor(name, shown.update)
                done += self.specs[name].nbytes
        return done

    @property
    def file_bytes(self) -> int:
        """Size of the file according to its header."""
        return max(start + self.specs[name].nbytes for name, start in self._start.items())

    def regions(self) -> dict[str, int]:
        """Bytes of the file by purpose; their sum is the file's size."""
        found = {"header": self.offset(SUPERBLOCK), "superblock": self.specs[SUPERBLOCK].nbytes}
        found["gates"] = sum(entry.gate_bytes for entry in self.entries)
        found["bundles"] = sum(entry.neurons * entry.neuron_bytes for entry in self.entries)
        found["slot_padding"] = sum(entry.slots_in_file * entry.slot_bytes for entry in self.entries) - found["bundles"]
        found["checks"] = sum(4 * entry.checksums for entry in self.entries)
        rows = {f"{name}.weight" for name in self.linears}
        found["linears"] = sum(self.specs[name].nbytes for name in self.checks if name in rows)
        parts = {name: part_of(name) for name in self.checks}
        floats = (name for name, part in parts.items() if part is None and name not in rows)
        found["floats"] = sum(self.specs[name].nbytes for name in floats)
        for part in PARTS:
            found[part] = sum(self.specs[name].nbytes for name, of in parts.items() if of == part)
        found["padding"] = self.file_bytes - sum(found.values())
        return found
