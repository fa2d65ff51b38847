"""The superblock of a neuron store: all that the C++ core reads to find neurons (docs/STORE.md has the offsets)."""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass, replace

import torch

from torch_pi2.ops.crc32c import crc32c

MAGIC = b"PI2STORE"
#: 1: a slot for every neuron; 2: slots of clusters; 3: down rows of another format; 4: some of a layer's chunks.
VERSIONS = (1, 2, 3, 4)
#: Slots of a layer, the superblock and the data begin at multiples of this.
PAGE = 4096
#: Slots are multiples of this, the smallest block of a device.
SECTOR = 512
#: Neurons in a slot at most: divides the number of neurons of any chunk that is computed.
MOST_CLUSTER = 64
#: Bytes of the part that is there once, and of a layer's entry.
_PART = 128
_HEADER = struct.Struct("<8sIIQQII32s")
_ENTRY = struct.Struct("<QQIIIIIIIIIIII")


@dataclass(frozen=True)
class LayerEntry:
    """Where one layer's neurons are, in the order of the fields in the file.

    Attributes:
        slots: file offset of the first slot. checks: file offset of the checksums, 4 bytes a neuron.
        neurons, hidden, rows: I, H and R. weights: the code of its format.
        slot_bytes: from one slot to the next. row_bytes: of one of the R rows that a slot begins with.
        n_hot: the first neurons, computed densely. layer: the site's number.
        cluster: neurons in a slot, a power of two up to ``MOST_CLUSTER``; the last slot may have fewer.
        down, down_row_bytes: code and bytes of down rows that have another format; 0: they are as the others.
        chunk: neurons of a chunk of the whole layer, of which the file has some chunks; 0: it has the whole layer.
    """

    slots: int
    checks: int
    neurons: int
    hidden: int
    rows: int
    weights: int
    slot_bytes: int
    row_bytes: int
    n_hot: int
    layer: int
    cluster: int = 1
    down: int = 0
    down_row_bytes: int = 0
    chunk: int = 0

    @property
    def neuron_bytes(self) -> int:
        """Of a neuron. A slot has ``cluster`` of them; the rest is zeros."""
        return (self.rows - 1) * self.row_bytes + (self.down_row_bytes or self.row_bytes)

    @property
    def slots_in_file(self) -> int:
        """How many slots the neurons take."""
        return -(-self.neurons // self.cluster)


@dataclass(frozen=True)
class Superblock:
    """The whole of it.

    Attributes:
        file_bytes: size of the file. model_hash: 32 bytes. layers: in plan order.
    """

    file_bytes: int
    model_hash: bytes
    layers: tuple[LayerEntry, ...]

    def pack(self) -> bytes:
        """Its bytes, ``superblock_bytes(len(layers))`` of them."""
        size = superblock_bytes(len(self.layers))
        fields = (size, self.file_bytes, len(self.layers), PAGE, self.model_hash)
        clusters = any(entry.cluster > 1 for entry in self.layers)
        version = 3 if any(entry.down for entry in self.layers) else 2 if clusters else 1
        version = 4 if any(entry.chunk for entry in self.layers) else version
        packed = (astuple(entry if version > 1 else replace(entry, cluster=0)) for entry in self.layers)
        entries = b"".join(_ENTRY.pack(*values).ljust(_PART, b"\0") for values in packed)

        def with_checksum(checksum: int) -> bytes:
            return (_HEADER.pack(MAGIC, version, checksum, *fields).ljust(_PART, b"\0") + entries).ljust(size, b"\0")

        return with_checksum(_checksum(with_checksum(0)))

    @staticmethod
    def parse(data: bytes) -> Superblock:
        """What ``pack`` made ``data`` of. Raises ValueError, with the reason, if it is not what it makes."""
        if len(data) < PAGE or len(data) % PAGE:
            raise ValueError(f"a superblock of {len(data)} bytes")
        magic, version, checksum, size, file_bytes, layers, page, model_hash = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise ValueError(f"magic {magic!r}")
        if version not in VERSIONS:
            raise ValueError(f"superblock version {version}")
        found = _checksum(data[:12] + bytes(4) + data[16:])
        if found != checksum:
            raise ValueError(f"superblock checksum {found:08x} where it says {checksum:08x}")
        if size != len(data) or size != superblock_bytes(layers) or not layers or page != PAGE:
            raise ValueError(f"{layers} layers in {size} of {len(data)} bytes, pages of {page}")
        unpacked = (_ENTRY.unpack_from(data, _PART * (i + 1)) for i in range(layers))
        entries = [LayerEntry(*values) for values in unpacked]
        if version == 1:
            entries = [replace(entry, cluster=1) for entry in entries]
        for i, entry in enumerate(entries):
            if not 0 < entry.cluster <= MOST_CLUSTER or entry.cluster & (entry.cluster - 1):
                raise ValueError(f"clusters of {entry.cluster} neurons in layer {i}")
        block = Superblock(file_bytes, model_hash, tuple(entries))
        if block.pack() != data:
            raise ValueError(f"values where version {version} has others")
        return block


def superblock_bytes(layers: int) -> int:
    """Size of a superblock, a multiple of ``PAGE``."""
    return -(-_PART * (1 + layers) // PAGE) * PAGE


def slot_bytes(neuron_bytes: int) -> int:
    """Bytes from one slot to the next: rounded up to a page, or to a sector where a page would hold several neurons."""
    align = PAGE if neuron_bytes >= PAGE else SECTOR
    return -(-neuron_bytes // align) * align


def hash_bytes(model_hash: str) -> bytes:
    """A plan's hexadecimal hash as the 32 bytes of the superblock. Raises ValueError if it is none."""
    return bytes.fromhex(model_hash)[:32].ljust(32, b"\0")


def _checksum(data: bytes) -> int:
    return int(crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8)[None])[0])
