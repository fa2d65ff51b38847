"""`torch-pi2 zeros`: counts against a count by hand, and what users get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_pi2
from tests.helpers.ggufs import tiny, tokenizer, written
from torch_pi2 import cli
from torch_pi2.errors import CalibrationError, ConfigError
from torch_pi2.planner import zeros as planner

NEAR = 0.05


def near_by_hand(h_I: torch.Tensor, score_I: torch.Tensor) -> int:
    """Neurons left out one by one, the smallest score first, while they have at most ``NEAR`` of the norm."""
    left_out, squares = 0, 0.0
    for i in score_I.argsort().tolist():
        squares += float(h_I[i].double() ** 2)
        if squares > NEAR**2 * float(h_I.double().square().sum()):
            break
        left_out += 1
    return left_out


@pytest.mark.parametrize(("name", "activation"), [("arcee", None), ("qwen2", F.silu), ("qwen2", F.relu)])
def test_shares_are_those_of_a_count_by_hand(name: str, activation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_SAMPLED", 1 << 20)
    model = tiny(name, **({} if activation is None else {"hidden_act": activation.__name__}))
    ids_NT = torch.randint(3, 300, (8, 16), generator=torch.Generator().manual_seed(1))
    found = torch_pi2.zeros(model, ids_NT, tokens=128, near=NEAR)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    mlp = model.model.layers[1].mlp
    gates: list[torch.Tensor] = []
    if activation is not None:
        mlp.gate_proj.register_forward_hook(lambda _m, _a, out: gates.append(activation(out).abs().flatten(0, 1)))

    def see(_module: Any, args: Any) -> None:
        h_TI = args[0].flatten(0, 1)
        seen.append((h_TI, gates.pop() if gates else h_TI.abs()))

    mlp.down_proj.register_forward_pre_hook(see)
    with torch.no_grad():
        model(ids_NT)
    (h_TI, score_TI), layer = seen[0], found.layers[1]
    assert found.tokens == layer.calls == 128
    assert layer.zeros == pytest.approx(float((score_TI == 0).float().mean()), abs=1e-6)
    for share, order_TI in ((layer.near_zeros, h_TI.abs()), (layer.below_gate, score_TI)):
        by_hand = sum(near_by_hand(h, order) for h, order in zip(h_TI, order_TI)) / h_TI.numel()
        assert share == pytest.approx(by_hand, abs=2e-5)
    assert layer.method == ("threshold" if activation is F.silu else "exact")
    assert layer.below_gate <= layer.near_zeros


def test_experts_are_counted_by_call_without_borrowed_tokens() -> None:
    model = tiny("qwen3_moe", hidden_act="relu")
    found = torch_pi2.zeros(model, torch.randint(3, 300, (8, 16)), tokens=128)
    assert [(layer.experts, layer.calls) for layer in found.layers] == [(4, 256), (4, 256)]  # 2 of 4 for each token
    assert all(0.3 < layer.zeros < 0.7 for layer in found.layers)


def test_wrong_settings_are_refused() -> None:
    model = tiny("arcee")
    with pytest.raises(ConfigError, match="near"):
        torch_pi2.zeros(model, torch.randint(3, 300, (8, 16)), near=1.0)
    with pytest.raises(CalibrationError, match="at least 64 tokens"):
        torch_pi2.zeros(model, torch.randint(3, 300, (1, 16)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zeros") / "arcee"
    tiny("arcee").save_pretrained(folder)
    tokenizer(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = cli.main(["zeros", *map(str, args), "-q"])
    return code, *capsys.readouterr()


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    code, out, _ = run(capsys, folder, "--tokens", 500)
    assert code == 0
    assert "relu2(up)" in out
    means = out.splitlines()[-1]
    assert means.startswith("zeros ")
    monkeypatch.setattr("torch_pi2.machine.process.free_bytes", lambda: 1 << 16)  # larger than memory
    assert run(capsys, folder, "--tokens", 500)[1] == out
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = written(folder, tmp_path / "arcee.gguf")
    assert run(capsys, file, "--tokens", 500)[1].splitlines()[-1] == means
    assert cli.main(["inspect", str(folder)]) == 0
    assert f"torch-pi2 zeros {folder} --text FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "found"), [("", "found none"), ("the cat", "at least 64 tokens"), (None, "No such file")]
)
def test_a_text_that_is_no_text(folder: Path, tmp_path: Path, capsys: Any, text: str | None, found: str) -> None:
    file = tmp_path / "text.txt"
    if text is not None:
        file.write_text(text)
    code, out, err = run(capsys, folder, "--text", file)
    assert (code, out) == (2, "")
    assert found in err


def test_models_that_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, tmp_path)
    assert code == 2
    assert "config.json" in err
    (tmp_path / "config.json").write_text('{"model_type": "zebra"}')
    code, _, err = run(capsys, tmp_path)
    assert code == 2
    assert "zebra" in err
    tokenizer(tmp_path)
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1)).save_pretrained(tmp_path)
    code, _, err = run(capsys, tmp_path)
    assert code == 2
    assert "feed-forward layers of MambaForCausalLM" in err
