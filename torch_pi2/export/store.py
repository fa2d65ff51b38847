"""The neuron store of a bundle, ``model.pi2``, and the delegate's blobs.

The format is that of ``torch-pi2 pack`` (docs/STORE.md), with feed-forward layers only. Besides plan and biases it has
each layer's predictor, ``KEY.predictor.*``, with rows of cold neurons in plan order; of a mixture those of all experts,
stacked, with ``KEY.cuts`` and ``KEY.thresholds``. The delegate parses no JSON: blobs have the offsets of all tensors.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from torch_pi2.base.crc32c import continue_crc32c, crc32c
from torch_pi2.base.dtypes import format_name
from torch_pi2.base.package import __version__
from torch_pi2.base.tensorfile import Spec
from torch_pi2.formats import formats_of, main_format
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import SparseLayer, layers_of
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.layers.prompt import PREDICTED_SHARE, PROMPT_TOKENS
from torch_pi2.ops.activations import ACTIVATIONS, Shaped, shaped
from torch_pi2.predict import tensors_among
from torch_pi2.store.storefile import StoreReader, format_fields
from torch_pi2.store.weights import metadata
from torch_pi2.store.writer import StoreAssembly, StoreLayer
from torch_pi2.types.plan import Plan

MAGIC, BYTES = b"PI2BLOB\0", 512
#: Of a layer, of a mixture of experts, and of either with extensions: two formats, thresholds per neuron, parameters of
#: the activation, or biases of experts.
VERSIONS = (1, 2, 3)
#: In blob order; ``a`` of a sign-bit predictor has the signs. Those of experts are stacked.
TENSORS = ("bias_gate", "bias_up", "bias_down", "a", "a_scale", "b", "b_scale", "b_bias")
#: Predictor kind and format of its rows -> code.
PREDICTORS = {("", ""): 0, ("lowrank", ""): 1, ("lowrank_q", "int4"): 2, ("lowrank_q", "int8"): 3, ("signbit", ""): 4}
_HEAD = struct.Struct("<8sIIIIQII32s")
_LAYER = struct.Struct("<IIIIIIIIfIdII")
_TENSOR = struct.Struct("<QQII")
#: Of a mixture in float64: thresholds or margins of predictors, and thresholds of gates; of a layer only the latter, in
#: float32 per neuron.
NUMBERS = ("cuts", "thresholds")
_EXPERTS, _NAME_BYTES = 376, 128
#: At the end of version 3: parameters of the activation (in, out, limit, plus, sigmas), and zeros.
_SHAPING = struct.Struct("<5f12x")
#: Names of calls in profiles, by role.
_EVENTS = ("pi2_ffn", "pi2_submit", "pi2_collect")


def event_of(blob: bytes) -> str:
    """The delegate's name of a call in profiles, such as ``pi2_ffn.LAYER``, with the layer's index in the store."""
    _, _, _, _, role, _, _, layer, _ = _HEAD.unpack_from(blob)
    (experts,) = struct.unpack_from("<I", blob, _EXPERTS)
    return f"{'pi2_experts' if experts else _EVENTS[role]}.{layer}"


@dataclass(frozen=True)
class Blob:
    """One delegate call. ``tensors``: name -> (file offset, bytes, CRC32C).

    ``layer`` of a mixture is the first of its ``experts``, which are consecutive. ``down``: format of down rows if it
    differs from that of gate and up, else 0. ``shaping``: the activation's parameters (in, out, limit, plus, sigmas) or
    empty. ``second``: they apply to the second matrix.
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
        flags = self.activation_on_up | self.int8_activations << 1 | self.predictor_int8_activations << 2
        flags |= bool(self.shaping) << 3 | self.second << 4
        numbers = (self.hidden, self.neurons, self.rows, self.weights, self.activation, flags, self.n_hot, self.first)
        layer = _LAYER.pack(*numbers, self.threshold, self.predictor, self.cut, self.rank, self.dense_from)
        entries = {n: _TENSOR.pack(*self.tensors.get(n, (0, 0, 0)), 0) for n in (*TENSORS, *NUMBERS)}
        places, more = (b"".join(entries[name] for name in names) for names in (TENSORS, NUMBERS))
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

        return with_checksum(continue_crc32c(0, with_checksum(0)))


