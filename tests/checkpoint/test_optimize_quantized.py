"""``optimize_quantized``: a quantised file becomes a sparse model, whose rows are the file's."""

from pathlib import Path
from typing import Any

import ggufs
import pytest
import torch
from quantised_folders import quantised

import torch_pi2
from torch_pi2 import cli
from torch_pi2.errors import CalibrationError, ConfigError, Pi2Error
from torch_pi2.fitting.thresholds import masked
from torch_pi2.graph.find import find_sites
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops.rows import row_of_neurons
from torch_pi2.predict.method import SparseMethod

GOLDEN = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"
IDS = torch.randint(0, 256, (24, 32), generator=torch.Generator().manual_seed(3))
TOKENS = IDS[:1, :10]
QUICK: dict[str, Any] = {"batch_size": 4, "seq_len": 32, "calibration_tokens": 768}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llama")
    ggufs.tiny("llama").save_pretrained(root / "floats")
    ggufs.tokenizer(root / "floats")
    ggufs.written(root / "floats", root / "floats.gguf")
    ggufs.retyped(root / "floats.gguf", root / "q4_k.gguf", "Q4_K")
    return root / "q4_k.gguf"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits.float()
    return found


@torch_pi2.register_method
class Second(SparseMethod):
    """Every second neuron."""

    name = "second"

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        return (torch.arange(self.count) % 2 == 0).expand(len(x_TH), -1)

    def fit(self, layer: Any) -> None:
        self.count = layer.site.intermediate


def rows_kept(model: Any, file: Path, kind: str = "q4_k") -> None:
    """Gate and up have the bytes of ``file``, in the plan's order."""
    imported = torch_pi2.load(file)
    for layer, plan in zip(sparse_layers(model), model.torch_pi2.plan.layers, strict=True):
        assert layer.weights == f"{kind}+int8"
        for row, ref in enumerate((plan.site.gate, plan.site.up)):
            found, of = row_of_neurons(layer.neuron_rows, row, layer.weights, plan.site.hidden)
            theirs: Any = imported.get_submodule(ref.weight.removesuffix(".weight"))
            assert of == kind
            assert torch.equal(found, theirs.in_row_order()[plan.order.long()])


def test_thresholds_skip_what_they_skip_in_floats(file: Path, tmp_path: Path) -> None:
    report = torch_pi2.optimize_quantized(file, tmp_path / "out", IDS, method="threshold", sparsity=0.5, **QUICK)
    assert report.neurons == 2
    assert {role for name in report.rounded for role in ("gate", "up", "down") if f".{role}_" in name} == {"down"}
    model: Any = torch_pi2.load(tmp_path / "out", activations="float")
    rows_kept(model, file)
    assert model.torch_pi2.lossy
    plan = model.torch_pi2.plan
    assert all(0.3 < layer.expected_active < 0.7 for layer in plan.layers)
    dense = torch_pi2.load_dense(tmp_path / "out", dtype=torch.float32)
    cuts = {y.site.key: y.threshold if y.thresholds is None else y.thresholds for y in plan.layers}
    sites = [layer.site for layer in plan.layers]
    with masked(dense, sites, cuts):
        wanted = logits(dense)
    assert 0 < float((logits(model) - wanted).norm()) < 0.05 * float((logits(dense) - wanted).norm())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lowrank", "own"])
