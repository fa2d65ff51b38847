"""``bench plan``: every planner on one model and the same tokens; the same neurons in another order; the table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from plan_fakes import FakeHardware

import torch_pi2
from benchmarks import plan, plan_model, table
from benchmarks.__main__ import main, render
from benchmarks.plan_model import Shuffled, Source, every_cold, find_folder, name_of
from benchmarks.timed_steps import PROMPT, Round, Steps
from torch_pi2.errors import ConfigError
from torch_pi2.eval import token_source
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.types.machine_plan import Bucket, HardwarePlan, PromptPlan
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import ActivationStats


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plan") / "q"
    torch_pi2.synthetic(made, "tiny", layers=2, rank=32)
    return made


@pytest.fixture
def at_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is made stays beside the folder, for all tests."""
    monkeypatch.chdir(folder.parent)
    return folder


def test_every_planner_in_every_case(at_work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_model, "STATISTICS", 8)
    monkeypatch.setattr(plan_model, "ACCESSES", 4)
    r = plan.run(folder=at_work, batch=(1, 4), tokens=3, rounds=2, hardware=FakeHardware())  # type: ignore[arg-type]
    assert (r["what"], r["shape"], r["weights"], r["activations"]) == ("plan", "tiny with 2 layers", "int4", "int8")
    assert r["methods"] == ["lowrank"]
    assert r["synthetic"]["active"] == 0.1
    assert r["hardware"] == {"name": "fake", "source": "measured", "hash": FakeHardware().hash}
    assert [(row["memory"], row["batch"]) for row in r["rows"]] == [
        ("whole", 1),
        ("whole", 4),
        ("half", 1),
        ("half", 4),
    ]
    for row in r["rows"]:
        check_row(row)
    shown = render(r)
    assert shown.splitlines()[1].split("  ")[-1].strip() == "planned / best"
    assert "50.0 % of neurons" in shown
    (tmp_path / "run.json").write_text(json.dumps(r))
    page = table.write(tmp_path).read_text()
    assert "## Planned against fixed plans" in page
    assert "tiny with 2 layers int4, int8 activations, lowrank, 50 % in memory | 4 |" in page


def test_from_the_command_line(at_work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(plan_model, "STATISTICS", 8)
    command = "plan --folder q --memory whole --batch 2 --planners planned,all-hot --tokens 2 --rounds 1"
    assert main([*command.split(), "--hardware", "sm8650-ufs4.0", "--json"]) == 0
    r = json.loads(capsys.readouterr().out)
    assert r["hardware"]["source"] == "published"
    assert [list(row["tokens_per_s"]) for row in r["rows"]] == [["planned", "all-hot"]]
    assert r["command"].startswith("python -m benchmarks plan --folder q --batch 2 --memory whole --ffn-in-memory 0.5")


def check_row(row: dict) -> None:
    planners, others = row["planners"], [name for name in plan.PLANNERS if name != "planned"]
    assert list(row["tokens_per_s"]) == list(planners) == list(plan.PLANNERS)
    assert set(row["planned_over"]) == set(row["spread"]) == set(others)
    assert row["tokens_per_s"][row["best"]] == max(row["tokens_per_s"][name] for name in others)
    assert row["planned_over_best"] == row["planned_over"][row["best"]]
    low, high = row["spread"][row["best"]]
    assert low <= row["planned_over_best"] <= high
    assert [planners[name]["hot_share"] for name in ("all-hot", "all-cold")] == [1, 0]
    for name, p in planners.items():
        assert p["tokens_per_s"] == row["tokens_per_s"][name] > 0
        assert (p["predicted_tokens_per_s"] is None) == (name == "random")  # of neurons that nobody chose
        if name != "random":
            wanted = row["batch"] * 1e3 / sum(p["predicted_ms"].values())
            assert p["predicted_tokens_per_s"] == pytest.approx(wanted, rel=0.01)
            assert p["predicted_over_measured"] == pytest.approx(wanted / p["tokens_per_s"], rel=0.01, abs=2e-3)
        assert set(p["ms_per_step"]) == {"linears", "predictor", "ffn", "rest"}
        assert p["ms_per_step"]["ffn"] > 0
        if row["memory"] == "half":
            assert 0 <= p["hit_rate"] <= 1
            assert 0 < p["neurons_in_memory"] <= 0.51
            assert row["budget_bytes"] > p["cache_bytes"] > 0
    if row["memory"] == "half":
        assert planners["all-hot"]["reads_per_step"] > 0
        assert planners["all-hot"]["hit_rate"] < 0.9
    if not any(p["same_as"] for p in planners.values()):
        assert planners["all-hot"]["ms_per_step"]["predictor"] == 0 < planners["all-cold"]["ms_per_step"]["predictor"]


# --- the model, and its neurons in another order ---


def test_shuffled_neurons_are_the_same_model(at_work: Path) -> None:
    source = Source(at_work)
    model = source.whole()
    assert {layer.n_hot for layer in sparse_layers(model)} == {0}
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    layers = sparse_layers(model)
    with torch.inference_mode():
        own = [layer(x) for layer in layers]
        order = layers[0].order.clone()
        other = Shuffled(model, 0)
        other.put(True)
        assert not torch.equal(layers[0].order, order)
        assert torch.equal(layers[0].order[layers[0].inverse], torch.arange(len(order)))
        for layer, y in zip(layers, own, strict=True):
            torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-5)
        other.put(False)
        for layer, y in zip(layers, own, strict=True):
            assert torch.equal(layer(x), y)


