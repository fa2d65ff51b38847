"""``Pi2Backend`` in ExecuTorch's own runtime: the operators' bits, what is refused with which code and in which words,
stores that are shared and closed, layers in two calls, kernels of weights that are in the ``.pte``."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ggml_rows import random_rows
from pte import Layer, Store, call, layer, one_call, write_pte
from torch import nn

from torch_pi2 import ops
from torch_pi2.errors import ConfigError, LibraryMissingError, VersionError
from torch_pi2.export import executorch as backend
from torch_pi2.export.store import Blob

TOKENS = torch.export.Dim("tokens", min=1, max=64)
HIDDEN = 32
#: What a ``.pte`` of one call says, by name: everything that a layer can have.
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"rows": 2, "biased": True},
    "exact": {"threshold": 0.02, "n_hot": 10, "activation": "silu", "activation_on_up": True},
    "own thresholds": {"own_thresholds": True, "n_hot": 10, "activation": "silu", "biased": True},
    "bfloat16": {"weights": "bfloat16", "biased": True, "kind": "signbit", "cut": 1.1, "n_hot": 30},
    "lowrank": {"kind": "lowrank", "n_hot": 20, "biased": True},
    "int4": {
        "weights": "int4", "kind": "lowrank_q", "predictor_weights": "int4", "n_hot": 16, "int8_activations": True,
    },
    "int8": {"weights": "int8", "kind": "lowrank_q", "predictor_weights": "int8", "cut": 0.1, "biased": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def runtime() -> Any:
    backend.load_library()
    from executorch.runtime import Runtime

    return Runtime.get()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store]:
    """A ``.pte`` of one call of every layer of LAYERS, and their store."""
    folder = tmp_path_factory.mktemp("bundle")
    store = Store(folder / "model.pi2", [layer(HIDDEN, seed=i, **rest) for i, rest in enumerate(LAYERS.values())])
    x = torch.zeros(3, HIDDEN)
    shapes = ({0: TOKENS},)

    class Net(nn.Module):
        def __init__(self, blob: Blob) -> None:
            super().__init__()
            self.ffn = call(blob.pack(), x, shapes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.ffn(x)

    blobs = {name: store.blob(i, dense_from=40) for i, name in enumerate(LAYERS)}
    return write_pte(folder / "model.pte", {name: (Net(blob), (x,), shapes) for name, blob in blobs.items()}), store


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    for key in ("store_path", "cache_bytes_kib", "threads", "policy", "preload", "trace", "direct", "engine"):
        backend.set_options({key: ""})
    backend.clear_error()


def failure(load: Any) -> tuple[str, str]:
    """The code that ExecuTorch passes on, and the backend's words."""
    with pytest.raises(RuntimeError) as found:
        load()
    code = re.search(r"0x:?([0-9a-f]+)", str(found.value))
    assert code is not None, str(found.value)
    return code[1], backend.last_error()


@pytest.mark.parametrize("name", LAYERS)
def test_bits_of_the_operators(runtime: Any, written: tuple[Path, Store], name: str) -> None:
    pte, store = written
    backend.set_options({"store_path": str(pte.parent)})
    method = runtime.load_program(pte).load_method(name)
    one = store.layers[list(LAYERS).index(name)]
    for tokens in (1, 7, 64):
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
        (y,) = method.execute([x])
        assert torch.equal(y, one(x, dense=tokens >= 40))


def test_budget_changes_no_bit(runtime: Any, written: tuple[Path, Store]) -> None:
    pte, store = written
    x = torch.randn(5, HIDDEN)
    for options in (
        {"cache_bytes_kib": 0},
        {"cache_bytes_kib": 20, "policy": "lru", "engine": "pread", "direct": False},
        {"preload": False},
    ):
        backend.set_options({"store_path": str(store.path), **options})
        program = runtime.load_program(pte)
        methods = [program.load_method(name) for name in LAYERS]
        for _ in range(2):
            for one, method in zip(store.layers, methods):
                assert torch.equal(method.execute([x])[0], one(x))
        (about,) = backend.stats()["stores"]
        assert about["reads"] > 0
        assert about["cache_bytes"] <= options.get("cache_bytes_kib", 1 << 30) * 1024
        del methods, method, program


