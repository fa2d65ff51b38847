"""Fits of many layers: from a folder, after a kill, of weights that stay in their files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_experts import build
from tiny_models import tiny
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import torch_pi2
from torch_pi2.base.files import locked
from torch_pi2.base.memory import is_mapped
from torch_pi2.errors import ArtifactError, DtypeError, StaleArtifactError
from torch_pi2.fitting import search, train
from torch_pi2.fitting.fit import fit, fit_layers
from torch_pi2.fitting.search import FitSettings
from torch_pi2.graph import find_sites
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.profiling import samples as sampling
from torch_pi2.profiling.run import profile
from torch_pi2.profiling.samples import SampleFiles, collect_samples

IDS = torch.randint(0, 64, (60, 24), generator=torch.Generator().manual_seed(0))
FEW = {"n_tokens": 400, "steps": 12, "max_rounds": 3, "seq_len": 24, "hot_frequency": 0.6, "tolerance": 0.05}


@pytest.fixture(scope="module")
def profiled() -> tuple[Any, Any, Any]:
    model = tiny("drelu")
    sites = find_sites(model)
    return model, sites, profile(model, IDS, sites, seq_len=24)


def same(one: FittedPredictors, two: FittedPredictors) -> bool:
    """Bit for bit."""
    return list(one) == list(two) and all(
        all(torch.equal(a, b) for a, b in zip(one[k].tensors().values(), two[k].tensors().values(), strict=True))
        and (one[k].threshold, one[k].card) == (two[k].threshold, two[k].card)
        for k in one
    )


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rank of each training; more than ``most`` of them (an attribute of the list) are interrupted."""
    done: Any = type("Trainings", (list,), {"most": 1000})()

    def counted(*args: Any, **kwargs: Any) -> Any:
        if len(done) == done.most:
            raise KeyboardInterrupt
        done.append(kwargs["rank"])
        return train.train_matrices(*args, **kwargs)

    monkeypatch.setattr(search, "train_matrices", counted)
    return done


def test_a_fit_in_a_folder_is_the_one_in_memory(profiled: Any, tmp_path: Path) -> None:
    settings = FitSettings(**FEW)
    in_memory = fit(*profiled[:1], IDS, *profiled[1:], settings)
    in_files = fit(*profiled[:1], IDS, *profiled[1:], settings, work=tmp_path / "work")
    assert len(in_memory) == 2
    assert same(in_memory, in_files)
    assert in_memory.report == in_files.report


def test_after_an_interrupt_the_same_fit_goes_on(profiled: Any, trainings: Any, tmp_path: Path) -> None:
    model, sites, stats = profiled
    whole = fit(model, IDS, sites, stats, FitSettings(**FEW))
    needed = list(trainings)
    trainings.clear()
    trainings.most = len(needed) - 2
    with pytest.raises(KeyboardInterrupt):
        fit(model, IDS, sites, stats, FitSettings(**FEW), work=tmp_path / "work")
    trainings.clear()
    ran = []
    hook = model.register_forward_hook(lambda *_: ran.append(1))
    again = fit(model, IDS, sites, stats, FitSettings(**FEW), work=tmp_path / "work")
    once = len(ran)
    fit(model, IDS, sites, stats, FitSettings(**FEW), work=tmp_path / "work")
    hook.remove()
    assert same(whole, again)
    assert whole.report == again.report
    assert len(trainings) == 2, "what was trained before was kept"
    assert len(ran) == once, "and so were samples and losses"
    assert not [p for p in (tmp_path / "work").rglob("*") if "partial" in p.name or "lock" in p.name]