@dataclass(frozen=True)
class StoreFacts:
    """Facts about a written store, for blobs and the manifest. ``header_crc``: CRC32C of the safetensors length and
    header. ``model_hash``: 32 bytes. ``places``: per call, tensor -> (file offset, bytes, CRC32C); ``first``: per call,
    its layer in the store; of a mixture that of the first expert. ``ffn_bytes``: of all neurons, without padding of
    slots; ``neuron_bytes``: of a neuron of each layer, with padding. ``predictor_bytes``: of tensors that stay in
    memory.
    """

    name: str
    file_bytes: int
    header_crc: int
    model_hash: bytes
    places: tuple[dict[str, tuple[int, int, int]], ...]
    first: tuple[int, ...]
    ffn_bytes: int
    neuron_bytes: tuple[int, ...]
    predictor_bytes: int


#: For a model without neurons.
NO_STORE = StoreFacts("", 0, 0, b"", (), (), 0, (), 0)


def kind_of(ffn: SparseLayer) -> str:
    return format_name(ffn.weights, ffn.neuron_rows.dtype)


def kinds_of(homes: Sequence[SparseLayer]) -> str:
    """Formats of neurons, for people; ``none`` if there are no layers."""
    return ", ".join(dict.fromkeys(map(kind_of, homes))) or "none"


