"""Every benchmark runs at its smallest size, in a process of its own folder, and its result becomes tables."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import _hf, randomise, tiny
from tiny_tokenizers import TEXT, byte_tokenizer

import torch_pi2
from benchmarks import cap, decode, drawings, figures, layer, real_models, tables
from benchmarks.__main__ import BENCHMARKS, call, main, render
from torch_pi2.errors import ArtifactError, ConfigError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SHORT = "--prompt 5 --tokens 3 --rounds 2"
needs_llama = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llama_cpp", "gguf")),
    reason="package llama-cpp-python is not installed (extra bench)",
)

#: Command lines; {synthetic}, {store}, {shards}, {relu}: folders.
COMMANDS = {
    "layer": "--hidden 64 --intermediate 256 --active 0.1,1.0 --rounds 2",
    "inputs": "--channels 65 --outputs 96 --rounds 2",
    "gpu": "--hidden 64 --intermediate 128 --rank 8 --weights int4 --layers 2 --rounds 2 --device cpu",
    "gpu-model": f"--folder {{synthetic}} {SHORT} --device cpu",
    "decode": f"--folder {{synthetic}} {SHORT} --eager --batch 1,2",
    "generate": f"--folder {{synthetic}} {SHORT}",
    "speculate": f"--shape tiny --right 1,0 --guesses 2 {SHORT} --eager --ffn-in-memory 0.5",
}
#: Of seconds.
SLOW = {
    "offload": "--folder {store} --eager --tokens 2 --rounds 1 --modes bundle,pipeline --prompt 20",
}
#: Of a minute or more, some with extras.
LONG = {
    "imported": f"--shape tiny --types q4_0 {SHORT}",
    "bundle": "--folder {synthetic} --kv int8 --prompts 5,20 --max-tokens 32 --tokens 3 --rounds 1 --peer executorch",
    "together": "--folder {store} --shards {shards} --links none --tokens 2 --rounds 1 --prompt 20 --eager",
    "serve": "--shape tiny --threads 1 --max-batch-size 2 --clients 1,2 --requests 2 --rounds 1 --prompts 8,40 "
    "--answers 2,5 --shared 20 --prefix-cache 1MiB",
    "prefix": "--shape tiny --threads 1 --prefix 64 --suffix 1,9 --rounds 1",
    "methods": "--model {relu} --methods exact --tokens 256 --window 64 --rounds 1 --calibration-tokens 3000 --store",
}
#: On the files of `make real-models`, run by `make test-real`.
REAL = {
    "real": "--models gemma-3-270m --tokens 2 --rounds 1 --loss 40 --window 30",
    "kv": "--models gemma-3-270m --loss 40 --context 30 --rounds 1",
    "drafts": "--model gemma-3-270m --draft-model gemma-3-270m --texts humaneval --prompts 1 --tokens 8 --rounds 1",
    "humaneval": "--model gemma-3-270m --tasks 2 --tokens 3",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("benchmarks")
    torch_pi2.synthetic(root / "synthetic", "tiny", layers=2, rank=32)
    torch_pi2.pack(root / "synthetic", root / "store")
    sizes: dict[str, Any] = {"vocab_size": 300, "num_hidden_layers": 1, "intermediate_size": 256}
    randomise(_hf("Llama", hidden_act="relu", max_position_embeddings=256, **sizes)).save_pretrained(root / "relu")
    byte_tokenizer(TEXT).save_pretrained(root / "relu")
    return {name: root / name for name in ("synthetic", "store", "shards", "relu")}


def measured(
    name: str,
    options: str,
    folders: dict[str, Path],
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> dict[str, Any]:
    """The result of a benchmark that keeps what it makes in ``work``."""
    monkeypatch.chdir(work)
    (work / "build").symlink_to(ROOT / "build")  # with the C++ runner
    threads = torch.get_num_threads()
    monkeypatch.setattr(layer, "_BYTES", 1 << 20)
    monkeypatch.setattr(decode, "BYTES", 1 << 20)
    try:
        code = main([name, *options.format(**folders).split(), "--json"])
    finally:
        torch.set_num_threads(threads)
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == 0, result
    return result


def check(name: str, result: dict[str, Any]) -> None:
    """What every result has, and that all of its tables have rows or say nothing."""
    assert result["what"] == name
    assert result["command"].startswith(f"python -m benchmarks {name}")
    assert {"threads", "machine", "versions"} <= set(result)
    module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
    text, page = render(result), tables.page({"x": result}, {name: module})
    assert module.about(result) in text
    for table in module.TABLES:
        cells = table.cells(result)
        assert all(len(row) == len(table.columns) for row in cells)
        assert (f"## {table.title}" in page) == bool(cells)
    assert module.TABLES[0].cells(result)
    if isinstance(result.get("spread"), dict):
        for figure, (low, high) in result["spread"].items():
            assert low <= high
            if isinstance(result.get(figure), float):
                assert low <= result[figure] <= high


@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_layers_without_gates(
    weights: str,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    activations = "int8" if weights == "int4" else "float"
    options = f"{COMMANDS['layer']} --ungated --weights {weights} --activations {activations}"
    result = measured("layer", options, folders, tmp_path, monkeypatch, capsys)
    assert [share["active"] for share in result["exact"]] == [0.1, 1.0]
    assert all(share["ms"] > 0 and share["linears_ms"] > 0 for share in result["exact"])
    assert "two linears ms" in render(result)


@pytest.mark.slow
def test_ranks_of_predictors(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The higher the recall that is asked for, the more is predicted and used."""
    options = f"{LONG['methods']} --ranks 4,16 --recalls 0.5,0.9"
    result = measured("methods", options, folders, tmp_path, monkeypatch, capsys)
    check("methods", result)
    assert [(row["rank"], row["asked"]) for row in result["ranks"]] == [(4, 0.5), (4, 0.9), (16, 0.5), (16, 0.9)]
    for low, high in (result["ranks"][:2], result["ranks"][2:]):
        assert low["recall"] < high["recall"]
        assert low["predicted"] < high["predicted"]
        assert low["neurons"] < high["neurons"] < 1


