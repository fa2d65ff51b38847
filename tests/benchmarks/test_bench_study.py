"""``bench study`` and ``study-validate``: misses are those of the law, machines scale as asked, simulated says so."""

from __future__ import annotations

import json

import pytest
import torch

import torch_pi2
from benchmarks import study, study_validate
from benchmarks.__main__ import main, render
from benchmarks.study_model import StreamMisses, decode, drawn_misses, synthetic_shape, with_memory, with_reads
from benchmarks.subject import Subject
from torch_pi2.errors import ConfigError
from torch_pi2.machine.find import find_hardware
from torch_pi2.planner.layer_cost import predicted_share
from torch_pi2.store.storefile import StoreReader

PHONE = find_hardware("sm8650-ufs4.0")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("study")
    torch_pi2.synthetic(root / "q", "tiny")
    torch_pi2.pack(root / "q", root / "store")
    return root / "store"


def test_shapes_are_those_of_synthetic_stores(store):
    shape = synthetic_shape("tiny")
    with StoreReader(store / "pi2" / "model.pi2") as reader:
        assert len(reader.entries) == len(shape.layers)
        for entry, layer in zip(reader.entries, shape.layers, strict=True):
            assert (entry.neurons, entry.hidden, entry.n_hot, entry.cluster) == (
                layer.intermediate, layer.hidden, layer.base_hot, layer.cluster,
            )  # fmt: skip
            assert (entry.slot_bytes, entry.neuron_bytes) == (layer.file_slot_bytes, layer.neuron_bytes)


def test_a_larger_cache_misses_less_and_decodes_faster():
    shape = synthetic_shape("tiny")
    misses = drawn_misses("tiny", shape, 1)
    costs = [decode(shape, PHONE, misses, batch=1, share=share, context=64) for share in (0, 0.1, 0.3, 0.5, 0.7, 1)]
    missed, speeds = [c.misses for c in costs], [c.tokens_per_s for c in costs]
    assert missed == sorted(missed, reverse=True)
    assert speeds == sorted(speeds)
    assert missed[0] == pytest.approx(misses.wanted(1))
    assert missed[-1] == costs[-1].ms["io"] == 0


def test_what_is_wanted_is_as_much_as_the_law_says():
    shape = synthetic_shape("tiny")
    by_law = sum(float(predicted_share(layer)[layer.base_hot :].sum()) + layer.base_hot for layer in shape.layers)
    assert drawn_misses("tiny", shape, 1).wanted(1) == pytest.approx(by_law, rel=0.05)


def test_the_same_token_wants_the_same_again():
    """One id for ever: a cache of what it wants misses nothing after it is warm; independent ids do."""
    shape = synthetic_shape("tiny")
    same = StreamMisses(shape, 0.4, torch.full((1, 16), 5), counted=8)
    other = StreamMisses(shape, 0.4, torch.arange(16)[None] * 61, counted=8)
    none, hot = [0] * len(shape.layers), [layer.base_hot for layer in shape.layers]
    slots = int(1.5 * same.wanted(1))
    assert same.misses(1, slots, none, hot).sum() == 0
    assert other.misses(1, slots, none, hot).sum() > 0


def test_experts_have_the_tokens_that_choose_them():
    shape = synthetic_shape("smallthinker-4b")
    layer = shape.layers[0]
    assert (layer.experts, layer.predictor, layer.cluster > 1) == (32, None, True)
    # all gates of 4 of 32 experts in each block, for one token
    assert drawn_misses("smallthinker-4b", shape, 1).wanted(1) == pytest.approx(4 * 32 * layer.slots)


def test_memory_and_drives_are_as_fast_as_asked():
    twice = with_memory(PHONE, 2 * 43.9)
    assert twice.memory[0].gb_per_s == pytest.approx(87.8)
    how = {"tokens": 1, "nbytes": 1e9, "macs": 0.0}
    fixed = PHONE.linear_us("int4/int8", tokens=1, nbytes=0, macs=0.0)
    assert twice.linear_us("int4/int8", **how) - fixed == pytest.approx(
        (PHONE.linear_us("int4/int8", **how) - fixed) / 2
    )
    faster = with_reads(PHONE, PHONE.reads, 4)
    asked = {"range_bytes": 1 << 29, "depth": 32}
    assert faster.read_us(1000, 8192, **asked) == pytest.approx(PHONE.read_us(1000, 8192, **asked) / 4)
    assert faster.stream_us(1e9) == pytest.approx(PHONE.stream_us(1e9) / 4)


