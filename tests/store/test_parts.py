"""Plan, predictors and statistics inside a store: they come back, old ones have them beside, damage is noticed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import by_hand
from stores import SMALL, Damaged, logits, rename_checked, store_of

import torch_pi2
from torch_pi2.base.crc32c import block_checks
from torch_pi2.base.tensorfile import Spec, tensor_check
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.cli import main
from torch_pi2.errors import ArtifactError, Pi2Error, StaleArtifactError
from torch_pi2.predict.file import FittedPredictors, load_predictors, save_predictors
from torch_pi2.predict.signbit import SignBit
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import StoreReader, part_of
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import HIST_BINS, ActivationStats, LayerStats

KEY = "model.layers.{}.mlp"


def quantised(folder: Path, seed: int = 0, **options: Any) -> Path:
    """A small synthetic model with predictors, and statistics of nothing."""
    torch_pi2.synthetic(folder, SMALL, **{"rank": 16, "seed": seed, **options})
    neurons, g = SMALL["intermediate_size"], torch.Generator().manual_seed(0)
    layers = {}
    for i in range(SMALL["num_hidden_layers"]):
        counts = torch.randint(0, 9, (4, neurons), generator=g)
        layers[KEY.format(i)] = LayerStats(
            key=KEY.format(i),
            layer=i,
            threshold=0.0,
            tokens=9,
            fired=counts[0],
            zeros=counts[1],
            abs_sum=counts[2].double(),
            batch_sizes=(1,),
            batch_groups=torch.tensor([9]),
            batch_fired=counts[3:],
            score_hist=torch.zeros(HIST_BINS, dtype=torch.int64),
        )
    ActivationStats(layers, Plan.load(folder / "pi2").model_hash, {"seed": 3}).save(folder / "pi2")
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``q``, a quantised folder; ``store``, packed from it; ``other``, the same of another model of this shape."""
    base = tmp_path_factory.mktemp("parts")
    torch_pi2.pack(quantised(base / "q"), base / "store")
    torch_pi2.pack(quantised(base / "other-q", seed=1), base / "other")
    return base


@pytest.fixture
def store(root: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(root / "store", tmp_path / "store"))


def content(pi2: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """All that a folder's parts say, as text and tensors."""
    with Parts(pi2) as parts:
        plan, predictors, stats = parts.plan(), parts.predictors(), parts.stats()
    tensors = dict(plan.orders)
    tensors |= {f"{key}.{n}": t for key, p in predictors.items() for n, t in p.tensors().items()}
    cards = {key: (type(p).__name__, p.threshold, p.card and p.card.to_json()) for key, p in predictors.items()}
    told = stats and (stats.model_hash, stats.made_by, [(s.layer, s.tokens, s.batch_sizes) for s in stats])
    tensors |= {f"{s.key}.{n}": t for s in stats or () for n, t in vars(s).items() if isinstance(t, torch.Tensor)}
    return json.dumps([plan.to_json(), predictors.model_hash, cards, told]), tensors


def same(a: tuple[str, dict[str, torch.Tensor]], b: tuple[str, dict[str, torch.Tensor]]) -> bool:
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(t, b[1][n]) for n, t in a[1].items())


# --- what is inside ---


def test_a_store_has_everything_inside(root: Path, tmp_path: Path) -> None:
    assert os.listdir(root / "store" / "pi2") == ["model.pi2"]
    assert len(content(root / "q" / "pi2")[1]) == 2 * (1 + 3 + 6)
    assert same(content(root / "store" / "pi2"), content(root / "q" / "pi2"))
    model = torch_pi2.load(root / "store")
    assert torch.equal(logits(model), logits(torch_pi2.load(root / "q")))
    assert model.torch_pi2.stats is not None
    torch_pi2.save(model, tmp_path / "saved")
    assert same(content(tmp_path / "saved" / "pi2"), content(root / "q" / "pi2"))


def test_a_budget_takes_plan_and_predictors_from_the_store(root: Path) -> None:
    wanted = logits(torch_pi2.load(root / "q"))
    assert torch.equal(logits(torch_pi2.load(root / "store", budget="1GiB")), wanted)


def test_regions_and_provenance(root: Path) -> None:
    with StoreReader(store_of(root / "store")) as reader:
        regions = reader.regions()
        assert sum(regions.values()) == reader.file_bytes
        for part in ("plan", "predictors", "stats"):
            assert regions[part] == sum(spec.nbytes for n, spec in reader.specs.items() if part_of(n) == part) > 1000
        found = reader.provenance()
        assert (found["from"], found["weights"]) == ("torch_pi2.weights", "int4")
        assert found["model"]["model_type"] == "llama"
        assert len(found["model"]["config_sha256"]) == 64
        floats = {torch.bfloat16}  # not the float32 of predictors
        assert {reader.float_dtype} == floats
        first = min(reader.offset(n) for n in reader.specs if part_of(n))
        assert first % 4096 == 0
        assert all(reader.offset(n) > first for n in ("lm_head.weight", "model.norm.weight"))