def test_the_shuffled_store_has_the_shuffled_model(at_work: Path) -> None:
    source = Source(at_work, activations="float")
    room = source.budget(0.5, 32, torch_pi2.OffloadConfig())
    ids = torch.randint(100, (1, 6), generator=torch.Generator().manual_seed(2))
    stored = source.over_store(room.total, 32, torch_pi2.OffloadConfig(), shuffled=True)
    model = source.whole()
    own = [layer.order.clone() for layer in sparse_layers(model)]
    Shuffled(model, source.seed).put(True)
    assert torch.equal(stored(ids).logits, model(ids).logits)
    for layer, shuffled, order in zip(sparse_layers(stored), sparse_layers(model), own, strict=True):
        assert torch.equal(layer.order, shuffled.order)
        assert not torch.equal(layer.order, order)
    assert stored.torch_pi2.plan.made_by["shuffled"] == source.seed


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_budget_has_room_for_a_share_of_the_neurons(at_work: Path, share: float) -> None:
    source = Source(at_work)
    room = source.budget(share, 64, torch_pi2.OffloadConfig())
    assert room.cache == pytest.approx(share * room.neurons, abs=room.slot)
    assert source.over_store(room.total, 64, torch_pi2.OffloadConfig()).torch_pi2.budget.cache == room.cache


def test_no_neuron_need_be_hot(folder: Path) -> None:
    own = Plan.load(folder / "pi2")
    assert own.layers[0].n_hot > 0
    cold = every_cold(own)
    assert {layer.n_hot for layer in cold.layers} == {0}
    assert cold.orders_hash == own.orders_hash
    assert cold.layers[0].expected_active == own.layers[0].expected_active

    class Often(ActivationStats):
        def frequency(self, key: str, batch: int = 1) -> torch.Tensor:
            return torch.ones(own.layers[0].site.intermediate)

    layer = own.layers[0]
    wanted = (layer.expected_active * layer.n_cold + layer.n_hot) / layer.site.intermediate
    assert every_cold(own, Often({}, own.model_hash)).layers[0].expected_active == pytest.approx(wanted)
    dense = dataclasses.replace(layer, method="dense", n_hot=layer.site.intermediate)
    assert every_cold(Plan([dense], own.model_hash)).layers == [dense]


def test_what_is_timed_is_not_what_plans_are_made_of(at_work: Path) -> None:
    source = Source(at_work)
    model = source.whole()
    drawn = {seed: source.tokens(model, "train", 3, seed).draw(8) for seed in (1, 2)}
    assert drawn[1].shape == (3, 8)
    assert not torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[1][0], drawn[1][1])
    assert torch.equal(drawn[1], source.tokens(model, "train", 3, 1).draw(8))


def test_a_real_model_reads_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_models import tiny
    from tiny_tokenizers import byte_tokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(token_source, "TEXT_BYTES", 4096)
    model = tiny("llama-relu")
    model.resize_token_embeddings(400)
    byte_tokenizer("def f(x): return x\n" * 50).save_pretrained(tmp_path / "dense")
    model.save_pretrained(tmp_path / "dense")
    made = find_folder(tmp_path / "dense", None, "exact")
    assert made == Path(f"work/bench/{name_of(tmp_path / 'dense')}-exact")
    assert {layer.n_hot for layer in Plan.load(made / "pi2").layers} == {0}
    assert find_folder(tmp_path / "dense", None, "exact") == made
    source = Source(made)
    assert (source.weights, source.activations) == ("float", "float")
    tokens = source.tokens(source.whole(), "heldout", 2, 0)
    assert tokens.about.startswith("source of Python's standard library")
    first, second = tokens.draw(5), tokens.draw(5)
    assert first.shape == (2, 5)
    assert not torch.equal(first, second)


