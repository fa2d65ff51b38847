"""Early routing: while a mixture is computed, what the next one is likely to want is read from the store."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_experts import IDS, SYNTHETIC, build, logits

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.graph.routed import LinearRouter
from torch_pi2.layers.offloaded import Store
from torch_pi2.types.offload import OffloadConfig

PREDICTORS = ("lowrank", None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """Stores of a synthetic mixture with predictors and without."""
    made: dict[str | None, Path] = {}
    shape = SYNTHETIC | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 96, "head_dim": 16}
    for kind in PREDICTORS:
        base = tmp_path_factory.mktemp(str(kind))
        torch_pi2.synthetic(base / "plain", shape | {"num_hidden_layers": 3}, active=0.25, rank=16, predictor=kind)
        made[kind] = base / "store"
        torch_pi2.pack(base / "plain", made[kind], cluster=1 if kind else 64)
    return made


def loaded(folder: Path, lookahead: bool, budget: str | int = "1GiB", **more: Any) -> Any:
    config = OffloadConfig(lookahead=lookahead, preload=False, **more)
    return torch_pi2.load(folder, budget=budget, context=32, offload=config)


@pytest.mark.parametrize("kind", PREDICTORS)
def test_what_is_guessed_is_there_when_it_is_wanted(folders: dict[str | None, Path], kind: str | None) -> None:
    """The last two layers see the same input here, so that every guess is right."""
    x_TH = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for lookahead in (False, True):
        model = loaded(folders[kind], lookahead)
        first, second = (layer.mlp for layer in model.model.layers[-2:])
        with torch.no_grad():
            results.append(first(x_TH[None]))
            after_first = torch_pi2.stats(model)
            results.append(second(x_TH[None]))
        after_second = torch_pi2.stats(model)
        assert (after_second["reads"] == after_first["reads"]) == lookahead
        assert (after_first["guessed"] > after_first["used"]) == lookahead
        assert after_second["used"] > after_first["used"]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


def announce_wrong(model: Any) -> None:
    """Every mixture is guessed to have the experts that its router likes least."""
    mixtures = [layer.mlp for layer in model.model.layers]
    for before, block in pairwise(mixtures):
        block.experts.sparse_ffn.announce(
            LinearRouter(-block.gate.weight.detach(), None, None, 2), before.experts.sparse_ffn
        )


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", PREDICTORS)
def test_the_bits_do_not_depend_on_guesses(folders: dict[str | None, Path], kind: str | None, compiled: bool) -> None:
    found, stats = [], []
    least = torch_pi2.stats(loaded(folders[kind], False))["budget"].smallest
    for guesses in ("none", "right", "wrong"):
        model = loaded(folders[kind], guesses != "none", least + 60_000)
        if guesses == "wrong":
            announce_wrong(model)
        torch._dynamo.reset()  # after eight versions of a model's code no more are compiled, and bits are others
        forward = torch.compile(model, backend="torch_pi2") if compiled else model
        with torch.no_grad():
            found.append([forward(IDS[:1, i : i + 3], use_cache=False).logits for i in range(6)])
        stats.append(torch_pi2.stats(model))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))
    assert all(s["used"] > 0 for s in stats)
    assert stats[2]["guessed"] - stats[2]["used"] > stats[0]["guessed"] - stats[0]["used"]


def test_routers_of_another_kind_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    mixture = {"n_routed_experts": 8, "moe_intermediate_size": 64, "first_k_dense_replace": 0, "n_shared_experts": 1}
    more = {"n_group": 4, "topk_group": 1, "num_key_value_heads": 4, "hidden_act": "relu", "intermediate_size": 64}
    model = build("DeepseekV3", **sizes, **mixture, **more)
    torch_pi2.save(torch_pi2.optimize(model, weights="int8"), tmp_path / "saved")
    torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    wanted = logits(loaded(tmp_path / "store", False))
    assert "early" not in caplog.text
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        found = logits(loaded(tmp_path / "store", True))
    assert torch.equal(found, wanted)
    assert "no early routing of model.layers.1.mlp.experts: expected a router that is one linear layer" in caplog.text
    assert "model.layers.0" not in caplog.text  # nothing is before it


def test_the_operator_refuses_what_does_not_fit(folders: dict[str | None, Path]) -> None:
    store = Store(folders[None] / "pi2" / "model.pi2", 1 << 20)
    good: dict[str, Any] = {
        "store": store.number, "at": 0, "first_layer": 8, "experts": 8,
        "router": torch.zeros(8, 64), "bias": torch.zeros(8), "correction": torch.zeros(8), "chosen": 2,
        "predictor": [], "kind": "none", "cuts": [], "predictor_weights": "", "predictor_int8_activations": False,
    }  # fmt: skip
    announce = torch.ops.pi2.store_early_routing
    assert announce(**good)
    assert announce(**good | {"bias": None, "correction": None, "router": torch.zeros(8, 64).bfloat16()})
    for change, message in (
        ({"at": 8}, "at: expected 0 to 7, found 8"),
        ({"first_layer": 20}, "first_layer: expected 0 to 16"),
        ({"router": torch.zeros(8, 63)}, r"router: expected contiguous \[8, 64\], found \[8, 63\]"),
        ({"router": torch.zeros(64, 8).T}, r"router: expected contiguous \[8, 64\], found strided"),
        ({"router": torch.zeros(8, 64).double()}, "dtype of router: expected float32, bfloat16 or float16"),
        ({"bias": torch.zeros(7)}, r"shape of bias: expected \[8\]"),
        ({"correction": torch.zeros(8).half()}, "dtype of correction: expected float32"),
        ({"chosen": 0}, "chosen: expected 1 to 8, found 0"),
        ({"chosen": 9}, "chosen: expected 1 to 8, found 9"),
        ({"cuts": [1.0]}, "expected no tensors and cuts for kind none"),
    ):
        with pytest.raises(RuntimeError, match=message):
            announce(**good | change)
    store.close()
    with pytest.raises(RuntimeError, match="expected an open one"):
        announce(**good)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decoded_tokens_are_the_same(folders: dict[str | None, Path], compiled: bool) -> None:
    tokens, unused = [], []
    for guesses in ("none", "right", "wrong"):
        model = loaded(folders[None], guesses != "none")
        if guesses == "wrong":
            announce_wrong(model)
        decoder = Decoder(model, max_tokens=24, compiled=compiled)
        token = decoder.prompt(IDS[:1, :4])
        tokens.append([int(token)])
        for _ in range(8):
            token = decoder.step(token)
            tokens[-1].append(int(token))
        stats = torch_pi2.stats(model)
        unused.append(stats["guessed"] - stats["used"])
    assert tokens[0] == tokens[1] == tokens[2]
    assert unused[2] > unused[0] == 0
