"""The training script on a tiny configuration: deterministic, resumable, and its folder loads with transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "examples" / "train_lm.py"
TINY = "--batch 2 --seq 16 --vocab 300 --hidden 32 --intermediate 64 --layers 2 --heads 2 --kv-heads 1 --device cpu"
LOGGING = "--eval-tokens 200 --log-every 2 --eval-every 4 --save-every 2 --warmup 2"
SETTINGS = [*TINY.split(), *LOGGING.split()]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus like the script's own, from a few files of the standard library."""
    import numpy as np

    sys.path.insert(0, str(REPO / "examples"))
    import train_lm as script

    sys.path.pop(0)
    from torch_pi2.profiling import text

    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        full = text.stdlib_files
        patch.setattr(text, "stdlib_files", lambda split, **kw: full(split, with_tests=False)[:6])
        info = script.prepare(folder, 300)
    assert info["train"]["tokens"] == len(np.load(folder / "train.npy"))
    assert script.prepare(folder, 300) == info  # the second time it is read back
    return folder


def train(work: Path, out: Path, steps: int, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--work", str(work), "--steps", str(steps)]
    return subprocess.run([*command, *SETTINGS, *more], capture_output=True, text=True, check=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_train_resume_and_load(work: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = tmp_path / "whole"
    train(work, whole, 6)
    rows = [json.loads(line) for line in (whole / "train_log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert 0 < rows[-1]["heldout_bits_per_byte"] < 10
    assert all(0.5 < s < 1 for s in rows[-1]["sparsity_per_layer"])

    # Killed after the state of step 4 was written: start again from there and end with the same weights.
    killed = tmp_path / "killed"
    state = torch.load(work / "whole.state.pt", weights_only=True)
    assert state["step"] == 6
    train(work, tmp_path / "other", 6)
    assert all(torch.equal(v, weights(tmp_path / "other")[k]) for k, v in weights(whole).items())
    code = (
        "import sys; sys.argv = sys.argv[1:]; import torch, os\n"
        "real = os.replace\n"
        "def replace(a, b):\n"
        "    real(a, b)\n"
        "    if str(b).endswith('.state.pt') and torch.load(b, weights_only=True)['step'] == 4: os._exit(9)\n"
        "os.replace = replace\n"
        "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code, str(SCRIPT), "--out", str(killed), "--work", str(work), "--steps", "6"]
    assert subprocess.run([*command, *SETTINGS], capture_output=True).returncode == 9
    assert not killed.exists()
    assert "resumed at step 4" in train(work, killed, 6).stderr
    assert all(torch.equal(v, weights(killed)[k]) for k, v in weights(whole).items())

    model = AutoModelForCausalLM.from_pretrained(whole, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(whole)
    assert type(model).__name__ == "DReLULlamaForCausalLM"
    text = "def f(x):\n    return x\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    recorded = json.loads((whole / "training.json").read_text())
    assert recorded["command"].startswith("python examples/train_lm.py --out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ffn", "of_class"),
    [
        ("reglu", "LlamaForCausalLM"),
        ("swiglu", "LlamaForCausalLM"),
        ("relu2", "ArceeForCausalLM"),
        ("experts", "MixtralForCausalLM"),
    ],
)
def test_other_ffns(work: Path, tmp_path: Path, ffn: str, of_class: str) -> None:
    """They are models of transformers, need no code of their own, and torch_pi2 finds their FFNs."""
    from transformers import AutoModelForCausalLM

    import torch_pi2

    train(work, tmp_path / ffn, 4, "--ffn", ffn)
    rows = [json.loads(line) for line in (tmp_path / ffn / "train_log.jsonl").read_text().splitlines()]
    assert ("sparsity_per_layer" in rows[-1]) == (ffn != "swiglu")
    assert ffn == "swiglu" or all(0.2 < share < 0.8 for share in rows[-1]["sparsity_per_layer"])
    assert not list((tmp_path / ffn).glob("*.py"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / ffn, dtype=torch.float32).eval()
    assert type(model).__name__ == of_class
    layers = torch_pi2.supported(model).layers
    assert len(layers) == (16 if ffn == "experts" else 2)
    assert all(layer.lossless == (ffn != "swiglu") for layer in layers)
    if ffn == "swiglu":
        return
    ids_1T = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model(ids_1T).logits
        found = torch_pi2.optimize(model)(ids_1T).logits
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.slow
def test_low_rank_predictors_of_layers_without_gate(work: Path, tmp_path: Path) -> None:
    """Of a model that was trained for seconds: far better than chance, whose recall is the share predicted."""
    import numpy as np
    from transformers import AutoModelForCausalLM

    import torch_pi2
    from torch_pi2.layers.prompt import sparse_only

    train(work, tmp_path / "relu2", 120, "--ffn", "relu2", "--batch", "8", "--seq", "64", "--control-every", "10")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "relu2", dtype=torch.float32).eval()
    tokens = torch.from_numpy(np.load(work / "train.npy").astype(np.int64))
    how = {"method": "lowrank", "target_recall": 0.9, "tolerance": 1e-4, "seq_len": 64}
    calibration, held_out = tokens[:6400].view(-1, 64), tokens[-640:].view(-1, 64)
    with torch.no_grad():
        dense = model(held_out, labels=held_out).loss
        sparse = torch_pi2.optimize(model, calibration, **how)
        with sparse_only():  # as a step of one token
            lossy = sparse(held_out, labels=held_out).loss
    assert 0 < abs(float(lossy / dense) - 1) < 0.05
    layers = sparse.torch_pi2.plan.layers
    assert [layer.method for layer in layers] == ["lowrank"] * 2
    for layer in layers:
        assert not layer.site.gated
        card = sparse.torch_pi2.predictors[layer.site.key].card
        assert card.recall > card.predicted_active + 0.2
