"""``benchmarks reads``: runs as the engine reads them, orders that gather what is wanted together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from replaying import decoded, loaded
from shared import small_store
from tiny_tokenizers import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import torch_pi2
from benchmarks import reads, table
from benchmarks.reads import SLOT, Seen, merged
from torch_pi2.errors import ConfigError
from torch_pi2.ops.constants import chunk_neurons
from torch_pi2.types.stats import unpack_bits


def test_runs_and_gaps() -> None:
    starts = np.array([0, 1, 3, 40, 41]) * SLOT
    assert [x.tolist() for x in merged(starts, SLOT, 0)] == [
        [0, 3 * SLOT, 40 * SLOT],
        [2 * SLOT, SLOT, 2 * SLOT],
    ]
    assert [x.tolist() for x in merged(starts, SLOT, SLOT)] == [[0, 40 * SLOT], [4 * SLOT, 2 * SLOT]]
    assert [x.tolist() for x in merged(np.arange(40) * SLOT, SLOT, 0)] == [[0, 32 * SLOT], [32 * SLOT, 8 * SLOT]]
    assert [len(x) for x in merged(np.array([], np.int64), SLOT, 0)] == [0, 0]


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_the_engine_reads_so(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, gap: int) -> None:
    folder = small_store(tmp_path_factory) / "store"
    with torch_pi2.record_accesses(loaded(folder, 0.3, gap_bytes=0), tmp_path / "about") as recorder:
        pass
    assert recorder.accesses is not None
    slot = recorder.accesses.stored[0].read_bytes
    model = loaded(folder, 0.3, policy="lfu", gap_bytes=gap * slot)
    with torch_pi2.record_accesses(model, tmp_path / "a") as recorder:
        decoded(model)
    accesses, stats = recorder.accesses, torch_pi2.stats(model)
    assert accesses is not None
    run = accesses.run
    bits = torch.ops.pi2.replay_missed(
        *accesses.arguments, "lfu", run["slots"], run["hot_share"], run["preload"], run["window"]
    )
    offsets: list[int] = []
    nbytes = 0
    for layer, row in zip(accesses.layers.tolist(), bits.split(accesses.row_bytes.tolist()), strict=True):
        neurons = accesses.stored[layer].neurons
        places = np.flatnonzero(unpack_bits(row[None], neurons)[0])
        chunk = chunk_neurons(neurons)
        for number in np.unique(places // chunk):
            begins, sizes = merged(places[places // chunk == number] * slot, slot, gap * slot)
            offsets += begins.tolist()
            nbytes += int(sizes.sum())
    assert (len(offsets), nbytes) == (stats["reads"], stats["bytes_read"])
    assert len(offsets) > 0


def test_orders_gather_what_is_wanted_together() -> None:
    generator = torch.Generator().manual_seed(1)
    group_I = torch.arange(64)[torch.randperm(64, generator=generator)] // 8
    wanted_NI = torch.rand(400, 8, generator=generator).lt(0.2)[:, group_I]
    place_I = reads.ordered("chains", wanted_NI, 0)
    assert sorted(place_I.tolist()) == list(range(64))
    assert int((group_I[place_I].diff() != 0).sum()) == 7  # each group in one piece
    assert reads.ordered("frequency", wanted_NI, 3).tolist() == list(range(64))
    kept = reads.ordered("chains", wanted_NI, 20).tolist()
    assert kept[:20] == list(range(20))
    assert sorted(kept) == list(range(64))


def test_what_is_missed_of_what_is_wanted() -> None:
    wanted_NI = torch.rand(40, 64, generator=torch.Generator().manual_seed(0)).lt(0.3)
    seen = Seen(0, wanted_NI, wanted_NI, wanted_NI)
    assert torch.equal(reads.missed([seen, seen], 0)[1], wanted_NI[20:])
    some = reads.missed([seen, seen], 0.5)[0]
    assert 0 < int(some.sum()) < int(wanted_NI[20:].sum())
    assert not bool((some & ~wanted_NI[20:]).any())


def _saved(folder: Path, intermediate: int) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=intermediate, hidden_act="relu")).save_pretrained(folder)
    byte_tokenizer("def main(): return 0").save_pretrained(folder)
    return folder


def test_a_whole_run(tmp_path: Path) -> None:
    result = reads.run(
        _saved(tmp_path, 256), tokens=512, calibration_tokens=1280, ffn_in_memory=[0.5], devices=["nvme"]
    )
    (cache,) = result["caches"]
    for layer in result["layers"]:
        assert layer["gate"] == layer["fired"] > 0  # up of a ReGLU layer is never zero
    by = {(p["order"], p["gap"]): p for p in cache["orders"]}
    assert len(by) == len(reads.ORDERS) * len(reads.GAPS)
    for name in reads.ORDERS:
        counts = [(by[name, gap]["reads"], -by[name, gap]["bytes"]) for gap in reads.GAPS]
        assert counts == sorted(counts, reverse=True)
    assert f"{by['random', 0]['reads']:.0f}" in reads.render(result)
    assert "| x | 50 % | nvme |" in table.page({"x": result})


def test_what_cannot_be_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a model of gated layers whose neurons divide 14336.*found .*48"):
        reads.run(_saved(tmp_path, 48), calibration_tokens=1280)
    with pytest.raises(ConfigError, match="calibration_tokens: expected 1280 or more, found 3"):
        reads.run(calibration_tokens=3)
