"""``torch-pi2 plan`` for a machine: folders of ours, budgets, comparisons, updates, and its messages."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import Ran
from stores import SMALL

import torch_pi2
from torch_pi2 import cli, errors
from torch_pi2.cli.plan_group import _options
from torch_pi2.decode.kv_cache import cache_name, cache_of
from torch_pi2.machine.find import find_hardware
from torch_pi2.planner.diff import diff
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import HIST_BINS, ActivationStats, LayerStats

PHONE = "sm8650-ufs4.0"
LAYERS, NEURONS = SMALL["num_hidden_layers"], SMALL["intermediate_size"]
TOKENS = 400


def statistics(model_hash: str, seed: int = 0) -> ActivationStats:
    """Few neurons fire often, at each of four batch sizes, the first ones most (with a ``seed``, the last ones)."""
    share_I = torch.exp(-8 * torch.arange(NEURONS) / NEURONS)
    share_I = share_I if seed == 0 else share_I.flip(0)
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
            cofire_bits=torch.zeros((0, -(-NEURONS // 8)), dtype=torch.uint8),
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
    statistics(model_hash, 1).save(base / "live")
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


def test_what_guesses_cost_on_a_measured_machine(command, root, tmp_path) -> None:
    measured = replace(find_hardware(PHONE), source="measured")
    measured.save(tmp_path / "here.json")
    given = (root / "model", "--hardware", tmp_path / "here.json", *BASE[2:], "--out", tmp_path / "plan")
    found = command(*given, "--json").json["hardware"]["passes"]
    hardware = Plan.load(tmp_path / "plan").hardware
    assert hardware is not None
    assert {row["guesses"] + 1: row["steps"] for row in found} == pytest.approx(hardware.passes, abs=1e-4)
    assert "guesses at next tokens that a pass verifies, and how many must be right to pay: 1 (" in command(*given).out


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
    assert found["hardware"]["passes"] == []  # published figures do not tell
    assert made.hardware.passes == {}
    for bucket, row in zip(made.hardware.buckets, found["buckets"], strict=True):
        assert row["tokens_per_s"] == pytest.approx(bucket.batch * 1e3 / bucket.total_ms, rel=1e-3)
        assert set(row["gain"]) == {"greedy", "all-hot", "all-cold", "random"}
        assert min(row["gain"].values()) >= 1 - 1e-9
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


def test_text_names_what_is_gained(command, root, tmp_path) -> None:
    shown = command(root / "model", *BASE, "--explain").out
    assert f"optimum for {PHONE} (published), everything in memory, 16 tokens each" in shown
    assert "batch  tokens/s" in shown
    assert "how many times as long a step of simple plans takes" in shown
    assert "wrote" not in shown
    assert "wrote" in command(root / "model", *BASE, "--out", tmp_path / "p").out


@pytest.mark.parametrize("planner", ["greedy", "all-hot", "all-cold", "random"])
def test_simple_plans(command, root, tmp_path, planner) -> None:
    found = command(root / "model", *BASE, "--planner", planner, "--out", tmp_path / "p", "--json").json
    assert found["hardware"]["planner"] == planner
    made = Plan.load(tmp_path / "p")
    assert made.made_by["planner"] == planner
    assert made.hardware is not None
    if planner.startswith("all"):
        own = Plan.load(root / "model" / "pi2")
        wanted = {"all-hot": [NEURONS] * LAYERS, "all-cold": [layer.n_hot for layer in own.layers]}[planner]
        assert all(list(b.hot) == wanted for b in made.hardware.buckets)


def test_settings_reach_the_solver(command, root, tmp_path) -> None:
    rest = ("--one-boundary", "--min-recall", 0.5, "--accelerator-memory", "1MiB", "--clusters", "1,2")
    command(root / "store", *BASE, "--budget", "1GiB", *rest, "--out", tmp_path / "p")
    hardware = Plan.load(tmp_path / "p").hardware
    assert hardware is not None
    assert len({b.hot for b in hardware.buckets}) == 1
    assert hardware.made_for["settings"]["min_recall"] == 0.5
    assert hardware.accelerator_bytes == 1 << 20
    assert hardware.context == 16


def test_recorded_accesses_choose_the_policy(command, root, tmp_path) -> None:
    model = torch_pi2.load(root / "store", budget="1GiB")
    with torch_pi2.record_accesses(model, tmp_path / "accesses"), torch.no_grad():
        cache = cache_of(model(torch.tensor([[1]])))
        for i in range(40):
            cache = cache_of(model(torch.tensor([[i % 7]]), **{cache_name(model): cache}))
    del model, cache
    command(
        *(root / "store", *BASE, "--budget", "1GiB", "--accesses", tmp_path / "accesses", "--out", tmp_path / "p"),
    )
    hardware = Plan.load(tmp_path / "p").hardware
    assert hardware is not None
    assert hardware.made_for["settings"]["misses"] == "ReplayMisses"
    assert hardware.offload["policy"] in ("lfu", "lru", "sieve", "s3-fifo")


def test_update_plans_with_statistics_of_use(command, root, tmp_path, caplog) -> None:
    command(root / "model", *BASE, "--out", tmp_path / "before")
    with caplog.at_level(logging.WARNING):
        found = command(root / "model", *BASE, "--update", root / "live", "--out", tmp_path / "p", "--json").json
    assert found["moved"]["tokens"] == TOKENS
    assert {"share", "planned", "layers"} <= found["moved"].keys()
    made = Plan.load(tmp_path / "p")
    assert made.made_by["stats"]["tokens"] == 2 * TOKENS
    assert made.orders_hash == Plan.load(tmp_path / "before").orders_hash
    changed = command("--diff", tmp_path / "before", tmp_path / "p", "--json").json
    assert not changed["same"]  # what fires has turned around
    # A folder without statistics is planned with those of use alone.
    text = command(root / "bare", *BASE, "--update", root / "live", "--out", tmp_path / "q").out
    assert "of the hot neurons before" in text


def test_the_same_statistics_move_nothing(command, root, tmp_path) -> None:
    """The plan before is one for the same machine, not the folder's own, which has other hot neurons."""
    stats = root / "model" / "pi2"
    found = command(root / "model", *BASE, "--update", stats, "--out", tmp_path / "p", "--json").json
    assert found["moved"]["planned"]["share"] == 0
    assert sum(row["hot"] for row in found["moved"]["planned"]["layers"]) > 0
    assert all(row["new"] == 0 for row in found["moved"]["planned"]["layers"])
    text = command(root / "model", *BASE, "--update", stats, "--out", tmp_path / "p").out
    assert "0.0% no longer are" in text or "0 % no longer are" in text or "0% no longer are" in text
    assert "the order of neurons stays (only torch-pi2 optimize changes it)" in text


