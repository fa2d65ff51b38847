"""Sizes predictors: the cheapest rank of each layer, and the recall that the whole model's loss allows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_pi2.base.fields import limited
from torch_pi2.fitting.resume import PredictorCache
from torch_pi2.fitting.train import calibrate, train_matrices
from torch_pi2.formats import GROUP
from torch_pi2.predict import PER_NEURON
from torch_pi2.predict.lowrank import LowRankRows
from torch_pi2.profiling.samples import Samples
from torch_pi2.types.config import Config
from torch_pi2.types.site import FFNSite

_HIGHEST_RECALL = 0.999


@dataclass(frozen=True)
class FitSettings(Config):
    """:class:`Config` with the settings of the search.

    Attributes:
        margin: share of the tolerance that the search may use; the rest is reserved for text unlike the calibration
            data (on the trained dReLU model the change on other files was up to 1.25 times that measured here).
        weight_bits: bits per FFN weight, to compare the bytes of neurons with those of predictors.
        n_tokens: training samples per layer; eval_tokens: maximum number of evaluation tokens.
        steps: optimiser steps per training.
        max_rounds: maximum number of evaluations with all predictors. A round that looks for the worst layer also
            evaluates every layer alone.
    """

    margin: float = limited(0, 1, above=True, default=0.5)
    weight_bits: float = limited(above=True, default=16.0)
    n_tokens: int = 20_000
    eval_tokens: int = 16_384
    steps: int = limited(1, default=500)
    max_rounds: int = limited(1, default=24)


def initial_rank(site: FFNSite, active_share: float, skew: float) -> int:
    """The rank at which the search starts, larger for dense layers, smaller for skewed ones (PowerInfer): a quarter of
    the hidden size if a tenth of the neurons fire, at most half; a multiple of an int4 group, or below one of 8.
    """
    rank = site.hidden / 4 * math.sqrt(active_share / 0.1) * (1.25 - skew)
    step = GROUP if min(rank, site.hidden // 2) >= GROUP else 8
    return max(min(8, site.hidden), min(site.hidden // 2, step * round(rank / step)))


def read_bytes(predictor: LowRankRows, cold: int) -> float:
    """Bytes that a token reads of a predictor for ``cold`` neurons."""
    share = {name: cold / len(tensor) if name in PER_NEURON else 1.0 for name, tensor in predictor.tensors().items()}
    return sum(tensor.nbytes * share[name] for name, tensor in predictor.tensors().items())


@dataclass
class Layer:
    """State of the search for one layer. ``fit`` and ``held_back`` are samples by site key, mapped when needed."""

    site: FFNSite
    cold: torch.Tensor
    fit: Mapping[str, Samples]
    held_back: Mapping[str, Samples]
    rank: int
    recall: float
    cache: PredictorCache = field(default_factory=PredictorCache)


class Search:
    """The search over ``layers``, which hold its state. ``rounds``: evaluations of the whole model; ``loss_change``:
    with the current predictors.

    Args:
        change: predictors -> relative increase of the model's loss (0.01: 1 %), and skipped share of cold (token,
            neuron) pairs. advance: called after each step.
    """

    def __init__(
        self,
        layers: list[Layer],
        settings: FitSettings,
        change: Callable[[Mapping[str, LowRankRows]], tuple[float, float]],
        advance: Callable[[], object],
    ) -> None:
        self.layers, self.rounds, self.loss_change = layers, list[dict[str, Any]](), 0.0
        self._settings, self._change, self._advance = settings, change, advance
        self._allowed = settings.tolerance * settings.margin

    def run(self) -> None:
        self._choose_ranks(self.layers, self._advance)
        if self.layers:
            self.loss_change = self._evaluate("start")
            self._repair()
        if self.layers and self.loss_change <= self._allowed:
            self._shrink()

    def predictor(self, layer: Layer, rank: int, *, probe: bool = False) -> LowRankRows:
        """The cached predictor, calibrated to the layer's recall. A probe is trained for fewer steps."""
        steps, site, cache = self._settings.steps, layer.site, layer.cache
        steps = max(1, steps // 4) if probe else steps
        predictor = cache.find(rank, steps, layer.recall)
        if predictor is None:
            trained = cache.find(rank, steps, None) or self._train(layer, rank, steps)
            trained = self._with_activations(trained)
            held_back = layer.held_back[site.key]
            predictor = calibrate(trained, held_back, site, target_recall=layer.recall, neurons=layer.cold)
            cache.put(predictor, steps, layer.recall)
        return self._with_activations(predictor)

    def _train(self, layer: Layer, rank: int, steps: int) -> LowRankRows:
        site, seed = layer.site, self._settings.seed + layer.site.layer
        matrices = train_matrices(layer.fit[site.key], rank=rank, neurons=layer.cold, steps=steps, seed=seed)
        return layer.cache.put(LowRankRows.fitted(*matrices), steps, None)

    def _with_activations(self, predictor: LowRankRows) -> LowRankRows:
        predictor.int8_activations = self._settings.activations == "int8"
        return predictor

    def cost(self, layer: Layer, rank: int, *, probe: bool = False) -> float:
        """Bytes of predictor and neurons that a token reads, relative to the dense FFN's."""
        predictor, site, cold = self.predictor(layer, rank, probe=probe), layer.site, len(layer.cold)
        assert predictor.card is not None
        dense = site.rows_per_neuron * site.hidden * site.intermediate * self._settings.weight_bits / 8
        return read_bytes(predictor, cold) / dense + predictor.card.predicted_active * cold / site.intermediate

    def _choose_ranks(self, layers: Sequence[Layer], advance: Callable[[], object] = lambda: None) -> None:
        for layer in layers:
            self.choose_rank(layer)
            self.predictor(layer, layer.rank)
            advance()

    def choose_rank(self, layer: Layer) -> None:
        """Double the rank while probes find that cheaper; if they never do, halve it while that is cheaper."""
        best, lowest = layer.rank, self.cost(layer, layer.rank, probe=True)
        for factor in (2.0, 0.5):
            while 4 <= (rank := int(best * factor)) <= layer.site.hidden:
                if (other := self.cost(layer, rank, probe=True)) >= lowest:
                    break
                best, lowest = rank, other
            if best != layer.rank:
                break
        layer.rank = best

    def predictors(self, only: Layer | None = None) -> dict[str, LowRankRows]:
        return {y.site.key: self.predictor(y, y.rank) for y in self.layers if only is None or y is only}

    def _evaluate(self, step: str, only: Layer | None = None) -> float:
        """Change of the loss with all predictors, which counts as a round, or with those of one layer alone."""
        change, skipped = self._change(self.predictors(only))
        if only is None:
            self.rounds.append({"step": step, "change": change, "skipped": skipped})
            self._advance()
        return change

    @property
    def _rounds_left(self) -> bool:
        return len(self.rounds) < self._settings.max_rounds

    def _repair(self) -> None:
        """Halve the misses of the worst quarter of the layers until the model is within tolerance."""
        while self.loss_change > self._allowed and self._rounds_left:
            alone = sorted(self.layers, key=lambda y: self._evaluate("alone", y), reverse=True)
            worst = alone[: max(1, len(alone) // 4)]
            for layer in worst:
                layer.recall = 1 - (1 - layer.recall) / 2
                if layer.recall > _HIGHEST_RECALL and 2 * layer.rank <= layer.site.hidden:
                    layer.recall, layer.rank = 1 - 2 * (1 - layer.recall), 2 * layer.rank
            self._choose_ranks(worst)
            self.loss_change = self._evaluate("raise " + alone[0].site.key)

    def _shrink(self) -> None:
        """Allow half as many misses again, in all layers and then one by one, while the loss allows it."""
        while self._rounds_left and self._lower(self.layers, "lower all"):
            pass
        candidates = sorted(self.layers, key=lambda y: self.cost(y, y.rank), reverse=True)
        while candidates and self._rounds_left:
            layer = candidates.pop(0)
            if self._lower([layer], "lower " + layer.site.key):
                candidates.append(layer)

    def _lower(self, layers: Sequence[Layer], step: str) -> bool:
        """Lower the recall of ``layers`` if that is cheaper and within tolerance; returns whether it was."""
        before = [(y.rank, y.recall) for y in self.layers]
        cost = sum(self.cost(y, y.rank) for y in layers)
        for y in layers:
            y.recall = max(0.05, 1 - 1.5 * (1 - y.recall))
        self._choose_ranks(layers)
        cheaper = sum(self.cost(y, y.rank) for y in layers) < cost
        new = self._evaluate(step) if cheaper else math.inf
        if new <= self._allowed:
            self.loss_change = new
            return True
        for y, (rank, recall) in zip(self.layers, before):
            y.rank, y.recall = rank, recall
        return False
