"""``bench decode`` and ``bench layer``: figures that hang together, peers in their own process, the page of tables.

The tests of llama.cpp and OpenVINO need the extra ``bench``; they are skipped, and say so, where it is not installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_models import HIDDEN, INTERMEDIATE, LAYERS, VOCAB, tiny

import torch_pi2
from benchmarks import decode, layer, table, traffic
from benchmarks.__main__ import main, render
from benchmarks.gguf import write_gguf
from benchmarks.peer import Peer, PeerError
from benchmarks.peer_command import CommandPeer
from benchmarks.subject import Subject
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ArtifactError, ConfigError, UnsupportedModelError
from torch_pi2.observe import attention

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="package gguf is not installed (extra bench)"
)
needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="package llama-cpp-python is not installed (extra bench)"
)
needs_openvino = pytest.mark.skipif(
    importlib.util.find_spec("openvino_genai") is None, reason="package openvino-genai is not installed (extra bench)"
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
    assert r["sdpa_from"] == "profiler"
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
    command = ["decode", "--folder", str(folder), "--shape", "tiny", "--prompt", "5", "--tokens", "2"]
    assert main([*command, "--rounds", "1", "--eager", "--json"]) == 0
    r = json.loads(capsys.readouterr().out)
    assert r["what"] == "decode"
    assert r["shape"] == "tiny with 1 layers"
    assert r["weights"] == "int4"
    assert r["command"] == (
        "python -m benchmarks decode --shape tiny --activations float --prompt 5 --tokens 2 --rounds 1 --batch 1 "
        "--folder m --eager --seed 0 --json"
    )
    assert r["synthetic"]["active"] == 0.1
    assert r["ms_per_token"]["predictor"] > 0
    assert r["bytes_by_part"]["predictor"] > 0
    assert 0 < r["active_share"] < 1
    assert main([*command, "--rounds", "1", "--eager", "--activations", "int8", "--batch", "2,1"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert main([*command, "--weights", "int8", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["what"] == "--weights with --folder m"


# --- attention ---


def stepping(name):
    """A tiny model, a decoder of it after a prompt, and what that is fed next."""
    model = tiny(name)
    decoder = Decoder(model, max_tokens=6 + attention.SPARE_TOKENS, batch=2, compiled=False)
    return model, decoder, decoder.prompt(torch.arange(12).view(2, 6))


def test_calls_of_a_step_are_those_of_its_cache():
    model, decoder, next_B1 = stepping("llama")
    calls = attention.calls_of_step(model, decoder, next_B1)
    assert len(calls) == LAYERS
    for _, (query, key, value, mask, _, causal, sinks), kwargs in calls:
        assert not causal
        assert sinks is None
        assert query.shape == (2, 4, 1, 8)
        assert key.shape == value.shape == (2, 2, decoder.max_tokens, 8)
        assert mask.shape == (2, 1, 1, decoder.max_tokens)
        assert mask[0].sum() == 7  # the prompt and this token
        assert not kwargs
    for (_, key, value, *_), cached in zip([args for _, args, _ in calls], decoder.cache.layers, strict=True):
        assert key.data_ptr() == cached.keys.data_ptr()
        assert value.data_ptr() == cached.values.data_ptr()


def test_attention_that_the_profiler_does_not_see_is_timed_apart(monkeypatch):
    monkeypatch.setattr(attention, "_EVENTS", (("no such event",),))
    evicted = []
    ms, source = attention.milliseconds(*stepping("llama"), lambda: evicted.append(time.sleep(0.02)))
    assert source == "timed apart"
    assert len(evicted) == 1 + attention._PASSES
    assert 0 < ms < 20  # evicting does not count


def test_attention_timed_apart_is_counted_once(monkeypatch):
    monkeypatch.setattr(attention, "milliseconds", lambda *_: (0.25, "timed apart"))
    r = measured(rounds=1)
    ms = r["ms_per_token"]
    assert r["sdpa_from"] == "timed apart"
    assert ms["attention"] == pytest.approx(ms["linears"] + 0.25, abs=1e-3)
    parts = ms["attention"] + ms["predictor"] + ms["ffn"] + ms["head"] + ms["python"]
    assert parts == pytest.approx(ms["total"], abs=1e-2)


def test_attention_without_sdpa_is_part_of_the_rest():
    model = tiny("llama-relu")
    model.config._attn_implementation = "eager"
    r = decode.measure(model, prompt=4, tokens=2, rounds=1, compiled=False, memory_size=SMALL)
    ms = r["ms_per_token"]
    assert r["sdpa_from"] is None
    assert ms["sdpa"] is None
    assert ms["attention"] is None
    parts = ms["linears"] + ms["predictor"] + ms["ffn"] + ms["head"] + ms["python"]
    assert parts == pytest.approx(ms["total"], abs=1e-2)
    head = {"what": "decode", "shape": "tiny", "weights": "float", "activations": "float", "synthetic": False}
    shown = render(head | r)
    assert "sdpa: not seen, python contains it" in shown
    assert "(a real model: speed only)" in shown
    page = table.page({"x": head | r})
    rest = f"{ms['python']:.2f} with attention"
    figures = f"{ms['predictor']:.2f} | {ms['ffn']:.2f} | {ms['head']:.2f} | {rest} | {ms['total']:.2f}"
    assert f"| x | {ms['linears']:.2f} |  | {figures} |" in page
    assert "| x: tiny float, float activations, real model |" in page


# --- labels ---


def test_rounds_with_peers_are_not_in_the_table_of_batches():
    r = measured(rounds=2, batch=[1, 2], peers={"clock": lambda _: _Slow()})
    assert r["rounds_kept"] == 4
    assert [b["rounds_kept"] for b in r["batches"]] == [2, 2]
    for b in r["batches"]:
        for name in ("tokens_per_s", "prompt_tokens_per_s"):
            low, high = b["spread"][name]
            assert 0 < low <= b[name] <= high


def test_a_real_model_is_called_what_it_is(tmp_path):
    torch_pi2.save(torch_pi2.optimize(tiny("llama-relu"), weights="int8"), tmp_path / "own")
    settings = {"prompt": 4, "tokens": 2, "rounds": 1, "compiled": False, "folder": tmp_path / "own"}
    r = decode.run(**settings)
    assert r["shape"] == f"LlamaForCausalLM, {LAYERS} layers of {HIDDEN} x {INTERMEDIATE}"
    assert r["weights"] == "int8"
    assert r["synthetic"] is False
    for name, value, message in (
        (
            "shape",
            "mistral-7b",
            "--shape with --folder own: expected llama or LlamaForCausalLM, as in the folder, found",
        ),
        (
            "weights",
            "int4",
            "--weights with --folder own: expected int8, as in the folder, found int4. Leave --weights",
        ),
        ("active", 0.1, "--active with --folder own: expected nothing: its model is real, found 0.1"),
    ):
        with pytest.raises(ConfigError, match=message):
            decode.run(**settings, **{name: value})


def test_options_that_contradict_a_synthetic_folder(tmp_path):
    torch_pi2.synthetic(tmp_path / "m", "tiny", layers=1, rank=32, active=0.2)
    for name, value, message in (
        ("shape", "llama-1b", "--shape with --folder m: expected tiny, as in the folder, found llama-1b"),
        ("weights", "int8", "--weights with --folder m: expected int4, as in the folder, found int8"),
        ("active", 0.1, "--active with --folder m: expected 0.2, as in the folder, found 0.1"),
    ):
        with pytest.raises(ConfigError, match=message):
            decode.run(folder=tmp_path / "m", **{name: value})


def test_int8_activations_of_float_weights_are_refused(tmp_path):
    torch_pi2.save(torch_pi2.optimize(tiny("llama-relu")), tmp_path / "m")
    with pytest.raises(ConfigError, match="expected float, as the weights are float, found 'int8'"):
        decode.run(folder=tmp_path / "m", activations="int8")


def test_sizes_without_a_name(tmp_path):
    shape = torch_pi2.store.shapes.SHAPES["tiny"] | {"num_hidden_layers": 2}
    torch_pi2.synthetic(tmp_path / "m", shape, rank=32)
    subject = Subject.of(torch_pi2.load(tmp_path / "m"), tmp_path / "m")
    assert subject.shape == "LlamaForCausalLM, 2 layers of 256 x 1024"
    assert subject.stem == "m"
    assert subject.synthetic["shape"] == shape


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": 0}, "prompt: expected 1 or more, found 0"),
        ({"batch": []}, "batch: expected 1 or more, found 0"),
        ({"peers": ["vllm"]}, "peer: expected llama.cpp or openvino or torch, found vllm"),
        (
            {"peer_commands": ["no-such-bench -fa 1"]},
            "--peer-command: expected a program like llama-bench, perhaps with "
            "options, found no program 'no-such-bench'. Build it",
        ),
        ({"peer_commands": ["'"]}, r"--peer-command: .* found \"'\" \(No closing quotation\)"),
        (
            {"peer_commands": [sys.executable], "batch": [4, 2]},
            "--batch with --peer-command: expected 1 among the sizes: "
            "such a program takes one sequence at once, found 4,2",
        ),
        (
            {"peer_file": "x.gguf"},
            "--peer-file: expected a file, and --peer-command for what loads it, found only x.gguf",
        ),
        (
            {"peer_commands": [sys.executable], "peer_file": "/nowhere/x.gguf"},
            "found no such file as x.gguf. Give both",
        ),
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
    one_sequence = False

    def round(self, prompt: int, tokens: int, _batch: int) -> dict:
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


def test_every_batch_size_alternates_with_a_peer():
    r = measured(rounds=2, batch=[2, 1, 4], peers={"clock": lambda _: _Slow()})
    clock = r["peers"]["clock"]
    assert [b["batch"] for b in clock["batches"]] == [2, 1, 4]
    assert clock["batch"] == 2
    for name in ("tokens_per_s", "ratio", "our_tokens_per_s", "prompt_ratio", "spread"):
        assert clock[name] == clock["batches"][0][name]
    for b in clock["batches"]:
        assert b["tokens_per_s"] == b["batch"] / 100
        assert b["prompt_tokens_per_s"] == b["batch"] / 10
        assert b["ratio"] == pytest.approx(b["our_tokens_per_s"] / b["tokens_per_s"], rel=1e-3)
        low, high = b["spread"]["ratio"]
        assert 0 < low <= b["ratio"] <= high
    head = {"what": "decode", "shape": "tiny", "weights": "float", "activations": "float", "synthetic": False}
    shown = render(head | r)
    for b in clock["batches"]:
        ours = f"ours, {b['our_tokens_per_s']:.2f}, is {b['ratio']:.2f} times as fast"
        assert f"clock, batch {b['batch']}: {b['tokens_per_s']:.2f} tokens/s, prompt " in shown
        assert ours in shown
    page = table.page({"x": head | r})
    for b in clock["batches"]:
        low, high = b["spread"]["ratio"]
        assert f"| x | clock | {b['batch']} | {b['tokens_per_s']:.2f} |" in page
        assert f"| {b['ratio']:.2f} | {low:.2f}-{high:.2f} |" in page


def test_a_peer_of_one_sequence_says_so(monkeypatch):
    monkeypatch.setattr(_Slow, "one_sequence", True)
    r = measured(rounds=1, batch=[2, 1], peers={"clock": lambda _: _Slow()})
    assert [b["batch"] for b in r["peers"]["clock"]["batches"]] == [1]
    assert r["peers"]["clock"]["batch"] == 1
    assert [b["rounds_kept"] for b in r["batches"]] == [1, 1]
    shown = render({"what": "decode", "shape": "x", "weights": "", "activations": "", "synthetic": False} | r)
    assert "clock: batch 1 only, as it takes one sequence at once" in shown


def test_a_peer_that_cannot_load_says_why(tmp_path):
    with pytest.raises(PeerError, match=r"benchmarks.peer_torch: expected a loaded model, found .*nowhere"):
        Peer("benchmarks.peer_torch", {"folder": str(tmp_path / "nowhere"), "threads": 1, "context": 8, "batches": [1]})


def test_a_peer_that_dies_is_an_error():
    with pytest.raises(PeerError, match="expected an answer, found its end with exit code 1"):
        Peer("benchmarks.no_such_module", {})


@pytest.mark.slow
@pytest.mark.long
def test_torch_as_a_peer(tmp_path):
    torch_pi2.synthetic(tmp_path / "m", "tiny", layers=1, rank=32)
    settings = {"folder": str(tmp_path / "m"), "threads": 1, "context": 9, "batches": [1, 2]}
    peer = Peer("benchmarks.peer_torch", settings)
    try:
        rounds = [peer.round(6, 3, batch) for batch in (1, 2)]
    finally:
        peer.close()
    assert all(r["prompt_s"] > 0 and r["decode_s"] > 0 for r in rounds)
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
    assert abs(values.mean()) < 0.02 * values.std()  # no direction that is common to all tokens
    made = path.stat().st_mtime_ns
    assert path == write_gguf(path, config, seed=1)
    assert path.stat().st_mtime_ns == made  # kept: not made again
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@needs_llama
@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_llama_cpp_reads_mixtures(shape, tmp_path):
    small = {"num_hidden_layers": 1, "vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32}
    config = torch_pi2.store.shapes.build_config(torch_pi2.store.shapes.SHAPES[shape] | small)
    path = write_gguf(tmp_path / "m.gguf", config)
    peer = Peer("benchmarks.peer_llama", {"gguf": str(path), "threads": 1, "context": 9})
    try:
        assert peer.round(3, 2)["decode_s"] > 0
    finally:
        peer.close()


@needs_gguf
@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 3},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 4, "head_dim": 64},
        {"intermediate_size": 512},
        {"vocab_size": 512},
        {"model_type": "qwen2"},
    ],
    ids=str,
)
def test_gguf_of_other_sizes_is_replaced(change, tmp_path):
    config = torch_pi2.store.shapes.build_config("tiny", num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config)
    other = torch_pi2.store.shapes.build_config(torch_pi2.store.shapes.SHAPES["tiny"] | change)
    fresh = write_gguf(tmp_path / "fresh.gguf", other).read_bytes()
    assert fresh != path.read_bytes()
    assert write_gguf(path, other).read_bytes() == fresh
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh.gguf", "m.gguf"]


@needs_gguf
def test_gguf_that_somebody_else_made_stays(tmp_path):
    import gguf

    config = torch_pi2.store.shapes.build_config("tiny", num_hidden_layers=1)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("my model")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match="written by this benchmark, or no file, found a model named 'my model'"):
        write_gguf(path, config)
    assert path.read_bytes() == before
    path.write_bytes(b"GGUF?")
    with pytest.raises(ArtifactError, match=r"found no complete GGUF file .*Move it, or choose another"):
        write_gguf(path, config)
    path.unlink()
    path.mkdir()
    with pytest.raises(ArtifactError, match=r"m\.gguf"):
        write_gguf(path, config)
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
    r = decode.run("tiny", peers=["llama.cpp"], batch=[1, 3], **settings)
    peer = r["peers"]["llama.cpp"]
    assert [b["batch"] for b in peer["batches"]] == [1, 3]
    assert all(b["tokens_per_s"] > 0 and b["prompt_tokens_per_s"] > 0 for b in peer["batches"])
    assert peer["tokens_per_s"] > 0
    assert peer["ratio"] == pytest.approx(peer["our_tokens_per_s"] / peer["tokens_per_s"], rel=0.01, abs=1e-3)
    assert peer["about"]["bytes"] == (tmp_path / "tiny-1-layers.q4_0.gguf").stat().st_size
    assert peer["about"]["threads"] == torch.get_num_threads()


@needs_llama
def test_llama_cpp_is_fed_all_sequences():
    import llama_cpp

    from benchmarks.peer_llama import _filled

    filled = _filled(llama_cpp, 2, 5, 3)
    try:
        assert filled.n_tokens == 6
        assert [filled.seq_id[i][0] for i in range(6)] == [0, 0, 0, 1, 1, 1]
        assert filled.pos[:6] == [5, 6, 7, 5, 6, 7]
        assert filled.n_seq_id[:6] == [1] * 6
        assert filled.logits[:6] == [0, 0, 1, 0, 0, 1]
    finally:
        llama_cpp.llama_batch_free(filled)


@needs_openvino
@needs_gguf
def test_openvino_has_no_mixtures_of_experts(tmp_path):
    sizes = {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = torch_pi2.store.shapes.build_config(torch_pi2.store.shapes.SHAPES["tiny"] | sizes)
    settings = {"gguf": str(write_gguf(tmp_path / "m.gguf", config)), "threads": 1, "context": 9, "batches": [1]}
    with pytest.raises(PeerError, match=r"RuntimeError: OpenVINO GenAI cannot read .*m\.gguf: unordered_map::at"):
        Peer("benchmarks.peer_openvino", settings)


@needs_openvino
@needs_gguf
def test_openvino_as_a_peer(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", torch_pi2.store.shapes.build_config("tiny", num_hidden_layers=1))
    settings = {"gguf": str(path), "threads": 1, "context": 9, "batches": [1, 2]}
    peer = Peer("benchmarks.peer_openvino", settings)
    try:
        rounds = [peer.round(6, 3, batch) for batch in (1, 2)]
    finally:
        peer.close()
    assert all(r["prompt_s"] > 0 and r["decode_s"] > 0 for r in rounds)
    assert peer.about["engine"].startswith("OpenVINO GenAI 20")


# --- a program as a peer ---

#: Prints what llama-bench does, of what it was told to run.
BENCH = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-r"] == "1" and given["-o"] == "json" and open(given["-m"]).read() == "weights", given
sizes = ((int(given["-p"]), 0, 2e9), (0, int(given["-n"]), 5e9))
threads = [int(given["-t"]), *map(int, given.get("-x", "").split())]
print(json.dumps([
    {{"build_commit": "abc123", "build_number": 7, "model_type": "tiny 1B", "n_threads": t,
      "n_prompt": p, "n_gen": n, "avg_ns": ns}} for p, n, ns in sizes for t in threads
]))
"""


