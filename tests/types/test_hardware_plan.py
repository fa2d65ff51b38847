"""The part ``hardware`` of plan.json: what is written is read, and what nobody can follow is refused by name."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from by_hand import by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny

import torch_pi2
from torch_pi2 import errors
from torch_pi2.types.plan import Bucket, HardwarePlan, Plan, PromptPlan

LAYERS = [("a", 64, 1024), ("b", 0, 700)]


def made() -> HardwarePlan:
    return HardwarePlan(
        {"hardware": "here", "hash": "abc", "source": "measured"},
        1 << 30,
        1 << 20,
        1024,
        (
            Bucket(1, (64, 0), (0, 0), (100, 10), 1 << 20, {"hot": 1.5, "cold": 0.25}),
            Bucket(4, (1024, 512), (1024, 512), (200, 700), 1 << 19),
        ),
        PromptPlan((48, 0)),
        {"policy": "lfu", "io_threads": 32, "lookahead": False},
        {"compute": 2, "io": 1},
        4,
    )


def test_round_trip() -> None:
    plan = made()
    text = json.dumps(plan.to_json())
    read = HardwarePlan.from_json(json.loads(text), LAYERS, "plan.json")
    assert read == plan
    assert json.dumps(read.to_json()) == text
    assert read.buckets[0].total_ms == 1.75


def test_buckets() -> None:
    plan = made()
    assert [plan.bucket(n).batch for n in (1, 2, 4, 5, 99)] == [1, 4, 4, 4, 4]


#: Path to a field, what is put there, and what the message says; test_hostile_files.py has what annotations refuse.
DAMAGE = [
    (("buckets",), [], r"buckets: expected a list of 1 or more, found \[\]"),
    (("buckets", 1, "batch"), 1, r"buckets: expected ascending batch sizes, found \[1, 1\]"),
    (("buckets", 0, "hot", 0), 63, r"buckets, 0, hot: expected 64 to 1024 for a, found 63"),
    (("buckets", 0, "hot"), [64], "expected 2 numbers, one for each layer, found 1"),
    (("buckets", 1, "accelerator", 1), 513, "accelerator: expected 0 to 512 for b, found 513"),
    (("buckets", 1, "accelerator", 0), 100, "accelerator: expected a multiple of 512, or 1024, for a, found 100"),
    (("buckets", 0, "resident", 1), -1, "resident, 1: expected a whole number, 0 or more, found -1"),
    (("buckets", 0, "ms", "hot"), 2e15, r"ms, hot: expected a number, 0 or more, at most 1e\+15, found 2"),
    (("offload", "policy"), "mru", "offload, policy: expected lru or sieve or .*found 'mru'"),
    (("offload", "io_threads"), 0, "offload, io_threads: expected a whole number, 1 or more"),
    (("offload", "speed"), 3, "offload: expected no other fields than policy, io_threads.*found 'speed'"),
    (("threads", "idle"), 1, "threads: expected no other fields than compute, io, found 'idle'"),
    (("cluster",), 0, "cluster: expected a whole number, 1 or more, found 0"),
]


@pytest.mark.parametrize(("path", "value", "message"), DAMAGE)
def test_damage_is_named(path: tuple, value: object, message: str) -> None:
    data = made().to_json()
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(errors.ArtifactError, match=message) as raised:
        HardwarePlan.from_json(data, LAYERS, "plan.json")
    assert str(raised.value).startswith("plan.json, hardware, ")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2000) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_anything_is_read_or_refused(data: st.DataObject) -> None:
    """Some field of a sound plan becomes anything: an ArtifactError, or a plan that says the same again."""
    plan = copy.deepcopy(made().to_json())
    place: object = plan
    for _ in range(data.draw(st.integers(1, 4))):
        keys = list(place) if isinstance(place, dict) else list(range(len(place))) if isinstance(place, list) else []
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        inner = place[key]  # type: ignore[index]
        if not isinstance(inner, dict | list) or data.draw(st.booleans()):
            place[key] = data.draw(json_values)  # type: ignore[index]
            break
        place = inner
    try:
        read = HardwarePlan.from_json(plan, LAYERS, "plan.json")
    except errors.ArtifactError:
        return
    again = HardwarePlan.from_json(read.to_json(), LAYERS, "plan.json")
    assert again.to_json() == read.to_json()


def with_hardware(plan: Plan) -> Plan:
    sizes = [layer.site.intermediate for layer in plan.layers]
    bucket = Bucket(1, tuple(sizes), (0,) * len(sizes), (0,) * len(sizes))
    return replace(plan, hardware=replace(made(), buckets=(bucket,), prompt=PromptPlan((0,) * len(sizes))))


def test_in_a_plan(tmp_path: Path) -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    plan = with_hardware(model.torch_pi2.plan)
    plan.save(tmp_path)
    read = Plan.load(tmp_path)
    assert read.hardware == plan.hardware
    assert read.to_json() == plan.to_json()
    text = by_hand((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(text.replace('"cluster": 4', '"cluster": 0'))
    with pytest.raises(errors.ArtifactError, match=r"plan\.json, hardware, cluster"):
        Plan.load(tmp_path)


def test_version_1_is_read(tmp_path: Path) -> None:
    plan = torch_pi2.optimize(tiny("llama-relu")).torch_pi2.plan
    plan.save(tmp_path)
    path = tmp_path / "plan.json"
    path.write_text(by_hand(path.read_text()).replace('"version": 2', '"version": 1'))
    assert Plan.load(tmp_path).hardware is None


def test_another_plan_for_a_folder(tmp_path: Path) -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    folder = torch_pi2.save(model, tmp_path / "m")
    other = with_hardware(Plan.load(folder / "pi2"))
    other.save(tmp_path / "plan")
    loaded = torch_pi2.load(folder, plan=tmp_path / "plan")
    assert loaded.torch_pi2.plan.hardware == other.hardware
    shuffled = copy.copy(other)
    shuffled.layers = [replace(y, order=y.order.flip(0)) for y in other.layers]
    with pytest.raises(errors.StaleArtifactError, match="neuron orders as in its own plan"):
        torch_pi2.load(folder, plan=shuffled)
    with pytest.raises(errors.StaleArtifactError, match="methods and thresholds as in its own plan"):
        torch_pi2.load(folder, plan=replace(other, layers=[replace(y, method="dense") for y in other.layers]))
    with pytest.raises(errors.StaleArtifactError, match="weights as in its own plan"):
        torch_pi2.load(folder, plan=replace(other, model_hash="0" * 64))


def test_other_hot_neurons_for_a_store(tmp_path: Path) -> None:
    """How many neurons are hot is the plan's affair, not the store's; results of the exact gate keep their bits."""
    torch_pi2.save(torch_pi2.optimize(tiny("llama-relu")), tmp_path / "m")
    torch_pi2.pack(tmp_path / "m", tmp_path / "s")
    ids = torch.arange(7)[None]
    wanted = torch_pi2.load(tmp_path / "s", budget="1GB")(input_ids=ids).logits
    own = Plan.load(tmp_path / "m" / "pi2")
    hotter = replace(own, layers=[replace(y, n_hot=y.site.intermediate // 2) for y in own.layers])
    found = torch_pi2.load(tmp_path / "s", budget="1GB", plan=hotter)(input_ids=ids).logits
    assert torch.equal(found, wanted)
