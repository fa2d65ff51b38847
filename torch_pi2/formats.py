"""Number formats: the one table (``pi2::DType`` of the core) from which all lists of names are derived.

Files and arguments call a format by its name. Operators say ``float`` for every format with a torch dtype, since the
tensor has that (:mod:`torch_pi2.base.dtypes`). This module does not import torch, for quick commands.
"""

from dataclasses import dataclass

from torch_pi2.errors import ShapeError

#: Numbers of a quantised row per float16 scale.
GROUP = 32
_SCALE_BYTES = 2
#: Formats of quantised keys and values in steps.
KV = ("int8", "int4")
#: Weights or activations in their own dtype.
FLOAT = "float"


@dataclass(frozen=True)
class Format:
    """One way to store numbers: its ``name`` in files and arguments (for floats also torch's), ``code`` in stores and
    delegate blobs, and ``bits`` per number, without scales. ``least``, ``most``: range of the integers of a format for
    quantising weights. ``block``, ``block_bytes``: numbers per ggml block, and its bytes with scales; else 0.
    """

    name: str
    code: int
    bits: int
    least: int = 0
    most: int = 0
    block: int = 0
    block_bytes: int = 0

    @property
    def quantized(self) -> bool:
        """Whether rows are bytes that include scales."""
        return self.most > 0 or self.block > 0

    @property
    def operand(self) -> str:
        return self.name if self.quantized else FLOAT

    @property
    def group_bytes(self) -> int:
        """Bytes of a group without its scale."""
        return GROUP * self.bits // 8

    @property
    def bits_per_weight(self) -> float:
        """Bits per number including its share of the scale: 4.5 for int4, 8.5 for int8."""
        if self.block:
            return 8 * self.block_bytes / self.block
        return self.bits + 8 * _SCALE_BYTES / GROUP if self.quantized else self.bits

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` numbers, padded to whole groups. Raises ShapeError: partial blocks."""
        if self.block:
            if columns % self.block:
                expected = f"a multiple of {self.block} (its blocks)"
                fix = "Pass the columns that the rows have in their file."
                raise ShapeError(f"columns of {self.name}", expected=expected, found=str(columns), fix=fix)
            return columns // self.block * self.block_bytes
        groups = -(-columns // GROUP)
        return groups * (self.group_bytes + _SCALE_BYTES) if self.quantized else columns * self.bits // 8


FORMATS = {
    one.name: one
    for one in (
        Format("float32", 0, 32),
        Format("bfloat16", 1, 16),
        Format("float16", 2, 16),
        Format("int4", 4, 4, -8, 7),
        Format("int8", 5, 8, -127, 127),
        Format("q4_1", 6, 4, block=32, block_bytes=20),
        Format("q5_0", 7, 5, block=32, block_bytes=22),
        Format("q5_1", 8, 5, block=32, block_bytes=24),
        Format("q4_k", 9, 4, block=256, block_bytes=144),
        Format("q5_k", 10, 5, block=256, block_bytes=176),
        Format("q6_k", 11, 6, block=256, block_bytes=210),
        Format("tq2_0", 12, 2, block=256, block_bytes=66),
    )
}
#: Formats for quantising weights.
QUANTIZED = tuple(name for name, one in FORMATS.items() if one.most)
FLOATS = tuple(name for name, one in FORMATS.items() if not one.quantized)
#: ggml's block formats: rows of linear layers from GGUF files, which are kept.
GGML = tuple(name for name, one in FORMATS.items() if one.block)
#: Formats of neurons in a single format.
OF_NEURONS = (*FLOATS, *QUANTIZED)
#: Formats of neurons in a pair: gate and up rows as in a checkpoint, and down rows, rarely stored by neuron, in int8;
#: in tq2_0 if they are ternary numbers with one scale for all (earlier imports: in int4).
PAIRS = (*(f"{name}+int8" for name in ("int4", *GGML)), "tq2_0+int4", "tq2_0+tq2_0")
#: Formats of rows of linear layers and embeddings.
ROWS = tuple(name for name in FORMATS if name not in FLOATS)
#: ``neurons`` of imports: which feed-forward layers become neurons, or in which format all do.
IMPORT_NEURONS = ("auto", "all", *QUANTIZED)
#: Formats of layer inputs: unchanged, or rounded per group.
ACTIVATIONS = (FLOAT, "int8")


def row_bytes(name: str, columns: int) -> int:
    return FORMATS[name].row_bytes(columns)


def has_two_formats(neurons: str) -> bool:
    """Whether ``neurons`` is ``FIRST+DOWN``, with down rows in another format than gate and up rows."""
    return "+" in neurons


def formats_of(neurons: str) -> tuple[str, str]:
    """The formats of gate and up rows, and of down rows, for ``neurons`` such as ``int4`` or ``FIRST+DOWN``."""
    first, plus, down = neurons.partition("+")
    return first, down if plus else first


def main_format(down: str) -> str:
    """The format that a file with such down rows names as that of its neurons: no ggml format, which pairs have."""
    return QUANTIZED[-1] if FORMATS[down].block else down


def neuron_shape(neurons: str, rows: int, hidden: int) -> tuple[int, ...]:
    """Shape in bytes of a neuron: ``[R, row bytes]``; of two formats ``[bytes]``. Raises ShapeError: partial blocks."""
    first, down = formats_of(neurons)
    if has_two_formats(neurons):
        return ((rows - 1) * row_bytes(first, hidden) + row_bytes(down, hidden),)
    return rows, row_bytes(first, hidden)