def test_drives_are_ordered_by_what_they_give():
    found = [study.device_reads(study.find_drive(name)) for name in study.DRIVES]
    per_s = [1 / reads.us(1000, 8192, reads.file_bytes, 64) for reads in found]
    assert per_s == sorted(per_s)
    streams = [reads.stream_gb_per_s for reads in found]
    assert streams[:3] == sorted(streams[:3])
    assert streams[3:] == sorted(streams[3:])


def test_steps_of_the_ablation_gain_as_they_do_in_the_paper():
    result = study.run(part="ablation")
    assert "SIMULATED" in render(result)
    for profile in study.ABLATED:
        rows = {row["step"]: row for row in result["rows"] if row["hardware"] == profile}
        speeds = [rows[step]["tokens_per_s"] for step in ("mmap", "bundle", "cache", "pipeline", "xpu")]
        assert speeds == sorted(speeds)
        assert rows["bundle"]["tokens_per_s"] < rows["llm-in-a-flash"]["tokens_per_s"] < rows["cache"]["tokens_per_s"]
        assert rows["cache"]["hit_rate"] == 0.95
        assert rows["cache"]["read_bytes"] == rows["pipeline"]["read_bytes"] > 0
        assert rows["cache"]["ms"]["io"] > rows["pipeline"]["ms"]["io"]
    first, second = ([r["tokens_per_s"] for r in result["rows"] if r["hardware"] == name] for name in study.ABLATED)
    assert all(a > b for a, b in zip(first, second, strict=True))


def test_cache_from_the_command_line(capsys):
    command = ["study", "--hardware", "sm8650-ufs4.0", "--models", "tiny", "--batch", "1,32", "--json"]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["simulated"] is True
    rows = [row for row in result["rows"] if row["batch"] == 1]
    assert [row["ffn_in_memory"] for row in rows] == list(study.SHARES)
    assert rows[0]["memory_bytes"] < rows[-1]["memory_bytes"]
    assert "tiny" in render(result)


def test_machines_from_the_command_line(monkeypatch, capsys):
    """More bandwidth never hurts, and two machines with room for 30 % of the neurons each are faster than one."""
    monkeypatch.setattr(study, "COUNTS", (2, 4))
    assert main(["study", "--part", "machines", "--hardware", "sm8650-ufs4.0", "--models", "llama-1b", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["simulated"] is True
    assert {row["room"] for row in result["rows"]} == {*study.ROOMS}
    by_case = {(row["link"], row["machines"]): row for row in result["rows"] if row["room"] == study.ROOMS[0]}
    assert by_case.keys() == {(link, count) for link in study.LINKS for count in (2, 4)}
    for count in (2, 4):
        for way in ("chunks", "ranks", "chunks, heads", "ranks, heads", "layers"):
            speeds = [by_case[link, count]["ways"][way]["tokens_per_s"] for link in study.LINKS]
            assert speeds == sorted(speeds), way
    fast = by_case["100 GbE", 2]
    assert all(way["tokens_per_s"] > 2 * fast["alone_tokens_per_s"] for way in fast["ways"].values())
    rows = study.dealt_rows(result)
    assert [row[3] for row in rows] == 2 * [*study.LINKS]
    assert [row[2].split(",")[0] for row in rows] == ["30 %"] * len(study.LINKS) + ["3 %"] * len(study.LINKS)
    assert rows[0][5].startswith("layers ")


def test_enough_is_where_a_step_hardly_waits(monkeypatch):
    monkeypatch.setattr(study, "LIMITED", "tiny")
    monkeypatch.setattr(study, "LIMITED_SHARES", (0.3,))
    monkeypatch.setattr(study, "MEMORY_GB_PER_S", (20, 120))
    monkeypatch.setattr(study, "DRIVES", ("ufs-3.1", "nvme-gen5"))
    rows = study.run(part="drives", hardware=["sm8650-ufs4.0"])["rows"]
    for row in rows:
        assert (row["enough_reads_per_s"] <= row["reads_per_s"]) == (row["over_no_drive"] <= study.ENOUGH)
    at = {(row["drive"], row["memory_gb_per_s"]): row for row in rows}
    assert at["ufs-3.1", 20]["lookahead_tokens_per_s"] > at["ufs-3.1", 20]["tokens_per_s"]
    assert at["ufs-3.1", 120]["waiting"] > at["ufs-3.1", 20]["waiting"] > 0  # computing is over sooner
    assert at["ufs-3.1", 20]["waiting"] > at["nvme-gen5", 20]["waiting"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"part": "else"}, "part: expected cache or drives or ablation or machines, found else"),
        ({"models": ["gpt-5"]}, "model: expected .*found gpt-5"),
    ],
)
def test_settings_of_studies_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        study.run(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modes": ["bundle"]}, "mode: expected cache or pipeline or lookahead, found bundle"),
        ({"tokens": 1}, "tokens: expected 2 or more, found 1"),
        ({"ffn_in_memory": [1.5]}, "ffn_in_memory: expected 0 to 1, found 1.5"),
    ],
)
def test_settings_of_the_validation_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        study_validate.run(**settings)


