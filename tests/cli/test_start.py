"""A command imports what it needs, and no more: its start is not felt."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import torch_pi2
from torch_pi2.base.uncompiled import uncompiled
from torch_pi2.checkpoint import importing
from torch_pi2.cli.imports import _Later, _LaterModule
from torch_pi2.cli.models import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"
#: Compilers, sharding, and what transformers imports for images, object detection and other quantisers.
NOT_NEEDED = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "triton")
NOT_NEEDED += ("accelerate", "networkx", "pandas", "scipy.optimize", "sklearn", "sympy", "torchao", "torchvision")
_GENERATE = """
import atexit
import sys
from torch_pi2 import cli
sys.argv = ["torch-pi2", "generate", *sys.argv[1:], "--max-new-tokens", "12"]
atexit.register(lambda: print("MODULES", *sorted(sys.modules)))
cli.command()
"""
#: Prints names of transformers, and whether they are there; with an argument after our imports.
_NAMES = """
import sys
if len(sys.argv) > 1:
    from torch_pi2.cli.imports import import_transformers
    import_transformers()
    scanned = sum(map(len, sys.modules["transformers"]._import_structure.values()))
import transformers
from transformers import initialization
from transformers.models import gemma3
if len(sys.argv) > 1:
    assert sum(map(len, transformers._import_structure.values())) == scanned < 2000, "modules need no scan"
names = ("AutoTokenizer", "ViTModel", "LlamaForCausalLM", "LlamaTokenizerFast", "FNetTokenizer", "no_such_name")
for name in names:
    found = getattr(transformers, name, None)
    print(name, getattr(found, "__module__", None), getattr(found, "__name__", None))
print(transformers.processing_utils.ProcessorMixin.__module__, transformers.models.vit.ViTModel.__name__)
print(*sorted(name for name in dir(transformers) if name not in ("direct_transformers_import",)))
print(*sorted(dir(transformers.models)))
"""


@pytest.mark.slow
def test_generate_imports_no_compiler_and_nothing_for_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for attempt in ("import", "again"):
        asked = [sys.executable, "-c", _GENERATE, str(GOLDEN), "--prompt", "the cat"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "12 tokens" in done.stdout
        modules = set(done.stdout.rpartition("MODULES ")[2].split())
        assert "transformers.modeling_utils" in modules
        of_import = {"sympy"} if attempt == "import" else set()  # of operators without values, which find layers
        assert not modules & {*NOT_NEEDED} - of_import


@pytest.mark.slow
def test_transformers_has_all_its_names_when_they_are_asked_for() -> None:
    found = [
        subprocess.run([sys.executable, "-c", _NAMES, *more], capture_output=True, text=True, check=False)
        for more in ([], ["ours"])
    ]
    assert [(run.returncode, run.stdout) for run in found] == [(0, found[0].stdout)] * 2, found[1].stderr
    assert "no_such_name None None" in found[1].stdout


def test_a_tokenizer_of_one_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_pi2.import_gguf(GOLDEN, tmp_path / "model")
    expected = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    opened: list[str] = []

    def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(str(file))
        return open(file, *args, **kwargs)

    monkeypatch.setattr("transformers.tokenization_utils_base.open", watched, raising=False)
    asked = argparse.Namespace(model=str(tmp_path / "model"), trust_remote_code=False, allow_download=False)
    found = load_tokenizer(asked)
    assert any(name.endswith("tokenizer_config.json") for name in opened)
    assert not any(name.endswith("tokenizer.json") for name in opened)  # which the tokenizer reads itself
    text = "the cat  sat<s> on</s> a <unk> mät\n\n 你"
    assert found(text) == expected(text)
    assert found.decode(found(text)["input_ids"]) == expected.decode(expected(text)["input_ids"])
    assert found.get_vocab() == expected.get_vocab()
    assert found.added_tokens_decoder == expected.added_tokens_decoder
    assert (found.all_special_ids, found.chat_template) == (expected.all_special_ids, expected.chat_template)
    for name, tokenizer in (("found", found), ("expected", expected)):
        tokenizer.save_pretrained(tmp_path / name)
    for file in (tmp_path / "expected").iterdir():
        assert (tmp_path / "found" / file.name).read_text() == file.read_text()


def test_a_name_that_is_imported_later_is_the_real_one_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = _LaterModule("fractions")
    later = module.Fraction
    monkeypatch.setitem(sys.modules, "fractions", module)
    assert isinstance(later, _Later)
    assert not isinstance(3, later)  # nothing is of a class that nobody has imported
    assert isinstance(sys.modules["fractions"], _LaterModule)
    assert later(1, 2) + later(1, 2) == 1
    assert isinstance(later(1, 2), later)
    assert later.from_float(0.5) == later(1, 2)
    assert sys.modules["fractions"] is not module
    with pytest.raises(AttributeError):
        module.__path__


def test_uncompiled_code_breaks_the_graph_and_runs_as_it_is() -> None:
    seen: list[bool] = []

    class Part:
        @uncompiled(reason="a test")
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_compiling())
            return x * 2

    part, graphs = Part(), []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def whole(x: torch.Tensor) -> torch.Tensor:
        return part(x.sin()).cos()

    x = torch.ones(3)
    assert torch.equal(torch.compile(whole, backend=backend)(x), whole(x))
    assert len(graphs) == 2
    assert seen == [False, False]
    torch._dynamo.reset()


@pytest.mark.parametrize(("neurons", "searched"), [("auto", False), ("all", True)])
def test_a_gguf_file_without_zeros_is_not_searched_for_neurons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neurons: str, searched: bool
) -> None:
    calls: list[bool] = []
    search = importing.search

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        return search(*args, **kwargs)

    monkeypatch.setattr(importing, "search", counted)
    report = torch_pi2.import_gguf(GOLDEN, tmp_path / "model", neurons=neurons)
    assert (bool(calls), bool(report.neurons)) == (searched, searched)