def test_statistics_are_kept_and_made_anew_for_other_batches(at_work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, calls = Source(at_work, seed=7), []

    def watched(_model: object, batches: object, *, tokens: int, ids: torch.Tensor) -> ActivationStats:
        calls.append(batches)
        assert ids.shape == (max(batches), 1 + tokens)  # type: ignore[call-overload]
        return ActivationStats({}, source.own.model_hash)

    monkeypatch.setattr(plan_model, "watched_stats", watched)
    model = source.whole()
    for batches in ([1, 4], [1, 4], [1, 8]):
        stats, about = source.statistics(model, batches)
        assert stats.made_by["bench plan"] == about == f"64 steps at batch {', '.join(map(str, batches))}"
    assert calls == [[1, 4], [1, 8]]


# --- steps and rounds ---


def test_rounds_begin_where_the_first_did(at_work: Path) -> None:
    model = Source(at_work).whole()
    ids_BT = torch.randint(100, (2, PROMPT + 6), generator=torch.Generator().manual_seed(3))
    steps = Steps(model, 2, ids_BT[:, :PROMPT], 6)
    assert steps.context == PROMPT + 6
    seen: list[torch.Tensor] = []
    step = steps._decoder.step

    def watched(next_B1: torch.Tensor) -> torch.Tensor:
        seen.append(step(next_B1))
        return seen[-1]

    steps._decoder.step = watched  # type: ignore[method-assign]
    first = steps.run(ids_BT[:, PROMPT:])
    assert (first.steps, first.stats) == (6, None)
    assert first.ms["ffn"] > 0
    assert sum(first.ms.values()) == pytest.approx(first.seconds * 1e3 / 6)
    steps.run(ids_BT[:, PROMPT:])
    assert all(torch.equal(a, b) for a, b in zip(seen[:6], seen[6:], strict=True))
    assert steps.run(ids_BT[:, PROMPT:], limit_s=0.0).steps == 2  # too slow: no more than two


def hardware_plan(hot: int, resident: int = 0, cache: int = 0, **offload: object) -> HardwarePlan:
    bucket = Bucket(4, (hot, hot), (0, 0), (resident, resident), cache, {"hot": 2.0})
    return HardwarePlan({}, None, 0, 32, (bucket,), PromptPlan((0, 0)), offload)


def test_a_plan_that_was_made_twice_is_timed_once() -> None:
    plans = {
        "planned": hardware_plan(64),
        "greedy": hardware_plan(64),
        "all-hot": hardware_plan(1024),
        "all-cold": hardware_plan(0),
        "random": hardware_plan(64),
    }
    assert plan._same(plans, 4) == {"greedy": "planned"}
    plans |= {"greedy": hardware_plan(64, policy="lru"), "random": hardware_plan(0)}
    assert plan._same(plans, 4) == {"random": "all-cold"}
    plans |= {"all-cold": hardware_plan(0, 0, 4096), "random": hardware_plan(0, 0, 4096)}
    assert plan._same(plans, 4) == {}  # what is first in a cache matters


def a_case(folder: Path, plans: dict[str, HardwarePlan], rounds: int = 4) -> plan._Case:
    settings = plan._Settings(Source(folder), FakeHardware(), (4,), tuple(plans), 3, rounds, 0.5, False, 0)
    return plan._Case(settings, "whole", 4, plans)


def some_tokens() -> token_source.Tokens:
    return token_source.Tokens("ids", lambda n: torch.randint(100, (4, n)))


def test_planners_alternate_on_the_same_tokens(at_work: Path) -> None:
    names = ("planned", "greedy", "all-hot")
    case = a_case(at_work, {name: hardware_plan(i) for i, name in enumerate(names)})
    ran: list[tuple[str, torch.Tensor]] = []
    seconds = {"planned": 1.0, "greedy": 2.0, "all-hot": 0.8}

    def run_round(name: str, ids_BT: torch.Tensor) -> Round:
        ran.append((name, ids_BT))
        slower = 1 + len(ran) // 4  # of a machine that gets slower all the time
        return Round(3, seconds[name] * slower, {"ffn": 1.0})

    case.alternate(run_round, some_tokens())
    assert [name[0] for name, _ in ran] == list("pgagapapgpga")
    for first in range(0, 12, 3):
        assert all(torch.equal(ran[first][1], ids) for _, ids in ran[first : first + 3])
    assert not torch.equal(ran[0][1], ran[3][1])
    row = case.row()
    assert row["best"] == "all-hot"
    assert row["planned_over_best"] == row["planned_over"]["all-hot"]
    ratios = sorted(a.seconds / b.seconds for a, b in zip(case.kept["all-hot"], case.kept["planned"], strict=True))
    assert row["planned_over_best"] == pytest.approx((ratios[1] + ratios[2]) / 2, abs=1e-4)
    assert row["planners"]["greedy"]["predicted_tokens_per_s"] == 2000


def test_same_plans_have_the_same_figures(at_work: Path) -> None:
    case = a_case(at_work, {"planned": hardware_plan(64), "greedy": hardware_plan(64)})
    case.alternate(lambda _name, _ids: Round(3, 0.5, {"ffn": 1.0}), some_tokens())
    row = case.row()
    assert row["planners"]["greedy"]["same_as"] == "planned"
    assert row["planned_over_best"] == 1
    r = {"rows": [row], "shape": "tiny", "weights": "int4", "activations": "int8", "methods": ["exact"], "threads": 2}
    r |= {"compiled": False, "hardware": {"name": "x", "source": "published"}, "tokens": "t", "statistics": "s"}
    assert "= planned" in render(r | {"what": "plan", "synthetic": False})


def test_caches_settle_before_rounds_count(at_work: Path) -> None:
    case = a_case(at_work, {name: hardware_plan(i) for i, name in enumerate(("planned", "greedy", "random"))})
    hits = {"planned": iter([50, 90, 90]), "greedy": iter([10, 20, 30, 40, 50, 60]), "random": iter([80] * 6)}
    left = {"random": iter([5, 3, 1, 0])}

    def run_round(name: str, _ids: torch.Tensor) -> Round:
        stats = {"hits": next(hits[name]), "wanted": 100, "reads": 0, "bytes_read": 0, "wait_ns": 0}
        return Round(3, 0.5, {}, stats | {"arranging": next(left[name]) if name in left else 0})

    case.settle(run_round, some_tokens())
    assert case.settled == {"planned": 3, "greedy": 6, "random": 4}


# --- what makes no sense ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": []}, "batch: expected 1 or more, found 0"),
        ({"batch": [0]}, "batch: expected 1 or more, found 0"),
        ({"memory": []}, "memory: expected 1 or more, found 0"),
        ({"memory": ["much"]}, "memory: expected whole or half, found much"),
        ({"tokens": 1}, "tokens: expected 2 or more, found 1"),
        ({"rounds": 0}, "rounds: expected 1 or more, found 0"),
        ({"ffn_in_memory": 1.5}, "ffn_in_memory: expected 0 to 1, found 1.5"),
        ({"planners": ["planned", "magic"]}, "planner: expected planned or greedy or all-hot or all-cold or random"),
        ({"planners": ["planned"]}, "planners: expected planned and others, found planned"),
        ({"planners": ["greedy", "random"]}, "planners: expected planned and others, found greedy,random"),
        ({"shape": "tiny"}, "--shape with --folder: expected one of them, found both"),
        ({"method": "exact"}, "--method exact: expected a float checkpoint to be optimised, found"),
    ],
)
def test_settings_that_make_no_sense(folder: Path, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan.run(**{"folder": folder, "hardware": FakeHardware(), **settings})
    assert str(error.value).startswith(message)


def test_a_method_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--method exact: expected a --folder that is to be optimised, found none"):
        find_folder(None, None, "exact")
    with pytest.raises(ConfigError, match=r"--method: expected exact or lowrank, found signbit"):
        find_folder(tmp_path, None, "signbit")


def test_experts_have_no_hot_neurons(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 64, **sizes}
    torch_pi2.synthetic(tmp_path / "m", shape, layers=1, rank=16)
    with pytest.raises(ConfigError, match=r"expected feed-forward layers with hot and cold neurons, found experts"):
        Source(tmp_path / "m")


def test_all_planners_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan._check_memory(1 << 20, 5)
    monkeypatch.setattr(plan, "_available_bytes", lambda: 1 << 30)
    with pytest.raises(ConfigError, match=r"5 planners over a store: expected 5.0 GiB of memory, .*found 1.0 GiB"):
        plan._check_memory(1 << 30, 5)


def test_a_changed_model_and_another_of_its_name_are_made_anew(tmp_path: Path) -> None:
    names = []
    for folder, text in (("a/model", "1"), ("b/model", "1"), ("b/model", "22"), ("b/model", "333")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "config.json").write_text(text)
        names.append(name_of(tmp_path / folder))
    assert all(name.startswith("model-") for name in names)
    assert len(set(names)) == 4
    assert name_of(tmp_path / "b/model") == names[-1]