def test_predictors_and_methods_over_a_store(file: Path, tmp_path: Path, method: str) -> None:
    """Whatever the order of neurons, in memory and over flash the same bits; statistics and predictors come along."""
    how: dict[str, Any] = {"method": Second() if method == "own" else method, "sparsity": 0.5, **QUICK}
    torch_pi2.optimize_quantized(file, tmp_path / "out", IDS, **how)
    model: Any = torch_pi2.load(tmp_path / "out")
    rows_kept(model, file)
    assert set(model.torch_pi2.predictors) == {layer.site.key for layer in model.torch_pi2.plan.layers}
    assert model.torch_pi2.stats is not None
    torch_pi2.pack(tmp_path / "out", tmp_path / "store")
    parts = torch_pi2.stats(torch_pi2.load(tmp_path / "store", budget="1GB", context=64))["budget"]
    stored = torch_pi2.load(tmp_path / "store", budget=parts.smallest + parts.in_slots(parts.neurons // 3), context=64)
    assert torch.equal(logits(stored), logits(model))


def test_a_layer_that_stays_dense_keeps_its_rows(file: Path, tmp_path: Path) -> None:
    key = find_sites(torch_pi2.load_dense(tmp_imported(file, tmp_path)))[1].key
    torch_pi2.optimize_quantized(file, tmp_path / "out", IDS, method={key: Second()}, **QUICK)
    model: Any = torch_pi2.load(tmp_path / "out")
    assert [layer.site.key for layer in sparse_layers(model)] == [key]
    assert model.model.layers[0].mlp.down_proj.weights == "q4_k"


def test_a_layer_that_would_read_more_keeps_its_rows(tmp_path: Path) -> None:
    """Down is Q6_K there, and int8 in neurons: skipping a tenth of them does not make up for that."""
    how: dict[str, Any] = {"method": "threshold", "score": "gate", **QUICK}
    torch_pi2.optimize_quantized(GOLDEN, tmp_path / "little", IDS, sparsity=0.1, **how)
    assert not sparse_layers(torch_pi2.load(tmp_path / "little"))
    torch_pi2.optimize_quantized(GOLDEN, tmp_path / "much", IDS, sparsity=0.5, **how)
    assert len(sparse_layers(torch_pi2.load(tmp_path / "much"))) == 1


@pytest.mark.slow
def test_a_mixture_whose_router_ties_in_bfloat16(tmp_path: Path) -> None:
    ggufs.tiny("smallthinker").save_pretrained(tmp_path / "floats")
    ggufs.tokenizer(tmp_path / "floats")
    file = ggufs.written(tmp_path / "floats", tmp_path / "m.gguf")
    torch_pi2.optimize_quantized(file, tmp_path / "out", IDS, method="threshold", **QUICK)
    assert torch_pi2.load(tmp_path / "out").torch_pi2.plan.layers


def tmp_imported(file: Path, tmp_path: Path) -> Path:
    torch_pi2.import_gguf(file, tmp_path / "imported")
    return tmp_path / "imported"


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (ConfigError, {"weights": "int4", "calibration": IDS}),
        (ConfigError, {"quantization": "gptq", "weights": "int4", "calibration": IDS}),
        (CalibrationError, {}),
    ],
)
def test_refused(file: Path, tmp_path: Path, error: type[Pi2Error], how: dict[str, Any]) -> None:
    with pytest.raises(error, match="optimize_quantized"):
        torch_pi2.optimize_quantized(file, tmp_path / "out", method="threshold", **how)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    how = ["--method", "threshold", "--sparsity", "0.5", "--tokens", "2000", "--out", out]
    assert cli.main(["optimize", str(GOLDEN), *how]) == 0
    said = capfd.readouterr().out
    assert "threshold" in said
    assert cli.main(["generate", out, "--prompt", "the cat", "--max-new-tokens", "4"]) == 0
    assert "sparse" in capfd.readouterr().out
    assert cli.main(["optimize", str(GOLDEN), "--hardware", "measured", *how]) == 2
    assert "in one go" in capfd.readouterr().err


def test_options_without_an_effect_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    what = ["optimize", "--method", "threshold", "--out", str(tmp_path / "out")]
    for option, value in (("dtype", "bfloat16"), ("activations", "float"), ("activations", "int8")):
        assert cli.main([*what, str(GOLDEN), f"--{option}", value]) == 2
        said = capfd.readouterr().err
        assert f"--{option} with {GOLDEN}: expected none" in said
        assert f"found {value}. Leave it out; torch_pi2.load(folder, {option}=...) chooses." in said
    assert cli.main([*what, str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf: expected a GGUF file or a folder, found nothing of that name" in capfd.readouterr().err


def test_another_tools_folder(tmp_path: Path) -> None:
    quantised(tmp_path / "in", "gptq")
    torch_pi2.optimize_quantized(tmp_path / "in", tmp_path / "out", IDS, method="threshold", sparsity=0.5, **QUICK)
    model: Any = torch_pi2.load(tmp_path / "out")
    assert {layer.weights for layer in sparse_layers(model)} == {"int4+int8"}
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")]
