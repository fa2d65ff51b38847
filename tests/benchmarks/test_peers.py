"""Other engines as peers: their processes, the files that are written for them, and memory caps."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config

from benchmarks import cap, executorch_llama
from benchmarks.executorch_llama import exported
from benchmarks.gguf import write_gguf
from benchmarks.peer import Peer, PeerError
from benchmarks.peer_command import CommandPeer
from benchmarks.serve import Requests, percentile
from benchmarks.server import Server
from benchmarks.words import END_ID, save_tokenizer, text, vocabulary
from torch_pi2.errors import ArtifactError, ConfigError, UnsupportedModelError
from torch_pi2.store.synthetic import SHAPES, build_config


def needs(*packages: str) -> Any:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed (extra bench): {', '.join(missing)}")


@pytest.mark.slow
def test_a_peer_that_cannot_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"peer_executorch: expected a loaded model, found .*nowhere"):
        Peer("benchmarks.peer_executorch", {"program": str(tmp_path / "nowhere"), "threads": 1})
    with pytest.raises(PeerError, match="expected an answer, found its end with exit code 1"):
        Peer("benchmarks.no_such_module", {})


@needs("gguf")
def test_gguf_files_are_kept_replaced_and_never_somebody_elses(tmp_path: Path) -> None:
    import gguf

    config, other = build_config("tiny", num_hidden_layers=1), build_config("tiny", num_hidden_layers=2)
    path = write_gguf(tmp_path / "m.gguf", config, seed=1)
    down = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight")
    values = gguf.dequantize(down.data, down.tensor_type)
    assert values.std() == pytest.approx(config.intermediate_size**-0.5, rel=0.05)
    made = path.stat().st_mtime_ns
    assert write_gguf(path, config, seed=1).stat().st_mtime_ns == made
    with pytest.raises(ArtifactError, match="random weights of the same sizes, or no file, found another file"):
        write_gguf(path, other)
    object.__setattr__(config, "model_type", "gemma")
    with pytest.raises(UnsupportedModelError, match="model type gemma: expected llama, mistral"):
        write_gguf(tmp_path / "none.gguf", config)


@needs("llama_cpp", "gguf")
@pytest.mark.parametrize(
    "shape",
    [
        *("tiny", "qwen3-30b-a3b", "afm-4.5b", "jais2-8b", "nemotron-h-8b", "nemotron-nano-30b", "bitnet-2b"),
        "rwkv7-7b",
    ],
)
def test_llama_cpp(shape: str, tmp_path: Path) -> None:
    small: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}
    if "nemotron" in shape:
        small["layers_block_type"] = [*dict.fromkeys(SHAPES[shape]["layers_block_type"])]
    else:
        small |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    config = build_config(SHAPES[shape] | ({} if shape == "tiny" else small), zeros=shape == "rwkv7-7b")
    path = write_gguf(tmp_path / "m.gguf", config)
    peer = Peer("benchmarks.peer_llama", {"gguf": str(path), "threads": 1, "context": 9, "batches": [1, 2]})
    try:
        assert all(peer.round(3, 2, batch)["decode_s"] > 0 for batch in (1, 2))
    finally:
        peer.close()


EXECUTORCH: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_executorch_weights_are_never_equal(tmp_path: Path) -> None:
    found = dict(executorch_llama._weights(LlamaConfig(**EXECUTORCH), torch.Generator().manual_seed(0)))
    linears = [tensor for name, tensor in found.items() if "norm" not in name and "embeddings" not in name]
    assert len({tuple(tensor.dequantize().flatten()[:16].tolist()) for tensor in linears}) == len(linears) == 15
    with pytest.raises(ConfigError, match=r"--peer executorch: expected .*llama or mistral.* found qwen2"):
        exported(Qwen2Config(**EXECUTORCH), tmp_path, 48)


#: Prints what llama-bench does.
BENCH = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
sizes = ((int(given["-p"]), 0, 2e9), (0, int(given["-n"]), 5e9))
print(json.dumps([
    {{"build_commit": "abc123", "build_number": 7, "model_type": "tiny 1B", "n_threads": int(given["-t"]),
      "n_prompt": p, "n_gen": n, "avg_ns": ns}} for p, n, ns in sizes
]))
"""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (BENCH, None),
        ("#!/bin/sh\necho no such model >&2\nexit 3\n", r"expected exit code 0, found .* exit code 3: no such model"),
        ("#!/bin/sh\necho hello\n", r"expected JSON as of llama-bench.*found 'hello' \(JSONDecodeError"),
        ("#!/bin/sh\necho '[]'\n", r"found '\[\]' \(ValueError: 0 tests with .*'n_prompt': 4"),
    ],
)
def test_a_program_like_llama_bench(program: str, message: str | None, tmp_path: Path) -> None:
    path, file = tmp_path / "bench", tmp_path / "m.gguf"
    path.write_text(program.format(python=sys.executable))
    path.chmod(0o755)
    file.write_text("weights")
    peer = CommandPeer(str(path), file, 1)
    if message is not None:
        with pytest.raises(PeerError, match=message):
            peer.round(4, 2)
        return
    took = peer.round(4, 2)
    assert (took["prompt_s"], took["decode_s"]) == (2, 5)
    assert peer.name == "bench, build abc123 (7)"


def test_letters_are_tokens_and_every_token_is_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, 1024)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(set(vocabulary(1024))) == 1024
    assert len(tokenizer(text(50, random.Random(0)))["input_ids"]) == 50
    words = [tokenizer.decode([token], skip_special_tokens=True) for token in range(1024)]
    assert [token for token, word in enumerate(words) if not word or "\ufffd" in word] == [END_ID]


def test_half_of_the_requests_begin_alike() -> None:
    asked = Requests([32, 256], [16, 128], 128, seed=0).of("one", 40)
    assert len({request.prompt for request in asked}) == len(asked)
    assert all(len(request.prompt) == request.prompt_tokens for request in asked)
    assert [request.prompt.startswith(asked[0].prompt[:16]) for request in asked] == [True, False] * 20
    assert [percentile([4, 2, 1, 3], share) for share in (0.5, 0.51, 0.99, 0)] == [2, 3, 4, 1]


def test_a_server_that_ends_at_once() -> None:
    with pytest.raises(PeerError, match=r"ours: expected a server .*exit code 1, after .*No module named absent"):
        Server("ours", "absent", [], {})


def test_memory_caps_that_cannot_be(tmp_path: Path) -> None:
    assert not cap.available(tmp_path)
    with pytest.raises(cap.CapError, match=r"memory controller of cgroup v1 in .*, found none. Mount it"):
        cap.MemoryCap(1 << 30, tmp_path).__enter__()
    (tmp_path / "memory.limit_in_bytes").write_text("0")
    (tmp_path / f"pi2-bench-{os.getpid()}").write_text("in the way")
    with pytest.raises(cap.CapError, match=r"permission to make a group in .*4096\}, found File exists"):
        cap.MemoryCap(4096, tmp_path).__enter__()
    with pytest.raises(cap.CapError, match=r"expected a group in .* that may be joined, found No such file"):
        cap.join(tmp_path / "none")