def test_one_store_for_all_and_closed_with_the_last(runtime: Any, written: tuple[Path, Store]) -> None:
    pte, _ = written
    backend.set_options({"store_path": str(pte.parent)})
    before = backend.stats()
    first, second = runtime.load_program(pte), runtime.load_program(pte)
    methods = [program.load_method(name) for program in (first, second) for name in LAYERS]
    assert backend.stats()["opens"] == before["opens"] + 1
    del methods[: len(LAYERS)], first
    assert len(backend.stats()["stores"]) == 1
    x = torch.randn(2, HIDDEN)
    methods[0].execute([x])
    about = backend.stats(reset=True)["stores"][0]
    assert about["calls"] == 1
    assert about["path"].endswith("model.pi2")
    assert backend.stats()["stores"][0]["calls"] == 0
    del methods, second
    after = backend.stats()
    assert (after["closes"], after["stores"]) == (before["closes"] + 1, [])


@pytest.mark.slow
def test_refusals_by_code_and_in_words(runtime: Any, tmp_path: Path) -> None:
    one = layer(HIDDEN, kind="signbit")
    store = Store(tmp_path / "model.pi2", [one])
    x = torch.zeros(2, HIDDEN)
    pte = one_call(tmp_path / "a.pte", store.blob().pack(), x)
    sound = store.path.read_bytes()

    def load() -> Any:
        return runtime.load_program(pte).load_method("forward")

    code, words = failure(load)  # nobody said where the store is
    assert (code, "neuron store model.pi2: expected a file, found No such file" in words) == ("22", True)
    assert "store_path" in words
    backend.set_options({"store_path": str(tmp_path)})
    store.path.write_bytes(sound[:-5000])
    code, words = failure(load)
    assert code == "22"
    assert f"expected {len(sound)} bytes, found {len(sound) - 5000} bytes (cut short). Copy the bundle again." in words
    other = Store(tmp_path / "other.pi2", [one], model_hash=bytes(32))
    backend.set_options({"store_path": str(other.path)})
    code, words = failure(load)
    assert code == "30"
    assert "expected weights 00010203, found 00000000. Give it the store of the same bundle" in words
    damaged = bytearray(sound)
    damaged[store.places[0]["a"][0]] ^= 1
    store.path.write_bytes(damaged)
    backend.set_options({"store_path": str(store.path)})
    code, words = failure(load)
    assert (code, "a at" in words, "found another checksum" in words) == ("22", True, True)
    store.path.write_bytes(sound)
    load()
    for blob, wanted, message in (
        (store.blob().pack()[:100], "23", "delegate blob, size: expected 512 bytes, found 100"),
        (bytes(512), "23", "delegate blob, magic: expected PI2BLOB"),
        (replace(store.blob(), neurons=99).pack(), "23", "a: expected 792 bytes, found 800"),
        (replace(store.blob(), layer=1).pack(), "30", "expected layer 1, found 1 layers"),
        (replace(store.blob(), header_crc=1).pack(), "30", "the header that the .pte was exported with"),
    ):
        pte = one_call(tmp_path / "b.pte", blob, x)
        code, words = failure(load)
        assert (code, message in words) == (wanted, True), words
    with pytest.raises(ConfigError, match=r"option of Pi2Backend: expected store_path, .*found 'speed'"):
        backend.set_options({"speed": 11})
    with pytest.raises(
        ConfigError, match=r"option engine of Pi2Backend: expected auto, io_uring or pread, found 'mmap'"
    ):
        backend.set_options({"engine": "mmap"})


def test_wrong_tensors_and_reading_that_fails(runtime: Any, tmp_path: Path) -> None:
    one = layer(HIDDEN)
    store = Store(tmp_path / "model.pi2", [one])
    backend.set_options({"store_path": str(tmp_path), "cache_bytes_kib": 0})
    for example, message in (
        (torch.zeros(2, HIDDEN + 1), "input: expected [..., 32], found a last size of 33"),
        (torch.zeros(2, HIDDEN, dtype=torch.int64), "input: expected float32, bfloat16 or float16, found dtype 4"),
    ):
        wrong = runtime.load_program(one_call(tmp_path / "w.pte", store.blob().pack(), example)).load_method("forward")
        code, words = failure(lambda: wrong.execute([example]))  # noqa: B023 (called within the round)
        assert (code, message in words) == ("12", True), words
    x = torch.randn(2, HIDDEN)
    method = runtime.load_program(one_call(tmp_path / "a.pte", store.blob().pack(), x)).load_method("forward")
    sound = store.path.read_bytes()
    os.truncate(store.path, 8192)
    code, words = failure(lambda: method.execute([x]))
    assert (code, "layer 0: expected its neurons, found layer 0, neuron 0" in words) == ("22", True), words
    with store.path.open("r+b") as file:
        file.write(sound)
    assert torch.equal(method.execute([x])[0], one(x))


