"""The superblock of a neuron store: what the C++ core needs to locate neurons (docs/STORE.md has the offsets)."""

import struct
from dataclasses import astuple, dataclass, replace

from torch_pi2.base.crc32c import continue_crc32c

MAGIC = b"PI2STORE"
#: 1: a slot per neuron; 2: a slot per cluster; 3: down rows in another format; 4: shards, with some of the chunks; 5:
#: gates apart from slots.
VERSIONS = (1, 2, 3, 4, 5)
#: Alignment of the superblock, the data and each layer's slots.
PAGE = 4096
#: Alignment of slots: the smallest block of a device.
SECTOR = 512
#: Most neurons in a slot; divides the neurons of any chunk that is computed.
MOST_CLUSTER = 64
#: Bytes of the fixed part, and of each layer's entry.
_PART = 128
_HEADER = struct.Struct("<8sIIQQII32s")
_ENTRY = struct.Struct("<QQIIIIIIIIIIIIQ")


@dataclass(frozen=True)
class LayerEntry:
    """Location and format of one layer's neurons, in the file's field order.

    Attributes:
        slots: file offset of the first slot. checks: file offset of the checksums, 4 bytes per neuron.
        neurons, hidden, rows: I, H and R. weights: code of the format.
        slot_bytes: distance between slots. row_bytes: bytes of one of the R rows at the start of a slot.
        n_hot: number of leading neurons that are computed densely. layer: the site's number.
        cluster: neurons per slot, a power of two up to ``MOST_CLUSTER``; the last slot may have fewer.
        down, down_row_bytes: format code and bytes of down rows; 0: the same as other rows.
        chunk: neurons per chunk of the complete layer, if the file has only some of its chunks; 0: it has all.
        gates: file offset of the first rows of all neurons, which slots then lack; 0: they are in the slots.
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
    gates: int = 0

    @property
    def neuron_bytes(self) -> int:
        """Bytes per neuron in its slot. A slot has ``cluster`` neurons, then zeros."""
        return (self.rows - (2 if self.gates else 1)) * self.row_bytes + (self.down_row_bytes or self.row_bytes)

    @property
    def gate_bytes(self) -> int:
        """Bytes of the first rows that lie apart."""
        return self.neurons * self.row_bytes if self.gates else 0

    @property
    def checksums(self) -> int:
        """Number of checksums: of each neuron's rows in its slot, then of each page of gates."""
        return self.neurons + -(-self.gate_bytes // PAGE)

    @property
    def slots_in_file(self) -> int:
        return -(-self.neurons // self.cluster)


@dataclass(frozen=True)
class Superblock:
    """``file_bytes``: size of the file; ``model_hash``: 32 bytes; ``layers``: in plan order."""

    file_bytes: int
    model_hash: bytes
    layers: tuple[LayerEntry, ...]

    def pack(self) -> bytes:
        """Serialise to ``superblock_bytes(len(layers))`` bytes."""
        size = superblock_bytes(len(self.layers))
        fields = (size, self.file_bytes, len(self.layers), PAGE, self.model_hash)
        clusters = any(entry.cluster > 1 for entry in self.layers)
        version = 3 if any(entry.down for entry in self.layers) else 2 if clusters else 1
        version = 4 if any(entry.chunk for entry in self.layers) else version
        version = 5 if any(entry.gates for entry in self.layers) else version
        packed = (astuple(entry if version > 1 else replace(entry, cluster=0)) for entry in self.layers)
        entries = b"".join(_ENTRY.pack(*values).ljust(_PART, b"\0") for values in packed)

        def with_checksum(checksum: int) -> bytes:
            return (_HEADER.pack(MAGIC, version, checksum, *fields).ljust(_PART, b"\0") + entries).ljust(size, b"\0")

        return with_checksum(continue_crc32c(0, with_checksum(0)))

    @staticmethod
    def parse(data: bytes) -> "Superblock":
        """Inverse of :meth:`pack`. Raises ValueError with the reason: ``data`` is no valid superblock."""
        if len(data) < PAGE or len(data) % PAGE:
            raise ValueError(f"a superblock of {len(data)} bytes")
        magic, version, checksum, size, file_bytes, layers, page, model_hash = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise ValueError(f"magic {magic!r}")
        if version not in VERSIONS:
            raise ValueError(f"superblock version {version}")
        found = continue_crc32c(0, data[:12] + bytes(4) + data[16:])
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
    """Distance between slots: rounded up to a page, or to a sector where a page would hold several neurons."""
    align = PAGE if neuron_bytes >= PAGE else SECTOR
    return -(-neuron_bytes // align) * align


def hash_bytes(model_hash: str) -> bytes:
    """A plan's hexadecimal hash as the superblock's 32 bytes. Raises ValueError: invalid."""
    return bytes.fromhex(model_hash)[:32].ljust(32, b"\0")