def test_a_folder_of_another_fit_is_refused(profiled: Any, tmp_path: Path) -> None:
    model, sites, stats = profiled
    work = tmp_path / "work"
    fit(model, IDS, sites, stats, FitSettings(**FEW), work=work)
    with pytest.raises(
        StaleArtifactError, match=r"fit begun in .*work: expected the same .*another steps \(12, now 13\)"
    ):
        fit(model, IDS, sites, stats, FitSettings(**(FEW | {"steps": 13})), work=work)
    with pytest.raises(
        StaleArtifactError, match=r"another text \(.*Repeat the command that started this fit, or remove"
    ):
        fit(model, IDS.flip(0), sites, stats, FitSettings(**FEW), work=work)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    with pytest.raises(ArtifactError, match=r"mine: expected an empty folder, or one of a fit, found other files"):
        fit(model, IDS, sites, stats, FitSettings(**FEW), work=tmp_path / "mine")
    begun = work / "begun.json"
    begun.write_text(begun.read_text()[:-20])
    with pytest.raises(ArtifactError, match=r"begun.json: expected .*JSON"):
        fit(model, IDS, sites, stats, FitSettings(**FEW), work=work)


def test_a_folder_that_is_in_use_or_none_is_refused(profiled: Any, tmp_path: Path) -> None:
    model, sites, stats = profiled
    with (
        locked(tmp_path / "work", 0.0),
        pytest.raises(ArtifactError, match=r"work: expected no other process that writes"),
    ):
        fit(model, IDS, sites, stats, FitSettings(**FEW), work=tmp_path / "work")
    (tmp_path / "file").touch()
    with pytest.raises(
        ArtifactError, match=r"writing .*file: expected a folder that can be written, found File exists"
    ):
        fit(model, IDS, sites, stats, FitSettings(**FEW), work=tmp_path / "file")


def test_signs_are_calibrated_from_files_too(profiled: Any, tmp_path: Path) -> None:
    model, sites, stats = profiled
    cold = {s.key: torch.arange(s.intermediate) for s in sites}
    data = list(torch_pi2.profiling.data.batches(IDS))
    in_memory = fit_layers(model, data, sites, stats, FitSettings(method="signbit", n_tokens=300), cold=cold)
    assert same(
        in_memory,
        fit_layers(
            model, data, sites, stats, FitSettings(method="signbit", n_tokens=300), cold=cold, work=tmp_path / "work"
        ),
    )
    with pytest.raises(StaleArtifactError, match=r"another n_tokens \(300, now 200\)"):
        fit_layers(
            model, data, sites, stats, FitSettings(method="signbit", n_tokens=200), cold=cold, work=tmp_path / "work"
        )


def test_samples_in_files_are_those_in_memory(profiled: Any, tmp_path: Path) -> None:
    model, sites, _ = profiled
    in_memory = collect_samples(model, IDS, sites, 200, seed=5)  # fewer than there are: some give way to others
    found = collect_samples(model, IDS, sites, 200, seed=5, folder=tmp_path / "s")
    assert list(found) == list(in_memory)
    for key, wanted in in_memory.items():
        assert torch.equal(found[key].x_NH, wanted.x_NH)
        assert torch.equal(found[key].fired_bits, wanted.fired_bits)
    (tmp_path / "s" / "1.x").write_bytes(b"short")
    with pytest.raises(ArtifactError, match=r"1.x: expected 25600 bytes, found 5. Remove .*s; begin again"):
        SampleFiles(tmp_path / "s")[sites[1].key]
    (tmp_path / "s" / "0.fired").unlink()
    with pytest.raises(ArtifactError, match=r"s: expected .*No such file"):
        SampleFiles(tmp_path / "s")[sites[0].key]


def test_a_disk_without_room_is_said(profiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(sampling.os, "posix_fallocate", full)
    with pytest.raises(ArtifactError, match=r"writing .*s: expected .*found No space left on device"):
        collect_samples(profiled[0], IDS, profiled[1], 200, folder=tmp_path / "s")
    assert not (tmp_path / "s" / "samples.json").exists()


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["phi3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2-relu", "opt"))])
def test_a_mapped_model_is_the_loaded_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_pi2.checkpoint.stored._SMALL_BYTES", 1024)
    folder = saved(tmp_path / "m", tiny(name))
    loaded, mapped = AutoModelForCausalLM.from_pretrained(folder), torch_pi2.load_mapped(folder)
    assert is_mapped(mapped)
    assert not is_mapped(loaded)
    config: dict[str, Any] = {"method": "lowrank", "calibration_tokens": 1440, "seq_len": 24}
    config |= {"hot_frequency": 0.7, "tolerance": 1.0}
    one, two = (torch_pi2.profile(model, IDS, **config) for model in (loaded, mapped))
    assert one.model_hash == two.model_hash
    assert all(torch.equal(one[key].fired, two[key].fired) for key in one.layers)
    fitted = [torch_pi2.fit(model, IDS, stats=one, **config) for model in (loaded, mapped)]
    assert fitted[0]
    assert same(*fitted)
    assert not any(module._forward_hooks for module in mapped.modules())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe"])
