"""Damaged files of every kind that is written: none is used, and what is wrong is said."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_hand import by_hand
from damage import content, damaged
from hostile import HASH, write_sound
from safetensors.torch import load_file, save_file
from tiny_models import tiny
from tiny_tokenizers import TEXT, byte_tokenizer

import torch_pi2
from torch_pi2.base.tensorfile import TensorReader, adding_checks, metadata_check
from torch_pi2.cli.inspect import describe
from torch_pi2.cli.models import load_tokenizer
from torch_pi2.errors import ArtifactError, ConfigError, Pi2Error, StaleArtifactError
from torch_pi2.export.manifest import Manifest
from torch_pi2.fitting.resume import Losses, PredictorFiles
from torch_pi2.machine.hardware import Hardware
from torch_pi2.observe.accesses import Accesses
from torch_pi2.predict.file import load_predictors
from torch_pi2.predict.lowrank import LowRankRows
from torch_pi2.profiling.samples import SampleFiles, collect_samples
from torch_pi2.store.storefile import StoreReader
from torch_pi2.store.trust import tokenizer_of
from torch_pi2.store.weights import QuantizedWeights
from torch_pi2.training.settings import ResumeInfo, SparsifySettings
from torch_pi2.training.zeros import Measured
from torch_pi2.types.method import PredictorCard
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import ActivationStats
from torch_pi2.types.verdict import Verdict

WRITTEN = Path(__file__).parents[1] / "data" / "written" / "2"


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (("owner",), "model.layebs.1.mlp", r"a module model\.layebs\.1\.mlp"),
        (("owner",), "model.layers.0.mlp", r"a module model\.layers\.0\.mlp that holds all parameters of"),
        (("inner",), ["model.nothing"], r"a module model\.nothing"),
        (("up", "weight"), "model.layers.1.up", r"a parameter model\.layers\.1\.up"),
    ],
)
def test_names_of_a_plan_that_the_model_does_not_have(tmp_path: Path, way: tuple, value: object, message: str) -> None:
    folder = shutil.copytree(WRITTEN / "optimised", tmp_path / "folder")
    plan = json.loads((folder / "pi2" / "plan.json").read_text())
    at = plan["layers"][1]["site"]
    for name in way[:-1]:
        at = at[name]
    at[way[-1]] = value
    (folder / "pi2" / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(StaleArtifactError, match=f"expected a model with {message}"):
        torch_pi2.load(folder)


# --- each kind of file: damaged at random ---


def _tensors(path: Path) -> Any:
    """All of a file that is read tensor by tensor."""
    kind = {"weights.safetensors": QuantizedWeights, "model.pi2": StoreReader}.get(path.name, TensorReader)
    with kind(path) as file:
        if isinstance(file, StoreReader):
            file.verify()
            return None
        return {name: file.read(name) for name in file.specs}, file.metadata


def _model(folder: Path) -> Any:
    return torch_pi2.load(folder).state_dict()


def _fit(folder: Path) -> Any:
    files = PredictorFiles(folder, 32)
    return files.find(4, 10, 0.9), Losses(folder)


#: Kind -> file in a folder, and what is read of it.
KINDS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "plan": ("plan/plan.json", lambda p: Plan.load(p.parent)),
    "orders": ("plan/plan.safetensors", lambda p: Plan.load(p.parent)),
    "stats": ("stats/stats.safetensors", ActivationStats.load),
    "predictors": ("predictors/predictors.safetensors", load_predictors),
    "weights": ("weights/weights.safetensors", _tensors),
    "store": ("store/model.pi2", _tensors),
    "verdict": ("verdict/verdict.json", lambda p: Verdict.load(p.parent)),
    "hardware": ("hardware/hardware.json", Hardware.load),
    "accesses": ("accesses/accesses.safetensors", Accesses.load),
    "model": ("model/model.safetensors", lambda p: _model(p.parent)),
    "shard": ("shards/model-00001-of-00003.safetensors", lambda p: _model(p.parent)),
    "index": ("shards/model.safetensors.index.json", lambda p: _model(p.parent)),
    "plan of a model": ("model/pi2/plan.json", lambda p: _model(p.parents[1])),
    "fit": ("fit/4-10-int4.safetensors", lambda p: _fit(p.parent)),
    "calibration": ("fit/4-10-int4-0.9.json", lambda p: _fit(p.parent)),
    "losses": ("fit/losses.json", lambda p: _fit(p.parent)),
    "samples": ("samples/samples.json", lambda p: dict(SampleFiles(p.parent))),
    "sampled": ("samples/0.x", lambda p: dict(SampleFiles(p.parent))),
    "training": ("training/begun.json", lambda p: ResumeInfo.load(p.parent)),
    "manifest": ("bundle/manifest.json", lambda p: Manifest.load(p.parent)),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    write_sound(root)
    model = torch_pi2.optimize(tiny("llama-relu"))
    torch_pi2.save(model, root / "model")
    shutil.copytree(root / "model", root / "shards")
    (root / "shards" / "model.safetensors").unlink()
    with adding_checks(root / "shards"):
        tiny("llama-relu").save_pretrained(root / "shards", max_shard_size="30KB")
    generator = torch.Generator().manual_seed(0)
    low = LowRankRows.fitted(*(torch.randn(n, generator=generator) for n in ((4, 32), (48, 4), (48,))))
    low.card = PredictorCard(0.9, 0.5, 0.2, 100, 0.1, 4, None)
    (root / "fit").mkdir()
    files = PredictorFiles(root / "fit", 32)
    files.put(low, 10, None)
    files.put(low, 10, 0.9)
    Losses(root / "fit").next(lambda: (2.5, 0.25))
    ids = torch.arange(128).view(4, 32) % 60
    sites = [layer.site for layer in model.torch_pi2.plan.layers]
    collect_samples(tiny("llama-relu"), ids, sites, 64, folder=root / "samples", progress=False)
    measured = Measured(2.5, 0.5, {"a": 0.25})
    ResumeInfo(SparsifySettings(), HASH, HASH, measured, measured).save(root / "training")
    shutil.copytree(WRITTEN / "bundle", root / "bundle")
    return root


def check_damage(sound: Path, kind: str, count: int) -> None:
    name, read = KINDS[kind]
    path = sound / name
    whole, wrong = path.read_bytes(), []
    wanted = content(read(path))
    for seed in range(count):
        how, data = damaged(whole, seed)
        path.write_bytes(data)
        try:
            found = content(read(path))
        except Pi2Error:
            continue
        except Exception as raw:
            wrong.append(f"{seed} {how}: {type(raw).__name__}: {str(raw)[:80]}")
            continue
        finally:
            path.write_bytes(whole)
        if found != wanted:
            wrong.append(f"{seed} {how}: used")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:40])


_SLOW = ("model", "shard", "index", "plan of a model")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in _SLOW])
def test_damaged_files_are_not_used(sound: Path, kind: str) -> None:
    check_damage(sound, kind, 18)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_300_damaged_files_are_not_used(sound: Path, kind: str) -> None:
    check_damage(sound, kind, 300)


def test_a_model_file_of_another_tool_is_no_damage(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound / "model", tmp_path / "copied")
    wanted = content(_model(folder))
    assert describe(folder, verify=True)["verified_bytes"] > 0
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert content(_model(folder)) == wanted
    path = sound / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    for read in (torch_pi2.load, torch_pi2.load_mapped, lambda folder: describe(folder, verify=True)):
        with pytest.raises(ArtifactError, match=r"has checksum \w{8}, not \w{8}"):
            read(folder)


def test_an_edited_plan_is_used_without_its_checksum(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound / "model", tmp_path / "edited")
    path = folder / "pi2" / "plan.json"
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text)))  # another layout is no change
    plan = torch_pi2.load(folder).torch_pi2.plan
    edited = json.dumps(json.loads(text) | {"made_by": {"me": 1}})
    path.write_text(edited)
    with pytest.raises(ArtifactError, match=r"crc32c, found \w{8}: it was edited .*remove the field crc32c"):
        torch_pi2.load(folder)
    path.write_text(by_hand(edited))
    assert torch_pi2.load(folder).torch_pi2.plan.made_by == {"me": 1}
    Plan.load(folder / "pi2").save(folder / "pi2")
    assert json.loads(path.read_text())["crc32c"]
    assert plan.made_by != {"me": 1}


def test_what_people_do_to_tensor_files(tmp_path: Path) -> None:
    folder = shutil.copytree(WRITTEN / "optimised", tmp_path / "folder")
    with adding_checks(folder):
        pass  # files that lack them are written again
    file, pointer = folder / "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "consolidated.safetensors").write_text(pointer)  # nothing reads it
    torch_pi2.load(folder)
    with TensorReader(file) as reader:
        said = {"checks": json.dumps(reader.checks), "metadata_check": metadata_check(reader.metadata)}
        metadata = reader.metadata | said
    tensors = load_file(file)
    name = next(name for name in tensors if "norm" in name)
    save_file(tensors | {name: tensors[name] * 2}, file, metadata)
    with pytest.raises(ArtifactError, match=r"has checksum .* on purpose, save it without the metadata checks and"):
        torch_pi2.load(folder)
    file.write_text(pointer)
    with pytest.raises(ArtifactError, match=r"a pointer of Git LFS.*git lfs pull"):
        torch_pi2.load(folder)


def test_a_tokenizer_whose_library_panics(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A panic of Rust is no ``Exception`` in Python."""
    byte_tokenizer(TEXT, bos=True).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    about = json.loads(path.read_text())
    about["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(about))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"expected a tokenizer to read text with, found that of .*no entry found"):
        tokenizer_of(SimpleNamespace(name_or_path=str(tmp_path)), None, "generate")
    with pytest.raises(ConfigError, match=r"tokenizer of .*no entry found for key\. Copy its files again"):
        load_tokenizer(Namespace(model=str(tmp_path), allow_download=False, trust_remote_code=False))


def test_two_words_of_one_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A digit was changed: a word has the id of another, and its own has none."""
    byte_tokenizer(TEXT).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    about = json.loads(path.read_text())
    about["model"]["vocab"]["return"] = about["model"]["vocab"]["x"]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for text, told in ((path.read_text(), False), (json.dumps(about), True)):
        path.write_text(text)
        tokenizer_of(SimpleNamespace(name_or_path=str(tmp_path)), None, "generate")
        assert ("has two words" in caplog.text) is told
        load_tokenizer(Namespace(model=str(tmp_path), allow_download=False, trust_remote_code=False))
    assert caplog.text.count("'x'") == 2
