"""Counts which neurons of a model fire in use; costs nothing while no watch runs.

::

    with torch_pi2.watch(model) as watched:
        model.generate(...)
    watched.stats().save("live")

The C++ core counts (csrc/ffn/firing.h) in every call of a layer's operator, from any thread, decoder or compiled graph;
results are bitwise the same. Limits of the counts:

* With a predictor, a neuron fires if it was computed and is not zero; neurons that the predictor missed do not count.
* Prompts computed as matrix products (:mod:`torch_pi2.layers.prompt`) and neurons of an accelerator are not counted.
* Scores and their histogram are empty. ``zeros`` counts tokens without firing if the threshold is zero, and is 0
  otherwise.
* A call of t tokens, up to the largest batch size, counts as a decoding step of t sequences, with t // s groups for
  batch size s; so does a short prompt. Experts have no groups, only the tokens that are routed to them.
"""

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from torch_pi2.base.fields import checked
from torch_pi2.errors import ConfigError
from torch_pi2.graph.routed import chosen_shares
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.offloaded import OffloadedFFN, explained
from torch_pi2.ops import load
from torch_pi2.ops.library import unseen_by_modes
from torch_pi2.rewrite.gpu import refuse_split
from torch_pi2.rewrite.state import get_state
from torch_pi2.store.parts import Parts
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import HIST_BINS, ActivationStats, LayerStats

#: Batch sizes for which it is counted how often a neuron fires for at least one of the sequences.
BATCH_SIZES = (1, 2, 4, 8, 16)


class Watch:
    """Counts which neurons of a model's sparse layers fire, from :meth:`start` to :meth:`stop` or in a ``with`` block.

    Each start begins at zero. Copies of a model that share a store are counted together; calls after a conversion
    (``model.to``) are not. A neuron fires if its score exceeds the threshold of the statistics that the model was made
    from, so the counts can be added to them; without statistics, the threshold of its layer (0 except for method
    ``threshold``). ``batch_sizes``: ascending from 1 (every token alone) to 64 at most. Raises ConfigError: a dense
    model, or (by ``start``) a layer that is already watched. ArtifactError: (by ``start``) its store has been closed.
    """

    def __init__(self, model: nn.Module, *, batch_sizes: Sequence[int] = BATCH_SIZES) -> None:
        refuse_split(model, "watching", whole=True)
        self.plan: Plan = get_state(model).plan
        self.batch_sizes = tuple(batch_sizes)
        layers = sparse_layers(model)
        known = _profiled(model)
        cuts = {layer.site.key: known.get(layer.site.key, layer.threshold) for layer in layers}
        experts = [y for y in layers if y.site.experts is not None]
        others = [y for y in layers if y.site.experts is None]
        self._groups = [_Group(others, cuts, self.batch_sizes), _Group(experts, cuts, ())]
        self._groups = [group for group in self._groups if group.layers]
        self._keys = [layer.site.key for layer in layers]
        # the number of experts that a token is routed to in a module; 0: no mixture
        shares = chosen_shares(getattr(model, "config", None), [layer.site for layer in layers])
        modules = [layer.site.experts for layer in layers]
        self._slots = max((s * modules.count(m) for m, s in shares.items() if m is not None), default=0.0)
        self._turn = threading.RLock()
        self._on = False
        weakref.finalize(self, _drop, self._groups).atexit = False

    def start(self) -> Self:
        load()
        with self._turn:
            if self._on:
                raise _already()
            try:
                for group in self._groups:
                    group.start()
            except BaseException:
                _drop(self._groups)
                raise
            self._on = True
        return self

    def stop(self) -> ActivationStats:
        """End counting and return :meth:`stats`. Raises ConfigError: it was not started."""
        with self._turn:
            if not self._on:
                expected, found = "a watch that was started", "one that was not"
                raise ConfigError("watching a model", expected=expected, found=found, fix="Call start().")
            for group in self._groups:
                group.stop()
            self._on = False
            return self.stats()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._on:
            self.stop()

    @property
    def tokens(self) -> int:
        """Number of tokens counted; cheap. Approximate for a model of experts alone."""
        with self._turn:
            first = self._groups[0]
            each = 1.0 if first.grouped else self._slots
            return round(first.tokens() / each) if each else 0

    def stats(self, *, reset: bool = False) -> ActivationStats:
        """The counts so far, in the original order of neurons; from any thread. ``reset``: count from zero."""
        with self._turn:
            tokens = self.tokens
            by_key = {y.site.key: group.stats(i, reset) for group in self._groups for i, y in enumerate(group.layers)}
        layers = {key: by_key[key] for key in self._keys}
        predicted = sorted({y.predictor_kind for g in self._groups for y in g.layers if y.has_predictor})
        made_by: dict[str, Any] = {"verb": "watch", "watched": True, "tokens": tokens}
        return ActivationStats(layers, self.plan.model_hash, made_by | ({"predictors": predicted} if predicted else {}))

    def counts(self, *, reset: bool = False) -> list[tuple[SparseFFN, torch.Tensor]]:
        """By layer int64 ``[1 + I]``: tokens, and for how many each neuron fired, hot first. ``reset``: from zero."""
        with self._turn:
            return [(y, group.counts(i, reset)[0]) for group in self._groups for i, y in enumerate(group.layers)]


