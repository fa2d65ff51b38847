"""Prompts on an accelerator: methods of fixed length that read them in pieces; XNNPACK in the accelerator's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import NEURONS, ROOM, bundle_of, one_layer
from hypothesis import given
from hypothesis import strategies as st
from runner_calls import run
from torch import nn

import torch_pi2
from torch_pi2.errors import ConfigError
from torch_pi2.export.describe import describe_program
from torch_pi2.export.manifest import Manifest
from torch_pi2.export.methods import check_npu_memory, hot_prompts
from torch_pi2.export.qnn import MOST_BYTES, Settings
from torch_pi2.export.run import Bundle
from torch_pi2.export.settings import ExportSettings
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import sparse_layers

pytestmark = pytest.mark.slow

SIZES = (4, 16)
IDS = torch.randint(3, 250, (ROOM,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A chunk of three is hot when decoding, all of them in prompts."""
    return bundle_of(
        tmp_path_factory,
        "hot-prompts",
        lambda: torch_pi2.optimize(one_layer()),
        batches=(1,),
        hot={1: 1},
        hot_prompts=SIZES[::-1],
        max_prompt=20,
    )


def test_the_manifest_and_the_program_have_them(bundle: tuple[nn.Module, Path]) -> None:
    manifest = Manifest.load(bundle[1])
    assert manifest.prefills == SIZES
    assert {manifest.methods[f"prefill_{n}"].hot_chunks for n in SIZES} == {(-(-NEURONS // 512),)}
    assert manifest.methods["decode_b1"].hot_chunks == (1,)
    methods = describe_program(bundle[1] / "model.pte")["methods"]
    for size in SIZES:
        assert methods[f"prefill_{size}"]["delegates"]["Pi2Backend"] == 2  # submit and collect


def called(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Methods that are called from now on, and where their tokens go."""
    calls: list[tuple[str, int]] = []
    call = bundle._program.call

    def recorded(name: str, *args: torch.Tensor) -> Any:
        calls.append((name, int(args[1].flatten()[0])))
        return call(name, *args)

    monkeypatch.setattr(bundle._program, "call", recorded)
    return calls


def test_prompts_of_every_length(bundle: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = bundle
    with Bundle(folder) as opened, torch.no_grad():
        calls = called(opened, monkeypatch)
        for length in range(1, ROOM, 3):
            logits = opened.logits(IDS[:length], length)[0]
            wanted = model(torch.tensor([IDS[:length]])).logits[0, -1]
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
            made = opened.generate(IDS[:length], 8).sequences[0].ids
            greedy = model.generate(
                torch.tensor([IDS[:length]]), max_new_tokens=min(8, ROOM - length), do_sample=False, pad_token_id=0
            )
            assert made == greedy[0, length:].tolist(), length
        calls.clear()
        opened.logits(IDS[:27], 27)  # 16 that fill a piece, and 11 that do not
        opened.logits(IDS[:35], 35)
        opened.logits(IDS[:47], 47)
    assert calls == [
        *(("prefill_16", 0), ("prefill_16", 16)),
        *(("prefill_16", 0), ("prefill_16", 16), ("prefill_4", 32)),
        *(("prefill_16", 0), ("prefill_16", 16), ("prefill_16", 32)),
    ]


@pytest.mark.parametrize("length", [4, 25, ROOM - 1])
def test_the_runner_reads_them_alike(bundle: tuple[nn.Module, Path], length: int, tmp_path: Path) -> None:
    """Bit for bit: other methods would have other last bits."""
    ids, logits = ",".join(map(str, IDS[:length])), tmp_path / "logits.npy"
    found = run(bundle[1], "--ids", ids, "--max-new-tokens", 6, "--logits", logits)
    with Bundle(bundle[1]) as opened:
        assert found["sequences"][0]["ids"] == opened.generate(IDS[:length], 6).sequences[0].ids
        assert np.array_equal(np.load(logits)[0, 0], opened.logits(IDS[:length], length)[0].numpy())


def test_weights_of_every_chunk_are_its_own(tmp_path: Path) -> None:
    """In 16 bit; test_hot_attention.py has it in 8. Of two layers, so that the keys of the second depend on the
    accelerator's part of the first."""
    model = one_layer(num_hidden_layers=2, intermediate_size=600).to(torch.bfloat16)
    model = torch_pi2.optimize(model, method="exact")
    sizes = {"batches": (1,), "max_tokens": 24, "max_prompt": 8, "hot": {1: 2}, "hot_prompts": (8,)}
    with Bundle(torch_pi2.export(model, tmp_path / "b", **sizes)) as opened, torch.no_grad():
        found = opened.logits(IDS[:14], 12)  # a piece that is filled, one that is not, and two steps
        wanted = model(torch.tensor([IDS[:14]])).logits[0, 11:].float()
    assert float((found - wanted).norm() / wanted.norm()) < 0.03


@given(st.data())
def test_pieces(bundle: tuple[nn.Module, Path], data: st.DataObject) -> None:
    """Every token once, in order; within the room; the logits are those of the last token."""
    fields = Manifest.load(bundle[1]).to_json()
    fields["max_tokens"] = room = data.draw(st.integers(21, 300))
    sizes = data.draw(st.sets(st.integers(2, room - 1), max_size=3))
    fields["methods"] = {n: m for n, m in fields["methods"].items() if not n.startswith("prefill_")}
    like = {"kind": "prefill", "batch": 1, "hot_chunks": [3]}
    fields["methods"] |= {f"prefill_{n}": like | {"max_tokens": n} for n in sizes}
    manifest = Manifest.from_json(fields)
    length = data.draw(st.integers(1, room - 1))
    at = 0
    for name, start, count in manifest.pieces(length):
        takes = manifest.methods[name].max_tokens
        assert start == at
        assert 1 <= count <= takes
        if name != "forward":
            assert start + takes <= room
            assert count == takes or start + count == length
        at += count
    assert at == length


def test_what_is_refused(tmp_path: Path, bundle: tuple[nn.Module, Path]) -> None:
    model = bundle[0]
    size = ", 0: expected a whole number, 2 or more, at most 15, found 16"
    for settings, message in (({}, ": expected it only with hot or an NPU"), ({"hot": {1: 1}, "max_tokens": 16}, size)):
        with pytest.raises(ConfigError, match=rf"export\(hot_prompts=...\){message}"):
            torch_pi2.export(model, tmp_path / "b", batches=(1,), hot_prompts=(16,), **settings)
    for wrong, at in (((1, 8), 0), ((16, None), 1), ((16.0,), 0), (("8",), 0)):
        message = rf"export\(hot_prompts=...\), {at}: expected a whole number, 2 or more"
        with pytest.raises(ConfigError, match=message):
            torch_pi2.export(model, tmp_path / "b", batches=(1,), hot={1: 1}, hot_prompts=wrong)


def npu(prompts: tuple[int, ...] | None, **settings: Any) -> ExportSettings:
    return ExportSettings("qnn:SM8650", batches=(1,), hot_prompts=prompts, **settings)


def test_the_memory_of_an_npu(bundle: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    layers = sparse_layers(bundle[0])
    assert hot_prompts(layers, npu(None)) == (128,)
    assert hot_prompts(layers, npu(None, max_tokens=128)) == ()
    assert hot_prompts(layers, npu(())) == ()
    assert hot_prompts(layers, npu((32, 64))) == (32, 64)
    assert Settings("SM8650").bits == 4.5
    many: list[SparseFFN] = layers * (1 + int(MOST_BYTES * 8 / 4.5 / (NEURONS * 3 * 64)))
    assert hot_prompts(many, npu(None)) == ()
    message = rf"hot neurons of {len(many)} layers, graph prefill_128, for SM8650: expected .*Pass fewer chunks"
    with pytest.raises(ConfigError, match=message):
        hot_prompts(many, npu((128,)))
    assert hot_prompts(layers * (len(many) // 2), npu(None, precision="w8a16")) == (128,)
    check_npu_memory(many, npu(()), "decode_b4", [1] * len(many))
    of = rf"hot neurons of {len(many)} layers, graph decode_b4, for SM8650"
    found = rf"found 3584 MiB in w4a16 \({NEURONS} to {NEURONS} neurons of a layer\)\. Pass fewer chunks \(hot\)"
    with pytest.raises(
        ConfigError, match=f"{of}: expected at most 3584 MiB of weights, which an NPU can have, {found}"
    ):
        check_npu_memory(many, npu(()), "decode_b4", [-(-NEURONS // 512)] * len(many))
