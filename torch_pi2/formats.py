"""How numbers are stored: the one table of formats (``pi2::DType`` of the core), which every list of names comes from.

Files and arguments call a format by its name. Operators say ``float`` for all that torch has a dtype for, as the tensor
itself says which (:mod:`torch_pi2.base.dtypes`). Nothing here needs torch, so that commands can list what there is.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_pi2.errors import ShapeError

#: Numbers of a quantised row that have a float16 scale in common.
GROUP = 32
_SCALE_BYTES = 2
#: Of weights or activations: as they are.
FLOAT = "float"


@dataclass(frozen=True)
class Format:
    """One way to store a number.

    Attributes:
        name: in files and arguments; of floats also torch's. code: in stores and delegate blobs.
        bits: of a number, without its group's scale. least, most: of the integers of a format that weights are
        quantised to.
        block, block_bytes: numbers of a block of ggml's, and its bytes with all scales; 0 of other formats.
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
        """Whether rows are bytes, with their scales."""
        return self.most > 0 or self.block > 0

    @property
    def operand(self) -> str:
        """Its name in operators."""
        return self.name if self.quantized else FLOAT

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's values, without its scale."""
        return GROUP * self.bits // 8

    @property
    def bits_per_weight(self) -> float:
        """Bits that a number takes, its share of the scale included: 4.5 for int4, 8.5 for int8."""
        if self.block:
            return 8 * self.block_bytes / self.block
        return self.bits + 8 * _SCALE_BYTES / GROUP if self.quantized else self.bits

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` numbers; the last group of a quantised row is padded.

        Raises:
            ShapeError: ``columns`` are no whole blocks of a format that has these.
        """
        if self.block:
            if columns % self.block:
                raise ShapeError(
                    f"columns of {self.name}",
                    expected=f"a multiple of {self.block} (its blocks)",
                    found=str(columns),
                    fix="Pass the columns that the rows have in their file.",
                )
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
    )
}
#: What weights can be quantised to.
QUANTIZED = tuple(name for name, one in FORMATS.items() if one.most)
FLOATS = tuple(name for name, one in FORMATS.items() if not one.quantized)
#: ggml's blocks: what rows of linear layers are in GGUF files, and stay.
GGML = tuple(name for name, one in FORMATS.items() if one.block)
#: How neurons can be stored in one format.
OF_NEURONS = (*FLOATS, *QUANTIZED)
#: Neurons in two: gate and up rows as a checkpoint has them, down rows, which hardly any has by neuron, in int8.
PAIRS = tuple(f"{name}+int8" for name in ("int4", *GGML))
#: What rows of linear layers and embeddings may be in.
ROWS = tuple(name for name in FORMATS if name not in FLOATS)
#: Which feed-forward layers of what is imported may become neurons, and in what.
IMPORT_NEURONS = ("auto", "all", *QUANTIZED)
#: What layers may see their inputs as: as they are, or rounded per group.
ACTIVATIONS = (FLOAT, "int8")


def row_bytes(name: str, columns: int) -> int:
    """Bytes of a row of ``columns`` numbers in the format ``name``."""
    return FORMATS[name].row_bytes(columns)


def has_two_formats(neurons: str) -> bool:
    """Whether ``neurons`` is ``FIRST+DOWN``: down rows in another format than gate and up rows."""
    return "+" in neurons


def formats_of(neurons: str) -> tuple[str, str]:
    """The formats of gate and up rows, and of down rows, for neurons stored as ``neurons`` (or ``FIRST+DOWN``)."""
    first, plus, down = neurons.partition("+")
    return first, down if plus else first


def neuron_shape(neurons: str, rows: int, hidden: int) -> tuple[int, ...]:
    """Bytes of a neuron of ``rows`` rows of ``hidden`` numbers: ``[R, row bytes]``, of two formats ``[bytes]``.

    Raises:
        ShapeError: ``hidden`` is no whole number of a format's blocks.
    """
    first, down = formats_of(neurons)
    if has_two_formats(neurons):
        return ((rows - 1) * row_bytes(first, hidden) + row_bytes(down, hidden),)
    return rows, row_bytes(first, hidden)