def test_a_run_is_predicted_with_its_accesses_and_text(command, root, tmp_path, monkeypatch) -> None:
    from torch_pi2.planner import explain
    from torch_pi2.planner.misses import ReplayMisses

    model = torch_pi2.load(root / "store", budget="1GiB")
    with torch_pi2.record_accesses(model, tmp_path / "accesses"), torch.no_grad():
        for i in range(20):
            model(torch.tensor([[i % 7]]))
    del model
    seen: list[dict[str, Any]] = []

    def compare(model: Any, plan: Plan, *rest: Any, **how: Any) -> Any:
        assert plan.hardware is not None
        seen.append(how | {"policy": plan.hardware.offload.get("policy")})
        raise errors.ConfigError("enough", expected="nothing", found="more", fix="Stop.")

    monkeypatch.setattr(explain, "compare", compare)
    given = ("--hardware", PHONE, "--batches", "2", "--context", 80, "--explain", "--measure-run", "--json")
    accesses = ("--budget", "1GiB", "--accesses", tmp_path / "accesses")
    assert command(root / "store", *given, *accesses, ok=False).code == 2
    assert command(root / "model", *given, ok=False).code == 2
    with_them, without = seen
    assert isinstance(with_them["misses"], ReplayMisses)
    assert with_them["misses"].policy == with_them["policy"]
    assert "misses" not in without
    assert with_them["ids_BT"].shape == (2, 64)
    assert torch.equal(with_them["ids_BT"], without["ids_BT"])


def test_a_run_beside_what_is_predicted(command, root) -> None:
    found = command(
        root / "model", "--hardware", PHONE, "--batches", "1", "--explain", "--measure-run", "--eager", "--json"
    ).json
    (run,) = found["explained"]
    assert run["measured_total_ms"] > 0
    assert run["predicted_total_ms"] > 0
    assert {row["part"] for row in run["parts"]} >= {"predictor", "ffn"}


def test_a_floor_of_recall_needs_statistics_that_see_misses(root) -> None:
    model = torch_pi2.load(root / "model")
    live = ActivationStats.load(root / "live")
    watched = ActivationStats(live.layers, live.model_hash, live.made_by | {"watched": True})
    message = r"min_recall of 0\.5: expected statistics of torch_pi2\.profile, which see what predictors miss"
    with pytest.raises(errors.ConfigError, match=message):
        torch_pi2.plan_for(model, PHONE, stats=watched, context=16, batches=(1,), min_recall=0.5)
    for stats, floor in ((watched, None), (live, 0.5)):
        made = torch_pi2.plan_for(model, PHONE, stats=stats, context=16, batches=(1,), min_recall=floor)
        assert made.hardware is not None


