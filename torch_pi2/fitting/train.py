"""Trains and calibrates one predictor on samples of one layer; measures its card on other samples.

What was tried on a really trained dReLU model (hidden 256, 1024 neurons, rank 64, 18 000 tokens; share of
neurons predicted at recall 0.95, sparsest / densest late layer): random start 0.088 / 0.276, start from a
whitened SVD of gate and up 0.089 / 0.284, from rows of the gate 0.087 / 0.277. After enough steps the start
does not matter, so it is random; learning rate and steps do (4 epochs instead of 12: 0.116 / 0.302).
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F

from torch_pi2.errors import CalibrationError, ConfigError
from torch_pi2.ops.activations import ACTIVATIONS, on_up
from torch_pi2.predict.lowrank import ALWAYS, LowRank
from torch_pi2.predict.signbit import SignBit
from torch_pi2.profiling.samples import Samples
from torch_pi2.types.predictor import Predictor, PredictorCard
from torch_pi2.types.site import FFNSite, FFNWeights

MIN_SAMPLES = 64


def train_matrices(
    samples: Samples,
    *,
    rank: int,
    neurons: torch.Tensor | None = None,
    steps: int = 800,
    batch: int = 256,
    lr: float = 1e-2,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit ``b relu(a x) + bias`` to which neurons fire.

    Loss: binary cross-entropy with Deja Vu's element weights, 1 where a neuron fires and
    ``w = mean(fired) + 0.005`` where not, so that a miss costs more than a false alarm. AdamW, warm-up
    and cosine, deterministic for a seed and thread count.

    Args:
        samples: tokens to fit to.
        rank: r.
        neurons: int64 indices to fit (the cold ones); all others are always predicted active. None: all.
        steps, batch, lr, seed: of the optimiser; batches are drawn by epoch without replacement.

    Returns:
        a ``[r, H]``, b ``[I, r]`` and bias ``[I]``, float32.

    Raises:
        CalibrationError: fewer than ``MIN_SAMPLES`` tokens. ConfigError: rank or steps below 1.
    """
    if rank < 1 or steps < 1 or batch < 1:
        raise ConfigError(
            "predictor training",
            expected="rank, steps and batch >= 1",
            found=f"rank={rank}, steps={steps}, batch={batch}",
            fix="Rank hidden/4 and 800 steps are a good start.",
        )
    if len(samples) < MIN_SAMPLES:
        raise CalibrationError(
            "predictor training samples",
            expected=f"at least {MIN_SAMPLES} tokens",
            found=str(len(samples)),
            fix="Collect more tokens; 20000 are a good start.",
        )
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
        # Steps of Adam do not shrink with fan-in, so the rates do (as in muP); 256 and 64 are where lr was tuned.
        rates = [lr * min(1.0, 256 / hidden), lr * min(1.0, 64 / rank), lr]
        groups = [
            {"params": [a], "lr": rates[0]},
            {"params": [b], "lr": rates[1]},
            {"params": [bias], "lr": rates[2], "weight_decay": 0.0},
        ]
        optimiser = torch.optim.AdamW(groups, weight_decay=0.01)
        warm = max(1, steps // 10)

        def rate(step: int) -> float:
            """Linear warm-up, then half a cosine to zero."""
            return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
        order = torch.empty(0, dtype=torch.long)
        for _ in range(steps):
            if len(order) < min(batch, n):
                order = torch.randperm(n, generator=generator)
            rows, order = order[:batch], order[batch:]
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
    predictor: LowRank,
    held_back: Samples,
    site: FFNSite,
    *,
    target_recall: float = 0.95,
    neurons: torch.Tensor | None = None,
    weights: FFNWeights | None = None,
) -> LowRank:
    """A copy of ``predictor`` with the highest threshold that reaches ``target_recall``, and its card.

    Done after quantisation and on tokens the predictor was not fitted to, so the card describes the stored
    predictor. There is one threshold per layer.

    Raises:
        ConfigError: target_recall outside (0, 1]. CalibrationError: no held-back tokens.
    """
    _check_target(target_recall)
    index = torch.arange(held_back.intermediate) if neurons is None else neurons.long()
    score_NC, fired_NC = _scores(predictor, held_back)[:, index], held_back.fired()[:, index]
    hit = score_NC[fired_NC]
    # Without a single firing neuron nothing need be predicted: a threshold above every score.
    if len(hit):
        threshold = float(hit.kthvalue(len(hit) - math.ceil(target_recall * len(hit)) + 1).values)
    else:
        finite = score_NC[score_NC < ALWAYS / 2]
        threshold = float(finite.max()) + 1.0 if finite.numel() else 0.0
    new = copy.copy(predictor)
    new.threshold = threshold
    new.card = measure(new, held_back, site, neurons=neurons, weights=weights)
    return new