MINE = """
import torch, torch_pi2

class First(torch_pi2.SparseMethod):
    name = "first"

    def __init__(self, share):
        self.share = share

    def fit(self, layer):
        if self.share > 1:
            raise torch_pi2.errors.ConfigError("share", expected="1 at most", found=str(self.share), fix="Lower it.")
        self.neurons = layer.site.intermediate

    def select(self, x_TH):
        return (torch.arange(self.neurons) < self.share * self.neurons).expand(len(x_TH), -1)
"""


def test_methods_go_on_where_a_run_ended(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases that are kept are not measured again; others are, and those of other settings."""
    (tmp_path / "mine.py").write_text(MINE)
    asked, compare = list[list[str]](), torch_pi2.compare
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        torch_pi2, "compare", lambda make, left, *a, **k: asked.append([*left]) or compare(make, left, *a, **k)
    )
    sizes = {"tokens": 256, "window": 64, "rounds": 0, "calibration_tokens": 2000, "cases": tmp_path / "kept.jsonl"}
    how = {"model": folders["relu"], "methods": "exact,mine.py:First", "bytes": [0.5], **sizes}
    first = call("methods", **how)
    assert [row["method"] for row in first["rows"][::2]] == ["dense", "exact", "first 0.5"]
    assert [row["text"] for row in first["rows"][:2]] == ["stdlib", "docs"]
    assert first["rows"][4]["neurons"] < first["rows"][4]["asked"] == 0.5
    with (tmp_path / "kept.jsonl").open("a") as file:
        file.write('\n{"about": {"cut o')
    assert call("methods", **how)["rows"] == first["rows"]
    more = call("methods", **how | {"bytes": [0.5, 2.0]})
    assert more["rows"][:6] == first["rows"]
    assert "refused: share: expected 1 at most" in render(more)
    call("methods", **how | {"window": 32})
    assert asked == [["exact", "first 0.5"], ["first 2"], ["exact", "first 0.5"]]
    drawn = drawings.methods("x", "ffn_bytes", "bytes", {"x": more})
    assert {name: len(points) for name, points in drawn.lines.items()} == {"exact": 1, "first": 1}
    assert all(point.low <= point.median <= point.high for points in drawn.lines.values() for point in points)
    with pytest.raises(ConfigError, match=r"--methods: expected all, exact, lowrank, signbit, .*found 'magic'"):
        call("methods", **how | {"methods": "magic"})


@pytest.mark.parametrize(
    "name",
    [
        *COMMANDS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long]) for name in LONG),
        *(pytest.param(name, marks=pytest.mark.real) for name in REAL),
    ],
)
def test_runs_at_its_smallest_size(
    name: str,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name in ("imported", "real", "humaneval") and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("package llama-cpp-python is not installed (extra bench)")
    if name in REAL:
        try:
            real_models.path("gemma-3-270m")
        except ArtifactError as error:
            pytest.skip(str(error))
    if name == "together":
        torch_pi2.pack(folders["store"], folders["shards"], ranks=2)
    options = (COMMANDS | SLOW | LONG | REAL)[name]
    check(name, measured(name, options, folders, tmp_path, monkeypatch, capsys))


def test_every_benchmark_is_run_here() -> None:
    assert set(COMMANDS | SLOW | LONG | REAL) == set(BENCHMARKS)


# --- rules


def test_rounds_alternate_and_begin_with_another_case() -> None:
    order: list[str] = []
    kept = figures.alternate(("a", "b", "c"), 4, lambda name, index: order.append(name) or (name, index))
    assert order == [*"abc", *"bca", *"cab", *"abc"]
    assert kept["b"] == [("b", index) for index in range(4)]


class Clock:
    """A peer that takes exactly so long."""

    about = {"engine": "clock"}  # noqa: RUF012
    one_sequence = False

    def round(self, prompt: int, tokens: int, _batch: int) -> dict[str, float]:
        return {"prompt_s": prompt * 10.0, "decode_s": tokens * 100.0, "peak_rss_bytes": 5}

    def close(self) -> None:
        """Nothing runs."""


def test_figures_of_decoding_hang_together() -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    peers: Any = {"clock": lambda _: Clock()}
    sizes: dict[str, Any] = {"prompt": 6, "tokens": 3, "rounds": 2, "compiled": False, "memory_size": 1 << 20}
    r = decode.measure(model, batch=[1, 2], peers=peers, **sizes)
    assert r["bytes_per_token"] == sum(r["bytes_by_part"].values())
    ms = r["ms_per_token"]
    parts = ms["attention"] + ms["predictor"] + ms["ffn"] + ms["head"] + ms["python"]
    assert parts == pytest.approx(ms["total"], abs=1e-2)
    assert r["active_share"] == pytest.approx((1 + 2 * r["firing_share"]) / 3, abs=1e-3)
    clock = r["peers"]["clock"]
    assert [b["tokens_per_s"] for b in clock["batches"]] == [0.01, 0.02]
    for b in clock["batches"]:
        assert b["ratio"] == pytest.approx(b["our_tokens_per_s"] / b["tokens_per_s"], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "drum"}, "device: expected ufs-4.0 or a JSON file, found 'drum'"),
        ({"device": "ufs-4.0", "peers": ["llama.cpp"]}, "--device with --peer: expected one of them, found both"),
    ],
)
def test_modes_that_make_no_sense(folders: dict[str, Path], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        call("offload", folder=folders["store"], **settings)
    assert str(error.value).startswith(message)


@needs_llama
def test_no_peer_where_memory_cannot_be_capped(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cap.available, "__defaults__", (tmp_path,))
    monkeypatch.setattr(cap.MemoryCap.__init__, "__defaults__", (tmp_path,))
    with pytest.raises(cap.CapError, match="measure without a cap"):
        call("offload", folder=folders["store"], peers=["llama.cpp"])


# --- the page


def test_the_page_is_of_the_committed_results(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert tables.write(tmp_path).read_text() == (RESULTS / "README.md").read_text(), "run benchmarks.tables"


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"what": "weather"}')
    with pytest.raises(torch_pi2.Pi2Error, match=r"a\.json: expected what `python -m benchmarks NAME --json` printed"):
        tables.write(tmp_path)