def test_help_says_what_is_run(command, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--measure-run beside it runs the model" in shown
    assert "torch-pi2 optimize --hardware" in shown


# --- a dense checkpoint ---


def test_a_dense_checkpoint_with_statistics(command, tmp_path, monkeypatch) -> None:
    from tiny_models import tiny

    tiny("llama-relu").save_pretrained(tmp_path / "hf")
    model = tiny("llama-relu")
    ids = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(0))
    torch_pi2.profile(model, ids, config=torch_pi2.Config(batch_size=4, seq_len=16)).save(tmp_path / "stats")
    given = (tmp_path / "hf", "--stats", tmp_path / "stats", "--method", "exact", "--out", tmp_path / "p")
    found = command(*given, "--hardware", PHONE, "--batches", "1,4", "--json").json
    assert found["contains"] == ["plan"]
    made = Plan.load(tmp_path / "p")
    assert made.hardware is not None
    assert [b.batch for b in made.hardware.buckets] == [1, 4]
    hot = [min(b.hot[i] for b in made.hardware.buckets) for i in range(len(made.layers))]
    assert [layer.n_hot for layer in made.layers] == hot
    # Without a machine: as ever, and with statistics of use how far the hot set has moved.
    plain = command(*given, "--json").json
    assert Plan.load(tmp_path / "p").hardware is None
    assert "moved" not in plain
    moved = command(*given, "--update", tmp_path / "stats", "--json").json["moved"]
    assert moved["share"] == 0


# --- differences ---


def test_what_differs(command, root, tmp_path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    command(root / "model", *BASE, "--out", a)
    command(root / "model", *BASE, "--planner", "all-cold", "--out", b)
    assert command("--diff", a, a, "--json").json["same"] is True
    assert "no difference" in command("--diff", a, a).out
    found = command("--diff", a, b, "--json").json
    assert found["same"] is False
    assert found["facts"]["made_by.planner"] == ["optimum", "all-cold"]
    ours, theirs = Plan.load(a).hardware, Plan.load(b).hardware
    assert ours is not None
    assert theirs is not None
    for row in found["buckets"]:
        first, second = ours.bucket(row["batch"]), theirs.bucket(row["batch"])
        for layer in row.get("layers", ()):
            i = int(layer["key"].split(".")[2])
            if "hot" in layer:
                assert layer["hot"] == [first.hot[i], second.hot[i]]
    text = command("--diff", a, b).out
    assert "optimum  all-cold" in text
    assert "batch 4, layer" in text
    # The folder's own plan has no part for a machine.
    bare = command("--diff", root / "store", b, "--json").json
    assert bare["facts"]["hardware"] == [False, True]
    assert [row["bucket"] for row in bare["buckets"]] == [[False, True]] * 2


def test_differences_of_layers(root) -> None:
    plan = Plan.load(root / "model" / "pi2")
    first = plan.layers[0]
    turned = replace(first, n_hot=64, order=first.order.flip(0))
    other = Plan([turned, *plan.layers[1:]], plan.model_hash, plan.made_by)
    found = diff(plan, other)
    (row,) = found["layers"]
    assert row["n_hot"] == [first.n_hot, 64]
    hot, new = set(first.order[: first.n_hot].tolist()), set(turned.order[:64].tolist())
    assert row["moved"] == [len(hot - new), len(new - hot)]
    assert set(found["facts"]) == {"orders_hash"}
    fewer = diff(plan, Plan(plan.layers[:1], plan.model_hash, plan.made_by))
    assert [layer["layer"] for layer in fewer["layers"]] == [[True, False]] * (LAYERS - 1)
    assert diff(plan, plan) == {"same": True, "facts": {}, "layers": [], "buckets": []}


# --- messages ---


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "MODEL a checkpoint or a folder none"),
        (("{model}",), "--hardware: the neuron orders and methods of a folder stay none"),
        (("{model}", "--budget", "1GiB"), "--budget --hardware beside it none"),
        (("{model}", "--hardware", PHONE), "--out a folder to write into none"),
        (("{model}", "--hardware", "toaster", "--out", "{tmp}/p"), "hardware measured, sm8650-ufs4.0"),
        (("{tmp}/hf", "--out", "{tmp}/p"), "--stats a folder written by torch-pi2 profile"),
        (("{model}", "--hardware", PHONE, "--out", "{tmp}/p", "--predictors", "x"), "none: the folder has its own x"),
        (("{model}", "--hardware", PHONE, "--out", "{tmp}/p", "--measure-run"), "--explain beside it"),
        (("{bare}", "--hardware", PHONE, "--out", "{tmp}/p"), "some: how often neurons fire .*torch_pi2.watch"),
        (("{model}", "--hardware", PHONE, "--out", "{tmp}/p", "--accesses", "x"), "--budget beside it: a cache"),
        (
            ("{model}", "--hardware", PHONE, "--out", "{tmp}/p", "--planner", "greedy", "--one-boundary"),
            "--one-boundary the optimum --planner greedy, which does not look at it",
        ),
        (("{store}", *map(str, BASE), "--out", "{store}/pi2"), "a folder of its own: the store there has its plan"),
        (("{model}", "--hardware", PHONE, "--out", "{tmp}/p", "--budget", "much"), "budget bytes, or text such as"),
        (
            ("{model}", "--hardware", PHONE, "--out", "{tmp}/p", "--budget", "1GiB"),
            "--budget 1GiB a model over a store .*model, which has none Pack it first: torch-pi2 pack MODEL STORE",
        ),
        (
            (
                "{store}",
                *map(str, BASE),
                "--out",
                "{tmp}/p",
                "--budget",
                "1GiB",
                "--clusters",
                "1,2",
                "--accesses",
                "x",
            ),
            "--clusters with --accesses one of them: accesses are of slots as they are both",
        ),
        (
            ("{bare}", *map(str, BASE), "--out", "{tmp}/p", "--update", "{live}", "--min-recall", "0.9"),
            "min_recall of 0.9 statistics of torch_pi2.profile, which see what predictors miss .*watched",
        ),
        (("--diff", "{tmp}/a", "{tmp}/b"), "plan.json a file nothing"),
    ],
)
def test_messages(command, root, tmp_path, argv, message) -> None:
    import re

    names = {name: root / name for name in ("model", "store", "bare")} | {"tmp": tmp_path, "live": tmp_path / "live"}
    live = ActivationStats.load(root / "live")
    ActivationStats(live.layers, live.model_hash, live.made_by | {"watched": True}).save(tmp_path / "live")
    found = refusal(command(*(str(a).format(**names) for a in argv), "--json", ok=False))
    assert re.search(message, found), found


