"""Compiling for Qualcomm's NPU without Qualcomm's libraries: what is refused, by name, before any work and offline."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_pi2.errors import (
    CompileError,
    ConfigError,
    LibraryMissingError,
    VersionError,
)
from torch_pi2.export import qnn
from torch_pi2.export.hot import HotChunks
from torch_pi2.export.qnn import compile as qnn_compile
from torch_pi2.export.qnn import lower, sdk
from torch_pi2.export.qnn.quantize import block_of, block_scales, hot_part


def tiny_hot(hidden: int = 32, neurons: int = 64, chunk: int = 32) -> HotChunks:
    torch.manual_seed(0)
    site = SimpleNamespace(activation="relu", activation_on_up=False, gated=True)
    return HotChunks(site, [torch.randn(neurons, hidden) for _ in range(3)], chunk=chunk)


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extra had never been installed."""
    known = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name == sdk.PACKAGE:
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)


@pytest.fixture
def fake_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An SDK of empty files: enough for everything that does not load it."""
    folder = tmp_path / "qairt/lib/x86_64-linux-clang"
    folder.mkdir(parents=True)
    for name in ("libQnnSystem.so", "libQnnHtp.so"):
        (folder / name).touch()
    monkeypatch.setenv("QNN_SDK_ROOT", str(tmp_path / "qairt"))
    return folder


@pytest.mark.usefixtures("without_libraries")
def test_missing_libraries_are_named_with_their_licence() -> None:
    with pytest.raises(LibraryMissingError, match=r"onnxruntime-qnn 2\.5\.0.*QNN_SDK_ROOT.*found neither") as raised:
        qnn.check("SM8650")
    assert "Qualcomm AI Stack License" in str(raised.value)
    assert "pip install executorch==1.5.1 onnxruntime-qnn==" in str(raised.value)
    assert [type(p) for p in qnn.problems("SM8650")] == [LibraryMissingError]


@pytest.mark.parametrize("version", ["2.4.0", "2.6.0", "2.7.0"])
def test_other_versions_of_the_package_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(version=version))
    with pytest.raises(VersionError, match=rf"expected 2\.5\.0 \(QNN 2\.49\.40\), found {version}.*=2\.5\.0"):
        sdk.find()


def test_another_executorch_is_refused(fake_sdk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.6.0")
    assert [type(p) for p in qnn.problems("SM8750")] == [VersionError]


def test_another_host_is_refused(fake_sdk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk.platform, "machine", lambda: "aarch64")
    with pytest.raises(LibraryMissingError, match=r"expected Linux on x86-64, found Linux aarch64"):
        qnn.check("SM8650")


def test_an_unknown_soc_is_refused_first() -> None:
    with pytest.raises(ConfigError, match=r"SM8550.*SM8650.*SM8750.*found 'SM8450'"):
        qnn.check("SM8450")
    assert "SM8450" in str(qnn.problems("SM8450")[0])


def test_wrong_settings() -> None:
    for settings, message in (
        ({"precision": "int4"}, r"precision of the hot part: expected w4a16 or w8a16 or fp16, found 'int4'"),
        ({"blocks": 8}, "blocks of the hot part: expected 'auto', 0, 16, 32 or 64, found 8"),
        (
            {"precision": "w8a16", "quantization": "gptq"},
            "quantization of the hot part: expected rtn, or gptq with w4a16",
        ),
        ({"quantization": "weighted"}, "quantization of the hot part: expected rtn or gptq, found 'weighted'"),
    ):
        with pytest.raises(ConfigError, match=message):
            qnn.Settings("SM8650", **settings)


def test_groups_that_do_not_divide_a_layer() -> None:
    hot = tiny_hot(hidden=40, neurons=48)
    with pytest.raises(ConfigError, match=r"multiples of blocks=32, found a hidden size of 40, chunks of \[32, 16\]"):
        block_of(hot, qnn.Settings("SM8650", blocks=32))
    assert block_of(hot, qnn.Settings("SM8650")) == 0
    assert block_of(tiny_hot(), qnn.Settings("SM8650")) == 16
    assert block_of(tiny_hot(), qnn.Settings("SM8650", "w8a16", blocks=32)) == 0


def test_scales_of_groups_are_multiples_and_no_worse_than_the_largest_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(12, 64)
    weight[3, 5], weight[7], weight[8, :32] = 30.0, 0.0, 0.0

    def error(scale: torch.Tensor) -> torch.Tensor:
        groups = weight.reshape(12, 4, 16)
        return ((groups / scale[..., None]).round().clamp(-7, 7) * scale[..., None] - groups).square().sum()

    scales = block_scales(weight, 16)
    step = scales.amax(1, keepdim=True) / 16
    multiples = scales / step
    torch.testing.assert_close(multiples, multiples.round())
    assert multiples.min() >= 1
    largest = weight.reshape(12, 4, 16).abs().amax(2).amax(1)
    torch.testing.assert_close(16 * 7 * step[:, 0][largest > 0], largest[largest > 0])
    whole = (weight.reshape(12, 4, 16).abs().amax(2) / 7 / step).ceil().clamp(1, 16) * step
    assert error(scales) < 0.97 * error(whole)
    assert scales.isfinite().all()


def _run_with(child: str, fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timeout: float = 60) -> None:
    """A job of one layer whose process is ``child``; its folder must be gone afterwards."""
    (tmp_path / "child.py").write_text(child)
    work = tmp_path / "temporary"
    work.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(lower, "_MODULE", "child")
    settings = qnn.Settings("SM8650", "fp16", timeout_s=timeout)
    try:
        qnn.lower_hot([tiny_hot()], [None], {"decode_b1": qnn.Graph((1, 1), [1])}, settings)
    finally:
        assert list(work.iterdir()) == []


_CRASH = (
    r"Qualcomm's compiler \(hot neurons of layer 0, graphs decode_b1\): expected a context binary for SM8650 in fp16, "
    r"found the process ended with SIGABRT: .*last words\. Choose another precision or fewer hot chunks"
)


def test_a_crash_of_the_compiler_is_an_error(fake_sdk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = "import os\nprint('last words', flush=True)\nos.abort()\n"
    with pytest.raises(CompileError, match=_CRASH):
        _run_with(child, fake_sdk, monkeypatch, tmp_path)


_CHILD = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
work = json.loads((folder / "job.json").read_text())
pathlib.Path(os.environ["SEEN"], folder.name).write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")
import torch
class One(torch.nn.Module):
    def forward(self, x):
        return (x,)
for name in work["parts"]:
    if name == os.environ.get("BAD"):
        os.kill(os.getpid(), 9)
    if os.environ.get("BAD"):
        time.sleep(60)
    place = str(folder.parent / name)
    torch.export.save(torch.export.export(One(), (torch.zeros(1, 32),)), place + ".pt2")
    pathlib.Path(place + ".context").write_bytes(name.encode())
    pathlib.Path(place + ".spec").write_bytes(b"spec")
    pathlib.Path(place + ".json").write_text(json.dumps({"by": folder.name, "graphs": {"decode_b1": {}}}))
(folder / "done.json").write_text(json.dumps({"build": "v2"}))
"""


