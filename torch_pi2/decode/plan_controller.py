"""``follow``: a model follows its plan while sequences begin and end.

PowerInfer-2's engine changes its ratio of hot to cold neurons with the number of sequences decoded together (arXiv
2406.06282, section 4.1.2). Here each layer knows its hot neurons for every batch size (``SparseFFN.by_batch``). The
controller resizes a store's cache and changes how many neurons of each layer are pinned in it; missing ones are read in
the background.
"""

import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from torch_pi2.base.fields import checked
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.progress import log
from torch_pi2.errors import ConfigError, ShapeError
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.offloaded import OffloadedFFN, Store
from torch_pi2.rewrite.state import ModelState
from torch_pi2.types.plan import Bucket, HardwarePlan, Plan


@checked
@fresh_settings()
def follow(model: nn.Module, plan: Plan | HardwarePlan) -> "PlanController":
    """Let an optimised ``model`` follow ``plan`` as the number of sequences that it decodes together changes.

    Call it before compiling the model: graphs keep the hot neurons that they were made with. A later call replaces the
    plan. Experts, and layers with a threshold, keep their hot neurons.

    Over a store the cache has the planned size, but at most the model's budget (:func:`torch_pi2.load`,
    :func:`torch_pi2.set_budget`); a plan that was made for a model in memory does not change it.

    Lossless without predictors. A predictor misses fewer neurons if more are hot.

    Raises:
        ConfigError: the model is dense, or the plan has no part for hardware.
        ShapeError: the plan is for other layers.
        ArtifactError: the store has been closed. The model is as it was.
    """
    hardware = plan.hardware if isinstance(plan, Plan) else plan
    layers = sparse_layers(model)
    if hardware is None or not layers:
        what = f"plan for {type(model).__name__}"
        expected = "a model with sparse layers, and a plan with a part for hardware"
        fix = "Plan with --hardware (torch-pi2 plan)." if layers else "Call torch_pi2.optimize(model) first."
        raise ConfigError(what, expected=expected, found="a plan without" if layers else "a model without", fix=fix)
    _check(layers, hardware, plan if isinstance(plan, Plan) else None)
    handle, before = ModelState.of(model) or ModelState(), controller_of(model)
    budget = handle.budget
    with nullcontext() if before is None else before._lock:
        controller = PlanController(handle.store, hardware, layers)
        if before is not None:
            before._replaced = True  # layers and store are the new one's
    handle.controller = controller
    if handle.budget is not budget:  # another thread has called set_budget meanwhile
        controller.refresh()
    if ModelState.of(model) is None:  # a module that contains an optimised model
        handle.attach(model)
    return controller


def controller_of(model: nn.Module) -> "PlanController | None":
    """The last result of :func:`follow`; None if ``model`` follows no plan."""
    handle = ModelState.of(model)
    controller = None if handle is None else handle.controller
    assert isinstance(controller, PlanController | None)
    return controller


