"""Trains and calibrates one predictor on samples of one layer; measures its card on other samples.

Initialisation is random: an SVD of gate and up, or rows of the gate, were no better after enough steps.
"""

import math
from typing import TypeVar

import torch
import torch.nn.functional as F

from torch_pi2.errors import CalibrationError, ConfigError
from torch_pi2.predict.lowrank import ALWAYS
from torch_pi2.profiling.samples import Samples
from torch_pi2.types.method import Predictor, PredictorCard
from torch_pi2.types.site import FFNSite, FFNWeights, intermediate

#: Minimum tokens to train on; tokens per batch; peak learning rate.
MIN_SAMPLES, _BATCH, _RATE = 64, 256, 1e-2

P = TypeVar("P", bound=Predictor)


def train_matrices(
    samples: Samples, *, rank: int, neurons: torch.Tensor | None = None, steps: int = 800, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit ``b relu(a x) + bias`` to which neurons fire; returns a ``[r, H]``, b ``[I, r]`` and bias ``[I]``, float32.

    Loss: binary cross-entropy with Deja Vu's element weights, 1 where a neuron fires and ``w = mean(fired) + 0.005``
    elsewhere, so that a miss costs more than a false alarm. AdamW, warm-up and cosine, deterministic for a seed and
    thread count; batches are drawn by epoch without replacement. ``neurons``: int64 indices to fit (the cold ones;
    None: all); all others are always predicted active. Raises CalibrationError: fewer than ``MIN_SAMPLES`` tokens.
    """
    if len(samples) < MIN_SAMPLES:
        fix = "Collect more tokens; 20000 are a good start."
        expected = f"at least {MIN_SAMPLES} tokens"
        raise CalibrationError("predictor training samples", expected=expected, found=str(len(samples)), fix=fix)
    n, hidden = samples.x_NH.shape
    index = torch.arange(samples.intermediate) if neurons is None else neurons.long()
    bias_I = torch.full((samples.intermediate,), ALWAYS)
    b_Ir = torch.zeros(samples.intermediate, rank)
    generator = torch.Generator().manual_seed(seed)
    head = samples.x_NH[:4096].float()
    scale = float(head.square().mean().sqrt().clamp_min(1e-12))  # scales inputs to unit size; folded into a
    # in blocks of rows, to bound memory
    fired_C = torch.zeros(len(index), dtype=torch.int64)
    for rows in torch.arange(n).split(1024):
        fired_C += samples.fired(rows)[:, index].sum(0)
    rate_C = fired_C.float() / n
    with torch.enable_grad():
        a = (torch.randn(rank, hidden, generator=generator) / hidden**0.5).requires_grad_()
        b = torch.zeros(len(index), rank, requires_grad=True)
        bias = torch.logit(rate_C.clamp(1e-4, 1 - 1e-4)).requires_grad_()
        miss = float(rate_C.mean()) + 0.005
        # Steps of Adam do not shrink with fan-in, so the rates do (as in muP); 256 and 64 are where the rate was tuned.
        rates = [_RATE * min(1.0, 256 / hidden), _RATE * min(1.0, 64 / rank), _RATE]
        groups: list[dict] = [{"params": [p], "lr": rate} for p, rate in zip((a, b, bias), rates)]
        groups[2]["weight_decay"] = 0.0
        optimiser = torch.optim.AdamW(groups, weight_decay=0.01)
        warm = max(1, steps // 10)

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
        order = torch.empty(0, dtype=torch.long)
        for _ in range(steps):
            if len(order) < min(_BATCH, n):
                order = torch.randperm(n, generator=generator)
            rows, order = order[:_BATCH], order[_BATCH:]
            x = samples.x_NH[rows].float() / scale
            y = samples.fired(rows)[:, index].float()
            logits = F.linear(torch.relu(F.linear(x, a)), b, bias)
            loss = F.binary_cross_entropy_with_logits(logits, y, weight=y * (1 - miss) + miss)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    b_Ir[index] = b.detach()
    bias_I[index] = bias.detach()
    return a.detach() / scale, b_Ir, bias_I


def calibrate(
    predictor: P,
    held_back: Samples,
    site: FFNSite,
    *,
    target_recall: float = 0.95,
    neurons: torch.Tensor | None = None,
    weights: FFNWeights | None = None,
) -> P:
    """A copy of ``predictor`` with the highest threshold that reaches ``target_recall`` on ``held_back``, and its card;
    ``neurons``: the predicted (cold) ones, or None; with ``weights`` the card has ``mass_recall``. Raises ConfigError:
    target_recall outside (0, 1]. CalibrationError: no held-back tokens.
    """
    if not 0 < target_recall <= 1:
        fix = "0.95 is a good start."
        raise ConfigError("target_recall", expected="more than 0, at most 1", found=str(target_recall), fix=fix)
    index = torch.arange(held_back.intermediate) if neurons is None else neurons.long()
    score_NC, fired_NC = _scores(predictor, held_back, index), held_back.fired()[:, index]
    hit = score_NC[fired_NC]
    # Without a single firing neuron, a threshold above every score.
    if len(hit):
        threshold = float(hit.kthvalue(len(hit) - math.ceil(target_recall * len(hit)) + 1).values)
    else:
        finite = score_NC[score_NC < ALWAYS / 2]
        threshold = float(finite.max()) + 1.0 if finite.numel() else 0.0
    new = predictor.at_threshold(threshold)
    new.card = _card(new, score_NC, fired_NC, held_back, site, index, weights)  # at_threshold changes no score
    return new


def measure(
    predictor: Predictor,
    held_back: Samples,
    site: FFNSite,
    *,
    neurons: torch.Tensor | None = None,
    weights: FFNWeights | None = None,
) -> PredictorCard:
    """Quality of ``predictor`` on ``held_back``, for ``neurons`` (None: all); with ``weights`` ``mass_recall``, too."""
    index = torch.arange(held_back.intermediate) if neurons is None else neurons.long()
    score_NC, fired_NC = _scores(predictor, held_back, index), held_back.fired()[:, index]
    return _card(predictor, score_NC, fired_NC, held_back, site, index, weights)


def _card(
    predictor: Predictor,
    score_NC: torch.Tensor,
    fired_NC: torch.Tensor,
    held_back: Samples,
    site: FFNSite,
    index: torch.Tensor,
    weights: FFNWeights | None,
) -> PredictorCard:
    active_NC = score_NC >= predictor.threshold
    both = float((active_NC & fired_NC).sum())
    fired, active = float(fired_NC.sum()), float(active_NC.sum())
    dense_macs = site.rows_per_neuron * site.hidden * site.intermediate
    rank, macs = getattr(predictor, "rank", 0), getattr(predictor, "macs", 0)
    mass: float | None = None
    if weights is not None:
        h_NI = torch.cat([intermediate(site, weights, x)[1] for x in held_back.x_NH.split(1024)])
        mass_NC = (h_NI.abs() * weights.down.float().norm(dim=0))[:, index]
        total = float(mass_NC.sum(dtype=torch.float64))
        mass = float((mass_NC * active_NC).sum(dtype=torch.float64)) / total if total else 1.0
    nbytes, recall = sum(t.nbytes for t in predictor.tensors().values()), both / fired if fired else 1.0
    precision, share = both / active if active else 1.0, active / max(1, active_NC.numel())
    return PredictorCard(recall, precision, share, nbytes, cost_share=macs / dense_macs, rank=rank, mass_recall=mass)


def _scores(predictor: Predictor, samples: Samples, neurons: torch.Tensor) -> torch.Tensor:
    if not len(samples):
        fix = "Collect more tokens."
        raise CalibrationError("held-back samples", expected="at least one token", found="none", fix=fix)
    with torch.no_grad():
        return torch.cat([predictor.scores(x)[:, neurons] for x in samples.x_NH.split(1024)])
