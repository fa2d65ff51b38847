"""The delegate blob: what a ``.pte`` has instead of a layer or a mixture of experts (docs/FORMATS.md)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from torch_pi2.ops.crc32c import crc32c

MAGIC, BYTES = b"PI2BLOB\0", 512
#: Of a layer, of a mixture of experts, and of either with more: neurons of two formats, thresholds per neuron, numbers
#: of the activation, biases of experts.
VERSIONS = (1, 2, 3)
#: In the order of the blob; of a sign-bit predictor ``a`` is the signs. Of a mixture: those of all experts, stacked.
TENSORS = ("bias_gate", "bias_up", "bias_down", "a", "a_scale", "b", "b_scale", "b_bias")
#: Predictor kind and format of its rows -> code.
PREDICTORS = {
    ("", ""): 0,
    ("lowrank", ""): 1,
    ("lowrank_q", "int4"): 2,
    ("lowrank_q", "int8"): 3,
    ("signbit", ""): 4,
}
_HEAD = struct.Struct("<8sIIIIQII32s")
_LAYER = struct.Struct("<IIIIIIIIfIdII")
_TENSOR = struct.Struct("<QQII")
#: Of a mixture besides, float64: the predictors' thresholds or margins, and the gates' thresholds. Of a layer the
#: latter alone, float32 and one for each neuron.
NUMBERS = ("cuts", "thresholds")
_EXPERTS, _NAME_BYTES = 376, 128
#: At the end of version 3: numbers of an activation (in, out, limit, plus, sigmas), and zeros.
_SHAPING = struct.Struct("<5f12x")


#: What a call is in profiles, by its role.
_EVENTS = ("pi2_ffn", "pi2_submit", "pi2_collect")


def event_of(blob: bytes) -> str:
    """The name of a call in profiles, as the delegate gives it: ``pi2_ffn.LAYER`` for instance, LAYER of the store."""
    _, _, _, _, role, _, _, layer, _ = _HEAD.unpack_from(blob)
    (experts,) = struct.unpack_from("<I", blob, _EXPERTS)
    return f"{'pi2_experts' if experts else _EVENTS[role]}.{layer}"


@dataclass(frozen=True)
class Blob:
    """One delegate call. Fields as in the blob; ``tensors``: name -> (file offset, bytes, CRC32C).

    Of a mixture ``layer`` is that of the first of its ``experts``, which follow each other. ``down``: the format of
    down rows, where it is another than that of gate and up; else 0. ``shaping``: numbers of the activation, in, out,
    limit, plus and sigmas; none if it has none. ``second``: the activation is that of the second matrix, which has
    such numbers then.
    """

    role: int
    store_bytes: int
    header_crc: int
    layer: int
    model_hash: bytes
    hidden: int
    neurons: int
    rows: int
    weights: int
    activation: int
    activation_on_up: bool
    int8_activations: bool
    predictor_int8_activations: bool
    n_hot: int
    first: int
    threshold: float
    predictor: int
    cut: float
    rank: int
    dense_from: int
    queue: int
    preload_from: int
    store: str
    tensors: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    experts: int = 0
    down: int = 0
    shaping: tuple[float, ...] = ()
    second: bool = False

    def pack(self) -> bytes:
        """Its ``BYTES`` bytes."""
        flags = self.activation_on_up | self.int8_activations << 1 | self.predictor_int8_activations << 2
        flags |= bool(self.shaping) << 3 | self.second << 4
        numbers = (self.hidden, self.neurons, self.rows, self.weights, self.activation, flags, self.n_hot, self.first)
        layer = _LAYER.pack(*numbers, self.threshold, self.predictor, self.cut, self.rank, self.dense_from)
        places, more = (
            b"".join(_TENSOR.pack(*self.tensors.get(name, (0, 0, 0)), 0) for name in names)
            for names in (TENSORS, NUMBERS)
        )
        of_others = {"bias_gate", "bias_up", "bias_down"} if self.experts else {"thresholds"}
        extended = bool(self.down or self.shaping or of_others & self.tensors.keys())
        version = VERSIONS[2 if extended else self.experts > 0]

        def with_checksum(checksum: int) -> bytes:
            head = _HEAD.pack(
                MAGIC, version, checksum, BYTES, self.role, self.store_bytes, self.header_crc, self.layer,
                self.model_hash,
            )  # fmt: skip
            body = head + layer + places + struct.pack("<II", self.queue, self.preload_from) + more
            body += struct.pack("<II", self.experts, self.down)
            if not extended:
                return body + self.store.encode().ljust(_NAME_BYTES, b"\0")
            body += self.store.encode().ljust(_NAME_BYTES - _SHAPING.size, b"\0")
            return body + (_SHAPING.pack(*self.shaping) if self.shaping else bytes(_SHAPING.size))

        data = bytearray(with_checksum(0))
        return with_checksum(int(crc32c(torch.frombuffer(data, dtype=torch.uint8)[None])[0]))
