"""Predictors that see a layer one feed-forward layer early, trained for it, in the place of those that look-ahead asks.

They learn what a layer's own predictor wants of the same tokens, as that is what is going to be read: ``whole`` are
predictors of their own, ``first matrix`` shares the second matrix with the layer's predictor and takes a fifth of the
bytes where there are four times as many neurons as inputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.fitting.train import train_matrices
from torch_pi2.layers.cold import PREDICTOR_TENSORS, cold_part
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.ops.rows import values
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.predict.lowrank_rows import LowRankRows
from torch_pi2.profiling.samples import Samples, collect_samples
from torch_pi2.types.config import Config
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import ActivationStats, pack_bits

_TOKENS, _STEPS, _BATCH = 20_000, 500, 256
WAYS = ("whole", "first matrix")


def train_early(
    model: nn.Module,
    sites: Sequence[FFNSite],
    text: str,
    fitted: Mapping[str, Any],
    stats: ActivationStats,
    config: Config,
    tokenizer: Any,
) -> dict[str, dict[str, tuple[LowRank, float]]]:
    """By :data:`WAYS` and site key: a predictor of each layer after the first, and the weight that what is not wanted
    had in its loss (:func:`at_odds`). ``model`` is dense; ``fitted`` are the layers' own.
    """
    given = {"tokenizer": tokenizer, "batch_size": config.batch_size, "seq_len": config.seq_len, "progress": False}
    seen = collect_samples(model, text, sites, _TOKENS, **given)
    made: dict[str, dict[str, tuple[LowRank, float]]] = {way: {} for way in WAYS}
    for before, site in pairwise(sites):
        own, key = fitted[site.key], site.key
        wanted = torch.cat([pack_bits(own.active(x_TH)) for x_TH in seen[key].x_NH.split(1024)])
        samples = Samples(seen[before.key].x_NH, wanted, site.intermediate)
        cold = torch.nonzero(stats.frequency(key) < config.hot_frequency).flatten()
        weight = float(samples.fired()[:, cold].float().mean()) + 0.005  # as train_matrices has it
        matrices = train_matrices(samples, rank=own.rank, neurons=cold, steps=_STEPS, seed=site.layer)
        made["whole"][key] = LowRank.quantised(*matrices), weight
        made["first matrix"][key] = _first_matrix(own, samples, cold, weight), weight
    return made


def _first_matrix(own: LowRank, samples: Samples, cold: torch.Tensor, weight: float) -> LowRank:
    """``own`` with another first matrix, trained from its own with the loss of ``train_matrices``."""
    if isinstance(own, LowRankRows):
        a, b = values(own.a, own.weights, own.hidden), values(own.b, own.weights, own.rank)
    else:
        a, b = own.a.float() * own.a_scale[:, None], own.b.float() * own.b_scale[:, None]
    scale, generator = float(samples.x_NH.float().square().mean().sqrt()), torch.Generator().manual_seed(0)
    bias_C = own.bias[cold] - own.threshold
    with torch.enable_grad():
        a = (a * scale).requires_grad_()
        optimiser = torch.optim.AdamW([a], lr=3e-3 * min(1.0, 256 / a.shape[1]))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: 0.5 + 0.5 * math.cos(math.pi * n / _STEPS))
        for _ in range(_STEPS):
            rows = torch.randint(len(samples), (_BATCH,), generator=generator)
            y = samples.fired(rows)[:, cold].float()
            logits = F.linear(torch.relu(F.linear(samples.x_NH[rows].float() / scale, a)), b[cold], bias_C)
            optimiser.zero_grad()
            F.binary_cross_entropy_with_logits(logits, y, weight=y * (1 - weight) + weight).backward()
            optimiser.step()
            schedule.step()
    return LowRank.quantised(a.detach() / scale, b, own.bias - own.threshold)


def at_odds(early: Mapping[str, tuple[LowRank, float]], odds: float) -> dict[str, LowRank]:
    """With the thresholds above which a neuron is wanted with these ``odds`` or better: 1 is as likely as not.

    What is not wanted weighs ``weight`` in the loss, so a score is the log of ``odds / weight``.
    """
    made = {}
    for key, (predictor, weight) in early.items():
        made[key] = copy.copy(predictor)
        made[key].threshold = math.log(odds / weight)
    return made


def announce(model: nn.Module, early: Mapping[str, LowRank]) -> None:
    """Let ``model``, over a store with look-ahead, go by ``early``."""
    for layer in model.modules():
        if isinstance(layer, OffloadedFFN) and layer.site.key in early:
            predictor = early[layer.site.key]
            rows = cold_part(layer.site, layer.method, layer.order[layer.n_hot :], predictor.tensors()).tensors
            asked = [rows[name] for name in PREDICTOR_TENSORS], "lowrank", predictor.threshold, "", False
            torch.ops.pi2.store_lookahead(layer.store.number, layer.store_layer, *asked, layer.hot_for(1))