def test_packing_twice_gives_the_same_bytes(root: Path, tmp_path: Path) -> None:
    torch_pi2.pack(root / "q", tmp_path / "again")
    assert store_of(tmp_path / "again").read_bytes() == store_of(root / "store").read_bytes()
    torch_pi2.pack(root / "store", tmp_path / "repacked")
    with StoreReader(store_of(tmp_path / "repacked")) as new, StoreReader(store_of(root / "store")) as old:
        assert new.checks == old.checks
        assert new.provenance() == old.provenance() | {"from": "torch_pi2.store"}
        new.verify()


@pytest.mark.parametrize("name", ["plan.json", "predictors.safetensors", "stats.safetensors"])
def test_files_beside_are_refused(root: Path, store: Path, name: str) -> None:
    shutil.copy(root / "q" / "pi2" / name, store / "pi2" / name)
    for load in (torch_pi2.load, load_dense):
        with pytest.raises(ArtifactError, match=rf"pi2/{name} beside model\.pi2: expected no such file: .* Remove it"):
            load(store)


# --- damage ---


def reseal(d: Damaged, name: str, change: Callable[[bytes], bytes]) -> None:
    """Other bytes of ``name``, as many, and the checksum that they have."""
    entry = d.header[name]
    start, stop = entry["data_offsets"]
    new = change(bytes(d.data[start:stop]))
    assert len(new) == stop - start
    d.data[start:stop] = new
    checks = json.loads(d.meta["checks"])
    data = torch.frombuffer(bytearray(new), dtype=torch.uint8)
    checks[name] = tensor_check(name, Spec(tuple(entry["shape"]), torch.uint8), [block_checks(data)])
    d.meta["checks"] = json.dumps(checks)


def flip(d: Damaged, name: str) -> None:
    d.data[d.at(name) + 5] ^= 4


def drop(d: Damaged, name: str) -> None:
    """As if it had never been packed."""
    d.rename(name, "pi2.padding.99")
    checks = json.loads(d.meta["checks"])
    del checks[name]
    d.meta["checks"] = json.dumps(checks)