def write_store(path: Path, homes: Sequence[SparseLayer], plan: Plan, *, progress: bool = False) -> StoreFacts:
    """Write the store of ``homes``, in memory or over stores, a few MB at a time. Raises ArtifactError."""
    of_home = [layers_of(home) for home in homes]
    layers = [ffn for some in of_home for ffn in some]
    kinds = {ffn.site.key: kind_of(ffn) for ffn in layers}
    kind = main_format(formats_of(next(iter(kinds.values())))[1])  # the default of layers
    small = [_small_tensors(home) for home in homes]
    text = torch.frombuffer(bytearray(plan.to_json().encode()), dtype=torch.uint8)
    parts = {"pi2.plan": text} | {f"pi2.plan.{name}": order for name, order in plan.orders.items()}
    beside = {_name(y.site.key, role): tensor for y, tensors in zip(homes, small) for role, tensor in tensors.items()}
    tensors = parts | beside
    others = SimpleNamespace(read_bytes=lambda name, start, stop: _bytes(tensors[name])[start:stop])
    groups = [{name: Spec.of(tensor) for name, tensor in group.items()} for group in (parts, beside)]
    provenance = json.dumps({"torch_pi2": __version__, "from": "torch_pi2.export", "weights": kinds_of(homes)})
    others_of = {key: other for key, other in kinds.items() if other != kind}
    weights = metadata(kind, plan.model_hash, {}, dict.fromkeys(kinds, "owner"), formats=others_of)
    with ExitStack() as stack:
        opened = cache(lambda path: stack.enter_context(StoreReader(path)))
        made = [StoreLayer(ffn.site, ffn.n_hot, kinds[ffn.site.key], _reader(ffn, opened)) for ffn in layers]
        store = StoreAssembly(plan, made, groups, lambda name: others, weights, provenance)
        out = store.writer(path, progress=progress)
        stack.enter_context(out)
        block = store.superblock(out)
        store.write(out, block)

        def place(key: str, role: str, tensor: torch.Tensor) -> tuple[int, int, int]:
            crc = int(crc32c(_bytes(tensor)[None])[0]) if tensor.numel() else 0
            return out.offset(_name(key, role)), tensor.nbytes, crc

        keys = (home.site.key for home in homes)
        places = tuple({role: place(key, role, t) for role, t in own.items()} for key, own in zip(keys, small))
    ffn_bytes = sum(ffn.site.intermediate * store.neuron_bytes[ffn.site.key] for ffn in layers)
    neuron_bytes = tuple(store.slots[ffn.site.key] // store.cluster for ffn in layers)
    kept_bytes = sum(tensor.nbytes for tensors in small for tensor in tensors.values())
    of_file = (path.name, block.file_bytes, _header_crc(path), block.model_hash)
    return StoreFacts(*of_file, places, (0, *accumulate(map(len, of_home)))[:-1], ffn_bytes, neuron_bytes, kept_bytes)


def blob_of(
    facts: StoreFacts, homes: Sequence, call: int, role: int, first: int = 0, queue: int = 0, preload_from: int = 0
) -> Blob:
    """The blob of one call of ``homes[call]``; see :class:`Blob`."""
    ffn = homes[call]
    form = shaped(ffn.site.activation)
    assert form is not None
    numbers = (form.scale_in, form.scale_out, form.limit, form.plus, form.sigmas)
    a = ffn._buffers["predictor_a"]
    fields = format_fields(kind_of(ffn), ffn.site.hidden)
    return Blob(
        role=role,
        store_bytes=facts.file_bytes,
        header_crc=facts.header_crc,
        layer=facts.first[call],
        model_hash=facts.model_hash,
        hidden=ffn.site.hidden,
        neurons=ffn.site.intermediate,
        rows=ffn.site.rows_per_neuron,
        weights=fields["weights"],
        down=fields["down"],
        activation=list(ACTIVATIONS).index(form.base),
        shaping=() if form == Shaped(form.base) else numbers,
        second=form.second,
        activation_on_up=ffn.site.activation_on_up,
        int8_activations=ffn.int8_activations,
        predictor_int8_activations=ffn.int8_activations and bool(ffn.predictor_weights),
        first=first,
        predictor=PREDICTORS[ffn.predictor_kind, ffn.predictor_weights] if ffn.has_predictor else 0,
        rank=0 if a is None else a.shape[-2],
        queue=queue,
        preload_from=0 if role else preload_from,
        store=facts.name,
        tensors=facts.places[call],
        **_settings(ffn),
    )


def _settings(home: SparseLayer) -> dict[str, Any]:
    """Blob fields that differ between layers and mixtures."""
    if isinstance(home, SparseExperts):
        return {"n_hot": 0, "threshold": 0.0, "cut": 0.0, "dense_from": 0, "experts": len(home.sites)}
    predicted = home.has_predictor
    return {
        "n_hot": home.n_hot,
        "threshold": home.threshold,
        "cut": home.predictor_threshold if predicted else 0.0,
        "dense_from": PROMPT_TOKENS if predicted and home.expected_share > PREDICTED_SHARE else 0,
    }


def _name(key: str, role: str) -> str:
    """The file's name of the tensor ``role`` of a blob."""
    return f"{key}.{role}" if role.startswith("bias_") or role in NUMBERS else f"{key}.predictor.{role}"


def _small_tensors(home: SparseLayer) -> dict[str, torch.Tensor]:
    """Biases and predictors by blob name."""
    if isinstance(home, SparseExperts):
        predictor = tensors_among(home._buffers)
        found = dict(zip(TENSORS[:3], home.biases())) | {
            "cuts": home.cuts_E if home.cuts else None,
            "thresholds": home.thresholds_E if home.thresholds else None,
        }
    else:
        predictor = home.predictor_rows()
        found = {role: getattr(home, role) for role in (*TENSORS[:3], "thresholds")}
    roles = {"signs": "a", "bias": "b_bias"}
    found |= {roles.get(name, name): tensor for name, tensor in predictor.items()}
    return {role: tensor.detach().contiguous() for role, tensor in found.items() if tensor is not None}


def _reader(ffn: SparseFFN, opened: Callable[[Path], StoreReader]) -> Callable[[int, int], torch.Tensor]:
    """Reads neurons from memory, or from the store by ``opened``."""
    if not isinstance(ffn, OffloadedFFN):
        return ffn.in_row_order
    reader, index = opened(ffn.store.path), ffn.store_layer
    return lambda first, last: reader.read_layer(index, (first, last))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _header_crc(path: Path) -> int:
    with open(path, "rb") as file:
        size = file.read(8)
        return continue_crc32c(0, size + file.read(int.from_bytes(size, "little")))
