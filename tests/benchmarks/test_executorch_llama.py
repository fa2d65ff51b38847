"""ExecuTorch's own Llama export as a peer of ``bench bundle``: its script makes a program, and its runtime runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from benchmarks import executorch_llama
from benchmarks.executorch_llama import exported
from benchmarks.peer import Peer, PeerError
from torch_pi2.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.slow
@pytest.mark.long
def test_a_program_is_made_once_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_pi2.export.contents import describe_program

    monkeypatch.setattr(executorch_llama, "PIECE", 16)
    program = exported(LlamaConfig(**SIZES), tmp_path, 48)
    assert [path.name for path in tmp_path.iterdir()] == [program.name]
    forward = describe_program(program)["methods"]["forward"]
    assert forward["delegates"]["XnnpackBackend"] >= 7 * 2
    assert forward["operators"]["llama::custom_sdpa.out"] == 2
    made = program.stat().st_mtime_ns
    assert exported(LlamaConfig(**SIZES), tmp_path, 48).stat().st_mtime_ns == made
    peer = Peer("benchmarks.peer_executorch", {"program": str(program), "threads": 1})
    try:
        assert (peer.about["context"], peer.about["threads"]) == (48, 1)
        took = peer.round(40, 6)  # three pieces
        assert took["prompt_s"] > 0 < took["decode_s"]
        with pytest.raises(PeerError):
            peer.round(40, 9)
    finally:
        peer.close()
    with pytest.raises(PeerError, match="expected a loaded model"):
        Peer("benchmarks.peer_executorch", {"program": str(tmp_path / "none"), "threads": 1})


def test_weights_are_those_of_the_sizes_and_never_equal() -> None:
    config = LlamaConfig(**SIZES)
    found = dict(executorch_llama._weights(config, torch.Generator().manual_seed(0)))
    assert found["layers.1.feed_forward.w2.weight"].shape == (64, 96)
    assert found["layers.0.attention.wk.weight"].shape == (32, 64)
    linears = [tensor for name, tensor in found.items() if "norm" not in name and "embeddings" not in name]
    assert len(linears) == 2 * 7 + 1
    assert {type(tensor).__name__ for tensor in linears} == {"IntxUnpackedToInt8Tensor"}
    firsts = {tuple(tensor.dequantize().flatten()[:16].tolist()) for tensor in linears}
    assert len(firsts) == len(linears)


def test_models_without_a_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--peer executorch: expected .*llama or mistral.* found qwen2"):
        exported(Qwen2Config(**SIZES), tmp_path, 48)
    with pytest.raises(ConfigError, match="found mistral, a window of 16"):
        exported(MistralConfig(**SIZES, sliding_window=16), tmp_path, 48)
    assert not [*tmp_path.iterdir()]


def test_a_script_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executorch_llama.sys, "executable", "/bin/false")
    with pytest.raises(
        PeerError, match=r"export_llama: expected a program, found its end with exit code 1: \(no words\)"
    ):
        exported(LlamaConfig(**SIZES), tmp_path, 48)
    assert not [*tmp_path.iterdir()]