def bench(tmp_path, text=BENCH, name="other-bench"):
    """A program and what it shall load."""
    path, file = tmp_path / name, tmp_path / "m.gguf"
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    file.write_text("weights")
    return str(path), file


def test_a_program_as_a_peer(tmp_path, capsys):
    program, file = bench(tmp_path)
    folder = tmp_path / "m"
    torch_pi2.synthetic(folder, "tiny", layers=1, rank=32)
    sizes = ["--prompt", "4", "--tokens", "2", "--rounds", "1", "--batch", "1,2", "--eager"]
    peers = ["--peer-command", f"{program} -x 64", "--peer-command", program, "--peer-file", str(file)]
    assert main(["decode", "--folder", str(folder), *sizes, *peers, "--json"]) == 0
    r = json.loads(capsys.readouterr().out)
    assert f"--peer-command 'other-bench -x 64' --peer-command other-bench --peer-file {file.name}" in r["command"]
    assert list(r["peers"]) == ["other-bench -x 64, build abc123 (7)", "other-bench, build abc123 (7)"]
    for name, peer in r["peers"].items():
        assert peer["prompt_tokens_per_s"] == 4 / 2
        assert peer["tokens_per_s"] == 2 / 5
        assert [b["batch"] for b in peer["batches"]] == [1]
        assert peer["peak_rss_bytes"] > 1e6
        assert peer["about"]["engine"] == name
        assert peer["about"]["weights"] == "m.gguf: tiny 1B"
        assert peer["about"]["bytes"] == len("weights")
    assert "other-bench, build abc123 (7): batch 1 only" in render(r)
    assert "other-bench, build abc123 (7): its answers come after 0 tokens, ours after 4" in render(r)


