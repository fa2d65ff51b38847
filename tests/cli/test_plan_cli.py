"""``torch-pi2 plan`` for a machine: folders of ours, budgets, and its messages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import Ran
from stores import SMALL

import torch_pi2
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import HIST_BINS, ActivationStats, LayerStats

PHONE = "sm8650-ufs4.0"
LAYERS, NEURONS = SMALL["num_hidden_layers"], SMALL["intermediate_size"]
TOKENS = 400


def statistics(model_hash: str) -> ActivationStats:
    """Few neurons fire often, at each of four batch sizes, the first ones most."""
    share_I = torch.exp(-8 * torch.arange(NEURONS) / NEURONS)
    layers = {}
    for i in range(LAYERS):
        fired_KI = torch.stack([((1 - (1 - share_I) ** b) * TOKENS).long() for b in (1, 2, 4, 8)])
        key = f"model.layers.{i}.mlp"
        layers[key] = LayerStats(
            key=key,
            layer=i,
            threshold=0.0,
            tokens=TOKENS,
            fired=fired_KI[0].clone(),
            zeros=TOKENS - fired_KI[0],
            abs_sum=fired_KI[0].double(),
            batch_sizes=(1, 2, 4, 8),
            batch_groups=torch.tensor([TOKENS] * 4),
            batch_fired=fired_KI,
            score_hist=torch.zeros(HIST_BINS, dtype=torch.int64),
        )
    return ActivationStats(layers, model_hash, {"tokens": TOKENS})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model``: int4 weights with predictors and statistics. ``store``: packed. ``bare``: without statistics."""
    base = tmp_path_factory.mktemp("plans")
    torch_pi2.synthetic(base / "model", SMALL, rank=16)
    model_hash = Plan.load(base / "model" / "pi2").model_hash
    torch_pi2.pack(base / "model", base / "bare")
    statistics(model_hash).save(base / "model" / "pi2")
    statistics(model_hash).save(base / "live")
    torch_pi2.pack(base / "model", base / "store")
    return base


@pytest.fixture
def command(command: Any) -> Any:
    """``torch-pi2 plan`` with what is given."""
    return partial(command, "plan")


def refusal(ran: Ran) -> str:
    assert ran.code == 2
    return " ".join(str(ran.json["error"][name]) for name in ("what", "expected", "found", "fix"))


BASE = ("--hardware", PHONE, "--context", 16, "--batches", "1,4")


def test_a_folder_of_ours_in_memory(command, root, tmp_path) -> None:
    out = tmp_path / "plan"
    found = command(root / "model", *BASE, "--out", out, "--json").json
    own, made = Plan.load(root / "model" / "pi2"), Plan.load(out)
    assert made.orders_hash == own.orders_hash
    assert [layer.method for layer in made.layers] == [layer.method for layer in own.layers]
    assert made.hardware is not None
    assert [b.batch for b in made.hardware.buckets] == [1, 4]
    assert found["hardware"]["source"] == "published"
    assert made.hardware.budget_bytes is None
    for bucket, row in zip(made.hardware.buckets, found["buckets"], strict=True):
        assert row["tokens_per_s"] == pytest.approx(bucket.batch * 1e3 / bucket.total_ms, rel=1e-3)
    first = (out / "plan.json").read_bytes()
    command(root / "model", *BASE, "--out", out)
    assert (out / "plan.json").read_bytes() == first


def test_a_store_under_a_budget_runs_as_planned(command, root, tmp_path) -> None:
    too_little = command(root / "store", *BASE, "--budget", "1KB", "--out", tmp_path / "p", "--json", ok=False)
    least = int(refusal(too_little).split("at least ")[1].split(" bytes")[0])
    assert not (tmp_path / "p").exists()
    budget = least + 60_000
    command(root / "store", *BASE, "--budget", budget, "--out", tmp_path / "p")
    hardware = Plan.load(tmp_path / "p").hardware
    assert hardware is not None
    assert hardware.budget_bytes == budget
    assert all(b.cache_bytes > 0 for b in hardware.buckets)
    assert hardware.buckets[0].cache_bytes >= hardware.buckets[1].cache_bytes
    ids = torch.arange(6)[None]
    with torch.no_grad():
        planned = torch_pi2.load(root / "store", plan=tmp_path / "p", budget=budget, context=16)
        assert torch.isfinite(planned(ids).logits).all()


def test_text(command, root, tmp_path) -> None:
    shown = command(root / "model", *BASE, "--explain").out
    assert f"predicted for {PHONE} (published), everything in memory, 16 tokens each" in shown
    assert "batch  tokens per s" in shown
    assert "wrote" not in shown
    assert "wrote" in command(root / "model", *BASE, "--out", tmp_path / "p").out


def test_settings_reach_the_solver(command, root, tmp_path) -> None:
    rest = ("--fixed-hot-set", "--accelerator-memory", "1MiB")
    command(root / "store", *BASE, "--budget", "1GiB", *rest, "--out", tmp_path / "p")
    hardware = Plan.load(tmp_path / "p").hardware
    assert hardware is not None
    assert len({b.hot for b in hardware.buckets}) == 1
    assert hardware.made_for["settings"] == {"batches": [1, 4], "fixed_hot_set": True}
    assert hardware.accelerator_bytes == 1 << 20
    assert hardware.context == 16


# --- messages ---


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("{model}",), "planning .* anew --hardware, because neuron orders and methods of a folder stay none"),
        (("{model}", "--budget", "1GiB"), "--budget --hardware beside it none"),
        (("{model}", "--hardware", PHONE), "--out a folder to write into none"),
        (("{model}", "--hardware", "toaster", "--out", "{tmp}/p"), "hardware measured, sm8650-ufs4.0"),
        (("{tmp}/hf", "--out", "{tmp}/p"), "--stats a folder written by torch-pi2 profile"),
        (("{model}", "--hardware", PHONE, "--out", "{tmp}/p", "--predictors", "x"), "none: the folder has its own x"),
        (("{bare}", "--hardware", PHONE, "--out", "{tmp}/p"), "statistics: how often neurons fire .*--stats"),
        (
            ("{tmp}/hf", *map(str, BASE), "--stats", "s", "--out", "{tmp}/p"),
            "for a machine a folder of optimize",
        ),
        (("{store}", "--hardware", PHONE, "--out", "{tmp}/p", "--budget", "much"), "budget bytes, or text such as"),
        (("{store}", *map(str, BASE), "--out", "{store}/pi2"), "a folder of its own: the store there has its plan"),
        (
            ("{model}", "--hardware", PHONE, "--out", "{tmp}/p", "--budget", "1GiB"),
            "--budget 1GiB a model over a store .*model, which has none Pack it first: torch-pi2 pack MODEL STORE",
        ),
    ],
)
def test_messages(command, root, tmp_path, argv, message) -> None:
    import re

    names = {name: root / name for name in ("model", "store", "bare")} | {"tmp": tmp_path}
    (tmp_path / "hf").mkdir()
    found = refusal(command(*(str(a).format(**names) for a in argv), "--json", ok=False))
    assert re.search(message, found), found
