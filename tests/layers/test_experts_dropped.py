"""``OffloadConfig.drop_experts``: experts of little weight that are mostly not in memory are left out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_experts import IDS, SYNTHETIC, logits

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.layers.experts import OffloadedExperts
from torch_pi2.types.offload import OffloadConfig

EXPERTS, CHOSEN = 8, 4
SHAPE = {"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "head_dim": 16}


@pytest.fixture(scope="module", params=["lowrank", None])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The store of a mixture with predictors, and of one without."""
    base = tmp_path_factory.mktemp(str(request.param))
    shape = SYNTHETIC | SHAPE | {"moe_intermediate_size": 96}
    torch_pi2.synthetic(base / "plain", shape, active=0.25, rank=16, predictor=request.param)
    torch_pi2.pack(base / "plain", base / "store")
    return base / "store"


def loaded(folder: Path, **settings: Any) -> Any:
    return torch_pi2.load(folder, budget="1GiB", context=64, offload=OffloadConfig(**settings))


def mixture(model: Any) -> OffloadedExperts:
    found = model.model.layers[0].mlp.experts.sparse_ffn
    assert isinstance(found, OffloadedExperts)
    return found


def mixed(model: Any, index: list[list[int]], routing: list[list[float]]) -> torch.Tensor:
    x_TH = torch.randn(len(index), 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        y: torch.Tensor = mixture(model)(x_TH, torch.tensor(index), torch.tensor(routing))
    return y


@pytest.mark.parametrize(
    ("index", "routing", "rest"),
    [
        # less than a fifth of the weight, whatever that is in all
        ([[0, 1, 2, 3]], [[4.0, 3.0, 1.9, 1.1]], [[0, 1, 8, 8]]),
        ([[0, 1, 2, 3]], [[0.04, 0.03, 0.021, 0.009]], [[0, 1, 2, 8]]),
        ([[5, 1, 2, 8]], [[0.1, 0.9, 0.0, 0.0]], [[8, 1, 8, 8]]),
        # as much, so that none has less than a fifth
        ([[0, 1, 2, 3]], [[1.0, 1.0, 1.0, 1.0]], [[0, 1, 2, 3]]),
        # what one token reads is there for the other
        ([[0, 1, 2, 3], [1, 4, 5, 6]], [[0.8, 0.1, 0.05, 0.05], [0.7, 0.1, 0.1, 0.1]], [[0, 1, 8, 8], [1, 8, 8, 8]]),
        # it goes twice to an expert
        ([[0, 1, 2, 2]], [[0.5, 0.1, 0.2, 0.2]], [[0, 8, 2, 2]]),
    ],
)
def test_those_of_little_weight_add_nothing(
    folder: Path, index: list[list[int]], routing: list[list[float]], rest: list[list[int]]
) -> None:
    whole, dropping = (loaded(folder, policy="none", preload=False, drop_experts=share) for share in (0, 0.2))
    assert torch.equal(mixed(dropping, index, routing), mixed(whole, rest, routing))
    left_out = sum(a != b for row, kept in zip(index, rest, strict=True) for a, b in zip(row, kept, strict=True))
    assert torch_pi2.stats(dropping)["experts_left_out"] == left_out
    assert torch_pi2.stats(dropping)["wanted"] == torch_pi2.stats(whole)["wanted"]


def test_one_expert_of_each_token_stays(folder: Path) -> None:
    whole, dropping = (loaded(folder, policy="none", preload=False, drop_experts=share) for share in (0, 1))
    index, routing = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.4, 0.3]]
    rest = [[0, 8, 8, 8], [8, 8, 6, 8]]
    assert torch.equal(mixed(dropping, index, routing), mixed(whole, rest, routing))


def test_what_is_in_memory_is_computed(folder: Path) -> None:
    """A second call of the same, with room for all; and one of experts that are not there yet."""
    whole, dropping = (loaded(folder, preload=False, drop_experts=share) for share in (0, 0.2))
    light, heavy = [[0.85, 0.05, 0.05, 0.05]], [[0.25, 0.25, 0.25, 0.25]]
    assert not torch.equal(mixed(dropping, [[0, 1, 2, 3]], light), mixed(whole, [[0, 1, 2, 3]], light))
    mixed(dropping, [[0, 1, 2, 3]], heavy)
    assert torch_pi2.stats(dropping)["experts_left_out"] == 3
    assert torch.equal(mixed(dropping, [[0, 1, 2, 3]], light), mixed(whole, [[0, 1, 2, 3]], light))
    assert torch_pi2.stats(dropping)["experts_left_out"] == 3
    assert torch.equal(mixed(dropping, [[0, 1, 4, 5]], light), mixed(whole, [[0, 1, 8, 8]], light))
    assert torch_pi2.stats(dropping)["experts_left_out"] == 5


def test_prompts_and_what_fits_are_as_without(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of 48 tokens nothing is left out, nor where everything is in memory."""
    ids = IDS.flatten().repeat(2)[None]
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        whole = loaded(folder)
    assert "lossy" not in caplog.text
    wanted, one = logits(whole, ids), logits(whole, IDS[:1, :1])
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        nothing = loaded(folder, policy="none", preload=False, drop_experts=0.3)
    assert "lossy: 2 mixtures of experts leave out what matters least of what is not in memory" in caplog.text
    assert nothing.torch_pi2.lossy
    assert nothing.torch_pi2.loss_change is None
    assert torch.equal(logits(nothing, ids), wanted)
    assert torch_pi2.stats(nothing)["experts_left_out"] == 0
    assert not torch.equal(logits(nothing, IDS[:1, :1]), one)
    assert torch_pi2.stats(nothing)["experts_left_out"] > 0
    everything = loaded(folder, drop_experts=0.3)
    assert torch.equal(logits(everything, IDS[:1, :1]), one)
    assert torch_pi2.stats(everything)["experts_left_out"] == 0


@pytest.mark.parametrize("lookahead", [False, True])
def test_fewer_are_read_while_decoding(folder: Path, lookahead: bool) -> None:
    read = []
    for share in (0.0, 0.3):
        least = torch_pi2.stats(loaded(folder))["budget"].smallest
        config = OffloadConfig(drop_experts=share, lookahead=lookahead, preload=False)
        model = torch_pi2.load(folder, budget=least + 40_000, context=64, offload=config)
        decoder = Decoder(model, max_tokens=64, compiled=False)
        token = decoder.prompt(IDS[:1, :4])
        torch_pi2.stats(model, reset=True)
        for _ in range(32):
            token = decoder.step(token)
        stats = torch_pi2.stats(model)
        assert (stats["experts_left_out"] > 0) == (share > 0)
        read.append(stats["bytes_read"])
    assert read[1] < read[0]
