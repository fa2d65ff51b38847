"""What is left out while it is not in memory shows in what is measured, however many tokens a text has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from losses import nats_per_token
from tiny_experts import SHAPE, SYNTHETIC
from torch import nn

import torch_pi2
from torch_pi2.errors import ConfigError
from torch_pi2.eval.harness import harness
from torch_pi2.eval.loss import by_token
from torch_pi2.graph.routed import Routed
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import called_modules
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.types.offload import OffloadConfig

MARGIN, SHARE = 2.0, 0.45
#: Of each setting, a shape that it is for, and what counts what it leaves out.
SHAPES: dict[str, Any] = {
    "miss_margin": "tiny",
    "drop_experts": SYNTHETIC | SHAPE["mixtral"] | {"model_type": "mixtral"},
}
COUNTS = {"miss_margin": "left_out", "drop_experts": "experts_left_out"}


def without_light(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A token's experts of less than ``SHARE`` of its weight but the heaviest are none, whose index is 4."""
    x_TH, index_Tk, routing_Tk = Routed.of(args, kwargs, 4)
    light_Tk = routing_Tk < SHARE * routing_Tk.sum(-1, keepdim=True)
    light_Tk.scatter_(1, routing_Tk.argmax(-1, keepdim=True), value=False)
    return (x_TH, index_Tk.masked_fill(light_Tk, 4), routing_Tk), {}


@pytest.fixture(scope="module", params=list(SHAPES))
def models(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """``over``: a store of which nothing stays in memory; ``fewer``: what that comes to, in memory; ``plain``."""
    base, setting = tmp_path_factory.mktemp(request.param), request.param
    torch_pi2.synthetic(base / "plain", SHAPES[setting], active=0.2, rank=16)
    torch_pi2.pack(base / "plain", base / "store")
    config = OffloadConfig(policy="none", preload=False, **{setting: MARGIN if setting == "miss_margin" else SHARE})
    found = {"plain": torch_pi2.load(base / "plain"), "fewer": torch_pi2.load(base / "plain")}
    for layer, module in called_modules(found["fewer"]).items():
        if isinstance(layer, SparseFFN):
            layer.predictor_threshold += MARGIN
        else:
            module.register_forward_pre_hook(without_light, with_kwargs=True)
    over = torch_pi2.load(base / "store", budget="1GiB", offload=config)
    return found | {"over": over, "count": COUNTS[setting]}


def stepped(model: Any, ids_T: torch.Tensor) -> torch.Tensor:
    """Logits [T, V], token by token."""
    with torch.no_grad(), sparse_only():
        return by_token(model, ids_T)[0]


def test_the_loss_is_that_of_decoding(models: dict[str, Any]) -> None:
    ids_BT = torch.randint(0, 80, (2, 41), generator=torch.Generator().manual_seed(1))
    wanted = torch.stack([stepped(models["fewer"], ids_T[:-1]) for ids_T in ids_BT])
    nats = F.cross_entropy(wanted.float().flatten(0, 1), ids_BT[:, 1:].flatten()).item()
    assert nats_per_token(models["over"], [ids_BT]) == pytest.approx(nats, rel=1e-6)
    assert nats_per_token(models["plain"], [ids_BT]) != pytest.approx(nats, rel=1e-4)
    assert torch_pi2.stats(models["over"])[models["count"]] > 0


def test_lm_eval_is_refused(models: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"lm-eval: expected a model that computes prompts as it decodes, found Off"):
        harness(models["over"], None, ["nothing"])