def test_two_programs_of_one_name_are_two_peers():
    peers = {name: lambda _: _Slow() for name in ("a/x", "b/x")}
    _Slow.name = "x"
    try:
        assert list(measured(rounds=1, peers=peers)["peers"]) == ["x", "x, another"]
    finally:
        del _Slow.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "#!/bin/sh\necho one >&2\necho no such model >&2\nexit 3\n",
            r"bad: expected exit code 0, found its end with exit code 3: no such model\. Run it by hand: .*bad -m "
            ".*m.gguf -t 1 -p 4 -n 2 -r 1 -o json",
        ),
        ("#!/bin/sh\nexit 1\n", r"exit code 1: \(no words\)\. Run"),
        (
            "#!/bin/sh\necho hello\n",
            "bad: expected JSON as of llama-bench: one test of a prompt of 4 and one of an answer of 2 tokens with 1 "
            r"threads, each with avg_ns, found 'hello' \(JSONDecodeError",
        ),
        ("#!/bin/sh\necho '[]'\n", r"found '\[\]' \(ValueError: 0 tests with .*'n_prompt': 4"),
        ("#!/bin/sh\necho '{{\"a\": 1}}'\n", "AttributeError"),
        ("#!/bin/sh\necho 3\n", "TypeError"),
        (
            """#!/bin/sh\necho '[{{"n_prompt": 4, "n_gen": 0, "n_threads": 1}}]'\n""",
            "KeyError: 'avg_ns'",
        ),
    ],
    ids=["fails", "silent", "words", "nothing", "object", "number", "no time"],
)
def test_programs_that_are_no_bench(text, message, tmp_path):
    program, file = bench(tmp_path, text, "bad")
    with pytest.raises(PeerError, match=message):
        CommandPeer(program, file, 1).round(4, 2)


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
    assert main(["layer", *sizes, "--rounds", "1", "--json"]) == 0
    r = json.loads(capsys.readouterr().out)
    text = render(r)
    assert "FFN 64 x 64 bf16" in text
    assert "100.0 %" in text
    assert r["command"] == (
        "python -m benchmarks layer --hidden 64 --intermediate 64 --tokens 1 --rounds 1 --seed 0 --active 0.5,1.0 "
        "--weights bf16 --activations float --json"
    )
    assert main(["layer", "--active", "0.1;0.2", "--json"]) == 2
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
    assert f"| whole: tiny float, float activations | {r['threads']} | 3 | {r['tokens_per_s']:.2f} |" in page
    assert f"| {100 * r['of_read']:.0f} % |" in page
    low, high = r["batches"][1]["spread"]["tokens_per_s"]
    assert f"| whole | 2 | 3 | {r['batches'][1]['tokens_per_s']:.2f} | {low:.2f}-{high:.2f} |" in page
    assert "Written by `python -m benchmarks.table` from the JSON files beside it" in page
    assert "| whole | clock | 1 | 0.01 |" in page
    assert page.count("| single: 64 x 256 int4, float |") == 6
    assert "| 100.0 % |" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for line, after in itertools.pairwise(rows):
        if after.startswith("| ---"):
            assert line.count("|") == after.count("|")