def test_experts_that_are_stored_one_by_one_are_put_together(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", build(name))
    before = set(tmp_path.rglob("*"))
    loaded, mapped = AutoModelForCausalLM.from_pretrained(folder), torch_pi2.load_mapped(folder, scratch=tmp_path)
    assert set(tmp_path.rglob("*")) == before, "files without names"
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, mapped(IDS).logits)
    sites = find_sites(loaded)
    assert profile(loaded, IDS, sites).model_hash == profile(mapped, IDS, sites).model_hash


def test_what_cannot_be_mapped_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_pi2.checkpoint.stored._SMALL_BYTES", 1024)
    folder = saved(tmp_path / "m", tiny("llama"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].half()}, file, {"format": "pt"})
    with pytest.raises(DtypeError, match=rf"{name} in .*m, mapped: expected float32, .* found float16. Load the model"):
        torch_pi2.load_mapped(folder)
    save_file(tensors | {name: tensors[name][:-1]}, file, {"format": "pt"})
    with pytest.raises(ArtifactError, match=rf"{name} in .*m: expected \[48, 32\], found \[47, 32\]"):
        torch_pi2.load_mapped(folder)
    save_file({n: t for n, t in tensors.items() if n != name}, file, {"format": "pt"})
    with pytest.raises(ArtifactError, match=rf"expected a value for every tensor of .*, found none for {name}"):
        torch_pi2.load_mapped(folder)
    monkeypatch.setattr(
        "torch_pi2.base.tensorfile.MappedFile", lambda *_: (_ for _ in ()).throw(OSError(12, "no memory"))
    )
    with pytest.raises(ArtifactError, match=r"model.safetensors: expected .*found damage \(no memory\)"):
        torch_pi2.load_mapped(folder)


_MEASURED = """
import sys, torch, torch_pi2
from pathlib import Path
from benchmarks.cap import peak_rss_bytes
from torch_pi2.fitting.fit import fit
from torch_pi2.fitting.search import FitSettings
from torch_pi2.graph.find import search
from torch_pi2.profiling.run import profile
from torch_pi2.rewrite.skeleton import on_meta
model = torch_pi2.load_mapped(sys.argv[1])
sites = search(on_meta(model), on_meta=True).sites
ids = torch.randint(0, 64, (20, 32))
settings = FitSettings(hot_frequency=1.01, steps=4, max_rounds=1, seq_len=32, batch_size=2)
profile(model, ids[:1, :].repeat(2, 1), sites[:1], progress=False)
before = peak_rss_bytes()
stats = profile(model, ids, sites, batch_size=2, seq_len=32, progress=False)
fit(model, ids, sites, stats, settings, work=Path(sys.argv[2]), progress=False)
print(peak_rss_bytes() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    """Weights of 8 layers are 270 MB, and those of 16 twice that; what is fitted takes as much memory for both."""
    took = {}
    for layers in (8, 16):
        sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 64}
        config = LlamaConfig(**sizes, num_hidden_layers=layers, num_key_value_heads=1, hidden_act="relu")
        folder = saved(tmp_path / f"{layers}", LlamaForCausalLM(config))
        weights = (folder / "model.safetensors").stat().st_size
        assert weights > layers * 25e6
        ran = subprocess.run(
            [sys.executable, "-c", _MEASURED, folder, tmp_path / f"work-{layers}"],
            capture_output=True,
            text=True,
            timeout=500,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert ran.returncode == 0, ran.stderr
        took[layers] = int(ran.stdout)
    assert took[16] < took[8] + 50e6, took
    assert took[16] < 200e6, took
