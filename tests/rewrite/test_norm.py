"""BitNet's layers, which have a norm over all neurons before down: zeros stay zeros, so that skipping is exact."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from rewriting import assert_same_state, close
from serving import greedy_alone
from stores import small
from tiny_models import HIDDEN, INTERMEDIATE, VOCAB, FunctionalBlock, plain, randomise
from torch import nn

import torch_pi2
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.graph.find import search
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.observe import counters
from torch_pi2.serve.batch import Batch, EndEvent, Sequence, TokenEvent

IDS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
TEXT = torch.randint(3, VOCAB, (16, 16), generator=torch.Generator().manual_seed(1))
FORM = "relu2[rms=1e-05](gate)*up"


def bitnet(dtype: torch.dtype = torch.float32, layers: int = 2, intermediate: int = 130, **more: Any) -> nn.Module:
    config = transformers.BitNetConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        **more,
    )
    torch.manual_seed(0)
    return randomise(transformers.BitNetForCausalLM(config).eval(), 0.2).to(dtype)


def logits(model, ids=IDS):
    return model(ids, use_cache=False).logits


@torch.no_grad()
def test_it_is_exact_and_comes_back() -> None:
    dense = bitnet()
    assert [site.form for site in search(dense).sites] == [FORM] * 2
    model = torch_pi2.optimize(copy.deepcopy(dense), method="exact")
    assert model.torch_pi2.plan.made_by["left"] == {}
    assert not model.torch_pi2.lossy
    wanted, many = logits(dense), TEXT.repeat(1, 4)  # 1024 tokens: through matrix products
    assert close(logits(model), wanted)
    assert close(logits(model, IDS[:1, :1]), logits(dense, IDS[:1, :1]))
    assert close(logits(model, many), logits(dense, many))
    options = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    tokens = dense.generate(IDS, **options)
    assert torch.equal(model.generate(IDS, **options), tokens)
    found = torch_pi2.generate(model, IDS[:1], max_new_tokens=5, eos_token_id=[])
    assert found.sequences == tokens[:1, IDS.shape[1] :].tolist()
    counters.reset()
    sparse_layers(model)[0](torch.randn(3, HIDDEN))
    done = counters.read()
    assert 0 < done["up_rows"] < 0.7 * done["gate_rows"]
    assert_same_state(model, dense.state_dict())
    other = bitnet()
    with torch.no_grad():
        other.model.layers[0].mlp.ffn_sub_norm.weight *= 3
    model.load_state_dict(other.state_dict())
    assert close(logits(model), logits(other))
    assert not close(logits(model), wanted, 1e-2)
    model.load_state_dict(dense.state_dict())
    assert_same_state(torch_pi2.restore(model), dense.state_dict())
    assert torch.equal(logits(model.eval()), wanted)


@pytest.mark.slow
@torch.no_grad()
def test_many_steps_and_the_compile_backend() -> None:
    dense = bitnet()
    wanted = logits(dense)
    assert close(torch.compile(copy.deepcopy(dense), backend="torch_pi2")(IDS).logits, wanted)
    model = torch_pi2.optimize(copy.deepcopy(dense), method="exact")
    tokens = dense.generate(IDS[:1], max_new_tokens=80, pad_token_id=0, eos_token_id=None, do_sample=False)
    found = torch_pi2.generate(model, IDS[:1], max_new_tokens=80, eos_token_id=[])  # most steps are recorded calls
    assert found.sequences == tokens[:, IDS.shape[1] :].tolist()


@pytest.mark.slow
def test_sequences_that_are_served_together() -> None:
    """Each is decoded as if it were alone."""
    model = torch_pi2.optimize(bitnet(), method="exact", weights="int4", activations="int8")
    prompts = [IDS[0].tolist(), IDS[1, :5].tolist(), TEXT[0].tolist()]
    wanted = [greedy_alone(model, ids, 12) for ids in prompts]
    batch, found = Batch(model, max_tokens=64, max_batch_size=3), [list[int]() for _ in prompts]

    def hear(i: int, what: TokenEvent | EndEvent) -> None:
        if isinstance(what, TokenEvent):
            found[i].append(what.token)

    for i, ids in enumerate(prompts):
        batch.submit(Sequence(ids, 12, partial(hear, i)))
    batch.start()
    batch.close()
    assert found == wanted


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_and_calibration(dtype: torch.dtype) -> None:
    """Whatever the method: a predictor would leave neurons out of the norm."""
    dense = bitnet(dtype)
    for method in ("auto", "signbit"):
        model = torch_pi2.optimize(copy.deepcopy(dense), TEXT.repeat(4, 1), method=method, batch_size=4, seq_len=16)
        assert [str(layer.method) for layer in sparse_layers(model)] == ["exact", "exact"]
        assert close(logits(model).float(), logits(dense).float(), 1e-5 if dtype == torch.float32 else 0.05)


@torch.no_grad()
@pytest.mark.parametrize("weights", ["float", "int8", "int4"])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_saved_packed_and_read_from_a_store(weights: str, activations: str, tmp_path: Path) -> None:
    """The bits of memory; quantised exact layers have those of dense ones."""
    if weights == "float":
        if activations == "int8":
            return
        model = torch_pi2.optimize(bitnet(intermediate=1100), TEXT.repeat(4, 1), method="exact", seq_len=16)
    else:
        how = {"weights": weights, "activations": activations}
        model = torch_pi2.optimize(bitnet(intermediate=1100), method="exact", **how)
        assert torch.equal(logits(model), logits(torch_pi2.quantize_(bitnet(intermediate=1100), **how)))
    wanted, many = logits(model), TEXT.repeat(1, 4)
    torch_pi2.save(model, tmp_path / "saved")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "saved")), wanted)
    torch_pi2.pack(tmp_path / "saved", tmp_path / "packed")
    for stored in (torch_pi2.load(tmp_path / "packed", budget="1GiB"), small(tmp_path / "packed")):
        assert torch.equal(logits(stored), wanted)
        assert close(logits(stored, many), logits(model, many), 1e-4)


@torch.no_grad()
def test_folders_are_quantised_as_models_are(tmp_path: Path) -> None:
    bitnet().save_pretrained(tmp_path / "float")
    torch_pi2.quantize(tmp_path / "float", tmp_path / "int4", "int4")
    made = torch_pi2.load(tmp_path / "int4")
    assert [layer.site.form for layer in sparse_layers(made)] == [FORM] * 2
    assert torch.equal(logits(made), logits(torch_pi2.quantize_(bitnet(), "int4")))


class Normed(nn.Module):
    """The layer with other names and another spelling."""

    def __init__(self, eps: float | None = 0.02, intermediate: int = INTERMEDIATE) -> None:
        super().__init__()
        self.g, self.u = nn.Linear(HIDDEN, intermediate), nn.Linear(HIDDEN, intermediate, bias=False)
        self.d, self.eps = nn.Linear(intermediate, HIDDEN), eps
        self.scale = nn.Parameter(torch.linspace(0.2, 2, intermediate))

    def norm(self, h):
        return self.scale * (h / torch.sqrt((h * h).mean(-1, keepdim=True) + self.eps))

    def forward(self, x):
        return self.d(self.norm(F.relu(self.g(x)) * self.u(x)))


X = torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_module_of_ones_own() -> None:
    model = plain(FunctionalBlock(), Normed(), nn.LayerNorm(HIDDEN), Normed(0.5, 101))
    wanted = model(X)
    torch_pi2.optimize(model, [(X,)], method="exact")
    forms = ["relu(up)", "relu[rms=0.02](gate)*up", "relu[rms=0.5](gate)*up"]
    assert [layer.site.form for layer in model.torch_pi2.plan.layers] == forms
    assert close(model(X), wanted)


class OverTokens(Normed):
    def norm(self, h):
        return self.scale * (h / torch.sqrt((h * h).mean(0, keepdim=True) + self.eps))


class WithoutMean(Normed):
    def norm(self, h):
        h = h - h.mean(-1, keepdim=True)
        return self.scale * (h / torch.sqrt((h * h).mean(-1, keepdim=True) + self.eps))


class Absolute(Normed):
    def norm(self, h):
        return self.scale * (h / (h.abs().mean(-1, keepdim=True) + self.eps))


class Before(Normed):
    """The gate passes the norm, the product does not."""

    def forward(self, x):
        return self.d(self.norm(F.relu(self.g(x))) * self.u(x))


class Smooth(Normed):
    def forward(self, x):
        return self.d(self.norm(F.silu(self.g(x)) * self.u(x)))


class Plain(Normed):
    def forward(self, x):
        return self.d(self.norm(F.relu(self.g(x))))


@pytest.mark.parametrize("other", [OverTokens, WithoutMean, Absolute, Before, Smooth, Plain])
def test_what_only_looks_like_it(other: type[nn.Module]) -> None:
    found = search(plain(FunctionalBlock(), other()), (X,))
    assert [site.key for site in found.sites] == ["0"]


def test_a_bias_of_up_beside_the_norm() -> None:
    layer = Normed()
    layer.u = nn.Linear(HIDDEN, INTERMEDIATE)
    assert [site.key for site in search(plain(FunctionalBlock(), layer), (X,)).sites] == ["0"]


@torch.no_grad()
def test_bundles_are_refused(tmp_path: Path) -> None:
    model = torch_pi2.optimize(bitnet(), method="exact")
    with pytest.raises(UnsupportedModelError, match="norm over all neurons"):
        torch_pi2.export(model, tmp_path / "bundle", max_tokens=32)
