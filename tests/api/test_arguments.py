"""Public functions called with odd arguments: a Pi2Error that names the argument, never a raw Python error."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_folders import quantised
from tiny_models import tiny

import torch_pi2
from torch_pi2.base.arguments import checked
from torch_pi2.base.units import parse_bytes
from torch_pi2.errors import ConfigError, Pi2Error

#: What is passed as every argument in turn.
ODD: dict[str, Any] = {
    "object": object(),
    "number": 2.5,
    "nan": math.nan,
    "huge": 10**5000,
    "truth": True,
    "text": "no such thing",
    "zero byte": "a\0b",
    "list": [object()],
    "dict": {"model.layers.0.mlp": object()},
    "tensor": torch.zeros(2, 2),
    "model": torch.nn.Linear(2, 2),
    "class": int,
}
IDS = torch.arange(1, 9)[None]
GGUF = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("arguments")
    tiny("llama-relu").save_pretrained(root / "float")
    torch_pi2.pack(root / "float", root / "store")
    quantised(root / "gptq", "gptq")
    return root


def good_calls(root: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Every public function or class, and arguments with which nothing is wrong."""
    model, stored = tiny("llama-relu"), torch_pi2.load(root / "store", budget="1GiB")
    optimised, out = torch_pi2.optimize(tiny("llama-relu")), root / "out"
    few = torch_pi2.Config(calibration_tokens=64, seq_len=8, batch_size=2)
    tokens = torch.randint(3, 60, (16, 8))
    stats = torch_pi2.profile(model, tokens, config=few)
    bound = torch_pi2.plan(model, stats)
    torch_pi2.export(optimised, root / "bundle", max_tokens=8, max_prompt=4, batches=(1,))
    return {
        "Bundle": (torch_pi2.Bundle, {"folder": root / "bundle"}),
        "Config": (torch_pi2.Config, {}),
        "Decoder": (torch_pi2.Decoder, {"model": optimised, "max_tokens": 8}),
        "NeuronClusterMode": (torch_pi2.NeuronClusterMode, {"plan": bound, "predictors": {}}),
        "GroupConfig": (torch_pi2.GroupConfig, {}),
        "OffloadConfig": (torch_pi2.OffloadConfig, {}),
        "export": (torch_pi2.export, {"model": optimised, "folder": out}),
        "export_gguf": (torch_pi2.export_gguf, {"folder": root / "float", "file": root / "out.gguf"}),
        "export_program": (torch_pi2.export_program, {"model": optimised, "kwargs": {"input_ids": IDS}}),
        "find_hardware": (torch_pi2.find_hardware, {"name": "sm8650-ufs4.0"}),
        "find_sites": (torch_pi2.find_sites, {"model": model}),
        "fit": (torch_pi2.fit, {"model": model, "data": tokens, "stats": stats, "config": few}),
        "follow": (torch_pi2.follow, {"model": optimised, "plan": bound}),
        "generate": (torch_pi2.generate, {"model": stored, "input_ids": IDS, "max_new_tokens": 1}),
        "import_gguf": (torch_pi2.import_gguf, {"file": GGUF, "folder": out}),
        "import_quantized": (torch_pi2.import_quantized, {"folder_in": root / "gptq", "folder_out": out}),
        "lead": (torch_pi2.lead, {"model": optimised}),
        "load": (torch_pi2.load, {"folder": root / "store", "budget": "1GiB"}),
        "load_mapped": (torch_pi2.load_mapped, {"folder": root / "float"}),
        "optimize": (torch_pi2.optimize, {"model": model, "calibration": tokens, "config": few}),
        "pack": (torch_pi2.pack, {"folder_in": root / "float", "folder_out": out}),
        "Pi2QuantizationConfig": (torch_pi2.Pi2QuantizationConfig, {}),
        "plan": (torch_pi2.plan, {"model": model, "stats": stats}),
        "plan_for": (torch_pi2.plan_for, {"model": optimised, "hardware": "sm8650-ufs4.0"}),
        "profile": (torch_pi2.profile, {"model": model, "data": tokens, "config": few}),
        "quantize": (torch_pi2.quantize, {"folder_in": root / "float", "folder_out": out}),
        "record_accesses": (torch_pi2.record_accesses, {"model": stored, "path": root / "a"}),
        "quantize_": (torch_pi2.quantize_, {"model": tiny("llama-relu")}),
        "restore": (torch_pi2.restore, {"model": tiny("llama-relu")}),
        "save": (torch_pi2.save, {"model": optimised, "folder": out}),
        "set_budget": (torch_pi2.set_budget, {"model": stored, "budget": "1GiB"}),
        "sparsify": (torch_pi2.sparsify, {"model": model, "out": out, "text": ["a text"]}),
        "stats": (torch_pi2.stats, {"model": stored}),
        "supported": (torch_pi2.supported, {"model": model}),
        "synthetic": (torch_pi2.synthetic, {"folder": out, "shape": "tiny"}),
        "trace": (torch_pi2.trace, {"path": root / "trace"}),
        "watch": (torch_pi2.watch, {"model": optimised}),
    }