@checked
def watch(model: nn.Module) -> Watch:
    """A :class:`Watch` of ``model``, for a ``with`` block; see there for errors."""
    return Watch(model)


def fired(layer: SparseFFN, x_TH: torch.Tensor) -> torch.Tensor:
    """Which neurons of ``layer`` fire for each token as a call of its own, bool ``[T, I]`` in the plan's order."""
    group = _Group([layer], {layer.site.key: layer.threshold}, ())
    group.start()
    try:
        fired_TI = torch.zeros((len(x_TH), layer.site.intermediate), dtype=torch.bool)
        for x_1H, fired_I in zip(x_TH.split(1), fired_TI):
            layer.whole(x_1H)
            fired_I.copy_(group.counts(0, True)[0, 1:] > 0)
    finally:
        group.drop()
    return fired_TI


class _Group:
    """Layers counted with the same batch sizes: experts, or others."""

    def __init__(self, layers: Sequence[SparseFFN], cuts: Mapping[str, float], sizes: tuple[int, ...]) -> None:
        self.layers, self.sizes = layers, sizes[1:]
        self.grouped = bool(sizes)
        self.cuts = [cuts[layer.site.key] for layer in layers]
        self._number = 0  # of the core's watch; 0: none is under way
        # counts of the watch that has ended, in the layout of ``firing_read``
        shapes = [(1 + len(self.sizes), 1 + layer.site.intermediate) for layer in layers]
        self._ended = [torch.zeros(shape, dtype=torch.int64) for shape in shapes]

    def start(self) -> None:
        first = self.layers[0]
        # neurons with thresholds of their own are zero below them
        cuts = [cut if layer.thresholds is None else 0.0 for layer, cut in zip(self.layers, self.cuts)]
        if isinstance(first, OffloadedFFN):
            numbers = [layer.store_layer for layer in self.layers if isinstance(layer, OffloadedFFN)]
            with explained(str(first.store.path)):
                number = torch.ops.pi2.firing_start_stored(first.store.number, numbers, cuts, self.sizes)
        else:
            number = torch.ops.pi2.firing_start([layer.neuron_rows for layer in self.layers], cuts, self.sizes)
        if not number:
            raise _already()
        self._number = number

    def stop(self) -> None:
        self._ended = [self.counts(i, False) for i in range(len(self.layers))]
        self.drop()

    def drop(self) -> None:
        """Stop without keeping the counts."""
        number, self._number = self._number, 0
        if number:
            torch.ops.pi2.firing_stop(number)

    def tokens(self) -> float:
        """Mean over layers, or over modules of experts."""
        ended = sum(int(counts[0, 0]) for counts in self._ended)
        total = int(torch.ops.pi2.firing_tokens(self._number)) if self._number else ended
        return total / (len(self.layers) if self.grouped else len({y.site.experts for y in self.layers}))

    def counts(self, index: int, reset: bool) -> torch.Tensor:
        """int64 ``[1 + sizes, 1 + I]``, neurons in plan order."""
        found: torch.Tensor = self._ended[index]
        return torch.ops.pi2.firing_read(self._number, index, reset) if self._number else found

    def stats(self, index: int, reset: bool) -> LayerStats:
        layer, counts, cut = self.layers[index], self.counts(index, reset), self.cuts[index]
        n = layer.site.intermediate
        tokens = int(counts[0, 0])
        grouped_KI = torch.empty((len(counts), n), dtype=torch.int64)
        grouped_KI[:, layer.order] = counts[:, 1:]
        fired_I = grouped_KI[0]
        return LayerStats(
            key=layer.site.key,
            layer=layer.site.layer,
            threshold=cut,
            tokens=tokens,
            fired=fired_I.clone(),
            zeros=tokens - fired_I if cut == 0 else torch.zeros_like(fired_I),
            abs_sum=torch.zeros(n, dtype=torch.float64),
            batch_sizes=(1, *self.sizes),
            batch_groups=counts[:, 0].clone(),
            batch_fired=grouped_KI,
            score_hist=torch.zeros(HIST_BINS, dtype=torch.int64),
            experts=layer.site.experts,
            thresholds=None if layer.thresholds is None else layer.thresholds[layer.inverse],
            up_first=layer.site.up_first,
        )


def _drop(groups: Sequence[_Group]) -> None:
    with unseen_by_modes():
        for group in groups:
            group.drop()


def _already() -> ConfigError:
    fix = "Stop that one first; its statistics can be read while it counts."
    return ConfigError("watching a model", expected="one watch of it at a time", found="another one running", fix=fix)


def _profiled(model: nn.Module) -> dict[str, float]:
    """Thresholds by key, from the statistics of the model or of its store."""
    state = get_state(model)
    if state.stats is not None:
        return {stats.key: stats.threshold for stats in state.stats}
    if state.store is None:
        return {}
    with Parts(state.store.path.parent) as parts:
        return parts.thresholds(state.plan.model_hash)
