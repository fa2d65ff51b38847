"""No result depends on settings of torch that are the caller's: default dtype, default device, modes, precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import close, sequential
from tiny_models import HIDDEN, INTERMEDIATE, VOCAB, FunctionalBlock, plain, randomise, tiny
from torch import nn

import torch_pi2
from torch_pi2.errors import ConfigError
from torch_pi2.graph.find import search
from torch_pi2.types.config import Config

IDS_NT = torch.randint(3, VOCAB, (32, 24), generator=torch.Generator().manual_seed(0))
X_BTH = torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(1))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def precision(name: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


SETTINGS: dict[str, Callable[[], Any]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: default_device("meta"),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "medium precision": lambda: precision("medium"),
}
CONFIG = Config(method="signbit", batch_size=4, seq_len=24, calibration_tokens=768)


@contextmanager
def all_at_once() -> Iterator[None]:
    with ExitStack() as stack:
        for settings in SETTINGS.values():
            stack.enter_context(settings())
        yield


def _pipeline(folder: Path, settings: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """What comes out of every step where ``settings`` hold; the models are built and run without them."""
    model = tiny("llama-relu")
    with settings():
        torch_pi2.optimize(model, IDS_NT, CONFIG)
        torch_pi2.save(model, folder / "saved")
        torch_pi2.pack(folder / "saved", folder / "packed")
        models = {"optimised": model, "saved": torch_pi2.load(folder / "saved")}
        models["stored"] = torch_pi2.load(folder / "packed", budget="64MB")
    parts = model.torch_pi2
    made = dict(parts.plan.orders)
    for key, predictor in parts.predictors.items():
        made |= {f"{name} of {key}": tensor for name, tensor in predictor.tensors().items()}
    with torch.no_grad():
        return made | {name: model(IDS_NT[:4]).logits for name, model in models.items()}


def test_same_results_of_all_steps(tmp_path: Path) -> None:
    wanted, made = _pipeline(tmp_path / "wanted", nullcontext), _pipeline(tmp_path / "made", all_at_once)
    assert made.keys() == wanted.keys()
    assert not [key for key in wanted if not torch.equal(made[key], wanted[key])]


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_same_layers(name: str) -> None:
    blocks = [plain(FunctionalBlock(), nn.Sequential(*sequential(nn.ReLU()))) for _ in range(2)]
    for block, settings in zip(blocks, (nullcontext, SETTINGS[name])):
        with settings():
            torch_pi2.optimize(block, [(X_BTH,)], Config(method="exact"))
    wanted, found = (block(X_BTH) for block in blocks)
    assert torch.equal(found, wanted)


def test_every_step_has_settings_of_its_own() -> None:
    steps = "find_sites fit follow load optimize pack plan plan_for profile quantize restore save synthetic"
    steps += " import_gguf import_quantized import_rwkv"
    functions = [getattr(torch_pi2, name) for name in steps.split()]
    functions[0] = search  # find_sites is a part of it
    assert [f.__name__ for f in functions if not hasattr(f, "__wrapped__")] == []


#: Settings in which a dense float32 model runs, and computes the same.
AT_CALL = ("float64", "bfloat16", "meta", "inference mode", "deterministic")


@pytest.mark.parametrize("name", AT_CALL)
def test_same_calls(name: str) -> None:
    """Whatever is set when an optimised model is called: lazy tensors check their formula at the first call."""
    block = plain(FunctionalBlock())
    wanted = block(X_BTH).detach()
    torch_pi2.optimize(block, [(X_BTH,)], Config(method="exact"))
    long_BTH = X_BTH.repeat(1, 40, 1)  # by the path of prompts
    with torch.no_grad(), SETTINGS[name]():
        found, long = block(X_BTH), block(long_BTH)
    assert close(found, wanted)
    assert close(long[:, : X_BTH.shape[1]], wanted)


@torch.no_grad()
def test_the_callers_settings_stay() -> None:
    block = plain(FunctionalBlock())
    with default_dtype(torch.float64), default_device("meta"), torch.autocast("cpu", torch.bfloat16), precision("high"):
        torch_pi2.optimize(block, [(X_BTH,)], Config(method="exact"))
        assert torch.get_default_dtype() == torch.float64
        assert torch.empty(1).is_meta
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.is_grad_enabled()


class Dropping(nn.Module):
    """Dropout in an FFN, as a module or as a call."""

    def __init__(self, how: str, p: float = 0.3) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
        self.module, self.how, self.p = nn.Dropout(p), how, p

    def forward(self, x):
        h = F.relu(self.up(x))
        if self.how == "module":
            h = self.module(h)
        elif self.how == "call":
            h = F.dropout(h, self.p, self.training)
        y = self.down(h)
        return self.module(y) if self.how == "after" else y


DROPPING = {how: lambda how=how: Dropping(how) for how in ("module", "call", "after")} | {
    "chain": lambda: nn.Sequential(nn.LayerNorm(HIDDEN), *sequential(nn.ReLU(), nn.Dropout(0.3)))
}


@pytest.mark.parametrize("name", DROPPING)
@torch.no_grad()
def test_dropout_in_training_mode_is_refused(name: str, tmp_path: Path) -> None:
    model = plain(DROPPING[name]())
    wanted = model(X_BTH)
    torch_pi2.optimize(model, [(X_BTH,)], Config(method="exact"))
    assert close(model(X_BTH), wanted)
    model.train()
    with pytest.raises(ConfigError, match=r"mode of 0.*evaluation mode.*found training mode.*model\.eval\(\)"):
        model(X_BTH)
    assert close(model.eval()(X_BTH), wanted)


@torch.no_grad()
def test_dropout_that_lazy_tensors_carry_out() -> None:
    """The code of a block runs as it is: in training mode it drops, and nobody computes anything else."""
    block = nn.Sequential(nn.LayerNorm(HIDDEN), PreDropped())
    model = randomise(block.eval())
    dense = copy.deepcopy(model)
    torch_pi2.optimize(model, [(X_BTH,)], Config(method="exact"))
    for mode in (False, True):
        for m in (model, dense):
            m.train(mode)
            torch.manual_seed(0)
            m.result = m(X_BTH)
        assert close(model.result, dense.result)


class PreDropped(Dropping):
    def __init__(self) -> None:
        super().__init__("call")
        self.n = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        return x + super().forward(self.n(x))


@torch.no_grad()
def test_without_dropout_training_mode_is_as_before() -> None:
    model = plain(Dropping("module", 0.0))
    wanted = model(X_BTH)
    torch_pi2.optimize(model.train(), [(X_BTH,)], Config(method="exact"))
    assert close(model(X_BTH), wanted)