@pytest.fixture
def three_layers(
    fake_sdk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[], tuple[Any, dict[str, Any]]]:
    """What two processes, which run ``_CHILD``, make of them."""
    (tmp_path / "child.py").write_text(_CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setattr(lower, "_MODULE", "child")
    monkeypatch.setattr(lower, "cores", lambda: 2)
    (tmp_path / "seen").mkdir()
    read: dict[str, Any] = {}
    settings, of_folder = qnn.Settings("SM8650", "fp16", timeout_s=100), lower._read
    monkeypatch.setattr(lower, "_read", lambda folder, name: read.setdefault(name, of_folder(folder, name)))

    def run() -> tuple[Any, dict[str, Any]]:
        given = ((f"layer{i}", *hot_part(tiny_hot(), None, settings, {"decode_b1": (1, 1)})) for i in range(3))
        return lower.lower_parts(given, settings).about["qnn"], read

    return run


@pytest.mark.slow
def test_layers_are_dealt_out_and_come_back_in_order(three_layers: Any, tmp_path: Path) -> None:
    build, compiled = three_layers()
    assert (build, list(compiled)) == ("v2", ["layer0", "layer1", "layer2"])
    assert [c.report["by"] for c in compiled.values()] == ["process0", "process1", "process0"]
    assert [c.context for c in compiled.values()] == [b"layer0", b"layer1", b"layer2"]
    seen = [(tmp_path / "seen" / f"process{i}").read_text().split() for i in (0, 1)]
    assert seen[0][0] != seen[1][0]
    assert [threads for _, threads in seen] == ["1", "1"]


@pytest.mark.parametrize("bad", ["layer1"])
def test_a_process_that_is_killed_is_named_and_the_others_end(
    bad: str, three_layers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAD", bad)
    started = time.monotonic()
    with pytest.raises(CompileError, match=rf"hot neurons of layer {bad[-1]}, graphs decode_b1\).*ended with SIGKILL"):
        three_layers()
    assert time.monotonic() - started < 50
    for path in (tmp_path / "seen").iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text().split()[0]), 0)


def test_a_compiler_that_hangs_is_killed(fake_sdk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = "import subprocess, sys, time\nsubprocess.Popen(['sleep', '60'])\ntime.sleep(60)\n"
    started = time.monotonic()
    with pytest.raises(CompileError, match=r"nothing after 1 s"):
        _run_with(child, fake_sdk, monkeypatch, tmp_path, timeout=1)
    assert time.monotonic() - started < 30


class _Refused(RuntimeError):
    """What ExecuTorch says of a graph that Qualcomm's compiler refuses."""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer3", r"hot neurons of layer 3, graphs decode_b1, prefill_8: .*fewer hot chunks.*target='xnnpack'"),
        ("attention3", r"attention of layer 3, graphs .*hot_attention='none'"),
    ],
)
def test_what_the_compiler_refuses_is_named_with_its_graphs_and_soc(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = qnn_compile._Log(tmp_path / "log")
    log.path.write_text("before\n")

    def lower(*_: object, **__: object) -> None:
        log.path.write_text("before\n <E> out of memory\n")
        raise _Refused("Failed to compile")

    monkeypatch.setattr(qnn_compile, "_lower", lower)
    programs: dict[str, Any] = dict.fromkeys(("decode_b1", "prefill_8"))
    with pytest.raises(CompileError, match=message) as raised:
        qnn_compile._compile(name, programs, qnn.Settings("SM8750", "w8a16"), log, convolutions=False)
    assert "takes for SM8750 in w8a16, and memory for it, found Failed to compile; <E> out of memory. " in str(
        raised.value
    )


@pytest.mark.slow
def test_libraries_that_cannot_be_loaded(fake_sdk: Path) -> None:
    code = "from torch_pi2.export.qnn import sdk; sdk.load(sdk.find())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "LibraryMissingError: Qualcomm's libQnnSystem.so" in done.stderr
    assert "file too short" in done.stderr