def of_another_model(data: bytes) -> bytes:
    found = json.loads(data)["model_hash"].encode()
    return by_hand(data.decode()).encode().replace(found, b"ef" * (len(found) // 2)).ljust(len(data))


ORDER, ROWS = f"pi2.plan.{KEY.format(1)}.order", f"pi2.predictors.{KEY.format(1)}.b"
FIRED = f"pi2.stats.{KEY.format(0)}.fired"

DAMAGE: dict[str, tuple[Callable[[Damaged], Any], type[Pi2Error], str]] = {
    "bit of a predictor": (lambda d: flip(d, ROWS), ArtifactError, rf"{ROWS} has checksum \w{{8}}, not \w{{8}}"),
    "bit of their text": (lambda d: flip(d, "pi2.predictors"), ArtifactError, r"pi2\.predictors has checksum"),
    "bit of the plan": (lambda d: flip(d, "pi2.plan"), ArtifactError, r"pi2\.plan has checksum"),
    "bit of an order": (lambda d: flip(d, ORDER), ArtifactError, rf"{ORDER} has checksum"),
    "bit of statistics": (lambda d: flip(d, FIRED), ArtifactError, rf"{FIRED} has checksum"),
    "no tensor of a predictor": (
        lambda d: drop(d, ROWS),
        ArtifactError,
        r"shapes of a low-rank predictor: expected uint8 a .* found a uint8 \[.*\], bias float32 \[104\]\.",
    ),
    "order of another name": (lambda d: rename_checked(d, ORDER, ORDER + "s"), ArtifactError, "orders has checksum"),
    "no order": (lambda d: drop(d, ORDER), ArtifactError, r"its plan: expected .*order, a permutation.*found none"),
    "no statistics of a layer": (
        lambda d: drop(d, FIRED),
        ArtifactError,
        r"its stats: model\.layers\.0\.mlp: expected all its tensors, found no fired",
    ),
    "plan that is no JSON": (
        lambda d: reseal(d, "pi2.plan", lambda b: b"[" + b[1:]),
        ArtifactError,
        "its plan: .*JSON",
    ),
    "plan that is no text": (
        lambda d: reseal(d, "pi2.plan", lambda b: b"\xff" + b[1:]),
        ArtifactError,
        r"pi2\.plan: 'utf",
    ),
    "predictors without metadata": (
        lambda d: reseal(d, "pi2.predictors", lambda b: b"[]".ljust(len(b))),
        ArtifactError,
        r"its predictors: expected an object, found \[\]",
    ),
    "foreign predictors": (
        lambda d: reseal(d, "pi2.predictors", of_another_model),
        StaleArtifactError,
        r"its predictors: expected made from FFN weights \w{12}, found efef",
    ),
    "foreign statistics": (
        lambda d: reseal(d, "pi2.stats", of_another_model),
        StaleArtifactError,
        "its stats: expected made from FFN weights",
    ),
    "foreign plan": (lambda d: reseal(d, "pi2.plan", of_another_model), StaleArtifactError, r"as in plan\.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_parts(store: Path, kind: str) -> None:
    change, error, message = DAMAGE[kind]
    damaged = Damaged(store_of(store))
    change(damaged)
    damaged.write(store_of(store))
    with pytest.raises(error, match=message):
        torch_pi2.load(store)
    with StoreReader(store_of(store)) as reader:
        if kind.startswith("bit"):
            with pytest.raises(ArtifactError, match=message):
                reader.verify()


# --- packing ---


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("predictors.safetensors", StaleArtifactError, r"predictors\.safetensors: expected made from FFN weights"),
        ("stats.safetensors", StaleArtifactError, r"stats\.safetensors: expected made from FFN weights"),
        (
            "none",
            ArtifactError,
            r"a lowrank predictor of model\.layers\.0\.mlp with 104 neurons and 64 inputs, found none",
        ),
        ("one", ArtifactError, r"a lowrank predictor of model\.layers\.1\.mlp with 104 .*, found none"),
        (
            "small",
            ArtifactError,
            r"104 neurons and 64 inputs, found lowrank of 96 neurons and 64 inputs\. Fit predictors",
        ),
        ("signs", ArtifactError, r"a lowrank predictor .*, found signbit of 104 neurons and 64 inputs"),
    ],
)
def test_parts_that_do_not_belong_together_are_not_packed(
    root: Path, tmp_path: Path, name: str, error: type[Pi2Error], message: str
) -> None:
    source = Path(shutil.copytree(root / "q", tmp_path / "q"))
    model_hash = Plan.load(source / "pi2").model_hash
    predictors = load_predictors(source / "pi2")
    if name == "none":
        (source / "pi2" / "predictors.safetensors").unlink()
    elif name == "one":
        del predictors[KEY.format(1)]
        save_predictors(source / "pi2", predictors, model_hash)
    elif name == "small":
        for predictor in predictors.values():
            predictor.b, predictor.bias = predictor.b[:96], predictor.bias[:96]
        save_predictors(source / "pi2", predictors, model_hash)
    elif name == "signs":
        bits = torch.zeros(104, 8, dtype=torch.uint8)
        signs = {key: SignBit(bits.clone(), 64, 0.5, one.card) for key, one in predictors.items()}
        save_predictors(source / "pi2", FittedPredictors(signs), model_hash)
    else:
        shutil.copy(root / "other-q" / "pi2" / name, source / "pi2" / name)
    with pytest.raises(error, match=message):
        torch_pi2.pack(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


# --- who else asks for them ---


def test_inspect_shows_parts_provenance_and_budgets(
    root: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(root / "store"), "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["contains"] == ["model", "stats", "predictors", "plan", "store"]
    assert found["store"]["format_version"] == "2"
    layer = found["layers"][1]
    assert (layer["method"], layer["rank"], layer["bundle_bytes"]) == ("lowrank", 16, 108)
    budget = torch_pi2.stats(torch_pi2.load(root / "store", budget="1GiB"))["budget"]
    for name in ("smallest", "cliff", "whole", "token", "neurons"):
        assert found["budget"][name] == getattr(budget, name)
    assert main(["inspect", str(root / "store")]) == 0
    text = capsys.readouterr().out
    assert "store version 2: 208 neurons in int4" in text
    assert "from torch_pi2.weights, weights int4, config_sha256" in text
    assert "MiB at least (all neurons from flash, context 1024)" in text
    (store / "config.json").unlink()
    assert main(["inspect", str(store)]) == 0
    assert "budget: not known (" in capsys.readouterr().out
    damaged = Damaged(store_of(root / "store"))
    flip(damaged, ROWS)
    shutil.rmtree(store / "pi2")
    (store / "pi2").mkdir()
    damaged.write(store_of(store))
    assert main(["inspect", str(store), "--verify"]) == 2
    assert f"{ROWS} has checksum" in capsys.readouterr().err
