"""Folders that bring code: ours load again without asking, once their code has run; no other code ever does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from offloading import logits
from tiny_models import drelu_module, randomise, tiny
from transformers import AutoConfig, AutoModelForCausalLM

import torch_pi2
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.cli import main
from torch_pi2.errors import ArtifactError
from torch_pi2.store import trust
from torch_pi2.store.trust import remember, trusted

TRAINED = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
ASKED = r"trust_remote_code=True.* It is not the code of a model that was made here"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where consent is kept: nothing as yet."""
    path = tmp_path / "cache" / "trusted-code.txt"
    monkeypatch.setattr(trust, "record_path", lambda: path)
    return path


@pytest.fixture
def saved(record: Path, tmp_path: Path) -> Path:
    """A folder of a model whose code runs, as after ``from_pretrained(trust_remote_code=True)``."""
    module = drelu_module()
    module.DReLULlamaConfig.register_for_auto_class()
    module.DReLULlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    return torch_pi2.save(torch_pi2.optimize(tiny("drelu")), tmp_path / "saved")


def test_what_is_made_of_a_saved_folder_needs_no_consent(saved: Path, tmp_path: Path) -> None:
    wanted = logits(torch_pi2.load(saved))
    assert torch.allclose(logits(load_dense(saved)), wanted, atol=1e-4)
    torch_pi2.pack(saved, tmp_path / "store")
    torch_pi2.quantize(saved, tmp_path / "small")
    torch_pi2.pack(tmp_path / "small", tmp_path / "small-store")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "store", budget="1GiB")), wanted)
    assert torch.equal(
        logits(torch_pi2.load(tmp_path / "small")), logits(torch_pi2.load(tmp_path / "small-store", budget="1GiB"))
    )
    shutil.move(saved, tmp_path / "elsewhere")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "elsewhere")), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("make", [torch_pi2.quantize, torch_pi2.pack])
def test_consent_is_given_once(make: Callable[..., object], record: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="Pass trust_remote_code=True if the checkpoint brings its own code"):
        make(TRAINED, tmp_path / "made")  # a checkpoint that is not ours
    make(TRAINED, tmp_path / "made", trust_remote_code=True)
    torch_pi2.load(tmp_path / "made")
    make(TRAINED, tmp_path / "again", trust_remote_code=True)
    assert len(record.read_text().split()) == 1
    assert not trusted(TRAINED, False)  # the same code, in a folder that nobody made with torch_pi2
    record.unlink()
    with pytest.raises(ArtifactError, match=ASKED):
        torch_pi2.load(tmp_path / "made")


def naming(name: object, file: str = "config.json") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / file
        about = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(about | {"auto_map": name}))

    return change


HOSTILE: dict[str, Callable[[Path], object]] = {
    "another byte": lambda folder: next(folder.glob("*.py")).open("a").write("\n"),
    "one more file": lambda folder: (folder / "more.py").write_text(""),
    "code of generate": lambda folder: shutil.copytree(
        folder, folder / "custom_generate", ignore=shutil.ignore_patterns("*.json", "*.safetensors", "pi2")
    ),
    "an adapter of another model": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "not ours": lambda folder: shutil.rmtree(folder / "pi2"),
    "the folder beside it": naming({"AutoConfig": "../evil/code.Config"}),
    "a repository": naming({"AutoConfig": "who/what--code.Config"}),
    "a file that is not there": naming({"AutoConfig": "missing.Config"}),
    "no names": naming([1, 2]),
    "not JSON": lambda folder: (folder / "config.json").write_text("{"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_else_is_run(kind: str, saved: Path) -> None:
    assert trusted(saved, False)
    HOSTILE[kind](saved)
    assert not trusted(saved, False)
    assert trusted(saved, True)


def test_a_folder_that_says_so_itself_is_not_believed(saved: Path, record: Path) -> None:
    said = record.read_text()
    record.unlink()
    for name in ("trusted-code.txt", "pi2/trusted-code.txt"):
        (saved / name).write_text(said)
    with pytest.raises(ArtifactError, match=ASKED):
        torch_pi2.load(saved)


def test_code_that_was_not_allowed_does_not_run(saved: Path, tmp_path: Path) -> None:
    """Not even while it is refused."""
    path = next(saved.glob("*.py"))
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{path.read_text()}")
    for call in (torch_pi2.load, load_dense, lambda folder: torch_pi2.pack(folder, tmp_path / "out")):
        with pytest.raises(ArtifactError, match=ASKED):
            call(saved)
    main(["inspect", str(saved)])
    assert not (tmp_path / "ran").exists()


def test_a_record_that_cannot_be_used(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(trust, "record_path", lambda: tmp_path / "file" / "record")
    assert not trusted(saved, False)
    remember(saved)
    assert "saved: its code is not remembered, pass trust_remote_code=True to load it" in caplog.text
    monkeypatch.setattr(trust, "record_path", lambda: tmp_path / "damaged")
    (tmp_path / "damaged").write_bytes(b"\xff\xfe")
    assert not trusted(saved, False)


def test_models_without_code_leave_no_record(record: Path, tmp_path: Path) -> None:
    torch_pi2.save(torch_pi2.optimize(tiny("llama-relu")), tmp_path / "m")
    torch_pi2.pack(tmp_path / "m", tmp_path / "store", trust_remote_code=True)
    assert not record.exists()


OWN = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scales_V", torch.linspace(0.5, 2, config.vocab_size), persistent=False)

    def _init_weights(self, module):
        pass

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.scales_V
        return output
"""


def test_buffers_of_a_models_own_code_are_computed(record: Path, tmp_path: Path) -> None:
    """transformers 5 leaves them uninitialised, which PyTorch's deterministic mode fills with NaN."""
    (tmp_path / "float").mkdir()
    (tmp_path / "float" / "modeling_own.py").write_text(OWN)
    named = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    about = tiny("llama-relu").config.to_dict() | {"model_type": "own-llama", "auto_map": named}
    (tmp_path / "float" / "config.json").write_text(json.dumps(about))
    config = AutoConfig.from_pretrained(tmp_path / "float", trust_remote_code=True)
    model = randomise(AutoModelForCausalLM.from_config(config, trust_remote_code=True).eval())
    wanted = logits(torch_pi2.optimize(model))
    torch_pi2.save(model, tmp_path / "saved")
    torch.use_deterministic_algorithms(True)
    try:
        loaded = torch_pi2.load(tmp_path / "saved")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(logits(loaded), wanted)