def odd_calls(root: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(what, function, arguments): each argument of each public function in turn is odd, one that its type excludes."""
    calls = good_calls(root)
    assert {*calls} == {*torch_pi2.__all__} - {"Pi2Error", "__version__"}
    for name, (function, good) in calls.items():
        for argument, parameter in inspect.signature(function).parameters.items():
            hint = str(parameter.annotation)
            for kind, value in ODD.items():
                if not takes(hint, kind):
                    yield f"{name}({argument}={kind})", function, good | {argument: value}


def takes(hint: str, kind: str) -> bool:
    """Whether a value of this kind may be right, so that nobody promises an error, or a slow one."""
    if hint == "Any" or "**" in hint or hint.startswith("Any "):
        return True
    return {
        "number": "float" in hint,
        "truth": "bool" in hint,
        "text": "str" in hint,
        "list": "Sequence" in hint,
        "dict": "Mapping[str, Any]" in hint,
        "tensor": "Tensor" in hint,
        "model": "nn.Module" in hint or hint == "Model" or "Callable" in hint,
        "class": "Callable" in hint,
        "object": hint in ("object",),
    }.get(kind, False)


@pytest.mark.slow
def test_every_odd_argument_is_named(root: Path) -> None:
    wrong, count = [], 0
    for what, function, arguments in odd_calls(root):
        count += 1
        try:
            function(**arguments)
        except Pi2Error as error:
            if len(str(error)) > 1000:
                wrong.append(f"{what}: a message of {len(str(error))} characters")
        except BaseException as error:
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:80]}")
        else:
            wrong.append(f"{what}: no error")
    assert not wrong, "\n".join(wrong)
    assert count > 500


NAME = "expected the name of a file or folder"
MESSAGES: list[tuple[Any, str]] = [
    (lambda: torch_pi2.pack(tiny("llama-relu")), rf"pack\(folder_in\): {NAME}, found a LlamaForCausalLM"),
    (lambda: torch_pi2.pack("here"), r"pack\(\): expected arguments folder_in, folder_out, found missing a req"),
    (lambda: torch_pi2.quantize(tiny("llama-relu")), rf"quantize\(folder_in\): {NAME}"),
    (
        lambda: torch_pi2.quantize("a", "b", speed=3),
        r"quantize\(speed=...\): expected one of folder_in, .*, found 'speed'. See help\(torch_pi2.quantize\)",
    ),
    (lambda: torch_pi2.generate(tiny("llama-relu"), 5), r"generate\(input_ids\): expected a Tensor or text, found 5"),
    (lambda: torch_pi2.load("x", budget=True), r"load\(budget\): expected a finite number or text or None, found T"),
    (lambda: torch_pi2.load("x", context=1.5), r"load\(context\): expected a whole number or None, found 1.5"),
    (lambda: torch_pi2.load("x", budget=1, context=-1), r"load\(context=...\): expected a whole number, 1 or more"),
    (lambda: torch_pi2.OffloadConfig(window="1"), r"OffloadConfig.window: expected a whole number, found '1'"),
    (lambda: torch_pi2.OffloadConfig(io_threads=10**9), r"OffloadConfig.io_threads: expected at most 65536"),
    (lambda: torch_pi2.Config(seed=None), r"Config.seed: expected a whole number, found None"),
    (lambda: torch_pi2.Config(seed=10**30), r"Config.seed: expected a whole number between -2\^62 and 2\^62, f"),
    (
        lambda: torch_pi2.load("x", budget=1e301),
        r"load\(budget\): expected a number between -1e300 and 1e300 or tex",
    ),
    (
        lambda: torch_pi2.load("x", budget=1, context=1 << 40),
        r"1 or more, at most 2147483648, found 1099511627776",
    ),
    (lambda: torch_pi2.Config(seed=-1), r"Config.seed: expected 0 or more, found -1"),
    (lambda: torch_pi2.NeuronClusterMode(5), r"NeuronClusterMode\(plan\): expected a Plan, found 5"),
    (
        lambda: torch_pi2.optimize(tiny("llama-relu"), IDS, predictors={"a": 5}),
        r"optimize\(predictors\)\['a'\]: expected a LowRank or a SignBit, found 5",
    ),
    (lambda: torch_pi2.profile(tiny("llama-relu"), "a text", tokenizer=5), "tokenizer: expected a tokenizer: called"),
    (lambda: parse_bytes("\u0663GB"), r"budget: expected bytes"),
    (lambda: torch_pi2.Bundle(5), rf"Bundle\(folder\): {NAME}, found 5"),
    (lambda: torch_pi2.Bundle(b".."), rf"Bundle\(folder\): {NAME}, found"),
    (lambda: torch_pi2.Bundle("x", trace="-"), r"Bundle\(trace\): expected a file, found standard output \(-\)"),
]


@pytest.mark.parametrize(("call", "message"), MESSAGES)
def test_messages(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_what_fits_goes_through() -> None:
    @checked
    def some(a: int, *, b: float = 1.0, c: str | Path | None = None, d: list[int] | None = None) -> list[Any]:
        return [a, b, c, d]

    assert some(np.int64(3), b=2, c=Path("x"), d=[1]) == [3, 2, Path("x"), [1]]
    assert inspect.signature(some).parameters["a"].annotation == "int"