def test_only_shapes_with_a_name_are_validated():
    real = Subject("LlamaForCausalLM, 4 layers of 256 x 1024", "m", "int4", False, "m", ("llama",))
    with pytest.raises(ConfigError, match=r"--folder m: expected a synthetic model of mistral-7b.*found LlamaFor"):
        study_validate._shape_name(real)


@pytest.mark.slow
def test_a_prediction_beside_every_measurement(store, capsys):
    """How near they are says nothing on so small a model; hits are counted, and have to agree."""
    result = study_validate.run(
        None, store, ffn_in_memory=(0.5, 0.9), batch=(1, 2), modes=("pipeline",), tokens=12, rounds=1,
        hardware="sm8650-ufs4.0",
    )  # fmt: skip
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        assert row["predicted_over_measured"] == pytest.approx(
            row["predicted_tokens_per_s"] / row["tokens_per_s"], rel=0.01
        )
        assert row["predicted_hit_rate"] == pytest.approx(row["hit_rate"], abs=0.06)
        assert set(row["ms"]) == set(row["predicted_ms"])
    assert result["drive_over_profile"]["pipeline"] > 0
    text = render(result)
    assert "predicted / measured" in text
    assert f"{result['near']} of 4 within 15 %" in text


def test_six_hundred_and_seventy_one_billion():
    shape = synthetic_shape("deepseek-v3")
    weights = sum(layer.intermediate * layer.hidden * 3 for layer in shape.layers)
    rest = sum(layer.attention_bytes for layer in shape.layers if layer.block) * 16 / 9  # 4.5 bits each
    assert weights + rest + 2 * 129280 * 7168 == pytest.approx(671e9, rel=0.002)
    used = sum(layer.chosen * layer.intermediate * layer.hidden * 3 for layer in shape.layers)
    assert used + rest + 129280 * 7168 == pytest.approx(37e9, rel=0.02)  # of a token
    assert sum(layer.block for layer in shape.layers) == 61


def test_more_machines_than_chunks_of_a_layer(monkeypatch):
    """They are a pipeline, and faster than few that have to read; more than blocks are left out."""
    monkeypatch.setattr(study, "LINKS", {"10 GbE": (10_000, 100)})
    result = study.run(part="machines", hardware=["sm8650-ufs4.0"], models=["qwen3-30b-a3b"])
    by_case = {(row["room"], row["machines"]): row["ways"] for row in result["rows"]}
    assert {count for _, count in by_case} == {2, 4, 8, 16, 32}  # 48 blocks
    assert {*by_case[0.03, 32]} == {"layers"}
    assert {*by_case[0.03, 8]} == {"layers", "ranks"}
    few, many = (by_case[0.03, count]["layers"]["tokens_per_s"] for count in (8, 32))
    assert many > 2 * few
    assert f"layers {many:.2f}" in render(result)


def test_thirteen_billion():
    shape = synthetic_shape("llama-13b")
    weights = sum(layer.intermediate * layer.hidden * 3 for layer in shape.layers)
    rest = sum(2 * layer.attention_bytes for layer in shape.layers if layer.block) * 8 / 9  # 4.5 bits each
    assert weights + rest + 2 * 32000 * 5120 == pytest.approx(13.0e9, rel=0.01)
