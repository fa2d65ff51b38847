"""``bench phone``: sizes are the paper's, parts add up, and what is simulated says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import phone
from benchmarks.__main__ import main
from benchmarks.phone import LARGE, PROMPT, SMALL, Decoding, Prompting, decode, miss_share, prompt, shape_of
from torch_pi2.machine.find import find_hardware
from torch_pi2.planner.cost import expected_misses

HARDWARE = find_hardware("sm8650-ufs4.0")


def test_models_have_the_sizes_of_the_papers() -> None:
    small, large = shape_of(SMALL), shape_of(LARGE)
    weights = [sum(y.intermediate * y.hidden * y.rows for y in shape.layers) for shape in (small, large)]
    assert weights == pytest.approx([5.6e9, 45.1e9], rel=0.01)
    assert sum(y.predictor_bytes for y in large.layers) == pytest.approx(2.6e9, rel=0.1)
    assert large.layers[0].chosen == 0.25
    assert sum(y.block for y in large.layers) == 32
    for shape, model in ((small, SMALL), (large, LARGE)):
        assert float(shape.layers[0].frequency(1).mean()) == pytest.approx(model.active, rel=0.01)


@pytest.mark.parametrize("model", [SMALL, LARGE], ids=lambda model: model.name)
def test_recurring_tokens_hit_as_often_as_in_the_paper(model: phone.Model) -> None:
    shape = shape_of(model)
    share, none = miss_share(shape, model.hits), [0] * len(shape.layers)
    wanted, missed = (expected_misses(shape, 1, slots, none, none, none).sum() for slots in (0, shape.slots // 2))
    assert share * missed / wanted == pytest.approx(1 - model.hits)
    assert 0.1 < share < 0.5


def test_prompts_on_the_npu_are_as_fast_as_published() -> None:
    whole = prompt(Prompting(SMALL, 1.0, "all", PROMPT, None, ""), HARDWARE)
    assert whole["tokens_per_s"] == pytest.approx(770, rel=0.02)
    cpu = prompt(Prompting(SMALL, 1.0, "", PROMPT, None, ""), HARDWARE)
    assert cpu["ms"]["npu"] == 0
    assert 8 < cpu["tokens_per_s"] < 12
    ours = prompt(Prompting(SMALL, 1.0, "ffn", 128, None, ""), HARDWARE)
    assert cpu["tokens_per_s"] < ours["tokens_per_s"] < whole["tokens_per_s"]
    assert ours["ms"]["npu"] < 0.1 * ours["ms"]["cpu"]  # attention's linear layers are what it waits for


def test_every_piece_reads_what_is_not_in_memory() -> None:
    row = Prompting(SMALL, 0.5, "all", PROMPT, None, "")
    one, four = prompt(row, HARDWARE), prompt(replace(row, piece=PROMPT // 4), HARDWARE)
    reading_ms = 0.5 * sum(y.slots * y.file_slot_bytes for y in shape_of(SMALL).layers) / 4e9 * 1e3
    assert one["ms"]["waiting"] < 0.1 * reading_ms
    assert sum(four["ms"].values()) > 4 * reading_ms
    assert prompt(replace(row, memory=1.0), HARDWARE)["ms"]["waiting"] == 0


@pytest.mark.slow
def test_decoding_says_where_time_goes() -> None:
    found = {npu: decode(Decoding(SMALL, 0.5, npu, 0, ""), HARDWARE, recurring=True) for npu in (False, True)}
    for npu, row in found.items():
        assert sum(row["ms"].values()) == pytest.approx(1e3 / row["tokens_per_s"], rel=0.01)
        assert (row["npu_ms"] > 0) == (row["npu_bytes"] > 0)
        assert not row["npu_bytes"] or npu
        assert row["read_bytes"] > 0 < row["drive_ms"]
    assert found[True]["tokens_per_s"] >= found[False]["tokens_per_s"]
    alone = decode(Decoding(SMALL, 0.5, False, 0, ""), HARDWARE, recurring=False)
    assert found[False]["cache_bytes"] == pytest.approx(
        0.5 * shape_of(SMALL).slots * shape_of(SMALL).place_bytes, rel=0.05
    )
    assert alone["hit_rate"] < found[False]["hit_rate"] == pytest.approx(SMALL.hits, abs=0.01)
    assert alone["tokens_per_s"] < found[False]["tokens_per_s"]


@pytest.mark.slow
def test_what_is_printed_is_labelled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(phone, "DECODING", phone.DECODING[:1])
    assert main(["phone"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("SIMULATED: sm8650-ufs4.0, published figures; nothing was measured")
    assert "20 (Fig. 12)" in text
    assert "404.6 (Fig. 8)" in text
    assert main(["phone", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["simulated"] is True
    assert len(result["prompts"]) == len(phone.PROMPTS)
