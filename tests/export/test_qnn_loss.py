"""What a model loses by its hot parts on an NPU: measured in PyTorch, without any of Qualcomm's libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import VOCAB, one_layer
from npu_report import NPU_REPORT
from torch import nn

import torch_pi2
from torch_pi2.errors import ArtifactError
from torch_pi2.export.calibrate import TOKENS, first_batches, hot_on_npu, inputs_of, loss_of, scored_rows
from torch_pi2.export.hot import HotChunks, hot_chunks
from torch_pi2.export.qnn.settings import REPORT_FILE, read_report
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.profiling.data import Batch


class Sums(nn.Module):
    """As a quantised program is called; ``wrong`` times what is right."""

    def __init__(self, hot: HotChunks, wrong: float = 1.0) -> None:
        super().__init__()
        self.hot, self.wrong = hot, wrong

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.wrong * self.hot.first(k)(x) for k in range(1, len(self.hot.up) + 1))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return torch_pi2.optimize(one_layer())


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(rows))


def rows_of(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([b.input_ids for b in batches if b.input_ids is not None])


def test_the_first_chunks_are_the_npus_and_the_rest_is_as_before(model: nn.Module) -> None:
    (ffn,) = sparse_layers(model)
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        before, hot = ffn(x), hot_chunks(ffn, 2)
        for count in (1, 2):
            wanted = before + 0.5 * hot.first(count)(x)
            with hot_on_npu([ffn], [Sums(hot_chunks(ffn, 3), 1.5)], [count]):
                torch.testing.assert_close(ffn(x), wanted, rtol=1e-4, atol=1e-5)
        with hot_on_npu([ffn], [Sums(hot_chunks(ffn, 3), 0.0)], [3]):  # no bias: all of it is the NPU's
            torch.testing.assert_close(ffn(x), torch.zeros_like(x), rtol=0, atol=1e-4)
        assert torch.equal(ffn(x), before)


def test_loss_is_that_of_the_smallest_and_of_the_largest_part(model: nn.Module) -> None:
    (ffn,) = sparse_layers(model)
    chunks = {"decode_b1": [1], "decode_b2": [2], "prefill_8": [3]}
    batches = first_batches(ids(8, 40))
    right = loss_of(model, [ffn], [Sums(hot_chunks(ffn, 3))], chunks, batches)
    assert list(right["npu"]) == ["decode_b1", "prefill_8"]
    with torch.no_grad():
        logits = model(ids(8, 40)).logits
    by_hand = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids(8, 40)[:, 1:].reshape(-1))
    assert right["tokens"] == 8 * 39
    assert right["nats_per_token"] == pytest.approx(by_hand.item(), rel=1e-5)
    assert all(abs(method["change"]) < 1e-5 for method in right["npu"].values())
    wrong = loss_of(model, [ffn], [Sums(hot_chunks(ffn, 3), -3.0)], chunks, batches)
    assert wrong["nats_per_token"] == right["nats_per_token"]
    changes = [method["change"] for method in wrong["npu"].values()]
    assert all(abs(change) > 1e-4 for change in changes)
    assert changes[0] != changes[1]
    for method in wrong["npu"].values():
        assert method["change"] == method["nats_per_token"] / wrong["nats_per_token"] - 1


def test_what_is_scored_comes_after_what_hot_parts_were_quantised_on(model: nn.Module) -> None:
    data = ids(40, 64)
    first = first_batches(data)
    seen = inputs_of(model, sparse_layers(model), first)
    rows, after = scored_rows(first)
    assert after
    assert len(seen[0]) == TOKENS == rows_of(rows).numel()
    taken = rows_of(first)[: TOKENS // 64]
    assert not any(torch.equal(row, other) for row in rows_of(rows) for other in taken)


def test_short_data_are_scored_on_what_hot_parts_were_quantised_on() -> None:
    data = ids(4, 64)
    rows, after = scored_rows(first_batches(data))
    assert not after
    assert sorted(rows_of(rows).tolist()) == sorted(data.tolist())
    long, after = scored_rows(first_batches(iter([ids(1, 3000)])))  # one row: it is cut
    assert (rows_of(long).shape, after) == ((1, TOKENS), False)
    alone = [Batch(ids(70, 1), torch.ones(70, 1, dtype=torch.bool))]
    assert scored_rows(alone) == ([], False)


@pytest.mark.parametrize("item", [(torch.randn(70, 8),), {"input_ids": ids(8, 64), "position_ids": torch.zeros(8, 64)}])
def test_data_that_are_no_rows_of_ids_are_not_scored(item: Any) -> None:
    assert scored_rows(first_batches([item])) == ([], False)


def test_a_report_is_read(tmp_path: Path) -> None:
    (tmp_path / REPORT_FILE).write_text(json.dumps(NPU_REPORT))
    assert read_report(tmp_path / REPORT_FILE) == NPU_REPORT
    (tmp_path / REPORT_FILE).write_text(json.dumps(NPU_REPORT | {"version": 2}))
    with pytest.raises(ArtifactError, match=r"expected torch_pi2\.qnn version 1, found torch_pi2\.qnn version 2"):
        read_report(tmp_path / REPORT_FILE)
