"""Plans and predictors at random, blocks to be rewritten, and what is compared afterwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tiny_models import HIDDEN, INTERMEDIATE
from torch import nn

from torch_pi2.graph import find_sites
from torch_pi2.types.plan import LayerPlan, Plan, weights_hash

X_BTH = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1))


def make_plan(model, args=(), *, method: str = "exact", hot: float = 0.25, threshold: float = 0.0) -> Plan:
    """A plan with a random neuron order for every FFN of ``model``."""
    generator = torch.Generator().manual_seed(3)
    sites = find_sites(model, args)
    layers = [
        LayerPlan(
            s, method, int(hot * s.intermediate), torch.randperm(s.intermediate, generator=generator).int(), threshold
        )
        for s in sites
    ]
    return Plan(layers, weights_hash(model, sites))


def predictor(hidden=HIDDEN, intermediate=INTERMEDIATE, rank=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randint(-127, 128, (rank, hidden), generator=g, dtype=torch.int8),
        "a_scale": torch.rand(rank, generator=g) / 127,
        "b": torch.randint(-127, 128, (intermediate, rank), generator=g, dtype=torch.int8),
        "b_scale": torch.rand(intermediate, generator=g) / 127,
        "bias": torch.randn(intermediate, generator=g),
    }


def close(found, wanted, tolerance=1e-5):
    return float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


def sequential(*middle):
    return nn.Sequential(nn.Linear(HIDDEN, INTERMEDIATE), *middle, nn.Linear(INTERMEDIATE, HIDDEN))


class FusedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.gu, self.d = (
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, 2 * INTERMEDIATE),
            nn.Linear(INTERMEDIATE, HIDDEN),
        )

    def forward(self, x):
        up, gate = self.gu(self.n(x)).chunk(2, dim=-1)
        return x + self.d(up * F.relu(gate))


def assert_same_state(model, state):
    found = model.state_dict()
    assert list(found) == list(state)
    assert all(torch.equal(found[k], state[k]) for k in state)


def count_op_calls(call, name: str = "pi2::sparse_ffn") -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.count for event in profiler.key_averages() if event.key == name)


class MLP(nn.Module):
    """An owner whose argument has a name of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)

    def forward(self, hidden_states):
        return self.down(F.relu(self.up(hidden_states)))


class Around(nn.Module):
    """``x + call(mlp, x)``."""

    def __init__(self, mlp, call=lambda mlp, x: mlp(x)):
        super().__init__()
        self.mlp, self.call = mlp, call

    def forward(self, x):
        return x + self.call(self.mlp, x)
