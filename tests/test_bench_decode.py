"""``bench decode`` and ``bench layer``: figures that hang together, peers in their own process, the page of tables.

The tests of llama.cpp need the extra ``bench``; they are skipped, and say so, where it is not installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import torch
from tiny_models import HIDDEN, INTERMEDIATE, LAYERS, VOCAB, tiny

import torch_pi2
from torch_pi2.bench import decode, layer, table, traffic
from torch_pi2.bench.gguf import write_gguf
from torch_pi2.bench.peer import Peer, PeerError
from torch_pi2.cli import main
from torch_pi2.errors import ArtifactError, ConfigError, UnsupportedModelError

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="package gguf is not installed (extra bench)"
)
needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="package llama-cpp-python is not installed (extra bench)"
)
SMALL = 1 << 20


def measured(rounds=3, **settings):
    model = torch_pi2.optimize(tiny("llama-relu"))
    return decode.measure(model, prompt=6, tokens=3, rounds=rounds, compiled=False, memory_size=SMALL, **settings)


def test_figures_of_a_model_hang_together():
    r = measured(batch=[1, 2])
    assert r["threads"] == torch.get_num_threads()
    assert r["gb_per_s"] == pytest.approx(r["bytes_per_token"] * r["tokens_per_s"] / 1e9, abs=0.01)
    assert r["bytes_per_token"] == sum(r["bytes_by_part"].values())
    ms = r["ms_per_token"]
    assert ms["total"] == pytest.approx(1e3 / r["tokens_per_s"], rel=1e-3)
    assert ms["attention"] == pytest.approx(ms["linears"] + ms["sdpa"], abs=1e-3)
    parts = ms["attention"] + ms["predictor"] + ms["ffn"] + ms["head"] + ms["python"]
    assert parts == pytest.approx(ms["total"], abs=1e-2)
    assert 0 < ms["ffn"] < ms["total"]
    assert ms["sdpa"] > 0  # of other tokens than the rest: may be more than that where the machine is busy
    assert [b["batch"] for b in r["batches"]] == [1, 2]
    assert r["batches"][0]["tokens_per_s"] == r["tokens_per_s"]
    for name in ("tokens_per_s", "prompt_tokens_per_s", "read_gb_per_s", "gather_gb_per_s"):
        low, high = r["spread"][name]
        assert 0 < low <= r[name] <= high
    assert r["peak_rss_bytes"] > 1e7
    assert set(r["versions"]) >= {"python", "torch", "torch-pi2"}
    assert json.loads(json.dumps(r)) == r


def test_bytes_are_those_of_what_is_read():
    r = measured(rounds=1)
    width, heads, keys = 8, 4, 2  # of tiny_models: 32 / 4 wide
    attention = HIDDEN * width * (heads + 2 * keys) + heads * width * HIDDEN
    norms = 2 * LAYERS * HIDDEN + HIDDEN
    parts = r["bytes_by_part"]
    assert parts["head"] == 4 * VOCAB * HIDDEN
    assert parts["embedding"] == 4 * HIDDEN
    assert parts["predictor"] == 0
    assert parts["cache"] == 4 * LAYERS * 2 * keys * width * (6 + 3 + 4)
    rotary = parts["attention"] - 4 * (LAYERS * attention + norms)
    assert 0 <= rotary <= 4 * 2 * width  # its frequencies
    # every gate row, and as many up rows and down columns as neurons fired
    rows = LAYERS * INTERMEDIATE * (1 + 2 * r["firing_share"])
    assert parts["ffn"] == pytest.approx(rows * 4 * HIDDEN, rel=1e-2)
    assert r["active_share"] == pytest.approx((1 + 2 * r["firing_share"]) / 3, abs=1e-3)


def test_a_dense_model_has_no_ffn_of_ours():
    r = decode.measure(tiny("llama"), prompt=4, tokens=2, rounds=1, compiled=False, memory_size=SMALL)
    assert r["active_share"] == 0
    assert r["bytes_by_part"]["ffn"] == 0
    mlp = LAYERS * 3 * HIDDEN * INTERMEDIATE * 4
    assert r["bytes_by_part"]["attention"] > mlp
    assert traffic.ffn_row_bytes(tiny("llama")) == 0


def test_synthetic_model_from_the_command_line(tmp_path, capsys):
    folder = tmp_path / "m"
    torch_pi2.synthetic(folder, "tiny", layers=1, rank=32)
    command = ["bench", "decode", "--folder", str(folder), "--shape", "tiny", "--prompt", "5", "--tokens", "2"]
    assert main([*command, "--rounds", "1", "--eager", "--json"]) == 0
    r = json.loads(capsys.readouterr().out)
    assert r["what"] == "decode"
    assert r["synthetic"]["active"] == 0.1
    assert r["ms_per_token"]["predictor"] > 0
    assert r["bytes_by_part"]["predictor"] > 0
    assert 0 < r["active_share"] < 1
    assert main([*command, "--rounds", "1", "--eager", "--activations", "int8", "--batch", "2"]) == 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": 0}, "prompt: expected 1 or more, found 0"),
        ({"batch": []}, "batch: expected 1 or more, found 0"),
        ({"peers": ["vllm"]}, "peer: expected llama.cpp or torch, found vllm"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        decode.run("tiny", folder=tmp_path / "m", **settings)


# --- peers ---


class _Slow:
    """A peer that takes exactly so long."""

    about = {"engine": "clock"}  # noqa: RUF012
    closed = False

    def round(self, prompt: int, tokens: int) -> dict:
        return {"prompt_s": prompt * 10.0, "decode_s": tokens * 100.0, "peak_rss_bytes": 5}

    def close(self) -> None:
        type(self).closed = True


def test_ratio_is_ours_over_theirs():
    r = measured(peers={"clock": lambda context: _Slow() if context == 9 else None})
    peer = r["peers"]["clock"]
    assert peer["tokens_per_s"] == 0.01
    assert peer["ratio"] == pytest.approx(r["tokens_per_s"] / 0.01, rel=0.5)
    assert peer["ratio"] > 100
    assert peer["prompt_ratio"] == pytest.approx(r["prompt_tokens_per_s"] * 10, rel=0.5)
    assert _Slow.closed


def test_a_peer_that_cannot_load_says_why(tmp_path):
    with pytest.raises(PeerError, match=r"torch_pi2.bench.peer_torch: expected a loaded model, found .*nowhere"):
        Peer("torch_pi2.bench.peer_torch", {"folder": str(tmp_path / "nowhere"), "threads": 1, "context": 8})


def test_a_peer_that_dies_is_an_error():
    with pytest.raises(PeerError, match="expected an answer, found its end with exit code 1"):
        Peer("torch_pi2.bench.no_such_module", {})


def test_torch_as_a_peer(tmp_path):
    torch_pi2.synthetic(tmp_path / "m", "tiny", layers=1, rank=32)
    peer = Peer("torch_pi2.bench.peer_torch", {"folder": str(tmp_path / "m"), "threads": 1, "context": 9})
    try:
        r = peer.round(6, 3)
    finally:
        peer.close()
    assert r["prompt_s"] > 0
    assert r["decode_s"] > 0
    assert peer.about["weights"] == "bfloat16"


@needs_gguf
def test_gguf_has_the_shape_and_finite_weights(tmp_path):
    import gguf

    config = torch_pi2.store.shapes.build_config("tiny")
    path = write_gguf(tmp_path / "m.gguf", config)
    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    assert len(tensors) == 3 + 9 * config.num_hidden_layers
    down = tensors["blk.3.ffn_down.weight"]
    assert list(down.shape) == [config.intermediate_size, config.hidden_size]
    values = gguf.dequantize(down.data, down.tensor_type)
    assert values.std() == pytest.approx(config.intermediate_size**-0.5, rel=0.05)
    assert path == write_gguf(path, None)  # kept: not made again
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@needs_gguf
@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ({"hidden_size": 48, "num_attention_heads": 2}, ConfigError, "rows of a multiple of 32, found token_embd"),
        ({"model_type": "gemma"}, UnsupportedModelError, "model type gemma: expected llama, mistral"),
    ],
    ids=["odd", "type"],
)
def test_gguf_that_cannot_be(shape, error, message, tmp_path):
    config = torch_pi2.store.shapes.build_config("tiny")
    for name, value in shape.items():
        object.__setattr__(config, name, value)
    with pytest.raises(error, match=message):
        write_gguf(tmp_path / "m.gguf", config)
    assert not list(tmp_path.iterdir())


@needs_llama
@needs_gguf
def test_llama_cpp_as_a_peer(tmp_path):
    torch_pi2.synthetic(tmp_path / "m", "tiny", layers=1, rank=32)
    settings = {"prompt": 6, "tokens": 2, "rounds": 1, "compiled": False, "folder": tmp_path / "m"}
    r = decode.run("tiny", peers=["llama.cpp"], **settings)
    peer = r["peers"]["llama.cpp"]
    assert peer["tokens_per_s"] > 0
    assert peer["ratio"] == pytest.approx(r["tokens_per_s"] / peer["tokens_per_s"], rel=0.01)
    assert peer["about"]["bytes"] == (tmp_path / "tiny.q4_0.gguf").stat().st_size
    assert peer["about"]["threads"] == torch.get_num_threads()


# --- one layer ---


@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_layer_against_its_bound(weights):
    r = layer.run(64, 256, weights, (0.1, 1.0), rounds=3, rank=16, memory_size=SMALL)
    assert [s["active"] for s in r["shares"]] == [pytest.approx(0.1, abs=0.01), 1.0]
    for share in r["shares"]:
        assert share["bound_ms"] == min(share["gather_ms"], r["stream_ms"])
        assert share["of_bound"] == pytest.approx(share["ms"] / share["bound_ms"], rel=0.2, abs=1e-3)
        low, high = share["spread_ms"]
        assert 0 < low <= share["ms"] <= high
    assert r["bytes"] == 256 * 3 * (36 if weights == "int4" else 128)
    assert ("linear" in r) == (weights == "int4")
    if weights == "int4":
        assert r["linear"]["of_read"] == pytest.approx(r["linear"]["gb_per_s"] / r["linear"]["read_gb_per_s"], rel=0.1)
        assert r["predictor_ms"] > 0


def test_layer_from_the_command_line(capsys):
    sizes = ["--hidden", "64", "--intermediate", "64", "--weights", "bf16", "--active", "0.5,1"]
    assert main(["bench", "layer", *sizes, "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    assert "FFN 64 x 64 bf16" in text
    assert "100.0 %" in text
    assert main(["bench", "layer", "--active", "0.1;0.2", "--json"]) == 2
    assert "comma-separated list of float" in json.loads(capsys.readouterr().out)["error"]["found"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"active": [0.1, 0]}, "active: expected shares above 0, at most 1, found"),
        ({"weights": "int3"}, "weights: expected int4, int8, bf16, fp32, found int3"),
        ({"weights": "bf16", "activations": "int8"}, "activations: expected float with bf16 weights, found int8"),
    ],
    ids=str,
)
def test_layer_settings_that_make_no_sense(settings, message):
    with pytest.raises(ConfigError, match=message):
        layer.run(64, 256, **settings)


# --- the page ---


def test_page_has_a_row_for_each_run(tmp_path: Path):
    r = {"what": "decode", "shape": "tiny", "weights": "float", "activations": "float", **measured(batch=[1, 2])}
    r["peers"] = measured(peers={"clock": lambda _: _Slow()})["peers"]
    (tmp_path / "whole.json").write_text(json.dumps(r))
    single = layer.run(64, 256, rounds=1, memory_size=SMALL)
    (tmp_path / "single.json").write_text(json.dumps({"what": "layer", **single}))
    table.main([str(tmp_path)])
    page = (tmp_path / "README.md").read_text()
    assert f"| whole: tiny float, float activations | {r['threads']} | {r['tokens_per_s']:.2f} |" in page
    assert f"| {100 * r['of_read']:.0f} % |" in page
    assert "| whole | 2 |" in page
    assert "| whole | clock | 0.01 |" in page
    assert page.count("| single: 64 x 256 int4, float |") == 6
    assert "| 100.0 % |" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for line, after in itertools.pairwise(rows):
        if after.startswith("| ---"):
            assert line.count("|") == after.count("|")


def test_page_of_something_else(tmp_path: Path):
    (tmp_path / "x.json").write_text('{"what": "ffn"}')
    with pytest.raises(ArtifactError, match="bench layer --json` printed, found a result of bench ffn"):
        table.write(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"found JSONDecodeError.*make bench"):
        table.write(tmp_path)
    assert not (tmp_path / "README.md").exists()
