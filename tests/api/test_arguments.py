"""Public functions called with odd arguments: a Pi2Error that names the argument, never a raw Python error."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny

import torch_pi2
from torch_pi2.base.fields import checked
from torch_pi2.base.units import parse_bytes
from torch_pi2.errors import ConfigError

IDS = torch.arange(1, 9)[None]
NAME = "expected the name of a file or folder"
MESSAGES: list[tuple[Any, str]] = [
    (lambda: torch_pi2.pack(tiny("llama-relu"), "b"), rf"pack\(folder_in\): {NAME}, found a LlamaForCausalLM"),
    (lambda: torch_pi2.pack("here"), r"pack\(\): expected arguments of folder_in, folder_out.*, found missing a req"),
    (lambda: torch_pi2.quantize(tiny("llama-relu"), "b"), rf"quantize\(folder_in\): {NAME}"),
    (
        lambda: torch_pi2.quantize("a", "b", speed=3),
        r"quantize\(speed=...\): expected one of folder_in, .*, found 'speed'. See help\(torch_pi2.quantize\)",
    ),
    (lambda: torch_pi2.generate(tiny("llama-relu"), 5), r"generate\(input_ids\): expected a Tensor or text, found 5"),
    (lambda: torch_pi2.load("x", budget=True), r"load\(budget\): expected a finite number or text or None, found T"),
    (lambda: torch_pi2.load("x", context=1.5), r"load\(context\): expected a whole number or None, found 1.5"),
    (lambda: torch_pi2.load("x", budget=1, context=-1), r"load\(context=...\): expected a whole number, 1 or more"),
    (lambda: torch_pi2.OffloadConfig(window="1"), r"OffloadConfig.window: expected a whole number, found '1'"),
    (
        lambda: torch_pi2.OffloadConfig(io_threads=10**9),
        r"OffloadConfig.io_threads: expected a whole number, 1 or more, at most 65536",
    ),
    (
        lambda: torch_pi2.Config(method="magic"),
        "method: expected auto, dense, exact, threshold, ",
    ),
    (lambda: torch_pi2.Config(hot_frequency=0), "hot_frequency: expected a number, above 0, at most 1.01, found 0"),
    (lambda: torch_pi2.Config(target_recall=1), "target_recall: expected a number, above 0, below 1, found 1"),
    (lambda: torch_pi2.Config(sparsity=1), "sparsity: expected a number, 0 or more, below 1, found 1"),
    (
        lambda: torch_pi2.Config(calibration_tokens=1),
        "calibration_tokens: expected a whole number, 64 or more",
    ),
    (lambda: torch_pi2.Config(quantization="gptq"), "quantization: expected rtn with weights='float', found 'gptq'"),
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
    (lambda: torch_pi2.Config(seed=-1), r"Config.seed: expected a whole number, 0 or more, found -1"),
    (lambda: torch_pi2.NeuronClusterMode(5), r"NeuronClusterMode\(plan\): expected a Plan, found 5"),
    (
        lambda: torch_pi2.optimize(tiny("llama-relu"), IDS, predictors={"a": 5}),
        r"optimize\(predictors\)\['a'\]: expected a LowRank or a SignBit or a SparseMethod or a InputMethod, found 5",
    ),
    (lambda: torch_pi2.profile(tiny("llama-relu"), "a text", tokenizer=5), "tokenizer: expected a tokenizer: called"),
    (lambda: parse_bytes("\u0663GB"), r"budget: expected bytes"),
    (lambda: torch_pi2.Bundle(5), rf"Bundle\(folder\): {NAME}, found 5"),
    (lambda: torch_pi2.Bundle(b".."), rf"Bundle\(folder\): {NAME}, found"),
    (lambda: torch_pi2.Bundle("x", trace="-"), r"Bundle\(trace\): expected a file, found standard output \(-\)"),
]


OTHERS = {"CachePolicy", "InputMethod", "Pi2Error", "SparseMethod", "__version__"}
DATACLASSES = {"Config", "FFNSite", "GroupConfig", "LayerSamples", "LinearRef", "LinearSamples", "OffloadConfig"}


@pytest.mark.parametrize("name", sorted({*torch_pi2.__all__} - DATACLASSES - OTHERS))
def test_every_public_function_checks_its_arguments(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no_such_argument"):
        getattr(torch_pi2, name)(no_such_argument=1)


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
