"""Stores and ``.pte`` files of a few calls of ``Pi2Backend``, without an exporter: for tests of the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.crc32c import crc32c
from torch_pi2.export.store import TENSORS, Blob
from torch_pi2.formats import FORMATS
from torch_pi2.ops import ACTIVATIONS, load
from torch_pi2.store.superblock import PAGE, LayerEntry, Superblock, superblock_bytes

HASH = bytes(range(32))


def checksum(data: bytes) -> int:
    return int(crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8)[None])[0])


@dataclass
class Layer:
    """A feed-forward layer with what belongs to it, in plan order."""

    neuron_rows: torch.Tensor  # [neurons, rows, row bytes or hidden]
    hidden: int
    weights: str = "float32"
    activation: str = "relu"
    activation_on_up: bool = False
    int8_activations: bool = False
    n_hot: int = 0
    threshold: float = 0.0
    thresholds: torch.Tensor | None = None  # neurons' own
    biases: tuple[torch.Tensor | None, ...] = (None, None, None)
    kind: str = ""  # of the predictor
    predictor: tuple[torch.Tensor, ...] = ()
    cut: float = 0.0
    predictor_weights: str = ""

    def __call__(self, x: torch.Tensor, dense: bool = False) -> torch.Tensor:
        """What the operators in PyTorch compute of it."""
        weights = "float" if self.weights not in ("int4", "int8") else self.weights
        form = (self.activation, self.activation_on_up)
        settings = (*form, self.n_hot, self.threshold, weights, self.int8_activations, self.thresholds)
        if dense or not self.kind:
            return torch.ops.pi2.sparse_ffn(x, self.neuron_rows, *self.biases, None, *settings)
        int8 = self.int8_activations and bool(self.predictor_weights)
        about = (list(self.predictor), self.kind, self.cut, self.predictor_weights, int8)
        return torch.ops.pi2.predicted_ffn(x, self.neuron_rows, *self.biases, *about, *settings)

    def parts(self) -> dict[str, torch.Tensor]:
        """Tensors by their names in the blob."""
        found = dict(zip(("bias_gate", "bias_up", "bias_down"), self.biases)) | {"thresholds": self.thresholds}
        names = {
            "lowrank": ("a", "a_scale", "b", "b_scale", "b_bias"),
            "lowrank_q": ("a", "b", "b_bias"),
            "signbit": ("a",),
        }
        found |= dict(zip(names.get(self.kind, ()), self.predictor, strict=False))
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def layer(
    hidden: int = 32, neurons: int = 100, rows: int = 3, weights: str = "float32", seed: int = 0, **rest: Any
) -> Layer:
    """Random weights; ``biased=True``: biases, too; ``own_thresholds=True``: one for each neuron; ``kind``: a random
    predictor of the cold neurons.
    """
    load()
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) / 6

    def stored(w: torch.Tensor, kind: str) -> torch.Tensor:
        if kind in ("int4", "int8"):
            return torch.ops.pi2.quantize(w, kind)
        return w.to(getattr(torch, kind))

    neuron_rows = stored(random(neurons * rows, hidden), weights).reshape(neurons, rows, -1)
    made = Layer(neuron_rows, hidden, weights)
    if rest.pop("biased", False):
        dtype = neuron_rows.dtype if weights not in ("int4", "int8") else torch.float32
        gate = random(neurons).to(dtype) if rows == 3 else None
        made.biases = (gate, random(neurons).to(dtype), random(hidden).to(dtype))
    if rest.pop("own_thresholds", False):
        made.thresholds = random(neurons).abs() / 4
    made = replace(made, **rest)
    cold, rank = neurons - made.n_hot, 16
    if made.kind == "lowrank":
        numbers = [
            torch.randint(-127, 128, shape, generator=g, dtype=torch.int8) for shape in ((rank, hidden), (cold, rank))
        ]
        scales = [torch.rand(n, generator=g) / 500 for n in (rank, cold)]
        made.predictor = (numbers[0], scales[0], numbers[1], scales[1], random(cold))
    elif made.kind == "lowrank_q":
        rows_of = [stored(random(*shape), made.predictor_weights) for shape in ((rank, hidden), (cold, rank))]
        made.predictor = (*rows_of, random(cold) / 10)
    elif made.kind == "signbit":
        signs = torch.randint(0, 256, (cold, -(-hidden // 64) * 8), generator=g, dtype=torch.uint8)
        signs[:, hidden // 8 :] = 0
        made.predictor = (signs,)
    return made


class Store:
    """``model.pi2`` of layers, as docs/FORMATS.md says, and the blobs of calls of them."""

    def __init__(self, path: Path, layers: list[Layer], model_hash: bytes = HASH, header: bytes = b"{}") -> None:
        self.path, self.layers, self.model_hash = path, layers, model_hash
        begin = PAGE + superblock_bytes(len(layers))
        self.places: list[dict[str, tuple[int, int, int]]] = []
        body, entries = bytearray(), []

        def add(data: bytes, align: int) -> int:
            body.extend(bytes(-(begin + len(body)) % align))
            body.extend(data)
            return begin + len(body) - len(data)

        for number, one in enumerate(layers):
            raw = one.neuron_rows.contiguous().view(torch.uint8).reshape(len(one.neuron_rows), -1)
            size = -(-raw.shape[1] // 512) * 512
            slots = b"".join(bytes(row.numpy()).ljust(size, b"\0") for row in raw)
            checks = b"".join(int(c).to_bytes(4, "little") for c in crc32c(raw))
            rows = one.neuron_rows.shape[1]
            entries.append(
                LayerEntry(
                    add(slots, PAGE), add(checks, 4), len(raw), one.hidden, rows, FORMATS[one.weights].code, size,
                    raw.shape[1] // rows, one.n_hot, number,
                )
            )  # fmt: skip
            blobs = {name: bytes(t.contiguous().view(torch.uint8).numpy()) for name, t in one.parts().items()}
            self.places.append({name: (add(data, 64), len(data), checksum(data)) for name, data in blobs.items()})
        add(b"", PAGE)
        self.bytes = begin + len(body)
        head = (PAGE - 8).to_bytes(8, "little") + header.ljust(PAGE - 8)
        self.header_crc = checksum(head)
        path.write_bytes(head + Superblock(self.bytes, model_hash, tuple(entries)).pack() + body)

    def blob(self, number: int = 0, **changes: Any) -> Blob:
        """Of a call that computes the whole layer; ``changes`` to its fields."""
        one = self.layers[number]
        rank = one.predictor[0].shape[0] if one.kind.startswith("lowrank") else 0
        form = {"": 0, "lowrank": 1, "lowrank_q": 2 if one.predictor_weights == "int4" else 3, "signbit": 4}[one.kind]
        made = Blob(
            role=0, store_bytes=self.bytes, header_crc=self.header_crc, layer=number, model_hash=self.model_hash,
            hidden=one.hidden, neurons=len(one.neuron_rows), rows=one.neuron_rows.shape[1],
            weights=FORMATS[one.weights].code,
            activation=list(ACTIVATIONS).index(one.activation), activation_on_up=one.activation_on_up,
            int8_activations=one.int8_activations,
            predictor_int8_activations=one.int8_activations and bool(one.predictor_weights),
            n_hot=one.n_hot, first=0, threshold=one.threshold, predictor=form, cut=one.cut, rank=rank, dense_from=0,
            queue=0, preload_from=0, store=self.path.name, tensors=self.places[number],
        )  # fmt: skip
        assert set(made.tensors) <= {*TENSORS, "thresholds"}
        return replace(made, **changes)


class _Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0


def call(blob: bytes, x: torch.Tensor, shapes: Any = None) -> nn.Module:
    """A module that is a call of Pi2Backend on tensors like ``x``."""
    from executorch.exir import to_edge
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    program = to_edge(torch.export.export(_Same(), (x,), dynamic_shapes=shapes)).exported_program()
    return LoweredBackendModule(program, "Pi2Backend", blob, [])


def write_pte(
    path: Path,
    methods: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...], Any]],
    constants: Mapping[str, int] | None = None,
) -> Path:
    """A ``.pte`` of methods: module, example, dynamic shapes; and of methods that return a number."""
    from executorch.exir import to_edge

    programs = {
        name: torch.export.export(module, example, dynamic_shapes=shapes)
        for name, (module, example, shapes) in methods.items()
    }
    path.write_bytes(to_edge(programs, constant_methods=dict(constants or {})).to_executorch().buffer)
    return path


def one_call(path: Path, blob: bytes, x: torch.Tensor, tokens: Any = None) -> Path:
    """A ``.pte`` whose ``forward`` is one call; ``tokens``: a ``torch.export.Dim`` of ``x``'s first size."""
    shapes = None if tokens is None else ({0: tokens},)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ffn = call(blob, x, shapes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.ffn(x)

    return write_pte(path, {"forward": (Net(), (x,), shapes)})