class PlanController:
    """Keeps a model to its plan; made by :func:`follow`. A copy of the model follows no plan. Decoders (and so
    ``generate`` without beams) set the number of sequences; without one, call :meth:`batch`. Thread-safe.
    ``sequences``: their number. ``bucket``: the part of ``plan`` in force.
    """

    def __init__(self, store: Store | None, plan: HardwarePlan, layers: Sequence[SparseFFN]) -> None:
        self.plan, self.sequences, self.bucket = plan, 1, plan.bucket(1)
        self._lock, self._replaced = threading.Lock(), False
        #: Weak, so that layers removed from the model (torch_pi2.restore) free their memory.
        self._layers = weakref.WeakSet(layers)
        followed = plan.budget_bytes is not None and store is not None and store.config.engine != "mmap"
        self._store: Store | None = store if followed else None
        self._places = [y.store_layer for y in layers if isinstance(y, OffloadedFFN)] if followed else []
        self._arrange(self.bucket)  # what may fail comes first
        if self._store is not None:
            self._warn_of_a_small_cache(self._store)
        most = plan.buckets[-1].batch
        for i, layer in enumerate(layers):
            if _has_own_hot(layer):
                layer.by_batch = tuple((b.batch, b.hot[i]) for b in plan.buckets)
            if not _is_expert(layer):
                layer.dense_from = plan.prompt.dense_from[i] and max(plan.prompt.dense_from[i], most + 1)
        self._announce(self.bucket.batch)

    def batch(self, sequences: int) -> None:
        """Set the number of sequences from the next step on. Missing neurons are read in the background.

        Resizing a store's cache waits for the running layer and takes milliseconds; otherwise this returns at once.
        """
        if sequences == self.sequences:
            return
        with self._lock:
            if self._replaced:
                return
            bucket = self.plan.bucket(sequences)
            if bucket is not self.bucket:
                self._arrange(bucket)
                self._announce(bucket.batch)
                self.bucket = bucket
            self.sequences = sequences

    def refresh(self) -> None:
        """Arrange the store again after :func:`torch_pi2.set_budget`."""
        with self._lock:
            if not self._replaced:
                self._arrange(self.bucket)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy may have another store

    def _arrange(self, bucket: Bucket) -> None:
        """Give the store the cache size and resident neurons of ``bucket``, within the budget."""
        if self._store is None or self._store.budget is None:
            return
        cache_bytes = min(bucket.cache_bytes, self._store.budget.cache)
        share = min(1.0, cache_bytes / bucket.cache_bytes) if bucket.cache_bytes else 0.0
        resident = [0] * len(self._store.layers())
        for place, planned in zip(self._places, bucket.resident, strict=True):
            resident[place] = int(planned * share)
        self._store.arrange(resident, cache_bytes)

    def _announce(self, batch: int) -> None:
        """Let layers prefetch the hot neurons of this batch size."""
        for layer in self._layers if self._store is not None else ():
            if _has_own_hot(layer) and isinstance(layer, OffloadedFFN) and layer.announced:
                layer.announce(batch)

    def _warn_of_a_small_cache(self, store: Store) -> None:
        planned = self.plan.bucket(1).cache_bytes
        actual = planned if store.budget is None else store.budget.cache
        if actual < 0.99 * planned:  # a smaller difference comes from rounding to slots
            log.warning(
                "the plan has a cache of %.1f MiB, the model's budget one of %.1f MiB: fewer neurons than planned stay "
                "in memory. Load it with the plan's budget, or plan for this one.",
                *(planned / 2**20, actual / 2**20),
            )


def _check(layers: Sequence[SparseFFN], plan: HardwarePlan, whole: Plan | None) -> None:

    def refuse(expected: str, found: str) -> ShapeError:
        fix = "It is for another: make the plan again."
        return ShapeError("plan for this model", expected=expected, found=found, fix=fix)

    columns = {f"{name} of batch {b.batch}": getattr(b, name) for b in plan.buckets for name in ("hot", "resident")}
    for name, counts in (columns | {"dense_from": plan.prompt.dense_from}).items():
        if len(counts) != len(layers):
            raise refuse(f"{len(layers)} layers", f"{name}: {len(counts)}")
    for i, layer in enumerate(layers):
        if whole is not None and layer.site.key != whole.layers[i].site.key:
            raise refuse(layer.site.key, whole.layers[i].site.key)
        least, most = layer.least_hot if _has_own_hot(layer) else 0, layer.site.intermediate
        for bucket in plan.buckets:
            for name, count, fewest in (("hot", bucket.hot[i], least), ("resident", bucket.resident[i], 0)):
                if not fewest <= count <= most:
                    raise refuse(f"{fewest} to {most} {name} neurons of {layer.site.key}", str(count))


def _is_expert(layer: SparseFFN) -> bool:
    return layer.site.experts is not None


def _has_own_hot(layer: SparseFFN) -> bool:
    """Whether the batch size may decide how many neurons are hot."""
    return not _is_expert(layer) and layer.method not in ("dense", "threshold")
