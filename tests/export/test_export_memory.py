"""Memory of a bundle without its neurons, as the manifest has it. That the runner keeps to it: test_runner.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from torch_pi2.export.memory import _most_alive, fixed_bytes
from torch_pi2.store.superblock import LayerEntry

MIB = 1 << 20
ENTRY = LayerEntry(4096, 4096, 4096, 256, 3, 0, 3072, 1024, 0, 0)
ARGUMENTS: dict[str, Any] = {
    "pte": 5 * MIB,
    "packed": 4 * MIB,
    "copies": 1,
    "planned": 2 * MIB,
    "workspace": 3 * MIB,
    "predictors": 0,
    "entries": [ENTRY],
    "tokens": 1,
    "tokenizer": 0,
}


class Attention(nn.Module):
    def forward(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(query, keys.transpose(1, 2))  # [2, T, 32]; the transposed one lives, and once more packed
        return torch.bmm(torch.softmax(scores * 0.5, -1), keys)


def test_workspace_is_what_lives_at_once_at_the_largest_size() -> None:
    length = torch.export.Dim("length", min=1, max=100)
    program = torch.export.export(
        Attention(), (torch.zeros(2, 8, 16), torch.zeros(2, 32, 16)), dynamic_shapes=({1: length}, None)
    )
    scores, keys = 2 * 100 * 32 * 4, 2 * 32 * 16 * 4
    assert _most_alive(program.graph) == 2 * scores  # two of three at once; keys twice are less
    long = torch.export.export(Attention(), (torch.zeros(2, 2, 16), torch.zeros(2, 32, 16)))
    assert _most_alive(long.graph) == 2 * keys + 2 * 2 * 32 * 4


@pytest.mark.parametrize(
    ("changed", "more"),
    [
        ({"copies": 3}, 8 * MIB),
        ({"planned": 5 * MIB}, 3 * MIB),
        ({"workspace": 0}, -3 * MIB),
        ({"predictors": 7}, 7),
        ({"tokenizer": MIB}, 4 * MIB),
        ({"tokenizer": 100 * MIB}, None),
        ({"entries": [ENTRY, ENTRY]}, 4096 * (37 + 40)),
        ({"entries": [dataclasses.replace(ENTRY, slot_bytes=4096)]}, 8 * 256 * 1024),
    ],
)
def test_parts_of_what_is_not_neurons(changed: dict[str, Any], more: int | None) -> None:
    least, found = fixed_bytes(**ARGUMENTS), fixed_bytes(**ARGUMENTS | changed)
    if more is None:
        assert found == 820 * MIB  # while the tokenizer is read nothing else is there
    else:
        assert found - least == more
    assert least > (20 + 5 + 2 + 3) * MIB + 8 * 256 * 3072  # staging: eight chunks
