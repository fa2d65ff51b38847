"""What ``OffloadConfig.miss_margin`` leaves out shows in what is measured, however many tokens a text has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_pi2
from torch_pi2.errors import ConfigError
from torch_pi2.eval.harness import harness
from torch_pi2.eval.loss import by_token, nats_per_token
from torch_pi2.eval.suite import _logits
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.spec.offload import OffloadConfig

MARGIN = 2.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``over``: a store of which nothing stays in memory; ``higher``: what that comes to, in memory; ``plain``."""
    base = tmp_path_factory.mktemp("margin")
    torch_pi2.synthetic(base / "plain", "tiny", active=0.2, rank=16)
    torch_pi2.pack(base / "plain", base / "store")
    config = OffloadConfig(miss_margin=MARGIN, policy="none", preload=False)
    found = {"plain": torch_pi2.load(base / "plain"), "higher": torch_pi2.load(base / "plain")}
    for module in found["higher"].modules():
        if isinstance(module, SparseFFN):
            module.predictor_threshold += MARGIN
    return found | {"over": torch_pi2.load(base / "store", budget="1GiB", offload=config)}


def stepped(model: Any, ids_T: torch.Tensor) -> torch.Tensor:
    """Logits [T, V], token by token."""
    with torch.no_grad(), sparse_only():
        return torch.cat(by_token(model, ids_T)[0], 1)[0]


def test_the_loss_is_that_of_decoding(models: dict[str, Any]) -> None:
    ids_BT = torch.randint(0, 80, (2, 41), generator=torch.Generator().manual_seed(1))
    wanted = torch.stack([stepped(models["higher"], ids_T[:-1]) for ids_T in ids_BT])
    nats = F.cross_entropy(wanted.float().flatten(0, 1), ids_BT[:, 1:].flatten()).item()
    assert nats_per_token(models["over"], [ids_BT]) == pytest.approx(nats, rel=1e-6)
    assert nats_per_token(models["plain"], [ids_BT]) != pytest.approx(nats, rel=1e-4)
    assert torch_pi2.stats(models["over"])["left_out"] > 0


def test_answers_are_those_of_decoding(models: dict[str, Any]) -> None:
    shared, endings = list(range(1, 37)), [[5, 6], [], [7]]
    with torch.no_grad(), sparse_only():
        found = _logits(models["over"], shared, endings)
    for of, ids in zip(found, endings, strict=True):
        text_T = torch.tensor([*shared, *ids])
        assert torch.equal(of, stepped(models["higher"], text_T)[len(shared) - 1 :])
        assert not torch.equal(of, stepped(models["plain"], text_T)[len(shared) - 1 :])


def test_lm_eval_is_refused(models: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"lm-eval: expected a model that computes prompts as it decodes, found Off"):
        harness(models["over"], None, ["nothing"])
