"""Sizing predictors, layer by layer: the cheapest rank and format, and the recall that the whole model's loss bears."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_pi2.base.fields import limited
from torch_pi2.distributed.ranks import Ranks
from torch_pi2.fitting.kept import Kept
from torch_pi2.fitting.train import calibrate, train_matrices
from torch_pi2.formats import GROUP
from torch_pi2.layers.cold import BY_NEURON
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.predict.lowrank_rows import FITTED, LowRankRows, quantised
from torch_pi2.profiling.samples import Samples
from torch_pi2.types.config import Config
from torch_pi2.types.site import FFNSite

_HIGHEST_RECALL = 0.999


@dataclass(frozen=True)
class FitSettings(Config):
    """What :class:`Config` says of fitting, and how far the search goes.

    Attributes:
        margin: share of the tolerance that the search may use up; the rest is for text unlike the calibration
            data (on the trained dReLU model the change on other files was up to 1.25 times that measured here).
        weight_bits: of an FFN's weight, for what neurons read beside what predictors read.
        n_tokens: samples per layer to fit to; eval_tokens: upper bound on evaluation tokens.
        steps: optimiser steps per training.
        max_rounds: bound on evaluations of the whole model with all predictors; each round that finds the worst
            layer evaluates every layer alone besides.
        max_bytes: bound on the memory of the samples of all layers, where they are in memory.
    """

    margin: float = limited(0, 1, above=True, default=0.5)
    weight_bits: float = limited(above=True, default=16.0)
    n_tokens: int = 20_000
    eval_tokens: int = 16_384
    steps: int = 500
    max_rounds: int = limited(1, default=24)
    max_bytes: int = 2 << 30


def initial_rank(site: FFNSite, active_share: float, skew: float) -> int:
    """Where the search starts: larger for dense layers, smaller for skewed ones (PowerInfer), whole groups of int4.

    A quarter of the hidden size where a tenth of the neurons fire; at most half of it. Below a group a multiple of 8.
    """
    rank = site.hidden / 4 * math.sqrt(active_share / 0.1) * (1.25 - skew)
    step = GROUP if min(rank, site.hidden // 2) >= GROUP else 8
    return max(min(8, site.hidden), min(site.hidden // 2, step * round(rank / step)))


def read_bytes(predictor: LowRank, cold: int) -> float:
    """What a token reads of a predictor that a layer keeps for ``cold`` neurons."""
    share = {name: cold / len(tensor) if name in BY_NEURON else 1.0 for name, tensor in predictor.tensors().items()}
    return sum(tensor.nbytes * share[name] for name, tensor in predictor.tensors().items())


@dataclass
class Layer:
    """State of the search for one layer. ``fit``, ``held``: samples by key, which may be mapped when asked for."""

    site: FFNSite
    cold: torch.Tensor
    fit: Mapping[str, Samples]
    held: Mapping[str, Samples]
    rank: int
    recall: float
    weights: str = FITTED[0]
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

    def predictor(
        self, layer: Layer, rank: int, weights: str | None = None, recall: float | None = None, *, probe: bool = False
    ) -> LowRank:
        """Trained and calibrated, once for each argument; a probe is trained for a quarter of the steps.

        Format and recall are the layer's, where they are None.
        """
        steps, site, kept = self._settings.steps, layer.site, layer.kept
        steps = max(1, steps // 4) if probe else steps
        weights, recall = weights or layer.weights, recall or layer.recall
        found = kept.find(rank, steps, weights, recall)
        if found is None:
            trained = self._seen(kept.find(rank, steps, weights, None) or self._trained(layer, rank, steps)[weights])
            made = calibrate(trained, layer.held[site.key], site, target_recall=recall, neurons=layer.cold)
            found = kept.keep(made, steps, recall)
        return self._seen(found)

    def _trained(self, layer: Layer, rank: int, steps: int) -> dict[str, LowRank]:
        """By format: one training serves all."""
        site, seed = layer.site, self._settings.seed + layer.site.layer
        made = train_matrices(layer.fit[site.key], rank=rank, neurons=layer.cold, steps=steps, seed=seed)
        return {weights: layer.kept.keep(quantised(*made, weights), steps, None) for weights in FITTED}

    def _seen(self, predictor: LowRank) -> LowRank:
        """It is measured with the inputs that it will be computed with."""
        if isinstance(predictor, LowRankRows):
            predictor.int8_activations = self._settings.activations == "int8"
        return predictor

    def cost(
        self, layer: Layer, rank: int, weights: str | None = None, recall: float | None = None, *, probe: bool = False
    ) -> float:
        """Bytes that a token reads over the dense FFN's: the predictor's, and those of the neurons let through."""
        predictor, site, cold = self.predictor(layer, rank, weights, recall, probe=probe), layer.site, len(layer.cold)
        assert predictor.card is not None
        dense = site.rows_per_neuron * site.hidden * site.intermediate * self._settings.weight_bits / 8
        return read_bytes(predictor, cold) / dense + predictor.card.predicted_active * cold / site.intermediate

    def _choose_ranks(self, layers: Sequence[Layer], advance: Callable[[], object] = lambda: None) -> None:
        """Each layer's by one of the processes, which trains the predictor too."""

        def choose(layer: Layer) -> tuple[int, str]:
            self.choose_rank(layer)
            self.predictor(layer, layer.rank)
            advance()
            return layer.rank, layer.weights

        for layer, found in zip(layers, self._ranks.map(choose, layers)):
            layer.rank, layer.weights = found
        for name in dict.fromkeys(y.site.experts for y in layers if y.site.experts is not None):
            self._agree([y for y in self.layers if y.site.experts == name])

    def _agree(self, experts: Sequence[Layer]) -> None:
        """All in the format in which they read least together: one operator computes the experts of a module."""
        if len({y.weights for y in experts}) > 1:
            costs = self._ranks.map(lambda y: [self.cost(y, y.rank, weights) for weights in FITTED], experts)
            sums = [sum(of_format) for of_format in zip(*costs)]
            for y in experts:
                y.weights = FITTED[sums.index(min(sums))]

    def choose_rank(self, layer: Layer) -> None:
        """Double the rank while that makes the layer cheaper, else halve it while that does (by probes).

        Of each rank counts the format in which it is cheaper.
        """

        def cheapest(rank: int) -> tuple[float, str]:
            return min((self.cost(layer, rank, weights, probe=True), weights) for weights in FITTED)

        best, found = layer.rank, cheapest(layer.rank)
        for factor in (2.0, 0.5):
            moved = False
            while True:
                rank = int(best * factor)
                if not 4 <= rank <= layer.site.hidden:
                    break
                other = cheapest(rank)
                if other[0] >= found[0]:
                    break
                best, found, moved = rank, other, True
            if moved:
                break
        layer.rank, layer.weights = best, found[1]

    def predictors(self, only: Layer | None = None) -> dict[str, LowRank]:
        return {y.site.key: self.predictor(y, y.rank) for y in self.layers if only is None or y is only}

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
        waiting = sorted(self.layers, key=lambda y: self.cost(y, y.rank), reverse=True)
        while waiting and self._goes_on:
            layer = waiting.pop(0)
            if self._lower([layer], "lower " + layer.site.key):
                waiting.append(layer)

    def _lower(self, layers: Sequence[Layer], step: str) -> bool:
        """Lower their recall, if that is cheaper and the model bears it; whether it was done."""
        before = [(y.rank, y.weights, y.recall) for y in self.layers]
        cost = sum(self.cost(y, y.rank) for y in layers)
        for y in layers:
            y.recall = max(0.05, 1 - 1.5 * (1 - y.recall))
        self._choose_ranks(layers)
        cheaper = sum(self.cost(y, y.rank) for y in layers) < cost
        new = self._evaluate(step) if cheaper else math.inf
        if new <= self._allowed:
            self.found = new
            return True
        for y, (rank, weights, recall) in zip(self.layers, before):
            y.rank, y.weights, y.recall = rank, weights, recall
        return False