def test_page_of_older_results():
    """Files from before these fields; 0.0 is what the profiler saw of attention where it could not."""
    r = {"what": "decode", "shape": "tiny", "weights": "float", "activations": "float", **measured(batch=[1, 2])}
    for result in (r, *r["batches"]):
        del result["rounds_kept"]
    for batch in r["batches"]:
        del batch["spread"]
    seen = json.loads(json.dumps(r))
    r["ms_per_token"]["sdpa"] = 0.0
    del r["sdpa_from"], seen["sdpa_from"]
    page = table.page({"unseen": r, "seen": seen})
    assert f"| unseen: tiny float, float activations | {r['threads']} |  | {r['tokens_per_s']:.2f} |" in page
    assert f"| unseen | {r['ms_per_token']['linears']:.2f} |  | " in page
    assert f"| {r['ms_per_token']['python']:.2f} with attention |" in page
    ms = seen["ms_per_token"]
    assert f"| seen | {ms['linears']:.2f} | {ms['sdpa']:.2f} | " in page
    batch = r["batches"][1]
    assert f"| unseen | 2 |  | {batch['tokens_per_s']:.2f} |  | {batch['prompt_tokens_per_s']:.1f} |  |" in page


def test_page_says_what_was_timed_apart():
    r = {"what": "decode", "shape": "tiny", "weights": "float", "activations": "float", **measured(rounds=1)}
    r |= {"sdpa_from": "timed apart"}
    ms = r["ms_per_token"]
    assert f"| x | {ms['linears']:.2f} | {ms['sdpa']:.2f} (apart) |" in table.page({"x": r})


def test_page_of_something_else(tmp_path: Path):
    (tmp_path / "x.json").write_text('{"what": "ffn"}')
    with pytest.raises(ArtifactError, match="fit or attention printed with --json, found a result of bench ffn"):
        table.write(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"found JSONDecodeError.*make bench"):
        table.write(tmp_path)
    assert not (tmp_path / "README.md").exists()
