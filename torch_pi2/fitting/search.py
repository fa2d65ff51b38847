"""Sizing predictors, layer by layer: the cheapest rank, and the recall that the whole model's loss bears."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_pi2.base.arguments import check_values
from torch_pi2.base.ranks import Ranks
from torch_pi2.fitting.kept import Kept
from torch_pi2.fitting.train import calibrate, train_lowrank
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.profiling.samples import Samples
from torch_pi2.spec.config import Config
from torch_pi2.spec.site import FFNSite

_HIGHEST_RECALL = 0.999


@dataclass(frozen=True)
class FitSettings(Config):
    """What :class:`Config` says of fitting, and how far the search goes.

    Attributes:
        margin: share of the tolerance that the search may use up; the rest is for text unlike the calibration
            data (on the trained dReLU model the change on other files was up to 1.25 times that measured here).
        predictor_weight: cost of a predictor's multiply-add over an FFN's (0.5: int8 against 16 bits).
        n_tokens: samples per layer to fit to; eval_tokens: upper bound on evaluation tokens.
        steps: optimiser steps per training.
        max_rounds: bound on evaluations of the whole model with all predictors; each round that finds the worst
            layer evaluates every layer alone besides.
        max_bytes: bound on the memory of the samples of all layers, where they are in memory.
    """

    margin: float = 0.5
    predictor_weight: float = 0.5
    n_tokens: int = 20_000
    eval_tokens: int = 16_384
    steps: int = 500
    max_rounds: int = 24
    max_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = (
            ("margin", 0 < self.margin <= 1, "more than 0, at most 1"),
            ("max_rounds", self.max_rounds >= 1, "at least 1"),
        )
        check_values(self, checks, "{}", "Leave it out for the default.")


def initial_rank(site: FFNSite, active_share: float, skew: float) -> int:
    """Where the search starts: larger for dense layers, smaller for skewed ones (PowerInfer), a multiple of 8.

    A quarter of the hidden size where a tenth of the neurons fire; between 8 and half of the hidden size.
    """
    rank = site.hidden / 4 * math.sqrt(active_share / 0.1) * (1.25 - skew)
    return max(min(8, site.hidden), min(site.hidden // 2, 8 * round(rank / 8)))


@dataclass
class Layer:
    """State of the search for one layer. ``fit``, ``held``: samples by key, which may be mapped when asked for."""

    site: FFNSite
    cold: torch.Tensor
    fit: Mapping[str, Samples]
    held: Mapping[str, Samples]
    rank: int
    recall: float
    kept: Kept = field(default_factory=Kept)


class Search:
    """The search over ``layers``, whose state is what has been found so far.

    Args:
        change: predictors -> by how much the model's loss is larger with them (0.01: 1 %), and the share of cold pairs
            that they skip.
        advance: called after each step, for a progress bar.
        ranks: processes that share the layers; each makes the same search, of what all of them keep in a folder.

    Attributes:
        rounds: evaluations of the whole model. found: the change with the predictors found.
    """

    def __init__(
        self,
        layers: list[Layer],
        settings: FitSettings,
        change: Callable[[Mapping[str, LowRank]], tuple[float, float]],
        advance: Callable[[], object],
        ranks: Ranks | None = None,
    ) -> None:
        self.layers, self.rounds, self.found = layers, list[dict[str, Any]](), 0.0
        self._settings, self._change, self._advance, self._ranks = settings, change, advance, ranks or Ranks()
        self._allowed = settings.tolerance * settings.margin

    def run(self) -> None:
        """Ranks first, then recalls."""
        self._choose_ranks(self.layers, self._advance)
        if self.layers:
            self.found = self._evaluate("start")
            self._repair()
        if self.layers and self.found <= self._allowed:
            self._shrink()

    def predictor(self, layer: Layer, rank: int, recall: float, *, probe: bool = False) -> LowRank:
        """Trained and calibrated, once for each argument; a probe is trained for a quarter of the steps."""
        steps, site, kept = self._settings.steps, layer.site, layer.kept
        steps = max(1, steps // 4) if probe else steps
        found = kept.find(rank, steps, recall)
        if found is None:
            seed = self._settings.seed + site.layer
            trained = kept.find(rank, steps, None) or kept.keep(
                train_lowrank(layer.fit[site.key], rank=rank, neurons=layer.cold, steps=steps, seed=seed), steps, None
            )
            made = calibrate(trained, layer.held[site.key], site, target_recall=recall, neurons=layer.cold)
            found = kept.keep(made, steps, recall)
        return found

    def cost(self, layer: Layer, rank: int, recall: float, *, probe: bool = False) -> float:
        """Work per token over the dense FFN's: the predictor's, weighted, and that of the neurons let through."""
        card = self.predictor(layer, rank, recall, probe=probe).card
        assert card is not None
        return (
            self._settings.predictor_weight * card.cost_share
            + card.predicted_active * len(layer.cold) / layer.site.intermediate
        )

    def _choose_ranks(self, layers: Sequence[Layer], advance: Callable[[], object] = lambda: None) -> None:
        """Each layer's by one of the processes, which trains the predictor too."""

        def choose(layer: Layer) -> int:
            self.choose_rank(layer)
            self.predictor(layer, layer.rank, layer.recall)
            advance()
            return layer.rank

        for layer, rank in zip(layers, self._ranks.map(choose, layers)):
            layer.rank = rank

    def choose_rank(self, layer: Layer) -> None:
        """Double the rank while that makes the layer cheaper, else halve it while that does (by probes)."""
        best, cost = layer.rank, self.cost(layer, layer.rank, layer.recall, probe=True)
        for factor in (2.0, 0.5):
            moved = False
            while True:
                rank = int(best * factor)
                if not 4 <= rank <= layer.site.hidden:
                    break
                other = self.cost(layer, rank, layer.recall, probe=True)
                if other >= cost:
                    break
                best, cost, moved = rank, other, True
            if moved:
                break
        layer.rank = best

    def predictors(self, only: Layer | None = None) -> dict[str, LowRank]:
        return {y.site.key: self.predictor(y, y.rank, y.recall) for y in self.layers if only is None or y is only}

    def _evaluate(self, step: str, only: Layer | None = None) -> float:
        """Change of the loss with all predictors, a round, or with one layer's alone."""
        change, skipped = self._change(self.predictors(only))
        if only is None:
            self.rounds.append({"step": step, "change": change, "skipped": skipped})
            self._advance()
        return change

    @property
    def _goes_on(self) -> bool:
        return len(self.rounds) < self._settings.max_rounds

    def _repair(self) -> None:
        """Halve the misses of the worst quarter of the layers until the model is within tolerance."""
        while self.found > self._allowed and self._goes_on:
            alone = sorted(self.layers, key=lambda y: self._evaluate("alone", y), reverse=True)
            worst = alone[: max(1, len(alone) // 4)]
            for layer in worst:
                layer.recall = 1 - (1 - layer.recall) / 2
                if layer.recall > _HIGHEST_RECALL and 2 * layer.rank <= layer.site.hidden:
                    layer.recall, layer.rank = 1 - 2 * (1 - layer.recall), 2 * layer.rank
            self._choose_ranks(worst)
            self.found = self._evaluate("raise " + alone[0].site.key)

    def _shrink(self) -> None:
        """Allow half as many misses again, in all layers and then one by one, for as long as the model bears it."""
        while self._goes_on and self._lower(self.layers, "lower all"):
            pass
        waiting = sorted(self.layers, key=lambda y: self.cost(y, y.rank, y.recall), reverse=True)
        while waiting and self._goes_on:
            layer = waiting.pop(0)
            if self._lower([layer], "lower " + layer.site.key):
                waiting.append(layer)

    def _lower(self, layers: Sequence[Layer], step: str) -> bool:
        """Lower their recall, if that is cheaper and the model bears it; whether it was done."""
        before = [(y.rank, y.recall) for y in layers]
        cost = sum(self.cost(y, y.rank, y.recall) for y in layers)
        for y in layers:
            y.recall = max(0.05, 1 - 1.5 * (1 - y.recall))
        self._choose_ranks(layers)
        cheaper = sum(self.cost(y, y.rank, y.recall) for y in layers) < cost
        new = self._evaluate(step) if cheaper else math.inf
        if new <= self._allowed:
            self.found = new
            return True
        for y, (rank, recall) in zip(layers, before):
            y.rank, y.recall = rank, recall
        return False
