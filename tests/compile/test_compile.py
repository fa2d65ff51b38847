"""The torch.compile backend: Inductor for models with sparse layers, whose errors are those of eager calls."""

from __future__ import annotations

import importlib.metadata
import warnings

import pytest
import torch
from rewriting import close, count_op_calls, make_plan
from tiny_models import HIDDEN, FunctionalBlock, plain
from torch import nn

import torch_pi2.compile as compile_module
from torch_pi2.base import progress as warn
from torch_pi2.rewrite.rewrite import restore, rewrite

X_BTH = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    warn._said.clear()


def sequence() -> nn.Module:
    return plain(nn.Sequential(nn.Linear(HIDDEN, 16), nn.ReLU(), nn.Linear(16, HIDDEN)), nn.LayerNorm(HIDDEN))


@torch.no_grad()
def test_backend_is_found_by_name_and_leaves_dense_models_as_they_are():
    """Through the entry point where the package is installed, else registered as the entry point says."""
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="torch_pi2")
    if not points:  # not installed in this environment: do what the entry point would
        torch._dynamo.register_backend(compile_module.backend, name="torch_pi2")
    assert torch._dynamo.lookup_backend("torch_pi2") is compile_module.backend
    model = sequence()
    fast = torch.compile(model, backend="torch_pi2")
    with pytest.warns(UserWarning, match="without sparse layers is left to Inductor: call torch_pi2.optimize"):
        assert close(fast(X_BTH), model(X_BTH))
    assert count_op_calls(lambda: fast(X_BTH)) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch._dynamo.reset()
        torch.compile(model, backend="torch_pi2")(X_BTH)


def test_dense_models_can_be_trained_through_it():
    model = sequence()
    torch.compile(model, backend="torch_pi2")(X_BTH).sum().backward()
    assert model[0][0].weight.grad is not None


def test_options_are_refused() -> None:
    with pytest.raises(Exception, match=r"ConfigError: options .*: expected none, found plan. .*torch_pi2.optimize"):
        torch.compile(sequence(), backend=compile_module.backend, options={"plan": "pi2"})(X_BTH)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("backend", ["inductor", compile_module.backend], ids=["inductor", "torch_pi2"])
def test_a_rewritten_model_compiles(backend):
    """Owner and lazy ways; nothing warns about missing FFNs, for they are there already."""
    model = plain(
        nn.Sequential(nn.Linear(HIDDEN, 16), nn.ReLU(), nn.Linear(16, HIDDEN)), nn.LayerNorm(HIDDEN), FunctionalBlock()
    )
    rewrite(model, make_plan(model, (X_BTH,)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch_pi2")
        fast = torch.compile(model, backend=backend, fullgraph=True)
        assert close(fast(X_BTH), model(X_BTH))
        assert count_op_calls(lambda: fast(X_BTH)) >= 1


@torch.no_grad()
def test_reading_that_fails_raises_what_modules_raise(tmp_path, monkeypatch):
    import torch_pi2
    from torch_pi2.errors import ArtifactError

    torch_pi2.synthetic(tmp_path / "plain", "tiny", layers=1, active=0.2)
    torch_pi2.pack(tmp_path / "plain", tmp_path / "store")
    model = torch_pi2.load(tmp_path / "store", budget="1GiB", offload=torch_pi2.OffloadConfig(preload=False))
    store = torch_pi2.stats(model)["store"]
    layer = model.model.layers[0].mlp
    fast = torch.compile(layer, backend="torch_pi2", fullgraph=True)
    x = torch.randn(1, 1, store.layers()[0][1])
    whole = store.path.read_bytes()
    store.path.write_bytes(bytes(4096) + bytes(len(whole) - 4096))  # the same file, which is open
    with pytest.raises(ArtifactError, match=r"model\.pi2: expected .*, found layer 0, neuron \d+ .*checksum") as error:
        fast(x)
    assert isinstance(error.value.__cause__, RuntimeError)
    store.path.write_bytes(whole)
    assert torch.equal(fast(x), layer(x))
    store.close()
    with pytest.raises(ArtifactError, match=r"model\.pi2: .* found a store that has been closed"):
        fast(x)

    def fails(*_):
        raise RuntimeError("something else")

    torch._dynamo.reset()
    monkeypatch.setattr(compile_module, "_inductor", lambda *_: fails)
    with pytest.raises(RuntimeError, match="something else"):
        torch.compile(layer, backend="torch_pi2", fullgraph=True)(x)


@torch.no_grad()
def test_layers_that_are_code_of_a_bigger_block_are_said_to_be_dense(caplog: pytest.LogCaptureFixture) -> None:
    model = plain(FunctionalBlock())
    rewrite(model, make_plan(model, (X_BTH,)))
    warn._said.clear()
    found = torch.compile(model, backend="eager", fullgraph=True)(X_BTH)
    assert "computes feed-forward layers densely, and slowly, whose activation is code of" in caplog.text
    assert close(found, restore(model)(X_BTH))