class _Split(nn.Module):
    """A layer in two calls with something between them."""

    def __init__(self, store: Store, first: int, x: torch.Tensor, number: int = 0, queue: int = 1) -> None:
        super().__init__()
        self.submit = call(store.blob(number, role=1, first=first, queue=queue).pack(), x)
        self.collect = call(store.blob(number, role=2, first=first, queue=queue).pack(), x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.collect(self.submit(x) * 2)


def _rest(one: Layer, first: int) -> Layer:
    """Its neurons from ``first`` on."""
    biases = [None if b is None else b[first:] for b in one.biases[:2]]
    return replace(
        one, neuron_rows=one.neuron_rows[first:].contiguous(), biases=(*biases, one.biases[2]), n_hot=one.n_hot - first
    )


@pytest.mark.slow
def test_submitted_and_collected(runtime: Any, tmp_path: Path) -> None:
    """Both methods use queue 1; each has its own session, in each program."""
    store = Store(tmp_path / "model.pi2", [layer(HIDDEN, 300, n_hot=150, kind="lowrank", biased=True)])
    examples = {"one": torch.randn(1, HIDDEN), "four": torch.randn(4, HIDDEN)}
    firsts = {"one": 64, "four": 128}
    pte = write_pte(
        tmp_path / "model.pte", {name: (_Split(store, firsts[name], x), (x,), None) for name, x in examples.items()}
    )
    backend.set_options({"store_path": str(tmp_path), "threads": 2})
    programs = [runtime.load_program(pte) for _ in range(2)]
    methods = {(i, name): programs[i].load_method(name) for i in range(2) for name in examples}
    for _ in range(3):
        for (_, name), method in methods.items():
            x = examples[name]
            wanted = x * 2 + _rest(store.layers[0], firsts[name])(x)
            assert torch.equal(method.execute([x])[0], wanted)
    (about,) = backend.stats()["stores"]
    assert about["calls"] == 12
    assert about["submit_wait_ns"] > 0


@pytest.mark.slow
def test_what_comes_between_may_fail(runtime: Any, tmp_path: Path) -> None:
    """A call that fails after a submit: the next execution of the method starts afresh, and unloading does not hang."""
    layers = [layer(HIDDEN, 200, n_hot=100), layer(HIDDEN, 200, n_hot=100, seed=1)]
    store = Store(tmp_path / "model.pi2", layers)

    class Net(nn.Module):
        def __init__(self, x: torch.Tensor) -> None:
            super().__init__()
            self.submit = call(store.blob(0, role=1, first=64, queue=1).pack(), x)
            self.between = call(store.blob(1).pack(), x)
            self.collect = call(store.blob(0, role=2, first=64, queue=1).pack(), x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.collect(self.between(self.submit(x)))

    x = torch.randn(2, HIDDEN)
    pte = write_pte(tmp_path / "model.pte", {"forward": (Net(x), (x,), None)})
    backend.set_options({"store_path": str(tmp_path), "cache_bytes_kib": 0})
    loaded = [runtime.load_program(pte).load_method("forward")]
    wanted = layers[1](x) + _rest(layers[0], 64)(x)
    assert torch.equal(loaded[0].execute([x])[0], wanted)
    sound = store.path.read_bytes()
    damaged = bytearray(sound)
    slots = int.from_bytes(sound[4096 + 128 + 128 : 4096 + 128 + 136], "little")  # of layer 1
    damaged[slots] ^= 1
    with store.path.open("r+b") as file:
        file.write(damaged)
    for _ in range(3):
        code, words = failure(lambda: loaded[0].execute([x]))
        assert (code, "layer 1, neuron 0" in words) == ("22", True), words
    with store.path.open("r+b") as file:
        file.write(sound)
    assert torch.equal(loaded[0].execute([x])[0], wanted)
    with store.path.open("r+b") as file:
        file.write(damaged)
    failure(lambda: loaded[0].execute([x]))
    loaded.clear()
    gc.collect()  # frames of what was raised
    assert backend.stats()["stores"] == []


class _InProgram(nn.Module):
    """Operators whose weights are in the ``.pte``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [
            layer(HIDDEN, weights="int4", rows=2, activation="gelu_tanh", biased=True),
            layer(HIDDEN, n_hot=10, kind="lowrank", biased=True),
            layer(HIDDEN, weights="int8", kind="lowrank_q", predictor_weights="int4", n_hot=30),
            layer(HIDDEN, weights="bfloat16", kind="signbit", cut=1.1),
        ]
        for i, one in enumerate(self.layers):
            for name, tensor in {"neuron_rows": one.neuron_rows, **one.parts()}.items():
                self.register_buffer(f"{name}_{i}", tensor)
        self.register_buffer("rows", torch.ops.pi2.quantize(torch.randn(50, HIDDEN), "int4"))
        self.register_buffer("blocks", random_rows("q5_0", 50, HIDDEN))
        self.register_buffer("bias", torch.randn(50))

    def _layer(self, i: int) -> Layer:
        one = self.layers[i]
        found = [getattr(self, f"{name}_{i}", None) for name in ("bias_gate", "bias_up", "bias_down")]
        names = [name for name in one.parts() if not name.startswith("bias_")]
        predictor = tuple(getattr(self, f"{name}_{i}") for name in names)
        return replace(one, neuron_rows=getattr(self, f"neuron_rows_{i}"), biases=tuple(found), predictor=predictor)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = (x @ x.T)[:, :1].expand(-1, 100) > 0
        one = self._layer(0)
        masked = torch.ops.pi2.sparse_ffn(
            x, one.neuron_rows, *one.biases, mask, one.activation, False, 0, 0.0, one.weights, False
        )
        linear = torch.ops.pi2.linear(x, self.rows, self.bias, "int4", True)
        blocks = torch.ops.pi2.linear(x, self.blocks, self.bias, "q5_0", False)
        numbers = (
            torch.ops.pi2.dequantize(rows.index_select(0, (x[:, 0] > 0).long()), kind, HIDDEN, torch.float32)
            for kind, rows in (("int4", self.rows), ("q5_0", self.blocks))
        )
        return (linear, blocks, *numbers, masked, *(self._layer(i)(x) for i in range(4)))


def test_kernels_of_weights_in_the_program(runtime: Any, tmp_path: Path) -> None:
    from executorch.exir import EdgeCompileConfig, to_edge

    torch.manual_seed(0)
    net = _InProgram()
    x = torch.randn(3, HIDDEN)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: TOKENS},))
    edge = to_edge(program, compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True))
    path = tmp_path / "model.pte"
    path.write_bytes(edge.to_executorch().buffer)
    loaded = runtime.load_program(path)
    method = loaded.load_method("forward")
    for tokens in (1, 3, 20):
        x = torch.randn(tokens, HIDDEN)
        for found, wanted in zip(method.execute([x]), net(x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (
            lambda x, r: torch.ops.pi2.sparse_ffn(x, r, None, None, None, None, "cube", False, 0, 0.0),
            "pi2::sparse_ffn.out, activation: expected one of torch_pi2.ops.ACTIVATIONS, found cube",
        ),
        (
            lambda x, r: torch.ops.pi2.linear(x, r[:, 0, :18].to(torch.uint8), r[0, 0], "int4"),
            "pi2::linear.out, bias: expected [9] of its dtype, found [32]",
        ),
    ],
)
def test_kernels_refuse_in_words(runtime: Any, tmp_path: Path, operator: Any, message: str) -> None:
    """What an exporter that checks no data lets through."""
    ops.load()
    from executorch.exir import EdgeCompileConfig, to_edge

    class Net(nn.Module):
        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return operator(x, rows)

    example = (torch.zeros(2, HIDDEN), torch.zeros(9, 3, HIDDEN))
    program = torch.export.export(Net(), example)
    edge = to_edge(program, compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True))
    path = tmp_path / "model.pte"
    path.write_bytes(edge.to_executorch().buffer)
    method = runtime.load_program(path).load_method("forward")
    code, words = failure(lambda: method.execute(example))
    assert (code, message in words) == ("12", True), words


def test_executorch_that_is_missing_or_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_library", None)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.4.0" if name == "executorch" else version(name))
    with pytest.raises(
        VersionError,
        match=r"ExecuTorch: expected executorch 1\.5\.1, found 1\.4\.0\. .*install executorch==1\.5\.1",
    ):
        backend.load_library()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(LibraryMissingError, match=r"found no such package\. .*pip install executorch==1\.5\.1 "):
        backend.load_library()
    monkeypatch.undo()
    monkeypatch.setattr(backend, "_library", None)
    monkeypatch.setattr(backend, "LIBRARY", "libpi2_nothing.so")
    with pytest.raises(LibraryMissingError, match=r"libpi2_nothing\.so: expected it in .*found no such file"):
        backend.load_library()