@pytest.mark.parametrize(
    ("way", "attention", "options"),
    [
        ("layers", "whole", ""),
        ("chunks", "whole", "--reduction chunks"),
        ("ranks", "heads", "--reduction ranks --attention heads"),
    ],
)
def test_what_generate_has_to_be_told(way: str, attention: str, options: str) -> None:
    assert _options(way, attention) == options


def test_several_machines(command, root, tmp_path) -> None:
    (tmp_path / "machines.json").write_text(
        '{"machines": [{"hardware": "sm8650-ufs4.0"}, {"hardware": "sm8475-ufs3.1", "budget": "1GiB"}], '
        '"link": {"mbit_per_s": 1000, "exchange_us": 200}}'
    )
    given = (root / "store", "--machines", tmp_path / "machines.json", "--context", 16)
    found = command(*given, "--json").json
    assert found["machines"] == ["sm8650-ufs4.0", "sm8475-ufs3.1"]
    assert {way["way"] for way in found["ways"]} == {"chunks", "ranks", "layers"}
    assert [way["ms"] for way in found["ways"]] == sorted(way["ms"] for way in found["ways"])
    best = found["ways"][0]
    by = "layers" if best["way"] == "layers" else "neurons"
    shares = ",".join(map(str, best["shares"]))
    assert found["pack"] == f"torch-pi2 pack {root / 'store'} OUT --ranks 2 --by {by} --shares {shares}"
    ways = {(way["way"], way["attention"]) for way in found["ways"]}
    assert ways == {("layers", "whole"), *itertools.product(("chunks", "ranks"), ("whole", "heads"))}
    text = command(*given).out
    assert "ranks, attention by heads" in text
    assert "1000 Mbit/s, 200 us an exchange; predicted, of one sequence after 16 tokens" in text
    assert found["pack"] in text
    for option in (("--hardware", PHONE), ("--out", tmp_path / "p"), ("--budget", "1GiB")):
        said = refusal(command(*given, *option, "--json", ok=False))
        assert f"{option[0]} with --machines" in said
    said = refusal(command(tmp_path, *given[1:], "--json", ok=False))
    assert "--stats a folder written by torch-pi2 profile none, and no folder of ours" in said