def calibrate_signbit(
    predictor: SignBit,
    held_back: Samples,
    site: FFNSite,
    *,
    target_recall: float = 0.95,
    neurons: torch.Tensor | None = None,
    weights: FFNWeights | None = None,
) -> SignBit:
    """A copy of ``predictor`` with the largest margin that reaches ``target_recall`` on ``held_back``, and its card.

    Args:
        neurons: those that are predicted (the cold ones); None: all.
        weights: with them the card has ``mass_recall``.

    Raises:
        ConfigError: target_recall outside (0, 1]. CalibrationError: no held-back tokens.
    """
    _check_target(target_recall)
    _check_held_back(held_back)
    index = torch.arange(held_back.intermediate) if neurons is None else neurons.long()
    # A histogram over 0..H instead of all scores: exact, and small for any number of tokens.
    count_H = torch.zeros(predictor.hidden + 1, dtype=torch.int64)
    rows = torch.arange(len(held_back)).split(1024)
    for some in rows:
        agree = predictor.scores(held_back.x_NH[some].float())[:, index]
        hit = agree[held_back.fired(some)[:, index]].round().long()
        count_H += torch.bincount(hit, minlength=predictor.hidden + 1)
    total = int(count_H.sum())
    at_least_H = count_H.flip(0).cumsum(0).flip(0)  # pairs that fire and agree in so many places or more
    enough = torch.nonzero(at_least_H >= math.ceil(target_recall * total)).flatten()
    # Without a single firing neuron nothing need be predicted.
    needed = int(enough[-1]) if total else predictor.hidden
    # Half a place below the count that must still pass, so that rounding cannot exclude it.
    margin = max(0.0, (needed - 0.5) / (predictor.hidden - needed + 0.5))
    new = SignBit(predictor.signs, predictor.hidden, margin)
    new.card = measure(new, held_back, site, neurons=neurons, weights=weights)
    return new


def measure(
    predictor: Predictor,
    held_back: Samples,
    site: FFNSite,
    *,
    neurons: torch.Tensor | None = None,
    weights: FFNWeights | None = None,
) -> PredictorCard:
    """The quality of ``predictor`` on ``held_back`` tokens, restricted to ``neurons`` (the cold ones) if given.

    Args:
        weights: of the layer. With them ``mass_recall`` is measured too: the share of ``sum |h_i| * ||down_i||`` that
            predicted neurons carry (missing a tiny activation costs little).
    """
    index = torch.arange(held_back.intermediate) if neurons is None else neurons.long()
    active_NC = (_scores(predictor, held_back) >= predictor.threshold)[:, index]
    fired_NC = held_back.fired()[:, index]
    both = float((active_NC & fired_NC).sum())
    fired, active = float(fired_NC.sum()), float(active_NC.sum())
    dense_macs = site.rows_per_neuron * site.hidden * site.intermediate
    rank, macs = getattr(predictor, "rank", 0), getattr(predictor, "macs", 0)
    mass: float | None = None
    if weights is not None:
        mass_NC = _mass(site, weights, held_back.x_NH)[:, index]
        total = float(mass_NC.sum(dtype=torch.float64))
        mass = float((mass_NC * active_NC).sum(dtype=torch.float64)) / total if total else 1.0
    return PredictorCard(
        recall=both / fired if fired else 1.0,
        precision=both / active if active else 1.0,
        predicted_active=active / max(1, active_NC.numel()),
        bytes=sum(t.numel() * t.element_size() for t in predictor.tensors().values()),
        cost_share=macs / dense_macs,
        rank=rank,
        mass_recall=mass,
    )


def _check_target(target_recall: float) -> None:
    if not 0 < target_recall <= 1:
        raise ConfigError(
            "target_recall", expected="more than 0, at most 1", found=str(target_recall), fix="0.95 is a good start."
        )


def _check_held_back(samples: Samples) -> None:
    if not len(samples):
        raise CalibrationError(
            "held-back samples", expected="at least one token", found="none", fix="Collect more tokens."
        )


def _scores(predictor: Predictor, samples: Samples) -> torch.Tensor:
    _check_held_back(samples)
    with torch.no_grad():
        return torch.cat([predictor.scores(x) for x in samples.x_NH.split(1024)])


def _mass(site: FFNSite, w: FFNWeights, x_NH: torch.Tensor) -> torch.Tensor:
    """``[N, I]`` float32 ``|h| * ||down column||``: how much each neuron adds to the layer's output."""
    act = ACTIVATIONS[site.activation]
    norm_I = w.down.float().norm(dim=0)
    parts = []
    for x in x_NH.split(1024):
        up = F.linear(x, w.up, w.bias_up).float()
        if w.gate is None:
            h = act(up)
        else:
            factor = on_up(site.activation, site.activation_on_up)
            h = act(F.linear(x, w.gate, w.bias_gate).float()) * factor(up)
        parts.append(h.abs() * norm_I)
    return torch.cat(parts)
